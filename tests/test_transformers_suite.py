"""transformers' own tests of all of its models, run on the models here; see `transformers_suite.py`.

What does not run, and why, is in the tables below and nowhere else: a test that skips itself without standing there
fails.
"""

import fnmatch
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from dar_models import tiny_dar_config
from proxyformer_models import tiny_proxyformer_config
from tiny_models import VOCABULARY, random_ids
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers_suite import SuiteMissing, load

from nearfar import (
    DARConfig,
    DARForCausalLM,
    DARForSequenceClassification,
    DARModel,
    ProxyFormerConfig,
    ProxyFormerForCausalLM,
    ProxyFormerModel,
)

try:
    common = load("test_modeling_common")
    configurations = load("test_configuration_common")
    training = load("test_training_mixin")
except SuiteMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

# Left out: these are about other kinds of models.
NOT_OURS = {
    "test_get_image_features_*": "models that see",
    "test_get_video_features_*": "models that see",
    "test_get_audio_features_*": "models that hear",
    "test_get_text_features_*": "models of text and images",
    "test_multimodal_outputs_are_returned": "models of several kinds of input",
    "test_vision_axial_rope": "models that see",
    "test_*_composite_model*": "models made of several",
    "test_*_can_dispatch_composite_models": "models made of several",
    "test_internal_model_config_and_subconfig_are_same": "models made of several",
    "test_encoder_decoder_loss_no_double_shift": "encoders with decoders",
    "test_eager_matches_batched_and_grouped_inference_*": "mixtures of experts",
    "test_moe_models_record_router_logits": "mixtures of experts",
    "test_output_router_logits_from_config": "mixtures of experts",
    "test_resize_position_vector_embeddings": "models with learnt positions",
    "test_sliding_window_mask": "models whose every layer slides",
    "test_flash_attn_*": "models with the flash_attention_2, 3 and 4 implementations, which ours refuse",
    "test_kernels_can_load_without_crashing": "models that take layers from the Hub's kernels",
    "test_keep_in_fp32_modules*": "models with weights that stay in float32",
    "test_can_load_from_already_mapped_keys": "models whose weights are renamed when they are loaded",
    "test_reverse_loading_mapping": "models whose weights are renamed when they are loaded",
    "test_bc_cache_name_forward": "models that make a DynamicCache",
}
# Skipped: they need what this machine or the source package has not, or what a model refuses.
SKIPPED = {
    "test_generation_tester_mixin_inheritance": "the source package comes without tests/generation; ours are in "
    "test_generation.py",
    "test_*deepspeed*": "needs DeepSpeed and a GPU",
}
NEEDS_GPU = (
    "test_can_load_with_device_context_manager",
    "test_can_load_with_global_device_set",
    "test_cpu_offload",
    "test_disk_offload_bin",
    "test_disk_offload_safetensors",
    "test_flex_attention_with_grads",
    "test_model_parallelism",
    "test_sdpa_can_compile_dynamic",
    "test_sdpa_can_dispatch_on_flash",
    "test_torch_compile_for_training",
)
if not torch.cuda.is_available():
    SKIPPED |= {name: "needs a GPU" for name in NEEDS_GPU}
DAR_SKIPPED = {
    "test_eager_matches_sdpa_inference_24_*": "attention weights are there with 'eager' only, which is said",
}
PROXYFORMER_SKIPPED = {
    "test_inputs_embeds*": "refused: the history stream embeds token ids a second time",
    "test_eager_matches_sdpa_inference_*": "one implementation of attention",
    "test_attention_outputs": "no weights to return: two softmaxes and a gate",
    "test_capture_outputs_decorator": "hidden states are cut out of a grid of whole blocks, which no hook can do",
    "test_can_capture_specific_layers_hidden_states": "hidden states are cut out of a grid, which no hook can do",
    "test_model_rope_scaling_frequencies": "the rotary embedding is no module: angles are made for a grid of blocks",
    "test_model_rope_with_partial_rotation": "the rotary embedding is off by default, and turns whole heads",
    "test_tp_plan_matches_params": "no tensor-parallel plan is declared",
    "test_model_rope_scaling_from_config_1_dynamic": "refused: rotary types are 'default' and 'linear'",
    "test_model_rope_scaling_from_config_2_yarn": "refused: rotary types are 'default' and 'linear'",
}

# The longest ones, beside others of their kind that always run.
SLOW = (
    "test_bc_torch_dtype",
    "test_training_overfit",
    "test_eager_matches_sdpa_inference_*_fp16_*",
    "test_eager_matches_sdpa_inference_*_bf16_*_no_attn_mask*",
    "test_eager_matches_sdpa_inference_*_bf16_*_sdpa_kernels",
)

# The suite knows what a class is for by transformers' lists of names.
NAMES: dict[str, dict[str, str]] = {
    "MODEL_MAPPING_NAMES": {"dar": "DARModel", "proxyformer": "ProxyFormerModel"},
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": {"dar": "DARForCausalLM", "proxyformer": "ProxyFormerForCausalLM"},
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": {"dar": "DARForSequenceClassification"},
}


@pytest.fixture(scope="module", autouse=True)
def _listed() -> Iterator[None]:
    for table, entries in NAMES.items():
        getattr(modeling_auto, table).update(entries)
    yield
    for table, entries in NAMES.items():
        for key in entries:
            del getattr(modeling_auto, table)[key]


class ModelTester:
    """What the suite asks of a family of models."""

    batch_size, is_training = 3, True

    def __init__(
        self,
        make_config: Callable[..., PreTrainedConfig],
        classes: tuple[type[PreTrainedModel], ...],
        seq_length: int = 18,
    ) -> None:
        self.make_config, self.seq_length = make_config, seq_length
        self.base_model_class, self.causal_lm_class = classes[:2]
        self.sequence_classification_class = classes[2] if len(classes) > 2 else None
        config: Any = self.get_config()
        self.num_hidden_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> PreTrainedConfig:
        return self.make_config(num_hidden_layers=2, max_position_embeddings=64)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        ids = random_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def matching(name: str, table: Mapping[str, str]) -> str | None:
    return next((reason for pattern, reason in table.items() if fnmatch.fnmatch(name, pattern)), None)


class Suite(common.ModelTesterMixin, training.TrainingTesterMixin):
    """All tests for one family."""

    skipped: ClassVar[dict[str, str]] = {}
    config_class: type[PreTrainedConfig]
    make_config: Any
    # Our `_init_weights` initialise everything, and the suite would leave that unasked for GPT-NeoX's age.
    test_can_init_all_missing_weights_before_2023 = True
    training_overfit_steps = 120
    training_overfit_learning_rate = 1e-2

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.skipped = {**SKIPPED, **cls.skipped}
        for name in [name for name in dir(cls) if name.startswith("test_") and callable(getattr(cls, name))]:
            test = getattr(cls, name)
            if matching(name, NOT_OURS):
                setattr(cls, name, None)
            elif reason := matching(name, cls.skipped):
                setattr(cls, name, unittest.skip(reason)(test))
            elif getattr(test, "__unittest_skip__", False):

                def unlisted(self: Any, reason: str = test.__unittest_skip_why__) -> None:
                    self.fail(f"skipped for {reason!r}, which no table here says")

                setattr(cls, name, unlisted)
            elif any(fnmatch.fnmatch(name, pattern) for pattern in SLOW):
                setattr(cls, name, pytest.mark.slow(test))

    def setUp(self) -> None:
        self.model_tester = ModelTester(type(self).make_config, self.all_model_classes)

    def skipTest(self, reason: Any) -> None:
        raise AssertionError(f"skipped itself for {reason!r}, which no table here says")

    def test_configuration(self) -> None:
        given = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
        configurations.ConfigTester(self, config_class=self.config_class, **given).run_common_tests()


class TestDAR(Suite, unittest.TestCase):
    all_model_classes = (DARModel, DARForCausalLM, DARForSequenceClassification)
    config_class = DARConfig
    make_config = staticmethod(tiny_dar_config)
    skipped = DAR_SKIPPED


class TestProxyFormer(Suite, unittest.TestCase):
    all_model_classes = (ProxyFormerModel, ProxyFormerForCausalLM)
    config_class = ProxyFormerConfig
    make_config = staticmethod(tiny_proxyformer_config)
    skipped = PROXYFORMER_SKIPPED
    has_attentions = False

    def test_retain_grad_hidden_states_attentions(self) -> None:
        # Whole blocks only: what is returned of others is cut out of what the layers read.
        self.model_tester = ModelTester(tiny_proxyformer_config, self.all_model_classes, seq_length=20)
        super().test_retain_grad_hidden_states_attentions()
