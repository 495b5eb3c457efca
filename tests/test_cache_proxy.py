"""Streaming with a ProxyCache: equal to one pass, in every mode of generation and around every block boundary."""

import copy
from typing import Any

import pytest
import torch
from proxyformer_models import tiny_proxyformer
from test_proxyformer import OPTIONS, ids
from transformers import DynamicCache

from nearfar import ProxyCache

LENGTH = 23


def cached(model: Any, tokens: torch.Tensor, cache: Any = None, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Logits of tokens behind what `cache` holds, and the cache."""
    cache = ProxyCache(model) if cache is None else cache
    return model(tokens, cache=cache, **kwargs).logits, cache


def padded(lengths: list[int], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(lengths)
    tokens, mask = (torch.zeros(len(lengths), longest, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if left else slice(0, length)
        tokens[row, place], mask[row, place] = ids(1, length, 10 + row)[0], 1
    return tokens, mask


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_token_by_token_is_one_pass(options: dict[str, Any]) -> None:
    model = tiny_proxyformer(**options)
    tokens = ids(2, LENGTH)
    whole = model(tokens, use_cache=False).logits
    cache, steps = ProxyCache(model), []
    for t in range(LENGTH):
        steps.append(cached(model, tokens[:, t : t + 1], cache)[0])
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-10
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@torch.no_grad()
def test_any_chunks_are_one_pass(options: dict[str, Any]) -> None:
    model = tiny_proxyformer(**options)
    tokens = ids(2, LENGTH)
    whole = model(tokens, use_cache=False).logits
    for sizes in ([3, 1, 1, 18], [4, 4, 15], [8, 15], [1, 22], [9, 3, 4, 7], [12, 1, 10], [22, 1]):
        cache, parts, start = ProxyCache(model), [], 0
        for size in sizes:
            parts.append(cached(model, tokens[:, start : start + size], cache)[0])
            start += size
        assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10, sizes


@pytest.mark.parametrize("retained", [0, 1, 2])
@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_rows_of_unequal_length_are_rows_alone(retained: int, left: bool) -> None:
    model = tiny_proxyformer(retained_blocks=retained)
    lengths = [13, 7, 1, 8, 4, 5]
    tokens, mask = padded(lengths, left)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    with_cache, cache = cached(model, tokens, attention_mask=mask)
    more = ids(len(lengths), 9, 5)
    grown = torch.cat([mask, torch.ones(len(lengths), 9, dtype=torch.long)], dim=1)
    chunk, _ = cached(model, more, copy.deepcopy(cache), attention_mask=grown)
    steps = torch.cat(
        [
            cached(model, more[:, t : t + 1], cache, attention_mask=grown[:, : tokens.shape[1] + t + 1])[0]
            for t in range(9)
        ],
        dim=1,
    )
    for row, length in enumerate(lengths):
        real = mask[row].bool()
        alone = torch.cat([tokens[row][real], more[row]])[None]
        expected = model(alone, use_cache=False).logits[0]
        for found in (whole, with_cache):
            assert (found[row][real] - expected[:length]).abs().max() < 1e-10
        for found in (steps, chunk):
            assert (found[row] - expected[length:]).abs().max() < 1e-10


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("distances", "recurrent", "ratios by layer", "rope")])
@torch.no_grad()
def test_options_with_rows_of_unequal_length(options: dict[str, Any]) -> None:
    model = tiny_proxyformer(**options)
    tokens, mask = padded([19, 6, 11], left=True)
    _, cache = cached(model, tokens, attention_mask=mask)
    more = ids(3, 14, 5)
    steps = torch.cat([cached(model, more[:, t : t + 1], cache)[0] for t in range(14)], dim=1)
    for row, length in enumerate([19, 6, 11]):
        alone = torch.cat([tokens[row, 19 - length :], more[row]])[None]
        assert (steps[row] - model(alone, use_cache=False).logits[0, length:]).abs().max() < 1e-10


@torch.no_grad()
def test_padding_in_the_middle_and_rows_of_nothing_but_padding() -> None:
    model = tiny_proxyformer()
    tokens = ids(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, 3:7] = 0
    mask[1] = 0
    found = model(tokens, attention_mask=mask, use_cache=False).logits
    alone = model(tokens[:1][mask[:1].bool()][None], use_cache=False).logits
    assert (found[0][mask[0].bool()] - alone[0]).abs().max() < 1e-10
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("keep", [1, 3, 6])
@pytest.mark.parametrize("retained", [0, 1])
@torch.no_grad()
def test_only_the_blocks_that_are_asked_for_are_computed(keep: int, retained: int) -> None:
    model = tiny_proxyformer(retained_blocks=retained, num_hidden_layers=2)
    tokens = ids(2, 41)
    whole = model(tokens, use_cache=False).logits
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    some, cache = cached(model, tokens, logits_to_keep=keep)
    handle.remove()
    assert (some - whole[:, -keep:]).abs().max() < 1e-10
    assert seen[0] < 41
    more = ids(2, 6, 3)
    after = torch.cat([cached(model, more[:, t : t + 1], cache)[0] for t in range(6)], dim=1)
    expected = model(torch.cat([tokens, more], dim=1), use_cache=False).logits[:, 41:]
    assert (after - expected).abs().max() < 1e-10


@torch.no_grad()
def test_logits_of_chosen_columns() -> None:
    model = tiny_proxyformer()
    tokens = ids(2, 20)
    whole = model(tokens, use_cache=False).logits
    columns = torch.tensor([17, 2, 9])
    assert (model(tokens, use_cache=False, logits_to_keep=columns).logits - whole[:, columns]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling", "two of two beams"],
)
def test_generation_with_and_without_a_cache(how: dict[str, Any]) -> None:
    model = tiny_proxyformer()
    tokens, mask = padded([13, 6], left=True)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=14, eos_token_id=None, use_cache=use_cache, **how
            )
        )
    assert torch.equal(*found)


def test_generation_behind_an_encoded_history() -> None:
    model = tiny_proxyformer()
    history, query = ids(2, 18, 1), ids(2, 4, 2)
    cache = model.encode_history(history)
    joined = model.generate(
        torch.cat([history, query], dim=1), cache=cache, max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    given = model.generate(query, history_ids=history, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert torch.equal(joined[:, 18:], given)


@torch.no_grad()
def test_prefill_in_chunks_by_generate() -> None:
    model = tiny_proxyformer()
    tokens = ids(1, 21)
    plain = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
    chunked = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, prefill_chunk_size=5)
    assert torch.equal(plain, chunked)


@torch.no_grad()
def test_rows_are_chosen_repeated_and_share_their_history() -> None:
    model = tiny_proxyformer()
    tokens = ids(3, 17)
    _, cache = cached(model, tokens)
    before = cache.layers[0].levels[0].nbytes()
    cache.batch_repeat_interleave(4)
    assert cache.layers[0].levels[0].nbytes() == before  # stored once
    cache.reorder_cache(torch.tensor([0, 0, 1, 2, 4, 4, 5, 7, 11, 8, 9, 9]))
    assert cache.layers[0].levels[0].nbytes() == before  # beams of one prompt still read the same row
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    more = ids(12, 9, 3)
    found = torch.cat([cached(model, more[:, t : t + 1], cache)[0] for t in range(9)], dim=1)
    expected = model(torch.cat([tokens[rows], more], dim=1), use_cache=False).logits[:, 17:]
    assert (found - expected).abs().max() < 1e-10
    cache.batch_select_indices(torch.tensor([5, 2]))
    assert cache.batch == 2
    last = ids(2, 3, 4)
    found, _ = cached(model, last, cache)
    expected = model(torch.cat([tokens[[1, 0]], more[[5, 2]], last], dim=1), use_cache=False).logits[:, 26:]
    assert (found - expected).abs().max() < 1e-10


@torch.no_grad()
def test_rows_chosen_by_a_mask() -> None:
    """As the rows of other caches; True and False are no numbers of rows."""
    model, tokens = tiny_proxyformer(), ids(3, 14)
    chosen = torch.tensor([True, False, True])
    cache = ProxyCache(model)
    cached(model, tokens[:, :9], cache)
    cache.batch_select_indices(chosen)
    found, _ = cached(model, tokens[chosen, 9:], cache)
    assert (found - model(tokens[chosen], use_cache=False).logits[:, 9:]).abs().max() < 1e-10


@torch.no_grad()
def test_a_copied_cache_goes_its_own_way() -> None:
    model = tiny_proxyformer()
    tokens = ids(1, 10)
    _, cache = cached(model, tokens)
    other = copy.deepcopy(cache)
    cached(model, ids(1, 7, 1), other)
    more = ids(1, 7, 2)
    found, _ = cached(model, more, cache)
    assert (found - model(torch.cat([tokens, more], 1), use_cache=False).logits[:, 10:]).abs().max() < 1e-10
    assert (cache.get_seq_length(), other.get_seq_length()) == (17, 17)


@torch.no_grad()
def test_what_is_held_is_proxies_and_one_block() -> None:
    model = tiny_proxyformer()
    _, cache = cached(model, ids(1, 400))
    assert cache.num_proxies() == [99] * 1  # the last block is needed by nobody yet
    layer = cache.layers[0]
    assert layer.raw_keys is not None and layer.raw_keys.shape == (1, 4, 4, 8)
    # Keys and values that the generation stream reads, and those that proxies read of each other.
    exact = 99 * 2 * 2 * 32 * 8
    held = sum(buffer.nbytes() for buffer in layer.buffers())
    assert held == exact  # a prompt reserves nothing to spare
    assert cache.nbytes() > held


@torch.no_grad()
def test_coarser_proxies_replace_finer_ones() -> None:
    model = tiny_proxyformer(distance_ratios=[[8, 8], [16, 16]])
    fine = tiny_proxyformer()
    sizes = []
    for each in (model, fine):
        _, cache = cached(each, ids(1, 4))
        for chunk in ids(1, 396).split(4, dim=1):
            cached(each, chunk, cache)
        sizes.append(sum(buffer.nbytes() for buffer in cache.layers[0].levels))
    assert sizes[0] < 0.55 * sizes[1]


@pytest.mark.parametrize(("kind", "bound"), [("keep", 1e-12), ("offload", 1e-12), ("quantize", 0.01)])
@torch.no_grad()
def test_released_features_are_what_the_stream_held(kind: str, bound: float) -> None:
    model = tiny_proxyformer()
    tokens, mask = padded([13, 6], left=True)
    cache = ProxyCache(model, released_features=kind)
    cached(model, tokens, cache, attention_mask=mask)
    for t in range(3):
        cached(model, ids(2, 1, t), cache)
    result, _, _ = model.model._encode(tokens[:1, :12], None, None, keeps_states=False, keeps_local=True)
    found = cache.released.features(0)
    assert found.shape == (12, 8)
    assert (found - result.local[0]).abs().max() <= bound * result.local.abs().max()
    assert cache.released.features(1).shape == (8, 8)
    with pytest.raises(ValueError, match="released_features='keep'"):
        cached(model, tokens)[1].released.features(0)


def test_what_a_cache_cannot_do_is_refused() -> None:
    model = tiny_proxyformer()
    _, cache = cached(model, ids(1, 9))
    with pytest.raises(ValueError, match="cannot take tokens back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="assisted"):
        cache.activate_past_recording()
    with pytest.raises(TypeError, match="ProxyCache"):
        model(ids(1, 3), cache=DynamicCache())
    with pytest.raises(ValueError, match="rows"):
        model(ids(2, 3), cache=cache)
    with pytest.raises(ValueError, match="empty cache"):
        model(ids(1, 3), cache=cache, history_ids=ids(1, 3))
    with pytest.raises(TypeError, match="ProxyCache needs"):
        ProxyCache(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="plain decoder"):
        ProxyCache(tiny_proxyformer(compression_ratio=None))
    with pytest.raises(ValueError, match="released_features"):
        ProxyCache(model, released_features="burn")
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids(1, 3), max_new_tokens=2, cache_implementation="static")


def test_assisted_decoding_is_refused_clearly() -> None:
    model = tiny_proxyformer()
    with pytest.raises(ValueError, match=r"assisted|draft"):
        model.generate(ids(1, 9), assistant_model=tiny_proxyformer(seed=1), max_new_tokens=4)


@torch.no_grad()
def test_rows_that_are_over_while_others_go_on() -> None:
    """Also where nothing real is left at all, and where a row is exactly one block long."""
    model = tiny_proxyformer()
    tokens, mask = padded([9, 4], left=False)
    _, cache = cached(model, tokens[:, :4], attention_mask=mask[:, :4])
    found, _ = cached(model, tokens[:, 4:], cache, attention_mask=mask)
    expected = model(tokens[:1], use_cache=False).logits[0, 4:]
    assert (found[0] - expected).abs().max() < 1e-10 and torch.isfinite(found).all()
    nothing = torch.zeros(2, 3, dtype=torch.long)
    found, _ = cached(model, nothing, cache, attention_mask=nothing)
    assert torch.isfinite(found).all()
    assert torch.isfinite(model(nothing, attention_mask=nothing, use_cache=False).logits).all()
    assert cache.lengths == [9, 4]


@torch.no_grad()
def test_a_cache_filled_in_another_dtype_is_read() -> None:
    model = tiny_proxyformer(dtype=torch.float32, retained_blocks=1)
    tokens = ids(1, 22)
    with torch.autocast("cpu", torch.bfloat16):
        _, cache = cached(model, tokens[:, :14])
    after = torch.cat([cached(model, part, cache)[0] for part in tokens[:, 14:].split([1, 3, 1, 3], dim=1)], dim=1)
    expected = model(tokens, use_cache=False).logits[:, 14:]
    assert (after - expected).norm() / expected.norm() < 0.1


@torch.no_grad()
def test_what_overlap_cannot_hold_is_refused_before_anything_is_stored() -> None:
    model = tiny_proxyformer(partition_overlap=2)
    tokens, mask = padded([13, 6], left=True)
    cache = ProxyCache(model)
    with pytest.raises(ValueError, match="use_cache=False"):
        cached(model, tokens, cache, attention_mask=mask)
    assert cache.num_proxies() == [0, 0]
    assert model(tokens, attention_mask=mask, use_cache=False).logits.isfinite().all()


@torch.no_grad()
def test_reset_makes_it_new() -> None:
    model = tiny_proxyformer()
    tokens = ids(2, 9)
    first, cache = cached(model, tokens)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(first, cached(model, tokens, cache)[0])
