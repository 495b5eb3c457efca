"""Rotating cached keys back and on, against the models' own rotary embeddings."""

import pytest
import torch
from tiny_models import random_ids, tiny_config, tiny_model
from transformers import DynamicCache, GPTJConfig, LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from nearfar.modeling.compat import cache_argument
from nearfar.modeling.rotary import KeyRotation


def keys_at(model, ids: torch.Tensor, offset: int) -> list[torch.Tensor]:
    """Each layer's cached keys of one token, placed at position `offset` with nothing before it."""
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, position_ids=torch.tensor([[offset]]), **{cache_argument(model): cache})
    return [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox"])
def test_keys_move_as_the_model_would_have_rotated_them(family: str) -> None:
    model = tiny_model(family)
    rotation = KeyRotation(model.config)
    ids = random_ids(1, 1)
    plain, here, there = (keys_at(model, ids, offset) for offset in (0, 11, 200))
    for layer, (zero, near, far) in enumerate(zip(plain, here, there, strict=True)):
        assert not torch.allclose(near, far)
        # The model takes its angles in float32.
        assert torch.allclose(rotation.rotate(near, torch.tensor([[189]]), layer), far, atol=1e-4)
        assert torch.allclose(rotation.unrotate(far, torch.tensor([[200]]), layer), zero, atol=1e-4)


def test_layers_without_a_rotary_embedding() -> None:
    config = SmolLM3Config(**{**tiny_config("llama").to_dict(), "num_hidden_layers": 4, "layer_types": None})
    torch.manual_seed(0)
    model, ids = SmolLM3ForCausalLM(config).double().eval(), random_ids(1, 1)
    rotation = KeyRotation(model.config)
    turned = []
    for layer, (near, far) in enumerate(zip(keys_at(model, ids, 11), keys_at(model, ids, 200), strict=True)):
        turned.append(not torch.equal(near, far))
        assert torch.allclose(rotation.rotate(near, torch.tensor([[189]]), layer), far, atol=1e-4)
        assert torch.allclose(rotation.unrotate(far, torch.tensor([[189]]), layer), near, atol=1e-4)
    assert turned == [True, True, True, False]


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_scaled_rotary_embeddings(parameters: dict) -> None:
    config = tiny_config("llama")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "rope_parameters": parameters})).double().eval()
    rotation = KeyRotation(model.config)
    ids = random_ids(1, 1)
    plain, far = keys_at(model, ids, 0), keys_at(model, ids, 90)
    scaling = model.model.rotary_emb.attention_scaling
    for layer in range(3):
        moved = rotation.unrotate(far[layer], torch.tensor([[90]]), layer)
        assert torch.allclose(moved, plain[layer] / scaling, atol=1e-4)


def test_conventions_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="gptj"):
        KeyRotation(GPTJConfig())
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="sequence length"):
        KeyRotation(config)
