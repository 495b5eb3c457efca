"""ProxyKV end to end on tiny models: what is kept, when it is evicted, and what happens when something goes wrong."""

import threading

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, left_padded
from tiny_models import FAMILIES, random_ids, tiny_model
from transformers import DynamicCache

import nearfar
from nearfar.modeling import proxy_scorer
from nearfar.modeling.attention_features import proxy_features
from nearfar.modeling.cache_proxykv import ProxyKVCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.model_identity import scored_layers
from nearfar.modeling.pending_scores import PendingScores
from nearfar.modeling.proxy_scorer import ProxyScorer
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates

LENGTH = 40


class FakeMapper:
    """Fixed mixtures of the proxy's heads: scores depend on the features alone, and differ between heads."""

    def __init__(self, layers: int = 3, heads: int = 2, gate: threading.Event | None = None) -> None:
        self.layers, self.heads, self.gate = layers, heads, gate
        self.seen: list[torch.Tensor] = []

    def check_compatible(self, proxy=None, target=None, **options) -> None:
        config = getattr(target, "config", target)
        if config is not None and len(scored_layers(config)) != self.layers:
            raise ValueError(f"This mapper was made for {self.layers} layers.")

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            assert self.gate.wait(20)
        self.seen.append(features)
        sources, heads, _ = features.shape
        generator = torch.Generator().manual_seed(3)
        weights = torch.rand(self.layers, self.heads, sources, heads, generator=generator, dtype=torch.float64)
        return torch.einsum("lhsg,sgn->lhn", weights, features.double())


@pytest.fixture
def proxy():
    return tiny_model("llama", seed=7)


def feed(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **{cache_argument(model): cache}).logits


def kept(cache: PrunedCache, row: int = 0) -> list[list[list[int]]]:
    return [cache.kept_columns(layer.layer_idx, row) for layer in cache.ragged_layers]


def expected_columns(scores: torch.Tensor, budget: int, sinks: int = 4) -> list[list[list[int]]]:
    """The best of all layers and heads, one sort over `(layers, heads, n)`; sinks and the newest token stay."""
    layers, heads, n = scores.shape
    ranked = []
    for layer in range(layers):
        for head in range(heads):
            for column in range(n):
                must = column < sinks or column == n - 1
                ranked.append((not must, -float(scores[layer, head, column]), column, layer, head))
    chosen: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(layers)]
    for *_, column, layer, head in sorted(ranked)[: budget * layers * heads]:
        chosen[layer][head].append(column)
    return [[sorted(columns) for columns in heads_] for heads_ in chosen]


def test_a_cache_with_a_scorer_reads_by_itself(proxy):
    """What `make_cache` makes does what `prefill` does, and one prompt's scores serve caches of several budgets."""
    target, ids, scorer = tiny_model("llama"), random_ids(1, LENGTH), ProxyScorer(proxy, FakeMapper())
    cache = ProxyKVCache(target, retention_ratio=0.4, scorer=scorer).score_prompt(ids, chunk_tokens=9)
    pending, other = cache.scores, ProxyKVCache(target, retention_ratio=0.2, scorer=scorer)
    other.expect(pending)
    for filled, ratio in ((cache, 0.4), (other, 0.2)):
        Drive(target, filled).feed(ids)
        expected = scorer.prefill(ids, target_model_or_config=target, retention_ratio=ratio)
        Drive(target, expected).feed(ids)
        assert kept(filled) == kept(expected)
    with pytest.raises(ValueError, match="has read a prompt already"):
        cache.score_prompt(ids)
    with pytest.raises(ValueError, match="no scorer"):
        ProxyKVCache(target, budget=8).score_prompt(ids)
    assert repr(scorer).startswith("ProxyScorer(")


def test_the_prefix_is_kept_where_a_prompt_starts_with_it(proxy):
    target, ids = tiny_model("llama"), random_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # the prefix starts behind the padding
    prefix = tuple(ids[0, 3:11].tolist())
    scorer = ProxyScorer(proxy, FakeMapper(), prefix_ids=prefix)
    cache = scorer.prefill(ids, mask, target_model_or_config=target, budget=14, sink_tokens=1)
    plain = ProxyScorer(proxy, FakeMapper()).prefill(
        ids, mask, target_model_or_config=target, budget=14, sink_tokens=1
    )
    scores, before = cache.scores.of_layer(0, ids.device), plain.scores.of_layer(0, ids.device)
    assert bool((scores[0, :, 3:11] > 1).all())
    assert torch.equal(scores[0, :, 11:], before[0, :, 11:]) and torch.equal(scores[1], before[1])
    with torch.no_grad():
        target(ids, attention_mask=mask, past_key_values=cache)
    for layer in cache.ragged_layers:
        _, _, columns = layer.store.rectangle()
        assert all(set(range(3, 11)) <= set(head) for head in columns[0].tolist())


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_the_best_by_the_mapper_are_kept_and_attention_is_right(family, mode, proxy):
    target = tiny_model(family)
    layers, heads = len(scored_layers(target.config)), 4 if family == "gpt_neox" else 2
    mapper = FakeMapper(layers, heads)
    ids = random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, mapper).prefill(
        ids, target_model_or_config=target, retention_ratio=0.4, mode=mode, chunk_tokens=9
    )
    assert isinstance(cache, ProxyKVCache)
    drive = Drive(target, cache)
    drive.feed(ids)
    if family != "mistral":  # there, what has left the window is let go besides
        scores = mapper.predict(proxy_features(proxy, ids)[:, 0])
        assert kept(cache) == expected_columns(scores, budget=16)
    for step in range(3):
        drive.feed(random_ids(1, 1, step))
    assert drive.error() < EXACT
    assert cache.scores is None  # used up, and let go


def test_generate_unmodified(proxy):
    target = tiny_model("llama")
    ids = random_ids(1, LENGTH)
    scorer = ProxyScorer(proxy, FakeMapper())
    full = target.generate(ids, max_new_tokens=5, do_sample=False)
    everything = scorer.prefill(ids, target_model_or_config=target, retention_ratio=1.0)
    assert torch.equal(target.generate(ids, past_key_values=everything, max_new_tokens=5, do_sample=False), full)
    answers = []
    for mode in ("sequential", "parallel"):
        cache = scorer.prefill(ids, target_model_or_config=target.config, mode=mode)  # 0.3 of the prompt
        answers.append(target.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False))
        assert cache.row_budgets == [12]
        assert cache.kept_pairs() == 12 * 6 + 4 * 6  # the last answer token was never fed
    assert torch.equal(*answers)


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize(
    "how", [{"prompt_lookup_num_tokens": 3}, {"num_beams": 3}, {"num_return_sequences": 2}, {"prefill_chunk_size": 16}]
)
def test_other_ways_to_generate(how, mode, proxy):
    target, ids = tiny_model("llama"), random_ids(1, 60)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(
        ids,
        target_model_or_config=target,
        budget=20,
        eviction_interval=8,
        mode=mode,
        chunked_prefill="prefill_chunk_size" in how,
    )
    sample = {"do_sample": True} if "num_return_sequences" in how else {"do_sample": False}
    out = target.generate(ids, past_key_values=cache, max_new_tokens=30, eos_token_id=None, **how, **sample)
    rows = how.get("num_return_sequences", how.get("num_beams", 1))
    assert out.shape[1] == 90 and cache.get_seq_length() >= 89
    assert 20 * 6 * rows <= cache.kept_pairs() <= (20 + 8 + 4) * 6 * rows
    assert cache.scores is None


def test_a_padded_batch_keeps_what_single_rows_keep(proxy):
    target = tiny_model("llama")
    ids, mask = left_padded([40, 25])
    mapper = FakeMapper()
    scorer = ProxyScorer(proxy, mapper)
    batched = scorer.prefill(ids, mask, target_model_or_config=target, budget=9)
    assert [features.shape[-1] for features in mapper.seen] == [40, 25]  # the mapper sees no padding
    drive = Drive(target, batched)
    drive.feed(ids, mask)
    drive.feed(random_ids(2, 1))
    assert drive.error() < EXACT
    for row, length in enumerate((40, 25)):
        alone = scorer.prefill(ids[row : row + 1, -length:], target_model_or_config=target, budget=9)
        feed(target, alone, ids[row : row + 1, -length:])
        feed(target, alone, random_ids(2, 1)[row : row + 1])
        shift = 40 - length
        shifted = [[[column + shift for column in head] for head in layer] for layer in kept(alone)]
        assert kept(batched, row) == shifted


def test_beams_repeat_the_prompt(proxy):
    target = tiny_model("llama")
    ids = random_ids(2, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=9)
    feed(target, cache, ids.repeat_interleave(2, 0))
    assert kept(cache, 0) == kept(cache, 1) != kept(cache, 2) == kept(cache, 3)


def test_rows_chosen_before_eviction_keep_their_own_scores(proxy):
    target = tiny_model("llama")
    ids = random_ids(2, LENGTH)
    scorer = ProxyScorer(proxy, FakeMapper())
    straight, swapped = (scorer.prefill(ids, target_model_or_config=target, budget=9) for _ in range(2))
    feed(target, straight, ids)
    with swapped.hold_eviction():
        feed(target, swapped, ids)
        swapped.batch_select_indices(torch.tensor([1, 0]))
    assert kept(swapped, 0) == kept(straight, 1) and kept(swapped, 1) == kept(straight, 0)


def test_pieces_held_together_end_as_one_prefill(proxy):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    scorer = ProxyScorer(proxy, FakeMapper())
    whole, pieces, chunked, taken = (
        scorer.prefill(ids, target_model_or_config=target, budget=9, chunked_prefill=flag)
        for flag in (False, False, True, False)
    )
    feed(target, whole, ids)
    with pieces.hold_eviction():
        for part in ids.split(15, 1):
            feed(target, pieces, part)
    assert kept(pieces) == kept(whole)
    drive = Drive(target, chunked)
    for part in ids.split(15, 1):
        drive.feed(part)
    assert drive.error() < EXACT and chunked.kept_pairs() == 9 * 6 and chunked.scores is None
    full = DynamicCache(config=target.config)
    feed(target, full, ids)
    assert kept(taken.ingest(full)) == kept(whole)


# -- when it is evicted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["uniform", "head", "global"])
def test_layers_wait_for_late_scores_without_stopping_the_target(allocation, proxy, monkeypatch):
    """Before the gate opens the target runs on with full layers; what it keeps in the end is the same."""
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", 0)
    target, ids, gate = tiny_model("llama"), random_ids(1, LENGTH), threading.Event()
    options = {"target_model_or_config": target, "budget": 9, "allocation": allocation}

    def read(cache, open_at):
        """Logits, and the pairs held after each layer; the gate opens just before layer `open_at` attends."""
        held, attend = [], cache.attend

        def watched(layer, call):
            if layer.layer_idx == open_at:
                gate.set()
                cache.scores.wait()
            output = attend(layer, call)
            held.append(cache.kept_pairs())
            return output

        monkeypatch.setattr(cache, "attend", watched)
        return feed(target, cache, ids), held

    for open_at in (1, 2):
        gate.clear()
        early = ProxyScorer(proxy, FakeMapper()).prefill(ids, **options, mode="sequential")
        late = ProxyScorer(proxy, FakeMapper(gate=gate)).prefill(ids, **options, mode="parallel")
        expected, held_early = read(early, None)
        logits, held_late = read(late, open_at)
        assert torch.equal(logits, expected) and kept(late) == kept(early)
        assert held_early[-1] == held_late[-1] == 9 * 6
        assert held_late[:open_at] == [2 * LENGTH * (layer + 1) for layer in range(open_at)]
        if allocation != "global":
            assert held_early[0] == 2 * 9
        assert held_late[open_at] <= 9 * 6


def test_the_last_layer_waits(proxy):
    target, ids, gate = tiny_model("llama"), random_ids(1, LENGTH), threading.Event()
    scorer = ProxyScorer(proxy, FakeMapper(gate=gate))
    cache = scorer.prefill(ids, target_model_or_config=target, budget=9, mode="parallel")
    assert not cache.scores.ready()
    score, open_when_asked = cache.score, []

    def watched(states):
        open_when_asked.append(gate.is_set())
        threading.Timer(0.05, gate.set).start()
        return score(states)

    cache.score = watched
    feed(target, cache, ids)
    # The first scores were asked for while they could not be there, and all layers got theirs.
    assert open_when_asked[0] is False and len(open_when_asked) == 3
    assert cache.kept_pairs() == 9 * 6


def test_sequential_holds_no_more_than_what_is_kept_and_one_layer(proxy, monkeypatch):
    monkeypatch.setattr("nearfar.modeling.pruned_cache.TRIM_BYTES", 0)
    target, held = tiny_model("llama"), []

    class Watched(ProxyKVCache):
        def score(self, states: TokenStates) -> torch.Tensor:
            held.append(self.kept_pairs())
            return super().score(states)

    monkeypatch.setattr(ProxyScorer, "cache_class", Watched)
    ids = random_ids(1, 200)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=10)
    feed(target, cache, ids)
    assert len(held) == 3 and max(held) <= 10 * 6 * 1.08 and cache.kept_pairs() == 10 * 6


def test_default_mode_is_sequential_on_one_device(proxy):
    ids = random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=tiny_model("llama"))
    assert cache.scores.ready()
    seconds = cache.scores.seconds()
    assert set(seconds) == {"proxy", "mapper"} and min(seconds.values()) > 0


def test_under_the_budget_nothing_is_lost(proxy):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(
        ids, target_model_or_config=target, budget=LENGTH + 6, eviction_interval=4, mode="parallel"
    )
    drive = Drive(target, cache)
    drive.feed(ids)
    assert cache.kept_pairs() == LENGTH * 6
    for step in range(12):
        drive.feed(random_ids(1, 1, step))
    assert drive.error() < EXACT
    # The first eviction comes in the answer, and still goes by the prompt's scores.
    scores = FakeMapper().predict(proxy_features(proxy, ids)[:, 0])
    lost = [[sorted(set(range(LENGTH)) - set(head)) for head in layer] for layer in kept(cache)]
    gone = [
        float(scores[la, h, c]) for la, heads in enumerate(lost) for h, columns in enumerate(heads) for c in columns
    ]
    there = [
        float(scores[la, h, c])
        for la, heads in enumerate(kept(cache))
        for h, columns in enumerate(heads)
        for c in columns
        if 4 <= c < LENGTH
    ]
    assert gone and max(gone) <= min(there)


def test_prompts_scored_at_the_same_time_take_turns(proxy):
    target = tiny_model("llama")
    scorers = [ProxyScorer(proxy, FakeMapper()) for _ in range(2)]
    prompts = [random_ids(1, 150, seed) for seed in range(6)]
    caches = [
        scorers[i % 2].prefill(ids, target_model_or_config=target, budget=9, mode="parallel", chunk_tokens=8)
        for i, ids in enumerate(prompts)
    ]
    for ids, cache in zip(prompts, caches, strict=True):
        feed(target, cache, ids)
        alone = scorers[0].prefill(ids, target_model_or_config=target, budget=9, mode="sequential")
        feed(target, alone, ids)
        assert kept(cache) == kept(alone)


# -- after the prompt -------------------------------------------------------------------------------------------------


def test_later_tokens_outrank_the_prompt_by_age(proxy):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(
        ids, target_model_or_config=target, budget=12, eviction_interval=4, allocation="uniform"
    )
    drive = Drive(target, cache)
    drive.feed(ids)
    before = kept(cache)
    for step in range(5):
        drive.feed(random_ids(1, 1, step))
    scores = FakeMapper().predict(proxy_features(proxy, ids)[:, 0])
    for layer in range(3):
        for head in range(2):
            columns = cache.kept_columns(layer)[head]
            # Four answer tokens pushed out the four prompt tokens with the lowest scores; sinks stay.
            # The prompt's last token was kept as the newest; now it counts by its score.
            old = sorted(before[layer][head][4:], key=lambda column: float(scores[layer, head, column]))
            assert columns[:-5] == sorted([*range(4), *old[4:]]) and columns[-5:] == list(range(40, 45))
    drive.feed(random_ids(1, 20, 9))  # a further turn, longer than the budget
    assert all(head == [*range(4), *range(57, 65)] for head in cache.kept_columns(1))
    assert drive.error() < EXACT


def test_extend_scores_a_further_turn(proxy):
    target = tiny_model("llama")
    first, answer, second = random_ids(1, 30), random_ids(1, 3, 1), random_ids(1, 17, 2)
    mapper = FakeMapper()
    scorer = ProxyScorer(proxy, mapper)
    cache = scorer.prefill(first, target_model_or_config=target, budget=12, allocation="uniform")
    drive = Drive(target, cache)
    drive.feed(first)
    before = kept(cache)
    for token in answer.split(1, 1):
        drive.feed(token)
    whole = torch.cat([first, answer, second], 1)
    for mode in ("parallel", "sequential"):  # the second call replaces the first
        scorer.extend(cache, whole, mode=mode)
    drive.feed(second)
    assert drive.error() < EXACT
    scores = mapper.predict(proxy_features(proxy, whole)[:, 0])
    old = mapper.predict(proxy_features(proxy, first)[:, 0])
    for layer in range(3):
        for head in range(2):
            middle = [*before[layer][head][4:], *range(30, 49)]
            value = {c: float((old if c < 30 else scores)[layer, head, c]) for c in middle}
            best = sorted(middle, key=lambda c: (-value[c], c))[: 12 - 4 - 1]
            assert cache.kept_columns(layer)[head] == sorted([*range(4), *best, 49])
    with pytest.raises(ValueError, match="50"):
        scorer.extend(cache, whole)


def test_two_questions_on_one_context(proxy):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=12)
    feed(target, cache, ids)
    snapshot = cache.snapshot()
    question = random_ids(1, 6, 4)
    first = feed(target, cache, question)
    cache.restore(snapshot)
    assert torch.equal(feed(target, cache, question), first)
    empty = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=12)
    snapshot = empty.snapshot()
    for _ in range(2):
        feed(target, empty, ids)
        columns = kept(empty)
        assert empty.scores is None
        empty.restore(snapshot)
        assert empty.scores is not None
    feed(target, empty, ids)
    assert kept(empty) == columns


def test_saved_and_loaded(proxy, tmp_path):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=12)
    feed(target, cache, ids)
    cache.save_context(tmp_path / "context")
    loaded = ProxyKVCache.load_context(tmp_path / "context", target)
    assert kept(loaded) == kept(cache)
    for step in range(70):  # past the next eviction
        token = random_ids(1, 1, step)
        assert torch.equal(feed(target, loaded, token), feed(target, cache, token))
    assert kept(loaded) == kept(cache)


def test_reset_forgets_the_scores(proxy):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    cache = ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, budget=12)
    cache.reset()
    with pytest.raises(ValueError, match="has no scores"):
        feed(target, cache, ids)


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def test_tokenizers_are_compared(proxy):
    same = Vocabulary("a", "b", "c")
    ProxyScorer(proxy, FakeMapper(), same, Vocabulary("a", "b", "c"))
    with pytest.raises(ValueError, match=r"2 of 3 tokens have different ids, such as 'b' \(1 and 2\)"):
        ProxyScorer(proxy, FakeMapper(), same, Vocabulary("a", "c", "b"))
    with pytest.raises(ValueError, match="neither"):
        ProxyScorer(proxy, FakeMapper(), same)


def test_ids_the_proxy_does_not_know(proxy):
    scorer = ProxyScorer(proxy, FakeMapper())
    ids = random_ids(1, 10)
    ids[0, 3] = 61
    with pytest.raises(ValueError, match="token id 61"):
        scorer.prefill(ids, target_model_or_config=tiny_model("llama"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"retention_ratio": 0.0}, "retention_ratio"),
        ({"retention_ratio": 1.5}, "retention_ratio"),
        ({"retention_ratio": 0.5, "budget": 8}, "exactly one"),
        ({"mode": "async"}, "mode"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"attention_mask": torch.zeros(1, 10)}, "without any token"),
        ({"input_ids": torch.ones(10, dtype=torch.long)}, "input_ids"),
    ],
)
def test_bad_requests_start_nothing(options, message, proxy, monkeypatch):
    monkeypatch.setattr(proxy_scorer, "proxy_features", lambda *args: pytest.fail("work began"))
    with pytest.raises(ValueError, match=message):
        ProxyScorer(proxy, FakeMapper()).prefill(
            **{"input_ids": random_ids(1, 10), "target_model_or_config": tiny_model("llama"), **options}
        )


def test_a_mapper_for_another_target(proxy):
    with pytest.raises(ValueError, match="made for 5 layers"):
        ProxyScorer(proxy, FakeMapper(5)).prefill(random_ids(1, 9), target_model_or_config=tiny_model("llama"))
    with pytest.raises(RuntimeError, match=r"Expected scores of shape \(3, 1, 2, 9\).*got \(3, 1, 4, 9\)"):
        ProxyScorer(proxy, FakeMapper(heads=4)).prefill(random_ids(1, 9), target_model_or_config=tiny_model("llama"))
    with pytest.raises(TypeError, match="predict"):
        ProxyScorer(proxy, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="eval"):
        ProxyScorer(tiny_model("llama").train(), FakeMapper())


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("bad, message", [(torch.nan, "NaN or infinite.*layers \\[1\\]"), (1e7, "stay below")])
def test_scores_that_cannot_be_ranked(mode, bad, message, proxy, monkeypatch):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)
    mapper = FakeMapper()
    predict = mapper.predict

    def spoiled(features):
        scores = predict(features)
        scores[1, 0, 5] = bad
        return scores

    monkeypatch.setattr(mapper, "predict", spoiled)
    with pytest.raises(RuntimeError, match=message):
        feed(target, ProxyScorer(proxy, mapper).prefill(ids, target_model_or_config=target, mode=mode), ids)


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_proxy_that_fails_in_the_middle(mode, proxy, monkeypatch):
    target, ids = tiny_model("llama"), random_ids(1, LENGTH)

    def fail(*args, **kwargs):
        raise MemoryError("no room for the proxy")

    proxy.model.layers[1].register_forward_pre_hook(fail)
    outcome: list[BaseException] = []

    def run():
        try:
            feed(target, ProxyScorer(proxy, FakeMapper()).prefill(ids, target_model_or_config=target, mode=mode), ids)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the target hangs"
    assert isinstance(outcome[0], RuntimeError) and isinstance(outcome[0].__cause__, MemoryError)
    assert "no room for the proxy" in str(outcome[0])


@pytest.mark.parametrize("length", [LENGTH - 2, LENGTH + 1])
def test_a_prompt_of_another_length(length, proxy):
    target = tiny_model("llama")
    scorer = ProxyScorer(proxy, FakeMapper())
    cache = scorer.prefill(random_ids(1, LENGTH), target_model_or_config=target)
    with pytest.raises(ValueError, match=f"read {LENGTH} tokens, the target has read {length}"):
        target.generate(random_ids(1, length), past_key_values=cache, max_new_tokens=2)
    cache = scorer.prefill(random_ids(1, LENGTH), target_model_or_config=target, chunked_prefill=True)
    with pytest.raises(ValueError, match=f"read {LENGTH} tokens, the target has read"):
        target.generate(random_ids(1, length), past_key_values=cache, max_new_tokens=2)
    if length < LENGTH:
        cache = scorer.prefill(random_ids(1, LENGTH), target_model_or_config=target)
        with pytest.raises(ValueError, match=f"has read {length}"), cache.hold_eviction():
            feed(target, cache, random_ids(1, length))


def test_a_batch_of_another_size(proxy):
    target = tiny_model("llama")
    cache = ProxyScorer(proxy, FakeMapper()).prefill(random_ids(2, LENGTH), target_model_or_config=target)
    with pytest.raises(ValueError, match="2 row"):
        feed(target, cache, random_ids(3, LENGTH))


def test_a_model_may_be_its_own_proxy_in_turn_only():
    model, ids = tiny_model("llama"), random_ids(1, LENGTH)
    scorer = ProxyScorer(model, FakeMapper())
    feed(model, scorer.prefill(ids, target_model_or_config=model), ids)
    with pytest.raises(ValueError, match="share one configuration"):
        scorer.prefill(ids, target_model_or_config=model, mode="parallel")


def test_a_cache_made_by_hand():
    target = tiny_model("llama")
    with pytest.raises(ValueError, match="has no scores"):
        feed(target, ProxyKVCache(target, budget=9), random_ids(1, 20))
    with pytest.raises(ValueError, match="4 in layers"):
        ProxyKVCache(target, budget=9, scores=PendingScores([0, 1, 2], 1, 4, 20))


# -- the mapper itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["none", "values"])
def test_the_hybrid_axial_mapper_serves(states):
    proxy, target = tiny_model("llama", seed=7), tiny_model("gemma3")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    if states != "none":
        sizes |= {"proxy_layers": "all", "layer_queries": True, "proxy_states": states}
    torch.manual_seed(0)
    mapper = nearfar.HybridAxialMapper.for_models(proxy, target, **sizes, window_tokens=16, window_stride=8).eval()
    ids, mask = left_padded([40, 25])
    cache = ProxyScorer(proxy, mapper).prefill(ids, mask, target_model_or_config=target, retention_ratio=0.4)
    drive = Drive(target, cache)
    drive.feed(ids, mask)
    drive.feed(random_ids(2, 1))
    assert drive.error() < EXACT
    scores = mapper.predict(proxy_features(proxy, ids[:1], states=states)[:, 0])
    columns = [[c for c in head if c < 40] for layer in kept(cache, 0) for head in layer]
    assert columns == [head for layer in expected_columns(scores, budget=16) for head in layer]
    with pytest.raises(ValueError, match="Train a mapper"):
        ProxyScorer(proxy, mapper).prefill(ids, mask, target_model_or_config=tiny_model("llama"))
    with pytest.raises(ValueError, match="other weights"):
        ProxyScorer(tiny_model("llama", seed=8), mapper)
    ProxyScorer(tiny_model("llama", seed=8), mapper, allow_other_models=True)
    with pytest.raises(ValueError, match="eval"):
        ProxyScorer(proxy, mapper.train())


# -- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_and_devices_agree():
    devices = ["cuda:0"] if torch.cuda.device_count() == 1 else ["cuda:0", "cuda:1"]
    target, ids = tiny_model("llama", dtype=torch.float32).to("cuda:0"), random_ids(2, 300).cuda()
    found = []
    for device in devices:
        proxy = tiny_model("llama", seed=7, dtype=torch.float32).to(device)
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        mapper = nearfar.HybridAxialMapper.for_models(proxy, target, **sizes).eval().to(device)
        for mode in ("sequential", "parallel"):
            cache = ProxyScorer(proxy, mapper).prefill(ids, target_model_or_config=target, mode=mode, chunk_tokens=64)
            pending = cache.scores
            feed(target, cache, ids)
            assert set(pending.seconds()) == {"proxy", "mapper"}
            found.append([kept(cache, row) for row in range(2)])
            assert cache.kept_pairs() == 2 * 90 * 6
    assert all(columns == found[0] for columns in found)
