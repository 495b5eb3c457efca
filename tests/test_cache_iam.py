"""KVzip + IAM: the proxy's scores land on the target's heads as the alignment says, and nowhere else."""

import pytest
import torch
from dense_oracle import Drive
from pruning_policies import EXACT, left_padded
from tiny_models import random_ids, tiny_model

from nearfar.modeling.cache_iam import HeadAlignment, IAMCache, IAMScorer
from nearfar.modeling.kvzip_scores import RepeatPrompt, reconstruction_scores

PROMPT = RepeatPrompt(prefix=(1, 2), first=(3, 4, 5), later=(6, 7), suffix=(8, 9))


def kept(cache: IAMCache, row: int = 0) -> list[list[list[int]]]:
    return [cache.kept_columns(layer.layer_idx, row) for layer in cache.ragged_layers]


def best(scores: list[list[list[float]]], budget: int, sinks: int = 4) -> list[list[list[int]]]:
    """The best of all layers and heads by one sort; sinks and the newest token stay."""
    last = len(scores[0][0]) - 1
    ranked = sorted(
        (sinks <= column < last, -score, column, layer, head)
        for layer, heads in enumerate(scores)
        for head, columns in enumerate(heads)
        for column, score in enumerate(columns)
    )
    found: list[list[list[int]]] = [[[] for _ in heads] for heads in scores]
    for *_, column, layer, head in ranked[: budget * len(scores) * len(scores[0])]:
        found[layer][head].append(column)
    return [[sorted(columns) for columns in heads] for heads in found]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_scores_follow_the_alignment(family):
    """Against the proxy's own KVzip scores, copied head by head."""
    proxy, target = tiny_model("llama", seed=7), tiny_model(family)
    ids = random_ids(1, 40)
    scorer = IAMScorer(proxy, PROMPT, prefix_length=3, repeat_tokens=15)
    cache = scorer.prefill(ids, target_model_or_config=target, retention_ratio=0.4)
    assert isinstance(cache, IAMCache)
    drive = Drive(target, cache)
    drive.feed(ids)
    own = reconstruction_scores(proxy, ids, PROMPT, prefix_length=3, chunk_tokens=15).scores
    layers = {"llama": [0, 1, 2], "gemma3": [1, 2], "gpt_neox": [0, 1, 2]}[family]
    heads = [0, 0, 1, 1] if family == "gpt_neox" else [0, 1]
    # In float32, as the cache holds them.
    expected = best([[own[layer][0, head].float().tolist() for head in heads] for layer in layers], 16)
    assert kept(cache) == expected
    drive.feed(random_ids(1, 1))
    assert drive.error() < EXACT


def test_depth_and_heads_are_proportional():
    shallow, deep = tiny_model("llama").config, tiny_model("gemma3").config
    shallow.num_hidden_layers = 2
    deep.layer_types = ["full_attention"] * 5
    deep.num_hidden_layers, deep.num_key_value_heads = 5, 4
    alignment = HeadAlignment.by_depth(shallow, deep)
    assert alignment.layers == (0, 0, 1, 1, 1)  # ceil(l * 2 / 5), from 1
    assert alignment.heads == ((0, 0, 1, 1),) * 5
    assert HeadAlignment.by_depth(deep, shallow) == HeadAlignment((2, 4), ((1, 3),) * 2)


def test_fit_finds_a_permutation():
    """A target whose heads are a proxy's, permuted and on another scale."""
    torch.manual_seed(0)
    layers, heads = (3, 0, 2), ((1, 0), (0, 1), (1, 1))
    proxy_texts, target_texts = [], []
    for length in (30, 50):
        proxy = {layer: torch.rand(1, 2, length) for layer in range(4)}
        noise = 1 + 0.05 * torch.rand(length)
        proxy_texts.append(proxy)
        target_texts.append({5 + i: (proxy[layers[i]][:, list(heads[i])] * noise) ** 2 for i in range(len(layers))})
    found = HeadAlignment.fit(proxy_texts, target_texts)
    assert found == HeadAlignment(layers, heads)
    mapped = found.apply(proxy_texts[0])
    assert mapped.shape == (3, 2, 30)
    assert torch.equal(mapped[0, 0], proxy_texts[0][3][0, 1])
    with pytest.raises(ValueError, match="at least one"):
        HeadAlignment.fit([], [])
    with pytest.raises(ValueError, match="30 tokens for the proxy and 50"):
        HeadAlignment.fit(proxy_texts[:1], target_texts[1:])


def test_a_fitted_alignment_is_used_and_checked():
    proxy, target = tiny_model("llama", seed=7), tiny_model("llama")
    ids = random_ids(1, 40)
    alignment = HeadAlignment((2, 2, 0), ((1, 1), (0, 0), (1, 0)))
    cache = IAMScorer(proxy, PROMPT, alignment).prefill(ids, target_model_or_config=target, budget=10)
    Drive(target, cache).feed(ids)
    own = reconstruction_scores(proxy, ids, PROMPT).scores
    rows = [(2, (1, 1)), (2, (0, 0)), (0, (1, 0))]
    assert kept(cache) == best([[own[la][0, h].float().tolist() for h in row] for la, row in rows], 10)
    for wrong, message in (
        (HeadAlignment((0, 1), ((0, 1),) * 2), "2 layers with \\[2\\]"),
        (HeadAlignment((0, 1, 2), ((0, 1, 1),) * 3), "3 layers with \\[3\\]"),
        (HeadAlignment((0, 1, 3), ((0, 1),) * 3), "does not have"),
        (HeadAlignment((0, 1, 2), ((0, 2),) * 3), "does not have"),
    ):
        with pytest.raises(ValueError, match=message):
            IAMScorer(proxy, PROMPT, wrong).prefill(ids, target_model_or_config=target)
    with pytest.raises(TypeError, match="RepeatPrompt"):
        IAMScorer(proxy, "Repeat!")


def test_a_padded_batch_in_parallel():
    proxy, target = tiny_model("llama", seed=7), tiny_model("llama")
    ids, mask = left_padded([40, 25])
    scorer = IAMScorer(proxy, PROMPT)
    batched = scorer.prefill(ids, mask, target_model_or_config=target, budget=9, mode="parallel")
    drive = Drive(target, batched)
    drive.feed(ids, mask)
    assert drive.error() < EXACT
    for row, length in enumerate((40, 25)):
        alone = scorer.prefill(ids[row : row + 1, -length:], target_model_or_config=target, budget=9)
        Drive(target, alone).feed(ids[row : row + 1, -length:])
        shift = 40 - length
        assert kept(batched, row) == [[[column + shift for column in head] for head in layer] for layer in kept(alone)]


def test_its_own_prefix_is_found_where_a_prompt_starts_with_it():
    proxy, target = tiny_model("llama", seed=7), tiny_model("llama")
    ids = random_ids(2, 40)
    ids[1, :2] = torch.tensor(PROMPT.prefix)
    cache = IAMScorer(proxy, PROMPT, prefix_length=None).prefill(ids, target_model_or_config=target, budget=9)
    for row, length in enumerate((0, 2)):
        own = reconstruction_scores(proxy, ids[row], PROMPT, prefix_length=length).scores
        scores = cache.scores.of_layer(0, ids.device)[row]
        torch.testing.assert_close(scores, own[0][0].float())
        assert bool((scores[:, :2] == 1).all()) == (row == 1)
