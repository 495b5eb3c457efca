"""Needle documents: every needle whole, in its own segment, the background complete, labels on the answer alone."""

import gzip
import itertools
import lzma
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_texts import english, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nearfar.evaluation.needle_documents import (
    NEEDLE,
    QUERY,
    NeedleBatch,
    NeedleDocuments,
    NeedleTemplates,
    encode_background,
    find_text_files,
    load_background,
    split_background,
)

# Ids that no tokenizer here has, in a row: what is background and in which order can be read off a document.
FIRST = 100_000
BACKGROUND = torch.arange(FIRST, FIRST + 5000, dtype=torch.int32)


def _corpus() -> list[str]:
    rng = random.Random(0)
    texts = [english(200, seed=seed) for seed in range(3)]
    for _ in range(600):
        name, value = rng.randint(1, 60), rng.randrange(100_000)
        texts.append(NEEDLE.format(id=name, value=f"{value:05d}") + QUERY.format(id=name))
    return texts


def _wrapped(backend: Tokenizer, **tokens: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **tokens)


def _byte_level(*before: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained; what `before` splits apart is never merged."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before or before[0] is not None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*(part for part in before if part is not None), byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_corpus(), trainer)
    return _wrapped(backend)


def _metaspace() -> PreTrainedTokenizerFast:
    """Marks words by what stands before them, and a text's start as if a space stood there."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<|end|>"], show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    return _wrapped(backend, unk_token="<unk>")


TOKENIZERS = {
    "bytes": tiny_tokenizer,
    "single digits": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "several digits": _byte_level,
    "across words": lambda: _byte_level(None),  # merges "17 is", "3. Remember" and whatever else is frequent
    "metaspace": _metaspace,
}
_MADE: dict[str, tuple[PreTrainedTokenizerFast, NeedleTemplates]] = {}


def _made(name: str) -> tuple[PreTrainedTokenizerFast, NeedleTemplates]:
    if name not in _MADE:
        tokenizer = TOKENIZERS[name]()
        _MADE[name] = tokenizer, NeedleTemplates(tokenizer)
    return _MADE[name]


def _sample(
    name: str, *arguments: Any, seed: int = 0, background: torch.Tensor = BACKGROUND, **more: Any
) -> NeedleBatch:
    documents = NeedleDocuments(background, _made(name)[1])
    return documents.sample(*arguments, generator=torch.Generator().manual_seed(seed), **more)


def _parts(document: torch.Tensor) -> tuple[list[int], dict[int, list[int]]]:
    """A document's background, and its runs of other tokens by the position where they start."""
    background, runs, start = [], {}, None
    for position, token in enumerate(document.tolist()):
        if token >= FIRST:
            background.append(token)
            start = None
        else:
            start = position if start is None else start
            runs.setdefault(start, []).append(token)
    return background, runs


def _inside(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text that follows another one."""
    before = tokenizer(".", add_special_tokens=False).input_ids
    joined = tokenizer("." + text, add_special_tokens=False).input_ids
    if joined[: len(before)] != before:  # one token across the two
        return tokenizer(text, add_special_tokens=False).input_ids
    return joined[len(before) :]


# --- what a tokenizer makes of it ------------------------------------------------------------------------------------


def test_the_kinds_of_tokenizers_are_told_apart() -> None:
    kinds = {name: (_made(name)[1].single_digits, _made(name)[1].exact_text) for name in TOKENIZERS}
    assert kinds["bytes"] == kinds["single digits"] == (True, False)
    assert kinds["several digits"] == (False, False)
    assert kinds["across words"] == (False, True)
    assert "single digits" in repr(_made("bytes")[1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_needles_and_questions_are_what_the_tokenizer_makes_of_their_text(name: str) -> None:
    tokenizer, templates = _made(name)
    names = torch.randint(1, 51, (4, 30))
    values = torch.randint(0, 100_000, (4, 30))
    values[0, :5] = torch.tensor([0, 7, 99_999, 12, 10_000])
    needles, lengths = templates.needle_ids(names, values)
    queries, query_lengths = templates.query_ids(names)
    answers, answer_lengths = templates.answer_ids(names, values)
    for index in [(row, column) for row in range(4) for column in range(30)]:
        number, value = int(names[index]), f"{int(values[index]):05d}"
        text = f" The passkey_{number} is {value}. Remember it."
        assert needles[index][: lengths[index]].tolist() == _inside(tokenizer, text)
        asked = f" What is the passkey_{number}? The passkey_{number} is"
        question = queries[index][: query_lengths[index]].tolist()
        assert question == _inside(tokenizer, asked)
        answer = answers[index][: answer_lengths[index]].tolist()
        if not templates.exact_text:
            assert question + answer == _inside(tokenizer, f"{asked} {value}")
        assert tokenizer.decode(question + answer).strip() == f"{asked} {value}".strip()
        assert (answers[index][answer_lengths[index] :] == templates.pad_id).all()
    assert needles.shape[-1] == templates.max_needle_tokens >= int(lengths.max())


def test_bad_templates_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="num_ids must be at least 1, got 0"):
        NeedleTemplates(tokenizer, num_ids=0)
    with pytest.raises(ValueError, match="a needle must hold"):
        NeedleTemplates(tokenizer, needle="{value} is the passkey_{id}")
    with pytest.raises(ValueError, match="a query must hold"):
        NeedleTemplates(tokenizer, query="what?")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "The": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="no tokens for digits"):
        NeedleTemplates(_wrapped(words, unk_token="<unk>"))


def test_another_wording() -> None:
    tokenizer = tiny_tokenizer()
    templates = NeedleTemplates(tokenizer, 3, needle=" Box {id} holds {value}!", query=" Box {id}:")
    ids, lengths = templates.needle_ids(torch.tensor([2]), torch.tensor([42]))
    assert tokenizer.decode(ids[0, : lengths[0]]) == " Box 2 holds 00042!"
    with pytest.raises(ValueError, match=r"4 needles need as many ids.*num_ids=4"):
        NeedleDocuments(BACKGROUND, templates).sample(1, 500, 4)


# --- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single digits", "several digits", "across words"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_document_holds_its_needles_whole_one_in_each_segment(name: str, data: st.DataObject) -> None:
    tokenizer, templates = _made(name)
    needles = data.draw(st.integers(1, 50), "needles")
    # Some tokens of slack: with this tokenizer the longest needle is an estimate.
    least = templates.min_length(needles) + 3 * needles * templates.exact_text
    length = least + data.draw(st.integers(0, 3000), "slack")
    span = data.draw(st.one_of(st.none(), st.integers(least, length)), "span")
    queries = data.draw(st.integers(1, needles), "queries")
    batch = _sample(name, 2, length, needles, queries, seed=data.draw(st.integers(0, 99), "seed"), span=span)

    assert batch.documents.shape == (2, length) and batch.documents.dtype == torch.int64
    for row, document in enumerate(batch.documents):
        starts = batch.needle_positions[row].tolist()
        background, runs = _parts(document)
        # Neighbours without background between them are one run.
        found, written = [], {}
        for start, run in runs.items():
            inner = [position for position in starts if start <= position < start + len(run)]
            for position, end in zip(inner, [*inner[1:], start + len(run)], strict=True):
                text = tokenizer.decode(run[position - start : end - start])
                assert text.startswith(" The passkey_") and text.endswith(". Remember it.")
                number, value = text.removeprefix(" The passkey_").removesuffix(". Remember it.").split(" is ")
                assert len(value) == 5
                written[position] = int(number), value
                found.append(position)
        assert found == starts == sorted(starts) and len(starts) == needles
        assert len({number for number, _ in written.values()}) == needles
        # Nothing of the background is lost, however it is read again from time to time.
        steps = [b - a for a, b in itertools.pairwise(background)]
        assert sum(step not in (1, 1 - len(BACKGROUND)) for step in steps) <= length // len(BACKGROUND)
        if span is None:
            for index, start in enumerate(starts):
                low, high = index * length // needles, (index + 1) * length // needles
                assert low <= start < high
        else:
            assert starts[-1] - starts[0] < span

        for query in range(queries):
            position = int(batch.positions[row, query])
            assert written[position] == (int(batch.ids[row, query]), batch.answers[row][query])
            assert batch.depths[row, query].item() == pytest.approx(position / length)
        assert len(set(batch.positions[row].tolist())) == queries


@pytest.mark.parametrize("name", TOKENIZERS)
def test_labels_are_the_answer_and_nothing_else(name: str) -> None:
    tokenizer, _ = _made(name)
    batch = _sample(name, 3, 3000, 50, 7)
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape
    assert batch.query_mask.shape == batch.queries.shape and batch.answer_mask.shape == batch.answer_ids.shape
    for row in range(3):
        for query in range(7):
            ids, labels = batch.input_ids[row, query], batch.labels[row, query]
            asked = f"What is the passkey_{batch.ids[row, query]}? The passkey_{batch.ids[row, query]} is"
            real = ids[batch.attention_mask[row, query].bool()]
            assert tokenizer.decode(real).strip() == f"{asked} {batch.answers[row][query]}"
            labelled = labels != -100
            assert torch.equal(labels[labelled], ids[labelled])
            assert tokenizer.decode(labels[labelled]).strip() == batch.answers[row][query]
            question = batch.queries[row, query][batch.query_mask[row, query]]
            answer = batch.answer_ids[row, query][batch.answer_mask[row, query]]
            assert torch.equal(torch.cat((question, answer)), real)
            assert torch.equal(labels[labelled], answer)
    ids, labels = batch.as_one_text(2)
    assert torch.equal(ids[:, :3000], batch.documents) and torch.equal(ids[:, 3000:], batch.input_ids[:, 2])
    assert (labels[:, :3000] == -100).all() and torch.equal(labels[:, 3000:], batch.labels[:, 2])


def test_the_shapes_do_not_depend_on_chance() -> None:
    shapes = set()
    for seed in range(8):
        batch = _sample("several digits", 1, 1000, 5, 1, seed=seed)
        shapes.add((batch.queries.shape, batch.answer_ids.shape, batch.input_ids.shape))
    assert len(shapes) == 1


def test_documents_repeat_with_their_generator_and_differ_without() -> None:
    first, again, other = (_sample("bytes", 2, 2500, 50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.documents, again.documents) and torch.equal(first.input_ids, again.input_ids)
    assert not torch.equal(first.documents, other.documents)
    assert not torch.equal(first.documents[0], first.documents[1])
    assert first.needle_positions.equal(first.positions)  # all needles: asked for in order


def test_all_ids_values_and_offsets_occur() -> None:
    batch = _sample("single digits", 400, 64, 1)
    assert set(batch.ids.flatten().tolist()) == set(range(1, 51))
    values = batch.values.flatten()
    assert values.min() < 2000 and values.max() > 98_000 and len(values.unique()) > 390
    room = 64 - int(_made("single digits")[1].max_needle_tokens)
    assert set(range(room + 1)) <= set(batch.positions.flatten().tolist())


def test_a_short_background_is_read_again_from_elsewhere() -> None:
    short = BACKGROUND[:100]
    batch = _sample("single digits", 3, 1500, 2, background=short)
    breaks = []
    for document in batch.documents:
        background, _ = _parts(document)
        steps = [(index, b - a) for index, (a, b) in enumerate(itertools.pairwise(background), 1)]
        odd = [index for index, step in steps if step not in (1, -99)]
        assert odd and all(index % 100 == 0 for index in odd)
        breaks += odd
    assert len(breaks) > 20
    one = _sample("single digits", 2, 300, 1, background=torch.tensor([FIRST]))
    assert one.documents.shape == (2, 300)


def test_constant_backgrounds_and_dense_needles_take_their_share() -> None:
    batch = _sample("single digits", 300, 600, 4, constant_background=0.3, dense=0.5)
    kinds = [len(set(_parts(document)[0])) for document in batch.documents]
    assert all(kind == 1 or kind > 400 for kind in kinds)
    assert 60 <= kinds.count(1) <= 120
    width = batch.needle_positions[:, -1] - batch.needle_positions[:, 0]
    apart = _sample("single digits", 300, 600, 4)
    assert (apart.needle_positions[:, -1] - apart.needle_positions[:, 0]).min() >= 300 - 20
    assert 90 <= int((width < 300 - 20).sum()) <= 170
    every = _sample("single digits", 50, 600, 4, constant_background=1.0, dense=1.0)
    assert all(len(set(_parts(document)[0])) == 1 for document in every.documents)


def test_wrong_numbers_are_refused() -> None:
    templates = _made("bytes")[1]
    documents = NeedleDocuments(BACKGROUND, templates)
    least = templates.min_length(50)
    with pytest.raises(ValueError, match=rf"1024 tokens cannot hold 50 needles.*at least {least} tokens"):
        documents.sample(1, 1024, 50)
    assert documents.sample(1, least, 50).documents.shape == (1, least)
    for arguments, more, message in [
        ((0, 3000, 5), {}, "at least 1, got 0 and 5"),
        ((1, 3000, 5, 6), {}, "between 1 and the 5 needles, got 6"),
        ((1, 30_000, 51), {}, "51 needles need as many ids"),
        ((1, 3000, 5), {"dense": 1.5}, "dense must be between 0 and 1, got 1.5"),
        ((1, 3000, 5), {"constant_background": -1}, "constant_background must be"),
        ((1, 3000, 5), {"span": 3001}, "span must be between"),
        ((1, 3000, 5), {"span": 20}, "span must be between"),
    ]:
        with pytest.raises(ValueError, match=message):
            documents.sample(*arguments, **more)
    for wrong in (torch.zeros(0, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long), torch.zeros(4)):
        with pytest.raises(ValueError, match="non-empty vector of token ids"):
            NeedleDocuments(wrong, templates)


def test_more_than_fifty_needles() -> None:
    templates = NeedleTemplates(tiny_tokenizer(), num_ids=120)
    narrow = torch.arange(5000).to(torch.uint16)
    batch = NeedleDocuments(narrow, templates).sample(1, 5000, 120)
    assert sorted(batch.ids[0].tolist()) == list(range(1, 121))


# --- background ------------------------------------------------------------------------------------------------------


def test_files_folders_and_packed_files_are_read_in_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "texts" / "b.txt").write_text("bbb\n<|endoftext|>\nBBB", encoding="utf-8-sig")
    with gzip.open(tmp_path / "texts" / "a.txt.gz", "wt") as file:
        file.write("aaa")
    with lzma.open(tmp_path / "texts" / "inner" / "c.md.xz", "wt") as file:
        file.write("ccc")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x00\xff")
    background = load_background(tmp_path / "texts", tokenizer)
    assert background.dtype == torch.int32 and background.dim() == 1
    assert tokenizer.decode(background) == "aaa\n\nbbb\n\nBBB\n\nccc\n\n"
    both = load_background([tmp_path / "texts" / "b.txt", str(tmp_path / "texts" / "a.txt.gz")], tokenizer)
    assert tokenizer.decode(both) == "bbb\n\nBBB\n\naaa\n\n"
    assert torch.equal(load_background(tmp_path / "texts", tokenizer, 6), background[:6])
    assert find_text_files(tmp_path / "texts" / "b.txt") == [tmp_path / "texts" / "b.txt"]
    assert find_text_files("someone/some-data:config") is None


def test_a_long_text_is_read_only_as_far_as_needed(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = english(25_000)
    (tmp_path / "long.txt").write_text(text + "\n\udcff", encoding="utf-8", errors="surrogateescape")
    few = load_background(tmp_path / "long.txt", tokenizer, 1000)  # never comes to the damage at the end
    assert tokenizer.decode(few) == text[:1000]
    with pytest.raises(ValueError, match=r"long\.txt is not UTF-8"):
        load_background(tmp_path / "long.txt", tokenizer)
    assert torch.equal(encode_background(text, tokenizer, 1000), few)
    assert len(encode_background(text, tokenizer)) == len(text)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.txt.xz").write_bytes(b"no such thing")
    (tmp_path / "nothing").mkdir()
    for source, error, message in [
        (tmp_path / "missing.txt", FileNotFoundError, "no such file or folder"),
        ("missing.txt", FileNotFoundError, "no such file or folder"),
        (tmp_path / "empty.txt", ValueError, "there is no text in"),
        (tmp_path / "bad.txt.xz", ValueError, "is damaged"),
        (tmp_path / "nothing", ValueError, "holds no text files"),
        ([], ValueError, "no text"),
    ]:
        with pytest.raises(error, match=message):
            load_background(source, tokenizer)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        load_background(tmp_path / "empty.txt", tokenizer, 0)
    with pytest.raises(ValueError, match="blank"):
        encode_background(" \n", tokenizer)


def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Fake:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
            asked.append((name, config, split, streaming))
            return ({"title": "t", "text": f"row {number}"} for number in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    tokenizer = tiny_tokenizer()
    background = load_background("someone/data:small", tokenizer, 20, split="test")
    assert tokenizer.decode(background) == "row 0\nrow 1\nrow 2\nro"
    assert asked == [("someone/data", "small", "test", True)]
    with pytest.raises(ValueError, match="no column 'body'; its columns are title, text"):
        load_background("someone/data", tokenizer, 20, column="body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"no file or folder here.*pip install"):
        load_background("someone/data", tokenizer, 20)


def test_the_end_is_held_out() -> None:
    train, held_out = split_background(BACKGROUND, 0.1)
    assert len(train) == 4500 and torch.equal(torch.cat((train, held_out)), BACKGROUND)
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match="held_out must be between 0 and 1"):
            split_background(BACKGROUND, share)
    with pytest.raises(ValueError, match="too few"):
        split_background(BACKGROUND[:3], 0.01)
