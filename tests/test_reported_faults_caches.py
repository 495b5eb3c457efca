"""Kinds of faults that others have reported of caches and generation, tried on ours. Docstrings say the kind.

Kinds that another test is about already:

- Beams leave a non-standard cache as it is: `test_cache_dar.py`, `test_generate_with_beams`; `test_cache_proxy.py`,
  `test_generation_with_and_without_a_cache`; `test_pruned_cache.py`, `test_beams`.
- A sliding or static cache attends to slots that hold nothing yet: `test_cache_dar.py`, `test_cached_equals_uncached`;
  `test_pruned_cache.py`, `test_within_the_budget_it_is_the_full_cache` (sliding families).
- A chunk of a prompt that is longer than the window sees too much: `test_generation.py`, `test_a_prompt_in_chunks`;
  `test_pruned_cache.py`, `test_chunked_prefill_agrees_with_the_oracle`.
- Queries and keys of unequal number, or seen tokens counted for all layers at once; layers of unequal length break
  masks; a lower-right causal mask after tokens have gone from the middle: `test_pruned_cache.py`,
  `test_one_layer_pruned_alone_then_a_multi_token_query` and `test_turns_agree_with_the_oracle`.
- Log-sum-exps in base 2, or zero: `test_dar_attention.py`, `test_window_attention` and
  `test_log_sum_exp_of_each_backend_on_cuda`.
- Past the window, keys are not rotated anew: `test_cache_streaming_llm.py`,
  `test_rerotated_sinks_stand_before_the_window`. On another device than theirs: `test_pruned_cache.py`,
  `test_layers_on_two_devices`.
- Only the first row of a batch is compressed: `test_pruned_cache_eviction.py`,
  `test_a_batch_keeps_what_single_rows_keep`.
- Chunks are scored with hidden states of a pass without chunks: `test_kvzip_scores.py`,
  `test_agrees_with_the_definition`.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from dense_oracle import Drive
from proxyformer_models import tiny_proxyformer
from pruning_policies import EXACT, POLICIES, left_padded
from tiny_models import random_ids, tiny_model
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from nearfar import DARCache, ProxyCache
from nearfar.modeling.cache_registry import cache_nbytes, make_cache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.dar_flex_attention import dar_block_mask
from nearfar.modeling.pruned_cache import PrunedCache
from nearfar.modeling.ragged_layer import RaggedLayer

OWN: dict[str, tuple[Callable[..., PreTrainedModel], Callable[..., Cache]]] = {
    "dar": (tiny_dar, DARCache),
    "proxyformer": (tiny_proxyformer, ProxyCache),
}
# Registered caches that need nothing but a model.
REGISTERED = ("streaming_llm", "random", "snapkv", "h2o")
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(params=[*OWN, *(policy.__name__ for policy in POLICIES)])
def kind(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Callable[[], Any]]:
    """A model, and what makes a cache of it that holds everything."""
    if request.param in OWN:
        make, cache = OWN[request.param]
        model = make()
        return model, lambda: cache(model)
    policy = next(policy for policy in POLICIES if policy.__name__ == request.param)
    model = tiny_model()
    return model, lambda: policy(model, budget=400)


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of one pass, with positions that count real tokens where there is a mask."""
    options: dict[str, Any] = {}
    if mask is not None:
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
    return model(ids, **{cache_argument(model): cache}, **options).logits


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_checkpointed_layers_leave_a_cache_alone(name: str) -> None:
    """A cache is filled a second time when a checkpointed layer is computed again. Pruned caches refuse training."""
    make, new_cache = OWN[name]
    model, ids = make().train(), random_ids(2, 22)
    found = []
    for options in ({"use_cache": False}, {"past_key_values": new_cache(model)}):
        model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    cache = new_cache(model)
    model(ids, labels=ids, past_key_values=cache).loss.backward()
    assert cache.get_seq_length() == 0, "nothing was stored, and nothing twice"
    read(model, cache, ids)  # without gradients a cache works in training mode too
    assert cache.get_seq_length() == 22
    with pytest.raises(ValueError, match="gradient checkpointing a layer is computed twice"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 22


# ---------------------------------------------------------------------------------------------------------------------
# Padding and roll-back
# ---------------------------------------------------------------------------------------------------------------------


def test_a_row_without_any_history(kind: tuple[PreTrainedModel, Callable[[], Any]]) -> None:
    """A row of the mask that sees nothing gives NaN, which then spreads: row 0 has no token in the first pass."""
    model, new_cache = kind
    cache, ids = new_cache(), random_ids(2, 17)
    mask = torch.ones_like(ids)
    ids[0, :12], mask[0, :12] = 0, 0
    read(model, cache, ids[:, :12], mask[:, :12])
    found = read(model, cache, ids[:, 12:], mask)
    assert torch.isfinite(found).all()
    following = random_ids(2, 1, 5)
    after = read(model, cache, following, torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1))
    for row, start in ((0, 12), (1, 0)):
        alone = torch.cat([ids[row : row + 1, start:], following[row : row + 1]], dim=1)
        wanted = model(alone, use_cache=False).logits[:, -6:]
        assert (torch.cat([found[row], after[row]])[None] - wanted).abs().max() < EXACT


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rolled_back_sliding_layers(family: str, policy: type[PrunedCache]) -> None:
    """After a roll-back a sliding layer returns more keys than its mask has columns: drafts beyond the window."""
    model, ids = tiny_model(family), random_ids(1, 6).repeat(1, 5)
    wanted = model.generate(ids, **GREEDY)
    drafted = model.generate(ids, **GREEDY, past_key_values=policy(model, budget=400), prompt_lookup_num_tokens=5)
    assert torch.equal(drafted, wanted)


def test_crops_of_nothing_and_of_too_much(kind: tuple[PreTrainedModel, Callable[[], Any]]) -> None:
    """`crop(0)` empties a cache, and a crop beyond its beginning leaves half of it."""
    model, new_cache = kind
    cache, ids = new_cache(), random_ids(1, 21)
    read(model, cache, ids[:, :15])
    if isinstance(cache, ProxyCache):
        with pytest.raises(ValueError, match="cannot take tokens back"):
            cache.crop(0)
    else:
        cache.crop(0)
        with pytest.raises(ValueError, match="Cannot remove 16"):
            cache.crop(-16)
    assert cache.get_seq_length() == 15
    found = read(model, cache, ids[:, 15:])
    assert (found - model(ids, use_cache=False).logits[:, 15:]).abs().max() < EXACT


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_pairs_follow_their_beams(quantization: str) -> None:
    """Keys and values are reordered, and what is quantised, or waits to be, is not."""
    pytest.importorskip("torchao")
    model, order = tiny_model(dtype=torch.float32), torch.tensor([2, 0, 0])
    ids, mask = left_padded([25, 19, 22])
    logits = []
    for rows, real, later in ((ids, mask, order), (ids[order], mask[order], None)):
        cache = POLICIES[0](model, budget=12, eviction_interval=5, quantization=quantization)
        drive = Drive(model, cache)
        drive.feed(rows, real)
        for step in range(2):  # these wait
            drive.feed(random_ids(1, 1, step).expand(3, 1))
        if later is not None:
            cache.reorder_cache(later)
            drive.mask = drive.mask[later]
        for step in range(8):
            drive.feed(random_ids(3, 1, 20 + step))
        logits.append(torch.cat(drive.logits[3:], dim=1))
    assert (logits[0] - logits[1]).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# What has been seen, and what is held
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGISTERED)
def test_positions_go_on_where_the_text_does(name: str) -> None:
    """The offset is the number of kept tokens: after 300 tokens and a budget of 128 the next position is 300."""
    model, ids = tiny_model(), random_ids(1, 302)
    cache: Any = make_cache(name, model, budget=128)
    read(model, cache, ids[:, :300])
    assert cache.get_seq_length() == 300 and all(layer.get_seq_length() == 300 for layer in cache.layers)
    assert all(len(cache.kept_columns(layer, 0)[0]) <= 128 for layer in range(3))
    named = copy.deepcopy(cache)
    by_itself = read(model, cache, ids[:, 300:301])
    with torch.no_grad():
        told = model(ids[:, 300:301], position_ids=torch.tensor([[300]]), **{cache_argument(model): named}).logits
    assert torch.equal(by_itself, told)
    assert max(cache.kept_columns(0, 0)[0]) == 300


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_beyond_the_budget(policy: type[PrunedCache]) -> None:
    """Garbage once the prompt exceeds the budget; what is asked comes last, and the budget is 160 below the length."""
    drive = Drive(tiny_model(), policy(tiny_model(), budget=40))
    drive.cache = policy(drive.model, budget=40)
    drive.feed(random_ids(1, 200))
    drive.feed(random_ids(1, 7, 1))
    for step in range(3):
        drive.feed(random_ids(1, 1, 2 + step))
    assert drive.error() < EXACT


def test_nothing_is_left_of_another_prompt(kind: tuple[PreTrainedModel, Callable[[], Any]]) -> None:
    """State of a long prompt leaks into the next, short one: by another cache, and by the same one reset."""
    model, new_cache = kind
    short = random_ids(1, 9, 3)
    wanted = model(short, use_cache=False).logits
    used = new_cache()
    read(model, used, random_ids(2, 90))
    assert (read(model, new_cache(), short) - wanted).abs().max() < EXACT
    used.reset()
    assert used.get_seq_length() == 0
    assert (read(model, used, short) - wanted).abs().max() < EXACT


def test_a_cache_and_only_the_new_tokens(kind: tuple[PreTrainedModel, Callable[[], Any]]) -> None:
    """Given a filled cache and only what comes after it, a model takes the new tokens for the beginning."""
    model, new_cache = kind
    cache, ids = new_cache(), random_ids(1, 26)
    read(model, cache, ids[:, :19])
    found = read(model, cache, ids[:, 19:])
    assert (found - model(ids, use_cache=False).logits[:, 19:]).abs().max() < EXACT


@pytest.mark.parametrize("name", REGISTERED)
def test_memory_is_saved_by_the_share_that_is_dropped(name: str) -> None:
    """Users see no memory saved: pairs are masked, copied, or stored once for each query head of a group."""
    # Room for coming tokens, whatever the prompt's length, is large beside pairs of 8 numbers.
    model, ids = tiny_model(), random_ids(1, 2000)
    full, pruned = make_cache("full", model), make_cache(name, model, retention_ratio=0.25)
    for cache in (full, pruned):
        read(model, cache, ids)
    assert cache_nbytes(pruned) < 0.4 * cache_nbytes(full)
    assert model.config.num_key_value_heads == 2 < model.config.num_attention_heads
    for layer in pruned.layers:
        assert isinstance(layer, RaggedLayer) and layer.store.heads == 2


def test_memory_of_the_models_own_caches() -> None:
    """The same of caches that hold something else than keys and values."""
    ids = random_ids(1, 600)
    dar = tiny_dar(bottleneck_size=4, far_cache="small")
    vanilla = tiny_dar(window_size=None)
    proxyformer = tiny_proxyformer(compression_ratio=8)
    plain = tiny_proxyformer(compression_ratio=None)
    pairs = [(dar, DARCache(dar), vanilla), (proxyformer, ProxyCache(proxyformer), plain)]
    for model, cache, other in pairs:
        full = DynamicCache(config=other.config)
        read(model, cache, ids)
        read(other, full, ids)
        assert cache_nbytes(cache) < 0.5 * cache_nbytes(full)


# ---------------------------------------------------------------------------------------------------------------------
# Block masks
# ---------------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_block_masks_of_long_texts() -> None:
    """To make a block mask takes memory with the square of 98,304 tokens."""

    def never(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        raise AssertionError("looked at")

    with Largest() as largest:
        mask = dar_block_mask(never, 98_304, 4096, None, plain=True, device=torch.device("cpu"))
    assert largest.elements < 4_000_000
    seen = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert seen.shape == (1, 1, 768) and int(seen[0, 0, -1]) == 768 + 1  # one block lies on the window's edge


@pytest.mark.parametrize("tokens", [5, 128, 300, 513])
@pytest.mark.parametrize("window", [0, 1, 128, 200, 1000])
@pytest.mark.parametrize("form", ["plain", "padded", "packed"])
def test_block_masks_name_every_block_that_is_seen(tokens: int, window: int, form: str) -> None:
    place = torch.arange(tokens)[None].expand(2, -1)
    ranks, ids = None, torch.zeros(2, tokens)
    if form == "padded":
        ranks = (place - torch.tensor([[0], [min(40, tokens - 1)]])).clamp(min=0)
    elif form == "packed":
        cut = torch.tensor([[tokens // 2], [tokens // 3]])
        ranks, ids = torch.where(place < cut, place, place - cut), (place >= cut).long()

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        is_near = k >= tokens
        j = torch.where(is_near, k - tokens, k)
        distance = q - j if ranks is None else ranks[b, q] - ranks[b, j]
        seen = (q >= j) & torch.where(is_near, distance < window, distance >= window)
        return seen & (ids[b, q] == ids[b, j])

    mine = dar_block_mask(visible, tokens, window, ranks, plain=form == "plain", device=torch.device("cpu"))
    wanted = create_block_mask(visible, None if form == "plain" else 2, None, tokens, 2 * tokens, device="cpu")
    found, least = mine.to_dense() > 0, wanted.to_dense() > 0
    assert bool((found | ~least).all())
    if form == "plain":
        assert torch.equal(found, least)
        assert torch.equal(mine.full_kv_num_blocks, wanted.full_kv_num_blocks)
