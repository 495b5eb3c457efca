"""nearfar inside lm-eval: its own model's answers where nothing is evicted, slow references where something is."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, save_tiny_checkpoint, tiny_llama, tiny_tokenizer
from torch.nn import functional as F

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from nearfar import cli
from nearfar.evaluation import longbench
from nearfar.evaluation.benchmark_runs import BenchmarkRun, open_run
from nearfar.evaluation.comparison import prefill
from nearfar.evaluation.dar_tasks import DAR_TASKS, run_dar_tasks
from nearfar.evaluation.lm_eval_model import PLUGIN_FILE, NearfarLM
from nearfar.evaluation.perplexity import continuation_perplexity
from nearfar.evaluation.restoring import eviction_held
from nearfar.modeling.cache_registry import make_cache
from nearfar.modeling.compat import cache_argument

ROOT = Path(__file__).parent.parent
Answer = tuple[float, bool]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def lm(model: Any, batch_size: int = 1, **arguments: Any) -> NearfarLM:
    return NearfarLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=batch_size, **arguments)


def requests(count: int = 5, seed: int = 0) -> list[tuple[tuple[str, str], list[int], list[int]]]:
    """Contexts of different lengths, each with one to three continuations of different lengths; one has one token."""
    rng = random.Random(seed)
    found = []
    for n in range(count):
        context = [rng.randrange(3, 250) for _ in range(1 if n == 1 else rng.randint(20, 60))]
        for k in range(rng.randint(1, 3)):
            continuation = [rng.randrange(3, 250) for _ in range(rng.randint(1, 9))]
            found.append(((f"context {n}", f"continuation {n} {k}"), context, continuation))
    rng.shuffle(found)
    return found


def close(found: list[Answer], expected: list[Answer], tolerance: float = 1e-4) -> None:
    assert len(found) == len(expected)
    for (mine, greedy), (theirs, their_greedy) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance) and greedy == their_greedy


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("cache", ["streaming_llm", "kvzip", "snapkv"])
def test_scores_are_lm_evals_where_nothing_is_evicted(model: Any, cache: str, batch_size: int) -> None:
    asked = requests()
    expected = HFLM(pretrained=model, tokenizer=tiny_tokenizer())._loglikelihood_tokens(asked, disable_tqdm=True)
    mine = lm(model, batch_size, cache=cache, retention_ratio=1.0)
    close(mine._loglikelihood_tokens(asked, disable_tqdm=True), expected)
    close(lm(model, batch_size)._loglikelihood_tokens(asked, disable_tqdm=True), expected)


def slow_scores(model: Any, cache: str, budget: int, asked: list[Any]) -> list[Answer]:
    """Each request by itself, token by token."""
    answers = []
    for _, context, continuation in asked:
        if len(context) == 1 and cache == "kvzip":
            held = make_cache("full", model)
        else:
            held = make_cache(cache, model, budget=budget)
        _, logits = prefill(model, held, context, tiny_tokenizer())
        total, greedy = 0.0, True
        with eviction_held(held), torch.no_grad():
            for token in continuation:
                total += F.log_softmax(logits[0], -1)[token].item()
                greedy = greedy and int(logits[0].argmax()) == token
                logits = model(torch.tensor([[token]]), **{cache_argument(model): held}, use_cache=True).logits[:, -1]
        answers.append((total, greedy))
    return answers


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("cache", ["streaming_llm", "kvzip", "snapkv", "h2o"])
def test_scores_of_a_compressed_context(model: Any, cache: str, batch_size: int) -> None:
    asked = requests()
    found = lm(model, batch_size, cache=cache, budget=12)._loglikelihood_tokens(asked, disable_tqdm=True)
    close(found, slow_scores(model, cache, 12, asked))
    full = lm(model)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, full, strict=True)) > 0.1  # something was evicted


def test_greedy_continuations_are_told(model: Any) -> None:
    mine = lm(model, 2, cache="streaming_llm", budget=12)
    context = list(range(60, 100))
    read = mine.reader.read(context)
    mine.reader.ends.clear()
    written = mine.reader.answer(read, [], 5)
    asked = [(("c", "right"), context, written), (("c", "wrong"), context, [*written[:4], written[4] + 1])]
    assert [greedy for _, greedy in mine._loglikelihood_tokens(asked, disable_tqdm=True)] == [True, False]


def test_rolling_scores_stream_through_the_cache(model: Any) -> None:
    texts = [english(30), english(12, seed=1)]
    asked = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    full = HFLM(pretrained=model, tokenizer=tiny_tokenizer()).loglikelihood_rolling(asked, disable_tqdm=True)
    nothing_evicted = lm(model, 2, cache="streaming_llm", retention_ratio=1.0, rolling_chunk_tokens=16)
    assert nothing_evicted.loglikelihood_rolling(asked, disable_tqdm=True) == pytest.approx(full, abs=1e-3)
    for batch_size in (1, 2):
        mine = lm(model, batch_size, cache="streaming_llm", budget=20, rolling_chunk_tokens=16)
        found = mine.loglikelihood_rolling(asked, disable_tqdm=True)
        for text, total in zip(texts, found, strict=True):
            ids = tiny_tokenizer()(text).input_ids
            cache = make_cache("streaming_llm", model, budget=20)
            _, logits = prefill(model, cache, [mine.prefix_token_id])
            first = F.log_softmax(logits[0], -1)[ids[0]].item()
            rest = continuation_perplexity(model, cache, ids, chunk_tokens=16, hold_eviction=False)
            assert total == pytest.approx(first - rest.nats * rest.tokens, abs=1e-3)
            assert abs(total - full[texts.index(text)]) > 1.0


@pytest.mark.parametrize("cache", ["streaming_llm", "kvzip", "snapkv", "full"])
def test_prompts_of_a_batch_are_answered_as_alone(model: Any, cache: str) -> None:
    size = {} if cache == "full" else {"budget": 12}
    asked = [
        Instance("generate_until", {}, (english(words, seed=words), {"until": ["#"], "max_gen_toks": 9}), index)
        for index, words in enumerate((9, 4, 6))
    ]
    alone = lm(model, 1, cache=cache, **size).generate_until(asked, disable_tqdm=True)
    assert lm(model, 3, cache=cache, **size).generate_until(asked, disable_tqdm=True) == alone
    assert len(set(alone)) > 1
    if cache == "kvzip":
        assert alone != lm(model).generate_until(asked, disable_tqdm=True)
    elif cache != "full":
        assert alone != lm(model).generate_until(asked, disable_tqdm=True)
        # The reader, which knows nothing of lm-eval, decodes the same.
        mine = lm(model, cache=cache, **size)
        read = mine.reader.read(tiny_tokenizer()(asked[0].args[0]).input_ids)
        text = tiny_tokenizer().decode(mine.reader.answer(read, [], 9), skip_special_tokens=True)
        assert text.split("#")[0] == alone[0]


@pytest.mark.parametrize("make", [tiny_dar, tiny_proxyformer], ids=["dar", "proxyformer"])
def test_our_own_models_are_asked(make: Any, tmp_path: Path) -> None:
    make(vocab_size=261).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    mine = NearfarLM(pretrained=str(tmp_path), device="cpu", dtype="float64", max_length=200)
    asked = requests(3)
    plain = []
    for _, context, continuation in asked:
        with torch.no_grad():
            logits = mine.model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        plain.append(sum(logits[p, token].item() for p, token in zip(places, continuation, strict=True)))
    assert [total for total, _ in mine._loglikelihood_tokens(asked, disable_tqdm=True)] == pytest.approx(
        plain, abs=1e-4
    )
    prompt = Instance("generate_until", {}, (english(6), {"until": ["#"], "max_gen_toks": 4}), 0)
    assert isinstance(mine.generate_until([prompt], disable_tqdm=True)[0], str)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "nothing"}, "unknown cache 'nothing'"),
        ({"cache": "snapkv"}, "budget"),
        ({"cache": "proxykv", "budget": 3}, "needs proxy="),
        ({"rolling_chunk_tokens": 0}, "rolling_chunk_tokens must be at least 1"),
    ],
)
def test_wrong_arguments_are_told(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm(model, **arguments)


# --- through lm-eval's own front ends --------------------------------------------------------------------------------


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    """A task of lm-eval over a local file; JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(data), "test": str(data)}},
        "test_split": "test",
        "fewshot_split": "train",
        **config,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def choices(count: int = 4) -> list[dict[str, Any]]:
    return [{"q": english(3 * n + 2, seed=n), "options": ["one", "two", "three"], "gold": n % 3} for n in range(count)]


CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "gold",
    "doc_to_choice": "options",
    "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{gold}}",
    "generation_kwargs": {"until": ["#"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def test_simple_evaluate_knows_the_model_type(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    write_task(tmp_path / "tasks", "tiny_choices", choices(), **CHOICES)
    write_task(tmp_path / "tasks", "tiny_answers", choices(), **GENERATE)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    found = simple_evaluate(
        model="nearfar",
        model_args=f"pretrained={checkpoint},cache=streaming_llm,retention_ratio=0.5,sink_tokens=2",
        tasks=["tiny_choices", "tiny_answers"],
        task_manager=manager,
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    assert found is not None
    assert set(found["results"]) == {"tiny_choices", "tiny_answers"}
    assert found["n-samples"]["tiny_choices"]["effective"] == 4
    assert found["config"]["nearfar"] == {
        "cache": "streaming_llm",
        "budget": None,
        "retention_ratio": 0.5,
        "cache_options": {"sink_tokens": 2},
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plain", "nearfar", "module"])
def test_the_commands_know_the_model_type(tmp_path: Path, command: str) -> None:
    """`lm_eval` itself with the plugin file, `nearfar lm-eval`, and the module, each in a fresh process."""
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    write_task(tmp_path / "tasks", "tiny_choices", choices(), **CHOICES)
    start = {
        "plain": [sys.executable, "-m", "lm_eval"],
        "nearfar": [sys.executable, "-m", "nearfar", "lm-eval"],
        "module": [sys.executable, "-m", "nearfar.evaluation.lm_eval_model"],
    }[command]
    tasks = "tiny_choices"
    if command == "plain":
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        plugin = subprocess.run(
            [sys.executable, "-m", "nearfar", "lm-eval", "plugin"], env=environment, capture_output=True, text=True
        ).stdout.strip()
        assert plugin == str(PLUGIN_FILE)
        tasks = f"{plugin},tiny_choices"
    done = subprocess.run(
        [*start, "--model", "nearfar", "--model_args", f"pretrained={checkpoint},cache=snapkv,retention_ratio=0.5",
         "--tasks", tasks, "--include_path", str(tmp_path / "tasks"), "--device", "cpu", "--limit", "2",
         "--output_path", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nearfar (" in done.stdout and "|tiny_choices|" in done.stdout
    (written,) = (tmp_path / "out").rglob("results*.json")
    assert set(json.loads(written.read_text())["results"]) - {"nearfar_plugin"} == {"tiny_choices"}


# --- the DAR paper's tasks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks under the names of the real ones."""
    folder = tmp_path_factory.mktemp("replicas")
    write_task(folder, "hellaswag", choices(8), **CHOICES)
    write_task(folder, "gsm8k", choices(8), **GENERATE)
    summaries = [
        {"context": english(10 * n + 1, seed=n), "input": "", "answers": [english(5, seed=n)]} for n in range(3)
    ]
    (folder / "multi_news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in summaries))
    return folder


def test_the_papers_tasks_and_shots() -> None:
    assert {name: task.shots for name, task in DAR_TASKS.items()} == {
        "mmlu": 5, "hellaswag": 5, "commonsense_qa": 5, "gsm8k": 5, "mbpp": 3, "multi_news": 0,
    }  # fmt: skip


def answer_dar_tasks(replicas: Path, path: Path, model: Any, window: int = 650) -> BenchmarkRun:
    mine = lm(model, 2, cache="streaming_llm", retention_ratio=0.5)
    run = open_run("dar-tasks", mine.reader, {"window": window}, path=path)
    manager = TaskManager(include_path=str(replicas), include_defaults=False)
    return run_dar_tasks(run, mine, ["hellaswag", "gsm8k"], window=window, manager=manager, path=path)


def test_dar_tasks_leave_short_prompts_out_and_go_on(
    replicas: Path, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    first = answer_dar_tasks(replicas, path, model)
    every = answer_dar_tasks(replicas, tmp_path / "every.json", model, 0)
    assert len(every.samples) == 16
    # Those that are left are what they are among all: the same worked examples, the same numbers.
    assert first.samples == {key: entry for key, entry in every.samples.items() if entry["context_tokens"] > 650}
    assert 4 < len(first.samples) < 16 and {entry["task"] for entry in first.samples.values()} == {
        "hellaswag",
        "gsm8k",
    }
    assert all(entry["score"] in (0.0, 1.0) for entry in first.samples.values())

    # Again: nothing is asked that has been answered.
    monkeypatch.setattr(NearfarLM, "_score", None)
    monkeypatch.setattr(NearfarLM, "_model_generate", None)
    assert answer_dar_tasks(replicas, path, model).samples == first.samples
    # A run that was interrupted before a task was judged has its answers beside it.
    path.write_text(json.dumps({**json.loads(path.read_text()), "samples": {}}))
    assert answer_dar_tasks(replicas, path, model).samples == first.samples
    # Other documents, or another accepted answer to the same prompt, are told from those.
    (tmp_path / "others").mkdir()
    write_task(tmp_path / "others", "hellaswag", choices(8), **CHOICES)
    write_task(tmp_path / "others", "gsm8k", [{**row, "gold": 7} for row in choices(8)], **GENERATE)
    with pytest.raises(ValueError, match=r"run.json holds results of other data \(gsm8k/gsm8k/"):
        answer_dar_tasks(tmp_path / "others", path, model)
    with pytest.raises(ValueError, match="another window"):
        answer_dar_tasks(replicas, path, model, 651)


@pytest.mark.slow
def test_the_dar_tasks_command(replicas: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    command = [
        "eval",
        "dar-tasks",
        str(checkpoint),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--include-path", str(replicas), "--tasks", "hellaswag", "--window", "550", "--limit", "3"]
    command += ["--caches", "full,streaming_llm", "--retention-ratio", "0.5"]
    assert cli.main(command) == 0
    assert "prompts beyond 550 tokens" in capsys.readouterr().out
    for name in ("full", "streaming_llm-0.5"):
        data = json.loads((tmp_path / "out" / f"dar-tasks-{name}.json").read_text())
        assert data["scores"][0]["count"] == 3 and data["command"].startswith("nearfar eval dar-tasks")


def test_multi_news_is_among_them(replicas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rouge_score")
    short = longbench.LongBenchTask(longbench.LONGBENCH["multi_news"].prompt, 3, "rouge_l")
    monkeypatch.setitem(longbench.LONGBENCH, "multi_news", short)
    mine = lm(tiny_llama(torch.float32))
    run = open_run("dar-tasks", mine.reader, {})
    run_dar_tasks(run, mine, ["multi_news"], window=220, data_dir=replicas, progress=False)
    assert list(run.samples) == ["multi_news/1", "multi_news/2"]
    assert all(sample["context_tokens"] > 150 for sample in run.samples.values())
    rows = (replicas / "multi_news.jsonl").read_text().splitlines()
    (tmp_path / "multi_news.jsonl").write_text("\n".join([rows[0], rows[2], rows[1], ""]))
    with pytest.raises(ValueError, match=r"the run holds results of other data \(multi_news/1 and 1 more\)"):
        run_dar_tasks(run, mine, ["multi_news"], window=220, data_dir=tmp_path, progress=False)
    with pytest.raises(ValueError, match="unknown task 'x'"):
        run_dar_tasks(run, mine, ["x"], window=0)
    with pytest.raises(ValueError, match="runs the programs"):
        run_dar_tasks(run, mine, ["mbpp"], window=0)
