"""Taking over attention for one look-up, and leaving no trace."""

import pytest
import torch
from tiny_models import random_ids, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nearfar.modeling.attention_dispatch import PREFIX, CacheHandle, take_over
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.new_token_padding import new_tokens_valid


class Owner:
    def attend(self, call):
        raise AssertionError("not asked")


def test_a_handle_tells_its_shape_and_refuses_to_be_computed_with() -> None:
    states = torch.randn(2, 3, 5, 4)
    handle = CacheHandle.wrap(states, Owner())
    assert handle.shape == (2, 3, 5, 4)
    assert handle.dtype == torch.float32
    assert handle.size(1) == 3
    for operation in (lambda: handle + 1, lambda: handle.transpose(1, 2), lambda: torch.cat([handle, handle])):
        with pytest.raises(RuntimeError, match="belong to a nearfar cache"):
            operation()
    assert type(handle.unwrap()) is torch.Tensor
    assert torch.equal(handle.unwrap(), states)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_foreign_keys_go_to_the_stock_function(attention: str) -> None:
    """A take-over that no attention call followed must not change what the next forward pass computes."""
    model, ids = tiny_model(attention=attention), random_ids(1, 12)
    expected = model(ids).logits
    take_over(model.config, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), Owner())
    assert model.config._attn_implementation == PREFIX + attention
    assert torch.equal(model(ids).logits, expected)
    assert model.config._attn_implementation == attention


def test_stock_names_stay_as_they_were_registered() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = tiny_model()
    take_over(model.config, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), Owner())
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_the_cache_argument_is_found() -> None:
    assert cache_argument(tiny_model()) in ("cache", "past_key_values")
    with pytest.raises(TypeError, match="neither"):
        cache_argument(torch.nn.Linear(2, 2))


def test_padding_is_read_from_every_kind_of_mask() -> None:
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    causal = torch.ones(5, 5).tril().bool()
    four = (causal & padding.bool()[:, None])[:, None]
    additive = torch.where(four, 0.0, torch.finfo(torch.float32).min)
    sliding = four & ~torch.ones(5, 5).tril(-2).bool()
    for mask in (padding, four, additive, sliding):
        assert new_tokens_valid(mask, 2, 5).tolist() == padding.bool().tolist()
        assert new_tokens_valid(mask, 2, 2) is None if mask is padding else True
    assert new_tokens_valid(torch.ones(2, 7), 2, 5) is None
    assert new_tokens_valid(four[:, :, -2:], 2, 2) is None  # two new tokens after three, all real
    with pytest.raises(TypeError, match="Unknown kind"):
        new_tokens_valid("mask", 1, 1)


def test_a_mask_may_be_passed_by_name() -> None:
    """As some models do."""
    model = tiny_model()
    take_over(model.config, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), Owner())
    states = torch.randn(1, 4, 3, 8, dtype=torch.float64)
    attend, module = ALL_ATTENTION_FUNCTIONS[PREFIX + "sdpa"], model.model.layers[0].self_attn
    keys = states[:, :2]
    by_name, _ = attend(module, query=states, key=keys, value=keys, attention_mask=None, scaling=0.5)
    assert torch.equal(by_name, attend(module, states, keys, keys, None, scaling=0.5)[0])
