"""Pairs of proxy features and oracle scores on disk: right numbers, resumed work, nothing mixed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_texts import english, tiny_llama, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nearfar.modeling.attention_features import proxy_features
from nearfar.modeling.kvzip_scores import RepeatPrompt, reconstruction_scores
from nearfar.training import mapper_pairs
from nearfar.training.mapper_contexts import PairContext
from nearfar.training.mapper_pairs import MapperPairs, PairSettings, compute_pairs

TOKENIZER = tiny_tokenizer()
EXACT = PairSettings(chunk_tokens=40, storage="float32")


def small_llama(seed: int = 5) -> LlamaForCausalLM:
    """A proxy: another model over the same tokens, of one layer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=261, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, bos_token_id=None, eos_token_id=256,
        pad_token_id=257,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25)
    return model.double().eval()


def column_sums(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Features by the whole matrix of attention probabilities."""
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack([layer.sum(2) for layer in weights])


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return small_llama(), tiny_llama()


@pytest.fixture(scope="module")
def contexts() -> list[PairContext]:
    return [
        PairContext(f"text{n}", tuple(TOKENIZER(english(12 + n, seed=n), add_special_tokens=False).input_ids))
        for n in range(4)
    ]


def test_numbers_are_those_of_the_models(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    proxy, target = models
    assert compute_pairs(tmp_path, proxy, target, TOKENIZER, contexts, EXACT, features=column_sums) == 4
    pairs = MapperPairs(tmp_path)
    assert len(pairs) == 4 and [entry.name for entry in pairs.contexts] == [context.name for context in contexts]
    prompt = RepeatPrompt.from_tokenizer(TOKENIZER)
    assert len(prompt.prefix) == 2
    for number, context in enumerate(contexts):
        ids = [*prompt.prefix, *context.ids]
        entry = pairs.contexts[number]
        assert (entry.tokens, entry.prefix_tokens) == (len(ids), len(prompt.prefix))
        with torch.no_grad():
            x = column_sums(proxy, torch.tensor([ids]))[:, 0]
        scores = reconstruction_scores(target, ids, prompt, prefix_length=len(prompt.prefix), chunk_tokens=40).scores
        y = torch.stack([scores[layer][0] for layer in (0, 1)])
        assert pairs.features(number).shape == (1, 2, len(ids)) and pairs.scores(number).shape == (2, 2, len(ids))
        assert np.abs(pairs.features(number) - x.numpy()).max() < 1e-4
        assert x.sum(-1).allclose(torch.tensor(float(len(ids)), dtype=torch.float64))
        assert np.abs(pairs.scores(number) - y.numpy()).max() < 1e-6
        assert isinstance(pairs.features(number).base, np.memmap)
        body = np.sort(pairs.scores(number)[:, :, entry.prefix_tokens :], axis=None)[::-1]
        found = pairs.thresholds(number, (0.1, 1.0))
        assert found[0] == body[round(0.1 * body.size) - 1] and found[1] == body[-1]
    fields = pairs.mapper_fields
    assert (fields["proxy_num_layers"], fields["proxy_num_heads"]) == (1, 2)
    assert (fields["target_num_layers"], fields["target_num_heads"], fields["target_layers"]) == (2, 2, [0, 1])
    assert fields["proxy_fingerprint"] and fields["proxy_fingerprint"] != fields["target_fingerprint"]


@pytest.mark.skipif(
    importlib.util.find_spec("nearfar.modeling.attention_features") is None, reason="the features are not there"
)
def test_default_features_are_the_column_sums(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    compute_pairs(tmp_path / "a", *models, TOKENIZER, contexts[:1], EXACT, features=column_sums)
    compute_pairs(tmp_path / "b", *models, TOKENIZER, contexts[:1], EXACT)
    a, b = (MapperPairs(tmp_path / name).features(0) for name in ("a", "b"))
    assert np.abs(a - b).max() < 1e-4


def test_values_are_stored_beside_the_column_sums(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    proxy, target = models
    settings = PairSettings(chunk_tokens=40, storage="float32", proxy_states="values")
    compute_pairs(tmp_path, proxy, target, TOKENIZER, contexts[:2], settings)
    pairs = MapperPairs(tmp_path)
    prompt = RepeatPrompt.from_tokenizer(TOKENIZER)
    channels = 2 + 8
    assert pairs.channels == channels and pairs.mapper_fields["proxy_states"] == "values"
    for number, context in enumerate(contexts[:2]):
        ids = torch.tensor([[*prompt.prefix, *context.ids]])
        x = proxy_features(proxy, ids, states="values")[:, 0]
        assert pairs.features(number).shape == (1, channels, ids.shape[1])
        assert np.abs(pairs.features(number) - x.numpy()).max() < 1e-4 and bool((x[:, 2:] < 0).any())
    with pytest.raises(ValueError, match="proxy_states='values', now it is 'none'"):
        compute_pairs(tmp_path, proxy, target, TOKENIZER, contexts, EXACT)


def test_folders_of_older_releases_are_gone_on_with(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    """They name neither states nor their size."""
    compute_pairs(tmp_path, *models, TOKENIZER, contexts[:1], EXACT)
    path = tmp_path / "index-0.json"
    index = json.loads(path.read_text())
    del index["settings"]["proxy_states"], index["mapper"]["proxy_state_size"]
    path.write_text(json.dumps(index))
    digest = MapperPairs(tmp_path).digest
    assert MapperPairs(tmp_path).channels == 2
    assert compute_pairs(tmp_path, *models, TOKENIZER, contexts[:2], EXACT) == 1
    assert len(MapperPairs(tmp_path)) == 2 and MapperPairs(tmp_path).digest != digest
    path.write_text(json.dumps(index))
    index["settings"]["proxy_states"], index["mapper"]["proxy_state_size"] = "values", 8
    (tmp_path / "index-1.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index-1\.json lists pairs with proxy_states='values', now it is 'none'"):
        MapperPairs(tmp_path)


def test_an_interrupted_run_goes_on(
    tmp_path: Path,
    models: tuple[PreTrainedModel, PreTrainedModel],
    contexts: list[PairContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapper_pairs, "SHARD_TOKENS", 150)
    read: list[int] = []

    def counting(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        if len(read) == 3:
            raise KeyboardInterrupt
        read.append(ids.shape[1])
        return column_sums(model, ids)

    with pytest.raises(KeyboardInterrupt):
        compute_pairs(tmp_path, *models, TOKENIZER, contexts, EXACT, features=counting)
    assert len(MapperPairs(tmp_path)) == 3, "what was whole is kept"
    read.clear()
    again = [*contexts, contexts[0], PairContext("another name", contexts[1].ids)]
    assert compute_pairs(tmp_path, *models, TOKENIZER, again, EXACT, features=counting) == 1
    assert compute_pairs(tmp_path, *models, TOKENIZER, again, EXACT, features=counting) == 0
    assert len(read) == 1
    whole = tmp_path / "whole"
    compute_pairs(whole, *models, TOKENIZER, list(reversed(contexts)), EXACT, features=column_sums)
    one, other = MapperPairs(tmp_path), MapperPairs(whole)
    assert one.digest == other.digest and len(one) == 4
    for number in range(4):
        assert np.array_equal(one.features(number), other.features(number))
        assert np.array_equal(one.scores(number), other.scores(number))
    files = {file.name for file in tmp_path.iterdir() if file.is_file()}
    shards = json.loads((tmp_path / "index-0.json").read_text())["shards"]
    assert len(shards) > 1
    assert files == {"index-0.json"} | {f"{s['name']}.{kind}.npy" for s in shards for kind in ("features", "scores")}


def test_nothing_is_mixed(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    proxy, target = models
    one = contexts[:1]

    def compute(*given: PreTrainedModel, settings: PairSettings = EXACT) -> None:
        compute_pairs(tmp_path, *given, TOKENIZER, one, settings, features=column_sums)

    compute(proxy, target)
    before = (tmp_path / "index-0.json").read_bytes()
    with pytest.raises(ValueError, match=r"pairs of the target .* another model"):
        compute(proxy, tiny_llama(seed=1))
    with pytest.raises(ValueError, match=r"pairs of the proxy .* another model"):
        compute(small_llama(seed=6), target)
    with pytest.raises(ValueError, match=r"pairs of the proxy .* another model"):
        compute(target, target)
    with pytest.raises(ValueError, match="chunk_tokens=40, now it is 41"):
        compute(proxy, target, settings=PairSettings(chunk_tokens=41, storage="float32"))
    with pytest.raises(ValueError, match="storage='float32', now it is 'float16'"):
        compute(proxy, target, settings=PairSettings(chunk_tokens=40))
    assert (tmp_path / "index-0.json").read_bytes() == before
    compute(small_llama().float(), target)  # a cast is the same model
    # A second process's index of another model.
    index = json.loads(before)
    index["mapper"]["target_fingerprint"] = [[-v for v in row] for row in index["mapper"]["target_fingerprint"]]
    (tmp_path / "index-1.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index-1.json lists pairs of the target"):
        MapperPairs(tmp_path)


def test_damage_is_told(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    with pytest.raises(FileNotFoundError, match="holds no mapper pairs"):
        MapperPairs(tmp_path)
    compute_pairs(tmp_path, *models, TOKENIZER, contexts[:1], EXACT, features=column_sums)
    scores = tmp_path / "shard-0-00000.scores.npy"
    content = scores.read_bytes()
    scores.write_bytes(content[:200])
    with pytest.raises(ValueError, match=r"scores.npy is damaged"):
        MapperPairs(tmp_path)
    np.save(scores, np.zeros((2, 2, 3), np.float32))
    with pytest.raises(ValueError, match=r"array of shape \(2, 2, 3\), the index says"):
        MapperPairs(tmp_path)
    scores.unlink()
    with pytest.raises(FileNotFoundError, match="is missing, though the index lists it"):
        MapperPairs(tmp_path)
    (tmp_path / "index-0.json").write_text("{")
    with pytest.raises(ValueError, match="is no index of mapper pairs"):
        MapperPairs(tmp_path)
    (tmp_path / "index-0.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="of format 99, not 1"):
        MapperPairs(tmp_path)


def test_bad_contexts_and_features_are_refused(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    proxy, target = models

    def compute(context: PairContext, features: Any = column_sums) -> None:
        compute_pairs(tmp_path, proxy, target, TOKENIZER, [context], EXACT, features=features)

    with pytest.raises(ValueError, match="id 261 and the proxy knows 261 ids"):
        compute(PairContext("foreign", (3, 261)))
    with pytest.raises(ValueError, match=r"long, a context of \d+ tokens, takes \d+ positions .* made for 4096"):
        compute(PairContext("long", (3,) * 4060))
    with pytest.raises(ValueError, match="a context is empty"):
        compute(PairContext("empty", ()))
    with pytest.raises(ValueError, match="features hold NaN"):
        compute(contexts[0], lambda model, ids: column_sums(model, ids) * float("nan"))
    with pytest.raises(ValueError, match=r"text0: features have shape \(1, 1, \d+\), expected \(1, 2, \d+\)"):
        compute(contexts[0], lambda model, ids: column_sums(model, ids)[:, :, :1])
    assert not list(tmp_path.glob("index-*")), "nothing wrong was listed"


def test_half_precision_on_disk(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    compute_pairs(
        tmp_path,
        *models,
        TOKENIZER,
        contexts[:1],
        PairSettings(chunk_tokens=40),
        features=lambda model, ids: column_sums(model, ids) * 1e5,
    )
    pairs = MapperPairs(tmp_path)
    assert pairs.features(0).dtype == np.float16
    assert np.isfinite(pairs.features(0)).all() and pairs.features(0).max() == 65504


def test_split_is_by_content(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    compute_pairs(tmp_path, *models, TOKENIZER, contexts, EXACT, features=column_sums)
    pairs = MapperPairs(tmp_path)
    train, validation = pairs.split(0.05)
    assert len(validation) == 1 and sorted(train + validation) == [0, 1, 2, 3]
    assert len(pairs.split(0.5)[1]) == 2 and len(pairs.split(0.99)[0]) == 1
    assert len({tuple(pairs.split(0.05, seed)[1]) for seed in range(20)}) > 1
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        pairs.split(1)
    pairs.contexts = pairs.contexts[:1]
    with pytest.raises(ValueError, match="a single context"):
        pairs.split(0.5)


def test_held_out_contexts_share_no_text(
    tmp_path: Path, models: tuple[PreTrainedModel, PreTrainedModel], contexts: list[PairContext]
) -> None:
    """a-b, b-c and d: with any of the first three goes the whole chain; what has no sources stands alone."""
    sources = [("a", "b"), ("b", "c"), ("c",), ("d",)]
    contexts = [PairContext(c.name, c.ids, s) for c, s in zip(contexts, sources, strict=True)]
    compute_pairs(tmp_path, *models, TOKENIZER, contexts, EXACT, features=column_sums)
    pairs = MapperPairs(tmp_path)
    assert [entry.sources for entry in pairs.contexts] == sources  # names are in this order
    assert {tuple(pairs.split(0.25, seed)[1]) for seed in range(20)} == {(3,)}
    assert {tuple(pairs.split(0.75, seed)[1]) for seed in range(20)} == {(3,), (0, 1, 2)}
    pairs.contexts = pairs.contexts[:3]
    with pytest.raises(ValueError, match="all made of the same text"):
        pairs.split(0.5)


def test_seconds_end_the_computing(tmp_path: Path) -> None:
    contexts = [PairContext(str(number), tuple(range(3, 40 + number))) for number in range(3)]
    model = tiny_llama(torch.float32)
    assert compute_pairs(tmp_path, model, model, TOKENIZER, contexts, seconds=1e-9, progress=False) == 0
    assert compute_pairs(tmp_path, model, model, TOKENIZER, contexts, progress=False) == 3


@pytest.mark.parametrize("options", [{"chunk_tokens": 0}, {"storage": "bfloat16"}, {"proxy_states": "keys"}])
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(options)))):
        PairSettings(**options)
