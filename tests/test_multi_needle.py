"""The multi-needle test counts what a model found, no more and no less, and reads a document once."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from tiny_models import VOCABULARY, random_ids, tiny_model
from tiny_texts import english, tiny_llama, tiny_tokenizer
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from nearfar.evaluation import multi_needle
from nearfar.evaluation.multi_needle import (
    LengthResult,
    NeedleResults,
    draw_heat_map,
    evaluate_needles,
    short_length,
    wilson_interval,
    write_heat_map,
)
from nearfar.evaluation.needle_documents import encode_background

TOKENIZER = tiny_tokenizer()
BACKGROUND = encode_background(english(3000), TOKENIZER)


class Rows:
    """A cache: the tokens of each row."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [list(row) for row in self.rows for _ in range(repeats)]


class Oracle(nn.Module):
    """Reads text and completes `The passkey_7 is` with what the text said before; for odd ids if asked to, wrongly.

    Args:
        answer: what it writes for a value; "" ends at once.
    """

    def __init__(self, answer: Any = lambda name, value: f" {value}") -> None:
        super().__init__()
        self.embedding = nn.Embedding(261, 2)
        self.config = SimpleNamespace(model_type="oracle")
        self.answer = answer
        self.reads: list[tuple[int, int]] = []
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Rows | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        self.reads.append(tuple(input_ids.shape))
        cache = Rows([[] for _ in input_ids]) if past_key_values is None else past_key_values
        logits = torch.zeros(*input_ids.shape, 261)
        for row, (before, new) in enumerate(zip(cache.rows, input_ids.tolist(), strict=True)):
            for column, token in enumerate(new):
                before.append(token)
                if not logits_to_keep or column == len(new) - 1:
                    logits[row, column, self._next(before)] = 1.0
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], past_key_values=cache)

    def _next(self, tokens: list[int]) -> int:
        asked = re.search(r"\? The passkey_(\d+) is([^.?]*)$", TOKENIZER.decode(tokens[-50:]))
        if asked is None:
            return 0
        text = TOKENIZER.decode(tokens)
        said = re.search(rf"The passkey_{asked[1]} is (\d{{5}})\. Remember it\.", text)
        answer = self.answer(int(asked[1]), said[1]) if said else " 99999"
        if asked[2] == answer or not answer.startswith(asked[2]):
            return TOKENIZER.eos_token_id
        return TOKENIZER(answer[len(asked[2])]).input_ids[0]


class ProxyOracle(Oracle):
    """The same with the two-input interface: a document is encoded by itself, or given as `history_ids`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.config.compression_ratio = 64
        self.encoded: list[tuple[int, int]] = []

    def encode_history(self, ids: torch.Tensor) -> Rows:
        self.encoded.append(tuple(ids.shape))
        return Rows(ids.tolist())

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        past_key_values: Rows | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        history_ids: torch.Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        if history_ids is not None:
            past_key_values = Rows([history_ids[0].tolist() for _ in input_ids])
        return super().forward(input_ids, past_key_values, use_cache, logits_to_keep)


def _measured(model: Any, lengths: Any = (500,), documents: int = 2, needles: int = 10, **more: Any) -> NeedleResults:
    return evaluate_needles(model, TOKENIZER, BACKGROUND, lengths, documents, needles, progress=False, **more)


# --- hits and misses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", [Oracle, ProxyOracle])
@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_an_oracle_finds_everything(kind: Any, quick: bool, batch_size: int) -> None:
    results = _measured(kind(), [500, 800], quick=quick, batch_size=batch_size)
    assert list(results.lengths) == [500, 800]
    for result in results.lengths.values():
        assert result.found == result.asked == 20 and result.accuracy == 1.0
        assert [asked for _, asked in result.by_depth()] == [2] * 10  # a needle in each tenth of each document
        assert result.needles_per_block == (None if kind is Oracle else result.needles_per_block)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", [Oracle, ProxyOracle])
def test_a_wrong_digit_is_a_miss_where_it_was_made(kind: Any, quick: bool) -> None:
    def answer(name: int, value: str) -> str:
        return f" {value}" if name % 3 else f" {value[:4]}{(int(value[4]) + 1) % 10}"

    seen: list[tuple[int, int]] = []
    model = kind(answer=lambda name, value: seen.append((name, int(value))) or answer(name, value))
    result = _measured(model, quick=quick, documents=3).lengths[500]
    wrong = {pair for pair in seen if pair[0] % 3 == 0}
    assert 0 < len(wrong) < 30
    assert result.asked == 30 and result.found == 30 - len(wrong)
    # The misses stand where these needles were.
    documents = multi_needle.NeedleDocuments(BACKGROUND, multi_needle.NeedleTemplates(TOKENIZER))
    for number in range(3):
        generator = torch.Generator().manual_seed(multi_needle._number(f"0/500/{number}"))
        batch = documents.sample(1, 500, 10, generator=generator)
        assert result.positions[number] == batch.positions[0].tolist()
        assert result.hits[number] == [name % 3 != 0 for name in batch.ids[0].tolist()]


@pytest.mark.parametrize(
    ("answer", "hit"),
    [
        (lambda value: f" {value}", True),
        (lambda value: f": {value}!", True),
        (lambda value: f"{value}", True),
        (lambda value: f" 11 {value}", True),  # 9 tokens
        (lambda value: f" 1111 {value}", False),  # the value's end is token 11
        (lambda value: f" 0{value}", True),  # the paper's rule: the digits appear
        (lambda value: f" {value[:3]} {value[3:]}", False),
        (lambda value: f" {value[:4]}", False),
        (lambda value: "", False),
    ],
)
def test_a_hit_is_five_digits_in_a_row_within_ten_tokens(answer: Any, hit: bool) -> None:
    result = _measured(Oracle(answer=lambda name, value: answer(value)), documents=1).lengths[500]
    assert result.found == (10 if hit else 0) and result.asked == 10


def test_nothing_counts_after_the_end() -> None:
    class Ends(Oracle):
        def _next(self, tokens: list[int]) -> int:
            if TOKENIZER.decode(tokens).endswith(" is"):
                return TOKENIZER.eos_token_id
            return super()._next([token for token in tokens if token != TOKENIZER.eos_token_id])

    assert _measured(Ends(), documents=1).lengths[500].found == 0
    assert _measured(Oracle(), documents=1, max_new_tokens=5).lengths[500].found == 0
    assert _measured(Oracle(), documents=1, max_new_tokens=6).lengths[500].found == 10


def test_quick_is_stricter_than_decoding() -> None:
    model = Oracle(answer=lambda name, value: f": {value}")
    assert _measured(model).lengths[500].found == 20
    results = _measured(model, quick=True)
    assert results.lengths[500].found == 0
    assert results.settings["measure"].startswith("quick") and results.settings["max_new_tokens"] is None


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", [Oracle, ProxyOracle])
def test_the_control_finds_nothing(kind: Any, quick: bool) -> None:
    # All ids are in every document, so that only the values tell documents apart.
    results = _measured(kind(), [2000], needles=50, documents=1, control=True, quick=quick)
    assert results.lengths[2000].asked == 50 and results.lengths[2000].found == 0


def test_decoding_stops_once_all_is_found() -> None:
    model = Oracle()
    _measured(model, documents=1, batch_size=50, chunk_tokens=200)
    assert model.reads[:3] == [(1, 200), (1, 200), (1, 100)]
    steps = [shape for shape in model.reads[3:] if shape[1] == 1]
    questions = [shape for shape in model.reads[3:] if shape[1] > 1]
    assert sum(rows for rows, _ in questions) == 10 and len(questions) == 2  # ids of one digit, ids of two
    assert len(steps) == 2 * 5  # a space came with the question's pass, then five digits
    model = Oracle(answer=lambda name, value: "")
    _measured(model, documents=1, batch_size=50)
    assert not [shape for shape in model.reads if shape[1] == 1]


def test_a_document_is_encoded_once_by_a_model_that_can() -> None:
    model = ProxyOracle()
    result = _measured(model, documents=3, batch_size=4).lengths[500]
    assert model.encoded == [(1, 500)] * 3
    assert max(length for _, length in model.reads) < 60
    mean, most = result.needles_per_block or (0, 0)
    assert mean == 10 / 8 and 1 <= most <= 3
    plain = ProxyOracle()
    plain.config.compression_ratio = None
    assert _measured(plain, documents=1).lengths[500].found == 10 and plain.encoded == []


# --- any model -------------------------------------------------------------------------------------------------------


class Numbers:
    """Writes token ids as numbers."""

    eos_token_id = None

    def batch_decode(self, rows: list[list[int]], **more: Any) -> list[str]:
        return ["".join(f"<{token}>" for token in row) for row in rows]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox", "dar"])
@pytest.mark.parametrize("rows", [1, 3])
def test_questions_on_a_copied_cache_get_what_generate_writes(family: str, rows: int) -> None:
    model = tiny_dar() if family == "dar" else tiny_model(family)
    model.generation_config.eos_token_id = None
    document, queries = random_ids(1, 50), random_ids(rows, 6, seed=1)
    expected = []
    for query in queries:
        ids = torch.cat((document, query[None]), 1)
        written = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
        expected.append("".join(f"<{token}>" for token in written[0, ids.shape[1] :].tolist()))
    asking = multi_needle._Asking(model, Numbers(), rows, 8, 13, quick=False)  # type: ignore[arg-type]
    with torch.no_grad():
        cache = asking.read(document)
        before = copy.deepcopy(cache)
        for _ in range(2):  # the cache is as it was after the first time
            assert asking.decoded(multi_needle._repeated(cache, rows), queries, expected) == [True] * rows
        others = [text + "<0>" for text in expected]
        assert asking.decoded(multi_needle._repeated(cache, rows), queries, others) == [False] * rows
    assert cache.get_seq_length() == before.get_seq_length() == 50

    tokens = torch.tensor([[int(token) for token in re.findall(r"\d+", text)] for text in expected])
    inputs = torch.cat((queries, tokens), 1)
    labels = inputs.clone()
    labels[:, :6] = -100
    wrong = torch.where(labels == -100, labels, (labels + 1) % VOCABULARY)
    with torch.no_grad():
        assert asking.exact(document, multi_needle._repeated(cache, rows), inputs, labels) == [True] * rows
        assert asking.exact(document, multi_needle._repeated(cache, rows), inputs, wrong) == [False] * rows


def test_a_real_model_is_measured_the_same_whatever_the_batches() -> None:
    model = tiny_llama()
    first = _measured(model, documents=1, batch_size=1, chunk_tokens=5000)
    second = _measured(model, documents=1, batch_size=9, chunk_tokens=77)
    assert first.lengths[500].hits == second.lengths[500].hits
    assert first.settings == second.settings


def test_a_beginning_token_is_the_documents_first() -> None:
    class Begins:
        bos_token_id, eos_token_id, pad_token_id = 260, 256, 257

        def __call__(self, text: Any, add_special_tokens: bool = True, **more: Any) -> Any:
            if add_special_tokens:
                return SimpleNamespace(input_ids=[260, *TOKENIZER(text).input_ids])
            return TOKENIZER(text, add_special_tokens=False)

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

    model = ProxyOracle()
    seen: list[torch.Tensor] = []
    encode = model.encode_history
    model.encode_history = lambda ids: seen.append(ids) or encode(ids)  # type: ignore[method-assign, func-returns-value]
    tokenizer: Any = Begins()
    results = evaluate_needles(model, tokenizer, BACKGROUND, [500], 1, 10, progress=False)
    (ids,) = seen
    assert ids.shape == (1, 500) and ids[0, 0] == 260 and (ids[0, 1:] != 260).all()
    for position in results.lengths[500].positions[0]:
        assert TOKENIZER.decode(ids[0, position : position + 13]) == " The passkey_"
    assert results.lengths[500].found == 10


# --- results ---------------------------------------------------------------------------------------------------------


def test_the_wilson_interval() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    low, high = wilson_interval(10, 10)
    assert (low, high) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson_interval(0, 10)[0] == 0.0
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_depths_and_blocks_are_counted() -> None:
    result = LengthResult(1000, {0: [True, False, True], 4: [False, True, True]}, block_tokens=100)
    result.positions = {0: [0, 99, 999], 4: [100, 500, 550]}
    assert result.by_depth() == [(1, 2), (0, 1), (0, 0), (0, 0), (0, 0), (2, 2), (0, 0), (0, 0), (0, 0), (1, 1)]
    assert result.by_depth(2) == [(1, 3), (3, 3)]
    assert result.needles_per_block == (0.3, 2)
    assert result.found == 4 and result.asked == 6 and result.accuracy == 4 / 6


def test_a_run_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "needles.json"
    whole = _measured(Oracle(), [500, 700], documents=3)

    class Stops(Oracle):
        def _next(self, tokens: list[int]) -> int:
            if len(self.reads) > 60:
                raise KeyboardInterrupt
            return super()._next(tokens)

    torch.manual_seed(0)
    stopping, model = Stops(), Oracle()
    model.load_state_dict(stopping.state_dict())
    with pytest.raises(KeyboardInterrupt):
        _measured(stopping, [500, 700], documents=3, path=path)
    kept = NeedleResults.read(path)
    done = {(length, number) for length, result in kept.lengths.items() for number in result.hits}
    assert 0 < len(done) < 6
    results = _measured(model, [500, 700], documents=3, path=path)
    assert sum(shape[1] > 60 for shape in model.reads) == 6 - len(done)  # one read a document
    for length in (500, 700):
        assert results.lengths[length].hits == whole.lengths[length].hits
        assert results.lengths[length].positions == whole.lengths[length].positions
    again = NeedleResults.read(path)
    assert again.to_dict() == results.to_dict()
    assert list(tmp_path.rglob("*")) == [tmp_path / "out", path]

    model.reads.clear()
    more = _measured(model, [600], documents=1, path=path)
    assert list(more.lengths) == [500, 600, 700] and sum(shape[1] > 60 for shape in model.reads) == 1
    model.reads.clear()
    _measured(model, [500], documents=3, path=path, batch_size=3)
    assert not model.reads
    _measured(model, [500], documents=3, path=path, restart=True)
    assert list(NeedleResults.read(path).lengths) == [500] and model.reads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"another seed \(seed: 0 there, 1 now\)"),
        ({"quick": True}, "another measure"),
        ({"control": True}, "another control"),
        ({"needles": 9}, "another needles"),
        ({"model_name": "other"}, "another model"),
        ({"span": 400}, "another span"),
    ],
)
def test_results_of_other_settings_are_never_mixed(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "needles.json"
    model = Oracle()
    _measured(model, documents=1, path=path)
    with pytest.raises(ValueError, match=message):
        _measured(model, documents=1, path=path, **change)
    assert NeedleResults.read(path).lengths[500].asked == 10


def test_other_weights_or_another_text_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "needles.json"
    model = Oracle()
    _measured(model, documents=1, path=path)
    with pytest.raises(ValueError, match="another background_tokens, another background "):
        evaluate_needles(model, TOKENIZER, BACKGROUND[1:], [500], 1, 10, path=path, progress=False)
    with torch.no_grad():
        model.embedding.weight[0, 0] += 0.5
    with pytest.raises(ValueError, match="another weights"):
        _measured(model, documents=1, path=path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "needles.json"
    for text in ("not json", "[]", "{}", '{"settings": {}, "lengths": {"5": {}}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"needles\.json"):
            _measured(Oracle(), documents=1, path=path)
        assert path.read_text() == text


def test_wrong_numbers_are_refused_before_any_work() -> None:
    model = Oracle()
    with pytest.raises(ValueError, match=r"10 needles of up to 38 tokens.*300 tokens: the least length is 380"):
        _measured(model, [500, 300])
    for change, message in [
        ({"lengths": []}, "no length"),
        ({"documents": 0}, "num_documents must be at least 1"),
        ({"needles": 0}, "num_needles must be at least 1"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"span": 20}, "span must be between"),
    ]:
        with pytest.raises(ValueError, match=message):
            _measured(model, **change)
    assert model.reads == []
    with pytest.raises(ValueError, match="training mode"):
        _measured(model.train())


def test_a_model_without_cache_is_refused() -> None:
    class Forgets(Oracle):
        def forward(self, *args: Any, **more: Any) -> Any:
            output = super().forward(*args, **more)
            output["past_key_values"] = None
            return CausalLMOutputWithPast(logits=output.logits)

    with pytest.raises(TypeError, match="Forgets returns no cache"):
        _measured(Forgets())


def test_the_table_the_file_and_the_heat_map(tmp_path: Path) -> None:
    results = _measured(
        ProxyOracle(answer=lambda name, value: f" {value}" if name > 9 else " no"),
        [512, 1024],
        path=tmp_path / "needles.json",
        model_name="oracle",
        record={"command": "a command"},
    )
    table = results.table()
    assert "1,024" in table and "95 % interval" in table and "needles/block" in table
    found = results.lengths[1024].found
    assert f"{100 * found / 20:.1f} %" in table and 0 < found < 20
    data = json.loads((tmp_path / "needles.json").read_text())
    assert data["command"] == "a command" and data["settings"]["model"] == "oracle" and "machine" in data
    entry = data["lengths"]["1024"]
    assert entry["found"] == found and entry["accuracy"] == found / 20 and len(entry["by_depth"]) == 10
    assert entry["needles_per_block"]["mean"] == 10 / 16

    figure = draw_heat_map(results, "a title")
    axis = figure.axes[0]
    texts = [text.get_text() for text in axis.texts]
    assert len(texts) == 20
    shares = [hit / asked for hit, asked in results.lengths[512].by_depth()]
    assert texts[:10] == [f"{100 * share:.0f}" for share in shares]
    assert [label.get_text().split("\n")[0] for label in axis.get_xticklabels()] == ["512", "1K"]
    path = write_heat_map(tmp_path / "needles.png", results)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_heat_map(NeedleResults({}))


def test_short_lengths() -> None:
    assert [short_length(tokens) for tokens in (1024, 8192, 1 << 20, 3 << 19, 1000)] == [
        "1K",
        "8K",
        "1M",
        "1536K",
        "1,000",
    ]
