"""Kinds of faults that others have reported of models and their checkpoints, tried on ours. Docstrings say the kind.

Kinds that another test is about already:

- `auto_map` changes when a model is loaded and saved twice: `test_remote_code.py`,
  `test_loading_and_saving_again_changes_no_byte`.
- The second load in one process fails: `test_remote_code.py`, `test_logits_and_generation_are_equal` ("second").
- An optional import is demanded when a model is loaded: all fresh processes of `test_remote_code.py` hide triton.
"""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar, tiny_dar_config
from proxyformer_models import tiny_proxyformer, tiny_proxyformer_config
from test_cache_dar import as_neox
from tiny_models import random_ids, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from nearfar import (
    DARCache,
    DARForCausalLM,
    DARForSequenceClassification,
    DARModel,
    HybridAxialMapper,
    ProxyCache,
    ProxyFormerForCausalLM,
    ProxyFormerModel,
)
from nearfar.modeling.proxy_rotary import RotaryAngles
from nearfar.modeling.rotary import KeyRotation

MODELS: dict[str, Callable[..., PreTrainedModel]] = {"dar": tiny_dar, "proxyformer": tiny_proxyformer}
IGNORED = -100


def mapper() -> HybridAxialMapper:
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    return HybridAxialMapper.for_models(tiny_model("llama"), tiny_model("qwen3"), **sizes)


CLASSES: dict[str, Callable[[], PreTrainedModel]] = {
    "DARModel": lambda: DARModel(tiny_dar_config()),
    "DARForCausalLM": lambda: DARForCausalLM(tiny_dar_config()),
    "DARForSequenceClassification": lambda: DARForSequenceClassification(tiny_dar_config()),
    "ProxyFormerModel": lambda: ProxyFormerModel(tiny_proxyformer_config()),
    "ProxyFormerForCausalLM": lambda: ProxyFormerForCausalLM(tiny_proxyformer_config(distance_ratios=[[8, 8]])),
    "HybridAxialMapper": mapper,
}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[..., PreTrainedModel]:
    return MODELS[request.param]


@pytest.fixture(params=CLASSES)
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return CLASSES[request.param]()


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embeddings
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_partial_rotary_embedding(share: float, tmp_path: Path) -> None:
    """A rotary share other than the default is lost on save and reload; frequencies are made for the whole head."""
    model = tiny_dar(rotary_pct=share, hidden_size=64, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = DARForCausalLM.from_pretrained(tmp_path)
    turned = int(16 * share)
    exponents = torch.arange(0, turned, 2) / turned
    for which in (model, loaded):
        assert which.config.rope_parameters["partial_rotary_factor"] == share
        assert which.config.rotary_dims == turned
        torch.testing.assert_close(which.gpt_neox.rotary_emb.inv_freq, 10000.0**-exponents)
    with torch.no_grad():
        assert torch.equal(model(random_ids(1, 30)).logits, loaded(random_ids(1, 30)).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loaded", [False, True])
def test_rotary_embedding_after_a_change_of_dtype(dtype: torch.dtype, loaded: bool, tmp_path: Path) -> None:
    """NaN, or other angles, once a model is cast or loaded in half precision: against the library's own GPT-NeoX."""
    model = tiny_dar(window_size=500, dtype=torch.float32)
    neox = as_neox(model).to(dtype)
    if loaded:
        model.save_pretrained(tmp_path)
        model = DARForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    else:
        model = model.to(dtype)
    assert model.gpt_neox.rotary_emb.inv_freq.dtype == torch.float32 or not loaded
    ids = random_ids(2, 200)
    with torch.no_grad():
        found, wanted = model(ids, use_cache=False).logits, neox(ids, use_cache=False).logits
    assert torch.isfinite(found).all()
    limit = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}[dtype]
    assert (found.double() - wanted.double()).norm() / wanted.double().norm() < limit


def test_angles_far_out_under_autocast() -> None:
    """Positions rounded to bfloat16 by autocast: 65,535 and 65,536 must be told apart, and be exact."""
    positions = torch.tensor([[0, 1, 65_535, 65_536]])
    model = tiny_dar(dtype=torch.float32)
    frequencies = 10000.0 ** -(torch.arange(0, 4, 2).double() / 4)
    wanted = (positions[0, :, None] * frequencies).cos().repeat(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        cos, _ = model.gpt_neox.rotary_emb(torch.zeros(1, 4, 32), position_ids=positions)
        assert (cos[0].double() - wanted).abs().max() < 5e-3  # float32 angles of 65,536 radians
        assert (cos[0, 3] - cos[0, 2]).abs().max() > 0.1

        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        angles = RotaryAngles(parameters, positions, 4, torch.float32)
        assert (angles.cos[0, 0].double() - wanted).abs().max() < 1e-6

        rotation, keys = KeyRotation(tiny_model("llama").config), torch.randn(1, 1, 4, 8)
        there_and_back = rotation.unrotate(rotation.rotate(keys, positions, 0), positions, 0)
        assert (there_and_back - keys).abs().max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_stay_tied_and_others_apart(
    make: Callable[..., PreTrainedModel], tied: bool, tmp_path: Path
) -> None:
    """Tied heads crash on saving, or come back untied; untied ones come back tied."""
    model = make(tie_word_embeddings=tied, dtype=torch.float32)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(70)
    for step in range(2):
        model.save_pretrained(tmp_path / str(step))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(step))
        head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
        assert head.shape[0] == embedding.shape[0] == 70
        assert (head is embedding) == tied and (head.data_ptr() == embedding.data_ptr()) == tied
        with torch.no_grad():
            ids = random_ids(1, 21)
            assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        model = again


def test_every_model_class_calls_post_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class without `post_init` has no initialised weights, no plans and no tied weights."""
    called: set[int] = set()
    original = PreTrainedModel.post_init

    def noting(self: PreTrainedModel) -> None:
        called.add(id(self))
        original(self)

    monkeypatch.setattr(PreTrainedModel, "post_init", noting)
    for name, build in CLASSES.items():
        model = build()
        assert all(id(part) in called for part in model.modules() if isinstance(part, PreTrainedModel)), name
        for parameter in model.parameters():
            assert torch.isfinite(parameter).all() and parameter.abs().max() < 30, name


def test_loaded_weights_are_those_of_the_file(any_model: PreTrainedModel, tmp_path: Path) -> None:
    """Loaded weights are initialised once more although nothing is reported missing: all are 0.5 here."""
    with torch.no_grad():
        for parameter in any_model.parameters():
            parameter.fill_(0.5)
    any_model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded, report = type(any_model).from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == dtype and bool((parameter == 0.5).all()), name


def test_buffers_that_are_not_saved_are_made_again(any_model: PreTrainedModel, tmp_path: Path) -> None:
    """Non-persistent buffers are garbage after a model has been made on the meta device."""
    any_model.save_pretrained(tmp_path)
    loaded = type(any_model).from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(any_model)(any_model.config)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(any_model.state_dict(), strict=False)
    for part in empty.modules():
        part._is_hf_initialized = False
    with torch.no_grad():
        empty.apply(empty._init_weights)
    buffers = dict(any_model.named_buffers())
    for which in (loaded, empty):
        found = dict(which.named_buffers())
        assert found.keys() == buffers.keys()
        for name, buffer in buffers.items():
            assert torch.equal(found[name], buffer), name


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def labelled(rows: int = 4, tokens: int = 22) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels of which each row has another number."""
    ids = random_ids(rows, tokens)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 3 + 4 * row] = IGNORED
    return ids, labels


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_accumulated_gradients_are_those_of_one_batch(make: Callable[..., PreTrainedModel]) -> None:
    """`num_items_in_batch` is swallowed, and the loss grows with accumulation: 1 step of 4 rows against 4 of 1."""
    model = make().train()
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    ids, labels = labelled()
    items = (labels[:, 1:] != IGNORED).sum()
    whole = model(ids, labels=labels, num_items_in_batch=items).loss
    assert (whole - model(ids, labels=labels).loss).abs() < 1e-6  # losses of a DAR are float32
    whole.backward()
    wanted = gradients(model)
    model.zero_grad()
    total = 0.0
    for row in range(4):
        part = model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=items).loss
        part.backward()
        total += part.item()
    assert abs(total - whole.item()) < 3e-6
    for name, gradient in gradients(model).items():
        assert (gradient - wanted[name]).abs().max() < 1e-5, name


def test_evaluation_does_not_gather_caches(make: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """The Trainer takes the cache of each batch for a prediction, and gathers it."""
    model = make(dtype=torch.float32)
    model.config.use_cache = True
    ids, labels = labelled()
    with torch.no_grad():
        assert isinstance(model(ids)[1], DARCache | ProxyCache), "there is a cache to gather"
    rows = [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    found = Trainer(model=model, args=arguments, eval_dataset=rows).predict(rows)
    assert found.predictions.shape == (4, 22, 61) and math.isfinite(found.metrics["test_loss"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_lower_layers_with_checkpointing(make: Callable[..., PreTrainedModel], reentrant: bool) -> None:
    """Nothing that reaches a checkpointed layer asks for gradients, and its weights get none."""
    model = make().train()
    ids, labels = labelled()
    frozen = [model.get_input_embeddings(), model.base_model.layers[0]]
    frozen += [part for name, part in model.base_model.named_children() if name.startswith("history")]
    for part in frozen:
        part.requires_grad_(False)
    model(ids, labels=labels).loss.backward()
    wanted = gradients(model)
    assert len(wanted) > 10
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # as PEFT and the Trainer do for it
    model(ids, labels=labels).loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max() < 1e-10, name


def test_unlabelled_positions_cost_no_logits(make: Callable[..., PreTrainedModel]) -> None:
    """Full-vocabulary logits of a long prompt without labels run out of memory."""
    model = make(logits_in_training=False, vocab_size=5000, loss_chunk_tokens=8).train()
    hidden_size = 32  # rows of the head's matrix, which stands beside the logits
    ids = random_ids(1, 200)
    labels = torch.full_like(ids, IGNORED)
    labels[:, -5:] = ids[:, -5:]
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (5000,) and tensor.ndim > 1:
                    largest = max(largest, tensor.numel() // 5000)
            return out

    with Watch():
        out = model(ids, labels=labels)
    assert out.logits is None and 0 < largest <= hidden_size
    out.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    model.config.logits_in_training = True
    again = model(ids, labels=labels)
    assert again.logits.shape == (1, 200, 5000) and (again.loss - out.loss).abs() < 3e-6
    again.loss.backward()
    for name, gradient in gradients(model).items():
        assert (gradient - wanted[name]).abs().max() < 1e-5, name
