"""Any cache by name, filled and asked: against the model without one, and rows of a batch against themselves alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from tiny_models import random_ids, tiny_model
from tiny_prototypes import fit_tiny
from tiny_texts import english, save_tiny_checkpoint, save_tiny_proxy, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM

from nearfar.evaluation.context_reading import CacheChoice, ContextReader, cache_label, known_caches

PROMPT = english(20)[:120]


class MeanMapper:
    """A proxy's features averaged over layers and heads, for every layer and head of the target."""

    def check_compatible(self, proxy: Any, target: Any, **options: Any) -> None:
        pass

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        return features.mean((0, 1)).expand(2, 2, -1)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def options(name: str) -> dict[str, Any]:
    if name == "proactive":
        return {"prototypes": fit_tiny(tiny_llama())}
    if name == "proxykv":
        return {"proxy": tiny_llama(seed=1), "mapper": MeanMapper()}
    return {"proxy": tiny_llama(seed=1)} if name == "iam" else {}


def reader(model: Any, name: str, ratio: float = 0.4) -> ContextReader:
    choice = CacheChoice(name) if name == "full" else CacheChoice(name, retention_ratio=ratio, options=options(name))
    return ContextReader(model, tiny_tokenizer(), choice)


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Without any cache."""
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


@pytest.mark.parametrize("name", known_caches())
def test_nothing_is_lost_where_nothing_is_evicted(model: Any, name: str) -> None:
    ids = tiny_tokenizer()(PROMPT).input_ids
    own = reader(model, name, 1.0)
    read = own.read(ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, -1]
    assert read.logits is not None and (read.logits - expected).abs().max() < 1e-10
    question = tiny_tokenizer()(" Why?").input_ids
    own.ends.clear()
    assert own.answer(read, question, 6) == greedy(model, ids + question, 6)
    assert own.answer(read, [], 4) == greedy(model, ids, 4)


@pytest.mark.parametrize("name", [name for name in known_caches() if name != "full"])
def test_a_compressed_context_is_left_as_it_was(model: Any, name: str) -> None:
    own = reader(model, name)
    own.ends.clear()
    read = own.read(tiny_tokenizer()(PROMPT).input_ids)
    layers_and_heads = 2 * 2
    assert read.kept_pairs() == 48 * layers_and_heads  # 0.4 of 120 tokens
    before = read.nbytes()
    question = tiny_tokenizer()(" Why is that so?").input_ids
    first = own.answer(read, question, 5)
    assert own.answer(read, [70, 71], 5) is not None
    assert own.answer(read, question, 5) == first
    assert read.kept_pairs() == 48 * layers_and_heads and read.nbytes() == before


@pytest.mark.parametrize("name", [name for name in known_caches() if name != "random"])
def test_rows_of_a_padded_batch_are_read_as_alone(model: Any, name: str) -> None:
    own = reader(model, name)
    tokenizer = tiny_tokenizer()
    rows = [tokenizer(PROMPT[:length]).input_ids for length in (90, 61)]
    ids, mask = torch.zeros(2, 90, dtype=torch.long), torch.zeros(2, 90, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, 90 - len(row) :], mask[place, 90 - len(row) :] = torch.tensor(row), 1
    together = own.read(ids, mask)
    following = random_ids(2, 7)
    logits = own.continue_with(together, following)
    for place, row in enumerate(rows):
        alone = own.read(row)
        assert together.logits is not None and alone.logits is not None
        assert (together.logits[place] - alone.logits[0]).abs().max() < 1e-10
        assert (logits[place] - own.continue_with(alone, following[place : place + 1])[0]).abs().max() < 1e-10


@pytest.mark.parametrize("make", [tiny_dar, tiny_proxyformer], ids=["dar", "proxyformer"])
def test_models_that_make_their_own_cache(make: Any) -> None:
    model = make(vocab_size=261)
    own = ContextReader(model, tiny_tokenizer())
    own.ends.clear()
    ids = tiny_tokenizer()(PROMPT[:60]).input_ids
    read = own.read(ids)
    assert type(read.cache).__name__ in ("DARCache", "ProxyCache") and read.nbytes() > 0
    expected = greedy(model, [*ids, 70, 71], 5)
    assert own.answer(read, [70, 71], 5) == expected
    assert own.answer(read, [70, 71], 5) == expected
    compressed = own.read(ids, logits=False)
    assert len(own.answer(compressed, [70, 71], 5)) == 5
    if make is tiny_proxyformer:
        assert compressed.logits is None
        with pytest.raises(ValueError, match="no question was given"):
            own.answer(compressed, [], 5)
    with pytest.raises(ValueError, match="makes its own cache: only the cache full, not snapkv"):
        ContextReader(model, tiny_tokenizer(), CacheChoice("snapkv", budget=8))


def test_an_answer_ends_at_an_end_token_or_a_line(model: Any) -> None:
    own = reader(model, "full")
    ids = tiny_tokenizer()(PROMPT).input_ids
    read = own.read(ids)
    expected = greedy(model, ids, 8)
    own.ends = {expected[3]}
    assert own.answer(read, [], 8) == expected[: expected.index(expected[3])]
    own.ends = set()
    newline = tiny_tokenizer()("\n").input_ids[0]
    own.tokenizer = tiny_tokenizer()
    own.tokenizer.decode = lambda ids, **options: "\n" if list(ids) == [newline] else "x\n"  # type: ignore[method-assign]
    assert own.answer(read, [], 8, one_line=True) == expected[:1]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"name": "snap"}, ValueError, "unknown cache 'snap'; known caches: full"),
        ({"name": "snapkv"}, ValueError, "budget"),
        ({"name": "snapkv", "budget": 8, "retention_ratio": 0.5}, ValueError, "budget"),
        ({"name": "snapkv", "retention_ratio": 1.5}, ValueError, "retention_ratio"),
        ({"name": "snapkv", "budget": 8, "options": {"head": "x"}}, TypeError, "takes no option 'head'"),
        ({"name": "full", "budget": 8}, ValueError, '"full" prunes nothing'),
        ({"name": "proxykv", "budget": 8, "options": {"proxy": "x"}}, ValueError, "needs mapper="),
        ({"name": "iam", "budget": 8}, ValueError, "needs proxy="),
    ],
)
def test_wrong_choices_are_told(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        CacheChoice(**arguments)


def test_labels_and_settings() -> None:
    choice = CacheChoice("proxykv", retention_ratio=0.3, options={"proxy": tiny_model(), "mapper": "m"})
    assert choice.label == "proxykv 0.3" and cache_label("iam") == "KVzip + IAM" and CacheChoice().label == "full"
    settings = choice.settings()
    assert settings["cache_options"]["mapper"] == "m" and isinstance(settings["cache_options"]["proxy"], str)


def test_one_token_is_read_by_every_cache(model: Any) -> None:
    for name in known_caches():
        assert reader(model, name).read([70]).logits is not None
    with pytest.raises(ValueError, match="the context is empty"):
        reader(model, "full").read([])


@pytest.mark.parametrize("name", ["proxykv", "iam"])
def test_a_proxy_with_another_tokenizer_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, mapper = save_tiny_proxy(tmp_path, save_tiny_checkpoint(tmp_path / "target"))
    options = {"proxy": str(proxy), **({"mapper": str(mapper)} if name == "proxykv" else {})}
    choice = CacheChoice(name, budget=8, options=options)
    assert ContextReader(tiny_llama(torch.float32), tiny_tokenizer(), choice).prunes
    other = tiny_tokenizer()
    other.add_tokens(["<extra>"])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # told before the proxy is loaded
    with pytest.raises(ValueError, match=r"different tokenizers: 1 of \d+ tokens .*<extra>"):
        ContextReader(tiny_llama(torch.float32), other, choice)
    for file in proxy.glob("token*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer to compare with the target's"):
        ContextReader(tiny_llama(torch.float32), tiny_tokenizer(), choice)
