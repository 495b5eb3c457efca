"""`nearfar eval perplexity|ruler|longbench|scbench|latency` with a tiny model: what is written, and going on."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from test_long_documents import ROW, turns, write_jsonl
from tiny_texts import english, save_tiny_checkpoint, tiny_llama, tiny_tokenizer

from nearfar import cli, cli_benchmarks, cli_loading
from nearfar.evaluation import benchmark_runs
from nearfar.evaluation.benchmark_runs import BenchmarkRun, measure_answers, open_run, run_items
from nearfar.evaluation.context_reading import CacheChoice, ContextReader
from nearfar.evaluation.file_lock import held_lock
from nearfar.evaluation.shared_folder import joined
from nearfar.evaluation.task_samples import PromptFrame, Question, Sample

MACHINE = ["--device", "cpu", "--threads", "1"]
TWO = ["--caches", "full,streaming_llm", "--retention-ratio", "0.2,0.5"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(english(1500), encoding="utf-8")
    return str(path)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model never stops by itself."""
    answer = ContextReader.answer

    def short(self: ContextReader, read: Any, ids: Any, max_new_tokens: int, **options: Any) -> list[int]:
        return answer(self, read, ids, min(max_new_tokens, 3), **options)

    monkeypatch.setattr(ContextReader, "answer", short)


def load(folder: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / name).read_text())
    return data


# --- the engine ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    reader = ContextReader(tiny_llama(), tiny_tokenizer())
    path, measured = tmp_path / "run.json", []

    def item(key: str, fails: bool = False) -> benchmark_runs.Item:
        def measure() -> dict[str, Any]:
            if fails:
                raise KeyboardInterrupt
            measured.append(key)
            return {"task": key.split("/")[0], "length": None, "score": 0.5}

        return key, measure

    run = open_run("ruler", reader, {"seed": 0}, path=path)
    with pytest.raises(KeyboardInterrupt):
        run_items(run, [item("a/0"), item("a/1"), item("a/2", fails=True)], path, progress=False)
    assert measured == ["a/0", "a/1"] and list(BenchmarkRun.read(path).samples) == ["a/0", "a/1"]
    run = open_run("ruler", reader, {"seed": 0}, path=path)
    run_items(run, [item("a/0"), item("a/1"), item("a/2"), item("b/0")], path, progress=False)
    assert measured == ["a/0", "a/1", "a/2", "b/0"]
    assert [(entry["task"], entry["count"], entry["score"]) for entry in run.scores()] == [
        ("a", 3, 50.0),
        ("b", 1, 50.0),
    ]
    assert BenchmarkRun.read(path).to_dict() == run.to_dict()
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]

    with pytest.raises(ValueError, match=r"another seed .seed: 0 there, 1 now.; write elsewhere, or restart"):
        open_run("ruler", reader, {"seed": 1}, path=path)
    with pytest.raises(ValueError, match="a run of ruler, not of scbench"):
        open_run("scbench", reader, {"seed": 0}, path=path)
    # Results say which data they are of; those of others, or of unknown ones, are not taken for them.
    run_items(run, [item("c/0")], path, data={"c/0": "mine"}, progress=False)
    run = open_run("ruler", reader, {"seed": 0}, path=path)
    run_items(run, [item("c/0"), item("c/1")], path, data={"c/0": "mine", "c/1": "mine"}, progress=False)
    assert measured[-2:] == ["c/0", "c/1"] and run.samples["c/1"]["data"] == "mine"
    for data, message in (
        (
            {"c/0": "yours", "c/1": "yours"},
            r"run.json holds results of other data \(c/0 and 1 more\); .* \(--restart\)",
        ),
        ({"a/0": "mine", "c/0": "mine"}, r"run.json holds results of unknown data \(a/0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run_items(run, [item("d/0")], path, data=data, progress=False)
    assert measured[-1] == "c/1"

    other = ContextReader(tiny_llama(seed=1), tiny_tokenizer())
    with pytest.raises(ValueError, match="another weights"):
        open_run("ruler", other, {"seed": 0}, path=path)
    assert not open_run("ruler", other, {"seed": 0}, path=path, restart=True).samples
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a run of a benchmark"):
        open_run("ruler", reader, {}, path=path)


def test_answers_are_asked_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions of a sample are what greedy decoding without a cache writes; the score is their mean."""
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    frame = PromptFrame(tokenizer)
    questions = [Question(" One?", ("?",), "contains", 4), Question(" Two?", ("?",), "contains", 4, answer_start="So")]

    def written(ids: list[int]) -> str:
        ids, start = list(ids), len(ids)
        with torch.no_grad():
            for _ in range(4):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return str(tokenizer.decode(ids[start:], skip_special_tokens=True))

    context = english(9)
    texts = [
        f"<|user|>\n{context} One?<|end|>\n<|assistant|>\n",
        f"<|user|>\n{context} Two?<|end|>\n<|assistant|>\nSo",
    ]
    expected = [written(tokenizer(text).input_ids) for text in texts]
    questions[1] = Question(" Two?", (expected[1],), "contains", 4, answer_start="So")
    sample = Sample("t", 0, context, tuple(questions))
    for seen in (False, True):
        reader = ContextReader(model, tokenizer)
        reader.ends.clear()
        entry = measure_answers(reader, frame, sample, question_seen=seen)
        assert [question["prediction"] for question in entry["questions"]] == expected
        assert [question["score"] for question in entry["questions"]] == [0.0, 1.0] and entry["score"] == 0.5
        assert entry["context_tokens"] == len(tokenizer(f"<|user|>\n{context}").input_ids)
        assert entry["new_tokens"] == 8
    # What is compressed: the context alone, or with the question.
    reader = ContextReader(model, tokenizer, CacheChoice("streaming_llm", retention_ratio=0.5))
    tokens = [len(tokenizer(text).input_ids) for text in (f"<|user|>\n{context}", *texts)]
    alone, seen_too = (measure_answers(reader, frame, sample, question_seen=seen) for seen in (False, True))
    assert alone["kept_pairs"] == 4 * -(-tokens[0] // 2)
    assert seen_too["kept_pairs"] == sum(4 * -(-n // 2) for n in tokens[1:]) / 2


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_answers")
def test_ruler(checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "ruler", checkpoint, *MACHINE, *TWO, "--text", text_file, "--lengths", "3k", "--limit", "1"]
    command += ["--out", str(tmp_path), "--tasks"]
    assert cli.main([*command, "niah_single_1,fwe"]) == 0
    shown = capsys.readouterr().out
    assert "niah_single_1" in shown and str(tmp_path / "ruler-streaming_llm-0.5.json") in shown
    names = [f"ruler-{label}.json" for label in ("full", "streaming_llm-0.2", "streaming_llm-0.5")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    runs = [load(tmp_path, name) for name in names]
    for data, ratio in zip(runs, (None, 0.2, 0.5), strict=True):
        assert list(data["samples"]) == ["niah_single_1/3072/0", "fwe/3072/0"]
        assert data["settings"]["retention_ratio"] == ratio and data["settings"]["seed"] == 0
        assert data["command"].startswith("nearfar eval ruler") and data["machine"]["versions"]["torch"]
        assert [entry["count"] for entry in data["scores"]] == [1, 1]
        sample = data["samples"]["fwe/3072/0"]
        full = runs[0]["samples"]["fwe/3072/0"]
        assert sample["kept_pairs"] == 4 * math.ceil((ratio or 1) * sample["context_tokens"])
        assert sample["cache_bytes"] <= full["cache_bytes"] and sample["prefill_seconds"] > 0
        assert sample["questions"][0]["answers"] == full["questions"][0]["answers"]
    # More tasks and samples are added to what is there.
    assert cli.main([*command, "fwe,vt", "--limit", "2"]) == 0
    data = load(tmp_path, names[1])
    assert list(data["samples"])[:2] == list(runs[1]["samples"]) and len(data["samples"]) == 5
    assert data["samples"]["fwe/3072/0"] == runs[1]["samples"]["fwe/3072/0"]
    capsys.readouterr()
    assert cli.main([*command, "fwe", "--seed", "1"]) == 2
    assert "another seed" in capsys.readouterr().err


def test_runs_are_shared_by_processes(
    checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that somebody measures is left to them, the others are measured; a lock goes with its process."""
    command = [
        "eval",
        "perplexity",
        checkpoint,
        *MACHINE,
        *TWO,
        "--text",
        text_file,
        "--lengths",
        "200",
        "--limit",
        "1",
    ]
    command += ["--out", str(tmp_path / "runs")]
    with held_lock(tmp_path / "runs" / ".perplexity-full.lock") as held:
        assert held and cli.main(command) == 0
    assert "perplexity-full.json: left to another process" in capsys.readouterr().err
    names = [f"perplexity-{label}.json" for label in ("full", "streaming_llm-0.2", "streaming_llm-0.5")]
    assert sorted(path.name for path in (tmp_path / "runs").glob("*.json")) == names[1:]
    assert cli.main(command) == 0
    assert sorted(path.name for path in (tmp_path / "runs").glob("*.json")) == names


def test_processes_that_restart_together_keep_what_one_of_them_has_redone(
    checkpoint: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []
    measure = benchmark_runs.measure_perplexity

    def counted(*args: Any) -> dict[str, Any]:
        measured.append(1)
        return measure(*args)

    monkeypatch.setattr(benchmark_runs, "measure_perplexity", counted)
    out = tmp_path / "runs"
    command = [
        "eval",
        "perplexity",
        checkpoint,
        *MACHINE,
        "--caches",
        "full,streaming_llm",
        "--retention-ratio",
        "0.5",
    ]
    command += ["--text", text_file, "--lengths", "200", "--limit", "1", "--out", str(out)]

    def run(*more: str) -> int:
        measured.clear()
        assert cli.main([*command, *more]) == 0
        return len(measured)

    assert run() == 2 and run("--restart") == 2 and run("--restart") == 2
    assert load(out, "perplexity-full.json")["samples"]["perplexity/200/0"]["shared"] is False
    assert "*" not in capsys.readouterr().out
    with joined(out) as other:
        assert run("--restart") == 2  # the other one has not begun a restart, and may go on with what is there
        first = other.join_restart("perplexity")
        assert run("--restart") == 2  # what is there is of an earlier one
        assert load(out, "perplexity-full.json")["restart"] == first
        assert run("--restart") == 0 and run("--restart", "--limit", "2") == 2  # goes on
        assert run("--limit", "3") == 2 and run("--restart", "--limit", "3") == 0  # also with what others have added
        # Times beside another process are told.
        capsys.readouterr()
        assert run() == 0
        shown = capsys.readouterr().out
        assert "* 3 of 3 samples were measured while other processes measured into the same folder" in shown
        (line,) = [line for line in shown.splitlines() if line.startswith("perplexity  ")][:1]
        assert line.split()[-2].endswith("*")
    assert run("--restart") == 2
    data = load(out, "perplexity-full.json")
    assert data["restart"] != first and "shared" not in data["scores"][0]
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".process")) == []


def test_a_restart_redoes_what_a_process_without_it_was_measuring(
    checkpoint: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [
        "eval",
        "perplexity",
        checkpoint,
        *MACHINE,
        "--caches",
        "full,streaming_llm",
        "--retention-ratio",
        "0.5",
    ]
    command += ["--text", text_file, "--lengths", "200", "--limit", "1", "--out", str(tmp_path)]
    full, other = (tmp_path / f"perplexity-{label}.json" for label in ("full", "streaming_llm-0.5"))
    assert cli.main(command) == 0
    before = full.read_text()
    waited: list[str] = []
    with ExitStack() as another:
        assert another.enter_context(held_lock(tmp_path / ".perplexity-full.lock", wait=False))

        def sleep(seconds: float) -> None:
            waited.append(full.read_text())
            assert load(tmp_path, other.name)["restart"]  # the rest comes first
            if len(waited) == 2:
                another.close()

        monkeypatch.setattr("time.sleep", sleep)
        assert cli.main([*command, "--restart"]) == 0
    assert waited == [before] * 2
    assert load(tmp_path, full.name)["restart"] == load(tmp_path, other.name)["restart"]
    shown = capsys.readouterr().err
    assert "left to another process, which is measuring it; --restart comes back to it" in shown
    assert shown.count("full.json: waiting for the process") == 1
    # Nobody waits for a process that restarts too.
    with joined(tmp_path) as beside, held_lock(tmp_path / ".perplexity-full.lock", wait=False):
        data = load(tmp_path, full.name)
        full.write_text(json.dumps({**data, "restart": beside.join_restart("perplexity")}))
        assert cli.main([*command, "--restart"]) == 0
    assert len(waited) == 2 and not list(tmp_path.glob(".perplexity-full.lock"))


def test_who_joins_a_restart_with_other_settings_is_told_so(tmp_path: Path) -> None:
    reader, path = ContextReader(tiny_llama(), tiny_tokenizer()), tmp_path / "run.json"
    sample = {"task": "a", "length": None, "score": 0.5}
    run = open_run("ruler", reader, {"seed": 0}, path=path, restart="together")
    run_items(run, [("a/0", lambda: sample)], path, data={"a/0": "mine"}, restart="together", progress=False)
    begun, after = "run.json: another process is restarting this benchmark with", "wait for it, or give another --out"
    with pytest.raises(ValueError, match=f"{begun} another seed .seed: 0 there, 1 now.; {after}"):
        open_run("ruler", reader, {"seed": 1}, path=path, restart="together")
    run = open_run("ruler", reader, {"seed": 0}, path=path, restart="together")
    with pytest.raises(ValueError, match=f"{begun} other data .a/0.; {after}"):
        run_items(run, [], path, data={"a/0": "yours"}, restart="together", progress=False)
    assert not open_run("ruler", reader, {"seed": 1}, path=path, restart="alone").samples


@pytest.mark.usefixtures("short_answers")
def test_ruler_goes_on_with_further_tasks_and_lengths(
    checkpoint: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither passages that come later nor a longer haystack for longer documents change the samples there are."""
    asked: list[int] = []
    text = cli_benchmarks._Session.text

    def shortened(self: Any, tokens: int) -> str:
        asked.append(tokens)
        return text(self, tokens)[: 5 * tokens]

    monkeypatch.setattr(cli_benchmarks._Session, "text", shortened)
    monkeypatch.setattr(cli_benchmarks, "_SHORT_HAYSTACK", 2048)
    squad = {"context": english(8), "qas": [{"question": "Who?", "answers": [{"text": "Ann"}]}]}
    for name in ("mine", "yours"):
        (tmp_path / name).mkdir()
        squad["context"] += name
        (tmp_path / name / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [squad]}]}))
    out = tmp_path / "out"
    command = ["eval", "ruler", checkpoint, *MACHINE, "--text", text_file, "--limit", "1", "--out", str(out)]
    assert cli.main([*command, "--lengths", "2k", "--tasks", "niah_single_2"]) == 0
    first = load(out, "ruler-full.json")["samples"]
    more = [*command, "--tasks", "niah_single_2,qa_1", "--lengths", "2k,3k", "--data-dir"]
    assert cli.main([*more, str(tmp_path / "mine")]) == 0
    samples = load(out, "ruler-full.json")["samples"]
    assert list(samples) == [*first, "niah_single_2/3072/0", "qa_1/2048/0", "qa_1/3072/0"]
    assert samples["niah_single_2/2048/0"] == first["niah_single_2/2048/0"] and asked == [2048, 2048, 3072]
    assert len({sample["data"] for sample in samples.values()}) == 3  # two haystacks, one set of passages
    capsys.readouterr()
    assert cli.main([*more, str(tmp_path / "yours")]) == 2
    assert "ruler-full.json holds results of other data (qa_1/2048/0 and 1 more)" in capsys.readouterr().err
    assert cli.main([*more, str(tmp_path / "yours"), "--restart"]) == 0


@pytest.mark.usefixtures("short_answers")
def test_longbench_and_scbench(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "data" / "hotpotqa.jsonl", *({**ROW, "context": english(20, seed=n)} for n in range(3)))
    write_jsonl(tmp_path / "data" / "trec.jsonl", {**ROW, "all_classes": ["Ann"], "context": english(900)})
    write_jsonl(tmp_path / "data" / "scbench_kv.jsonl", {"context": english(30), "multi_turns": turns()})
    common = [checkpoint, *MACHINE, *TWO, "--data-dir", str(tmp_path / "data"), "--limit", "2"]
    assert cli.main(["eval", "longbench", *common, "--out", str(tmp_path / "long")]) == 0
    assert "without narrativeqa, qasper" in capsys.readouterr().err
    data = load(tmp_path / "long", "longbench-streaming_llm-0.5.json")
    assert list(data["samples"]) == ["hotpotqa/0", "hotpotqa/1", "trec/0"]
    assert data["samples"]["trec/0"]["context_tokens"] < 4096 < len(english(900))  # its middle was cut out
    assert data["settings"]["max_tokens"] == 4096
    again = ["eval", "longbench", *common, "--out", str(tmp_path / "long")]
    write_jsonl(tmp_path / "data" / "hotpotqa.jsonl", *({**ROW, "context": english(20, seed=n)} for n in (0, 5)))
    assert cli.main(again) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'long' / 'longbench-full.json'} holds results of other data (hotpotqa/1)" in message
    assert "(--out)" in message and "(--restart)" in message
    assert cli.main([*again, "--restart"]) == 0

    assert cli.main(["eval", "scbench", *common, "--out", str(tmp_path / "sc"), "--question-seen"]) == 0
    data = load(tmp_path / "sc", "scbench-full.json")
    assert list(data["samples"]) == ["scbench_kv/0"] and len(data["samples"]["scbench_kv/0"]["questions"]) == 3
    assert data["settings"]["question_seen"] is True


def test_perplexity_and_latency(checkpoint: str, text_file: str, tmp_path: Path) -> None:
    common = [checkpoint, *MACHINE, *TWO, "--text", text_file, "--lengths", "200,300", "--limit", "2"]
    assert cli.main(["eval", "perplexity", *common, "--continuation", "20", "--out", str(tmp_path)]) == 0
    full, pruned = (load(tmp_path, f"perplexity-{name}.json") for name in ("full", "streaming_llm-0.2"))
    assert [(entry["length"], entry["count"], entry["tokens"]) for entry in full["scores"]] == [
        (200, 2, 40),
        (300, 2, 40),
    ]
    # Against the whole read at once, without any cache.
    model, ids = tiny_llama(torch.float32), tiny_tokenizer()(english(1500)).input_ids
    nats = []
    for number in range(2):
        context, following = cli_benchmarks._window(ids, 200, 21, 0, number)
        with torch.no_grad():
            logits = model(torch.tensor([context + following])).logits[0].log_softmax(-1)
        nats.append(-logits[200:220].gather(1, torch.tensor(following[1:])[:, None]).mean())
    expected = torch.stack(nats).mean().exp().item()
    assert full["scores"][0]["score"] == pytest.approx(expected, rel=1e-4)
    assert pruned["scores"][0]["score"] != pytest.approx(expected, rel=1e-3)
    assert pruned["scores"][0]["kept_pairs"] == 4 * 40 and full["scores"][0]["kept_pairs"] == 4 * 200

    assert cli.main(["eval", "latency", *common, "--decode-tokens", "3", "--out", str(tmp_path)]) == 0
    data = load(tmp_path, "latency-streaming_llm-0.5.json")
    entry = data["scores"][1]
    assert (entry["length"], entry["count"], entry["score"], entry["kept_pairs"]) == (300, 2, None, 4 * 150)
    assert entry["prefill_seconds"] > 0 and entry["seconds_per_token"] > 0
    assert cli.main(["report", str(tmp_path)]) == 0
    charts = {path.name.split("-")[0] for path in (tmp_path / "report").glob("*.png")}
    assert charts == {"latency", "perplexity"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ruler", "m", "--caches", "snap"], "unknown cache 'snap'"),
        (["ruler", "m", "--caches", "snapkv"], "give --retention-ratio or --budget for snapkv"),
        (["ruler", "m", "--caches", "snapkv", "--retention-ratio", "0.2,2"], "must be in (0, 1], got 2"),
        (["ruler", "m", "--caches", "snapkv", "--budget", "9", "--retention-ratio", "0.2"], "not both"),
        (["ruler", "m", "--caches", "snapkv", "--budget", "2"], "raise the budget to at least 5"),
        (["ruler", "m", "--caches", "proxykv", "--budget", "9"], "needs proxy="),
        (["ruler", "m", "--proxy", "p"], "--proxy was given, but none of full takes it"),
        (["ruler", "m", "--caches", "snapkv", "--budget", "9", "--cache-option", "x=1"], "takes no option 'x'"),
        (["ruler", "m", "--cache-option", "h2o.x=1"], "h2o is not among the caches full"),
        (["ruler", "m", "--tasks", "x"], "unknown task 'x' of RULER"),
        (["ruler", "m", "--data-dir", "/nowhere"], "no such folder: /nowhere"),
        (["ruler", "m", "--limit", "0"], "positive number, got 0"),
        (["ruler", "CHECKPOINT", "--text", "TEXT", "--lengths", "8k"], "8192 tokens, more than the 4096 positions"),
        (["ruler", "CHECKPOINT", "--text", "TEXT", "--lengths", "300"], "does not fit into 300 tokens"),
        (["ruler", "CHECKPOINT", "--out", "TEXT"], "is a file; give a folder"),
        (["longbench", "CHECKPOINT", "--tasks", "x"], "unknown task 'x' of longbench"),
        (["longbench", "CHECKPOINT", "--tasks", "trec", "--data-dir", "FOLDER"], "there is no trec.jsonl"),
        (["longbench", "CHECKPOINT", "--tasks", "trec"], "from the Hub (or give local files with --data-dir)"),
        (
            ["perplexity", "CHECKPOINT", "--text", "SHORT", "--lengths", "1k"],
            "tokens, at least 1281 are needed: give more with --text",
        ),
        (["dar-tasks", "CHECKPOINT", "--tasks", "mbpp"], "allow it with --allow-code"),
        (["dar-tasks", "CHECKPOINT", "--tasks", "x"], "unknown task 'x' of dar-tasks"),
    ],
)
def test_wrong_input_is_told_before_the_model_is_loaded(
    arguments: list[str],
    message: str,
    checkpoint: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(cli_loading, "load_model", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("x" * 57)
    names = {
        "TEXT": text_file,
        "CHECKPOINT": checkpoint,
        "FOLDER": str(tmp_path),
        "SHORT": str(tmp_path / "short.txt"),
    }
    assert cli.main(["eval", *(names.get(argument, argument) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("without qa_1")]
    assert out == "" and len(lines) == 1 and message in lines[0], err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("perplexity", "ruler", "longbench", "scbench", "latency", "dar-tasks"):
        assert cli.main(["eval", name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"  nearfar eval {name} " in shown and "default: None" not in shown and "(default: [])" not in shown
    assert cli.main(["report", "--help"]) == 0 and "nearfar report runs/" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "lm-eval" in shown and "report" in shown
