"""KVzip as a cache: what it keeps of a context, and what works on it afterwards."""

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, left_padded
from test_kvzip_scores import slow_scores
from tiny_models import random_ids, tiny_model
from tiny_texts import english, tiny_llama, tiny_tokenizer
from transformers import DynamicCache

from nearfar.evaluation.comparison import compare_caches, prefill
from nearfar.evaluation.needles import multi_needle_context
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt, reconstruction_scores
from nearfar.modeling.pruned_cache import TokenStates

# As `slow_scores` has it: a request of [3, 4, 5] or [6, 7, …], then [8, 9]; three tokens of prefix.
PROMPT = RepeatPrompt(prefix=(11, 12, 13), first=(3, 4, 5), later=(6, 7), suffix=(8, 9))
PREFIX = 3


def context_ids(length: int, seed: int = 1) -> torch.Tensor:
    ids = random_ids(1, length, seed)
    ids[0, :PREFIX] = torch.tensor(PROMPT.prefix)
    return ids


def read(model, cache: KVzipCache, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> Drive:
    """A drive that goes on from the compressed context."""
    cache.compress_context(model, ids, PROMPT, attention_mask=mask, **options)
    return Drive(model, cache, ids, torch.ones_like(ids) if mask is None else mask)


def best(scores: dict[int, torch.Tensor], budget: int, allocation: str, sinks: int) -> dict[int, list[list[int]]]:
    """What stays of scores `(heads, n)` by layer; the first tokens and the last one always do."""
    heads, length = next(iter(scores.values())).shape
    rivals: dict[object, list[tuple[float, int, int, int]]] = {}
    for layer, layer_scores in scores.items():
        for head in range(heads):
            key = {"uniform": (layer, head), "head": layer, "global": None}[allocation]
            for column, score in enumerate(layer_scores[head].tolist()):
                kept = column < sinks or column == length - 1
                rivals.setdefault(key, []).append((-9.0 if kept else -score, column, layer, head))
    share = budget * len(scores) * heads // len(rivals)
    stay: dict[int, list[list[int]]] = {layer: [[] for _ in range(heads)] for layer in scores}
    for group in rivals.values():
        for _, column, layer, head in sorted(group)[:share]:
            stay[layer][head].append(column)
    return {layer: [sorted(columns) for columns in by_head] for layer, by_head in stay.items()}


@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
@pytest.mark.parametrize(
    "family, heads, layers", [("llama", 2, [0, 1, 2]), ("gpt_neox", 4, [0, 1, 2]), ("gemma3", 2, [2, 3])]
)
@pytest.mark.parametrize("chunk_tokens, chunks", [(100, [(3, 23)]), (9, [(3, 10), (10, 16), (16, 23)])])
def test_keeps_what_the_definition_says(family, heads, layers, allocation, chunk_tokens, chunks, monkeypatch) -> None:
    model, ids = tiny_model(family), context_ids(23)
    cache = KVzipCache(model, budget=8, sink_tokens=2, allocation=allocation)
    given: dict[int, torch.Tensor] = {}
    score = cache.score

    def watched(states: TokenStates) -> torch.Tensor:
        scores = score(states)
        given.setdefault(states.layer_idx, scores)
        return scores

    monkeypatch.setattr(cache, "score", watched)
    drive = read(model, cache, ids, chunk_tokens=chunk_tokens)
    expected = slow_scores(model, ids[0].tolist(), chunks, 2, heads, layers)
    for layer in layers:
        assert float((given[layer][0] - expected[layer]).abs().max()) < 1e-10
    kept = best(expected, 8, allocation, 2)
    assert {layer: cache.kept_columns(layer) for layer in layers} == kept
    assert all(head[:PREFIX] == [0, 1, 2] for by_head in kept.values() for head in by_head)
    assert cache.kept_pairs() - sum(la.keys.shape[2] * heads for la in cache.layers[: layers[0]]) == 8 * heads * len(
        layers
    )
    model_logits = drive.feed(random_ids(1, 4, 9))
    assert cache.get_seq_length() == 27 and bool(torch.isfinite(model_logits).all())


def follow(drive: Drive, batch: int = 1) -> torch.Tensor:
    drive.logits.clear()
    for piece in (random_ids(batch, 5, 3), *(random_ids(batch, 1, 20 + step) for step in range(7))):
        drive.feed(piece)
    return torch.cat(drive.logits, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt_neox"])
def test_is_the_pruned_full_cache(family) -> None:
    """A context evicted by the scores, and a conversation after it, agree with the dense oracle."""
    model, ids = tiny_model(family), context_ids(30)
    # The oracle needs to know what was read: the context by a full cache, then what is left of it.
    drive = read(model, KVzipCache(model, budget=9, sink_tokens=2, eviction_interval=3), ids)
    held = [drive._held(layer, 1) for layer in drive.cache.layers]
    drive.pieces.append((0, 30, [None if h is None else [[[]] * 64] for h in held]))
    drive.logits.append(torch.zeros(1, 30, 61, dtype=torch.float64))
    for piece in (random_ids(1, 5, 3), *(random_ids(1, 1, 20 + step) for step in range(7))):
        drive.feed(piece)
    got, expected = torch.cat(drive.logits, 1)[:, 30:], drive.oracle()[:, 30:]
    assert float((got - expected).abs().max()) < EXACT
    assert drive.cache.get_seq_length() == 42


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_rows_of_a_padded_batch_are_as_if_alone(family) -> None:
    model = tiny_model(family)
    ids, mask = left_padded([34, 21, 6])
    options = {"budget": 8, "sink_tokens": 2, "eviction_interval": 3}
    together = read(model, KVzipCache(model, **options), ids, mask, chunk_tokens=12)
    alone = []
    for row, length in enumerate((34, 21, 6)):
        cache = KVzipCache(model, **options)
        alone.append(read(model, cache, ids[row : row + 1, 34 - length :], chunk_tokens=12))
        for layer in (2, 3) if family == "gemma3" else range(3):
            expected = [[column + 34 - length for column in head] for head in cache.kept_columns(layer)]
            assert together.cache.kept_columns(layer, row) == expected
    following = [random_ids(3, 5, 3), *(random_ids(3, 1, 20 + step) for step in range(7))]
    for piece in following:
        logits = together.feed(piece)
        for row, drive in enumerate(alone):
            assert float((drive.feed(piece[row : row + 1]) - logits[row]).abs().max()) < EXACT


def test_right_padding() -> None:
    model = tiny_model()
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    drive = read(model, KVzipCache(model, budget=6, sink_tokens=2), ids, mask)
    alone = read(model, KVzipCache(model, budget=6, sink_tokens=2), ids[1:, :13])
    assert [drive.cache.kept_columns(layer, 1) for layer in range(3)] == [
        alone.cache.kept_columns(layer) for layer in range(3)
    ]


def test_generate_goes_on_from_the_context() -> None:
    model, ids = tiny_model(), context_ids(40)
    question = torch.cat([ids, random_ids(1, 6, 4)], 1)
    settings = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    full = model.generate(question, **settings)
    kept = KVzipCache(model, retention_ratio=1.0).compress_context(model, ids, PROMPT)
    everything = model.generate(question, past_key_values=kept, **settings)
    assert torch.equal(full.sequences, everything.sequences)
    for a, b in zip(full.scores, everything.scores, strict=True):
        assert float((a - b).abs().max()) < EXACT
    cache = KVzipCache(model, budget=12, eviction_interval=4).compress_context(model, ids, PROMPT)
    snapshot = cache.snapshot()
    first = model.generate(question, past_key_values=cache, **settings).sequences
    assert cache.kept_pairs() <= (12 + 4) * 6 and cache.get_seq_length() == first.shape[1] - 1
    cache.restore(snapshot)
    model.generate(torch.cat([ids, random_ids(1, 9, 8)], 1), past_key_values=cache, **settings)
    cache.restore(snapshot)
    assert torch.equal(model.generate(question, past_key_values=cache, **settings).sequences, first)
    cache.restore(snapshot)
    cache.batch_repeat_interleave(3)
    beams = model.generate(question, past_key_values=cache, num_beams=3, max_new_tokens=8)
    assert beams.shape[1] <= 54


def test_a_context_within_the_budget_keeps_its_scores_for_later() -> None:
    """Evicted when the question has come: the weakest of the context go, what came after it stays."""
    model, ids = tiny_model(), context_ids(23)
    cache = KVzipCache(model, budget=24, sink_tokens=2, allocation="uniform", eviction_interval=2)
    drive = read(model, cache, ids)
    assert cache.kept_pairs() == 23 * 6
    drive.feed(random_ids(1, 7, 2))
    scores = slow_scores(model, ids[0].tolist(), [(3, 23)], 2, 2, [0, 1, 2])
    kept = best({layer: s[:, :23] for layer, s in scores.items()}, 24 - 7, "uniform", 3)
    for layer in range(3):
        for head, columns in enumerate(cache.kept_columns(layer)):
            assert columns[-7:] == list(range(23, 30)) and len(columns) == 24
            order = sorted(range(3, 23), key=lambda c, la=layer, h=head: -float(scores[la][h, c]))
            assert set(columns[:-7]) == {0, 1, 2, *order[: 24 - 7 - 3]}
    assert kept


def test_one_reconstruction_fills_caches_of_any_budget() -> None:
    model, ids = tiny_model("gemma3"), context_ids(30)
    found = reconstruction_scores(model, ids, PROMPT, prefix_length=PREFIX, sink_tokens=2)
    before = [layer.keys.clone() for layer in found.cache.layers]
    for budget in (6, 12):
        direct = read(model, KVzipCache(model, budget=budget, sink_tokens=2), ids)
        taken = KVzipCache(model, budget=budget, sink_tokens=2).ingest_scored(found)
        assert [taken.kept_columns(la) for la in (2, 3)] == [direct.cache.kept_columns(la) for la in (2, 3)]
        other = Drive(model, taken, ids, torch.ones_like(ids))
        assert float((follow(other) - follow(direct)).abs().max()) < EXACT
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(found.cache.layers, before, strict=True))


@pytest.mark.parametrize("options", [{}, {"offloading": True}, {"quantization": "int8"}])
def test_files_copies_and_storage(options, tmp_path) -> None:
    if "quantization" in options:
        pytest.importorskip("torchao")
    model = tiny_model(dtype=torch.float32)
    ids, mask = left_padded([34, 21])
    drive = read(model, KVzipCache(model, budget=9, eviction_interval=3, **options), ids, mask)
    drive.cache.save_context(tmp_path / "context")
    loaded = KVzipCache.load_context(tmp_path / "context", model)
    assert loaded.settings() == drive.cache.settings()
    drive.cache.batch_select_indices(torch.tensor([1, 0]))
    loaded.batch_select_indices(torch.tensor([1, 0]))
    other = Drive(model, loaded, ids[[1, 0]], mask[[1, 0]])
    drive.ids, drive.mask = ids[[1, 0]], mask[[1, 0]]
    got, expected = follow(other, 2), follow(drive, 2)
    assert float((got - expected).norm() / expected.norm()) < 0.02
    drive.cache.reset()
    assert drive.cache.nbytes() == 0
    read(model, drive.cache, context_ids(12))


def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    drive = read(model, KVzipCache(model, budget=9), context_ids(40))
    assert drive.cache.kept_pairs() == 9 * 6 and bool(torch.isfinite(follow(drive)).all())


def test_held_eviction() -> None:
    model, ids = tiny_model(), context_ids(30)
    direct = read(model, KVzipCache(model, budget=8), ids).cache
    held = KVzipCache(model, budget=8)
    with held.hold_eviction():
        held.compress_context(model, ids, PROMPT)
        assert held.kept_pairs() == 30 * 6
    assert [held.kept_columns(la) for la in range(3)] == [direct.kept_columns(la) for la in range(3)]


def test_prefix_length_is_found_or_given() -> None:
    model, ids = tiny_model(), context_ids(30)
    given = read(model, KVzipCache(model, budget=8, sink_tokens=0), ids, prefix_length=PREFIX).cache
    found = read(model, KVzipCache(model, budget=8, sink_tokens=0), ids).cache
    other = read(model, KVzipCache(model, budget=8, sink_tokens=0), random_ids(1, 30)).cache
    assert [given.kept_columns(la) for la in range(3)] == [found.kept_columns(la) for la in range(3)]
    assert all(head[:3] == [0, 1, 2] for la in range(3) for head in found.kept_columns(la))
    assert any(head[:3] != [0, 1, 2] for la in range(3) for head in other.kept_columns(la))


def test_what_it_cannot_do_is_refused_before_any_work() -> None:
    model, ids = tiny_model(), context_ids(20)
    cache = KVzipCache(model, budget=8)
    with pytest.raises(ValueError, match="compress_context"), torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    assert cache.get_seq_length() == 0 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="compress_context"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{cache_argument(model): full})
    with pytest.raises(ValueError, match="ingest_scored"):
        cache.ingest(full)
    with pytest.raises(ValueError, match="attention_mask has the shape"):
        cache.compress_context(model, ids, PROMPT, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="another model"):
        cache.compress_context(tiny_model(), ids, PROMPT)
    with pytest.raises(ValueError, match="empty"):
        cache.compress_context(model, ids, PROMPT, attention_mask=torch.zeros(1, 20))
    found = [reconstruction_scores(model, ids[:, :n], PROMPT) for n in (20, 12)]
    with pytest.raises(ValueError, match="say where they stand"):
        cache.ingest_scored(found)
    with pytest.raises(ValueError, match="tokens a row"):
        cache.ingest_scored(found[:1], torch.ones(1, 12))
    cache.compress_context(model, ids, PROMPT)
    with pytest.raises(ValueError, match="reset"):
        cache.compress_context(model, ids, PROMPT)


# -- in comparisons -------------------------------------------------------------------------------------------------


def test_comparison_fills_it_with_its_own_passes() -> None:
    model, tokenizer = tiny_llama(torch.float32), tiny_tokenizer()
    results = compare_caches(
        model, tokenizer, english(400), ["full", "kvzip", "snapkv", "h2o"], budget=64, needles=3, context_tokens=300,
        continuation_tokens=40, decode_tokens=3, progress=False,
    )  # fmt: skip
    assert [result.error for result in results] == [None] * 4
    full, *pruned = results
    for result in pruned:
        assert result.kept_pairs == 64 * full.kept_pairs / full.context_tokens
        assert result.perplexity is not None and len(result.answers) == 3


def test_prefill_equals_compressing_and_reading_the_last_token() -> None:
    model, tokenizer = tiny_llama(torch.float64), tiny_tokenizer()
    context = multi_needle_context(tokenizer, english(400), 2, 120)
    ids = context.context_ids
    cache = KVzipCache(model, retention_ratio=1.0)
    _, logits = prefill(model, cache, ids, tokenizer)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, -1]
    assert float((logits - expected).abs().max()) < 1e-8
    assert cache.get_seq_length() == len(ids)
    with pytest.raises(ValueError, match="tokenizer"):
        prefill(model, KVzipCache(model, budget=8), ids)
