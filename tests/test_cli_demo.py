"""The demo's sections on tiny checkpoints in a folder of their own, and what is left out where there are none."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from finetune_files import IDS
from image_models import tiny_image_model
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, save_tiny_checkpoint, tiny_tokenizer

from nearfar import FlowMatchingPipeline, cli, cli_demo, cli_loading
from nearfar.evaluation.comparison import write_json
from nearfar.evaluation.far_caches import compare_far_caches, format_far_caches, training_words
from nearfar.evaluation.long_reading import plain_decoder_bytes, read_long_documents

MACHINE = ["--device", "cpu", "--threads", "1"]


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(english(600), encoding="utf-8")
    return str(path)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without checkpoints, and sections that read little."""
    monkeypatch.setattr(cli_loading, "__file__", str(tmp_path / "checkout" / "nearfar" / "cli_loading.py"))
    for name, value in (
        ("NEEDLE_LENGTHS", (600, 900, 10**6)), ("NEEDLES", 4), ("DAR_TOKENS", 100), ("DAR_DECODED", 5),
        ("IMAGES", 10), ("IMAGE_STEPS", 2),
    ):  # fmt: skip
        monkeypatch.setattr(cli_demo, name, value)
    return tmp_path / "checkout"


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_all(checkout: Path) -> None:
    save(tiny_proxyformer(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_PROXYFORMER)
    save(tiny_dar(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_DAR)
    images = tiny_image_model(dtype=torch.float32, image_size=[8, 8], in_channels=1)
    FlowMatchingPipeline(images).save_pretrained(checkout / cli_demo.KEPT_IMAGES)


def demo(text_file: str, out: Path, *more: str) -> list[str]:
    return ["demo", "--text", text_file, "--out", str(out), *MACHINE, *more]


# --- the command -----------------------------------------------------------------------------------------------------


def test_all_systems(checkout: Path, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    save_all(checkout)
    model = str(save_tiny_checkpoint(tmp_path / "tiny"))
    small = ["--context-tokens", "300", "--needles", "2", "--continuation-tokens", "0", "--budget", "64"]
    everything = ["--systems", "images,pruned,dar,proxyformer", "--caches", "full,streaming_llm", "--model", model]
    out = tmp_path / "out"
    assert cli.main(demo(text_file, out, *everything, *small, "--decode-tokens", "1")) == 0
    shown = capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["comparison.json", "comparison.png", "digits.png"]
    record = json.loads((out / "comparison.json").read_text())
    assert [result["name"] for result in record["results"]] == ["full", "streaming_llm"]
    assert [reading["tokens"] for reading in record["proxyformer"]["readings"]] == [600, 900]
    assert [result["mode"] for result in record["dar"]["results"]] == ["fast", "small"]
    assert record["images"]["figure"] == "digits.png" and str(out / "digits.png") in shown
    # Sections in their order, and at the end a line for each.
    order = [shown.index(word) for word in ("StreamingLLM", "passkeys hidden", "bottleneck of", "images, a class")]
    assert order == sorted(order)
    end = shown[shown.index("system ") :].splitlines()
    assert [line.split("  ")[0] for line in end[2:6]] == ["Pruned caches", "ProxyFormer", "DAR", "ProxyFormer, images"]


def test_without_checkpoints(
    checkout: Path, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(demo(text_file, tmp_path / "out", "--systems", "proxyformer,dar,images")) == 1  # asked for by name
    lines = [line for line in capsys.readouterr().out.splitlines() if line and "cores busy" not in line]
    assert [line.split(":")[0] for line in lines] == ["proxyformer", "dar", "images"]
    assert all("skipped, checkpoints/" in line and "is not there" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_for_a_section(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_proxyformer(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_PROXYFORMER)
    save(tiny_dar(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_DAR)
    short = tmp_path / "short.txt"
    short.write_text("Six.", encoding="utf-8")
    assert cli.main(demo(str(short), tmp_path / "out", "--systems", "proxyformer,dar")) == 1
    shown = capsys.readouterr().out
    assert "proxyformer: skipped, short.txt has 4 tokens, and 600 are needed" in shown
    assert "dar: skipped, short.txt has 4 tokens, and none is beyond" in shown


def test_one_system_s_failure_does_not_hide_the_others(
    checkout: Path, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_proxyformer(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_PROXYFORMER)
    save(tiny_dar(dtype=torch.float32, window_size=None, **IDS), checkout / cli_demo.KEPT_DAR)
    assert cli.main(demo(text_file, tmp_path / "out", "--systems", "dar,proxyformer")) == 1
    shown = capsys.readouterr().out
    assert "dar: failed, " in shown and "window_size=None" in shown and "passkeys hidden" in shown
    assert "window_size=None" in json.loads((tmp_path / "out" / "comparison.json").read_text())["dar"]["error"]
    assert cli.main(demo(text_file, tmp_path / "out", "--systems", "dar")) == 2
    assert "window_size=None" in capsys.readouterr().err


def test_results_of_other_systems_stay(
    checkout: Path, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each system's newest, with the circumstances of the command that it is of."""
    save(tiny_proxyformer(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_PROXYFORMER)
    save(tiny_dar(dtype=torch.float32, **IDS), checkout / cli_demo.KEPT_DAR)
    path = tmp_path / "comparison.json"
    results = [{"name": "full"}]
    before = {
        "time": "2000", "command": "nearfar demo", "model": "m", "seed": 7, "machine": {"cpu": "c"},
        "held_equal": {"budget": 4}, "results": results, "dar": {"checkpoint": "older"},
    }  # fmt: skip
    path.write_text(json.dumps(before))
    assert cli.main(demo(text_file, tmp_path, "--systems", "proxyformer", "--seed", "1")) == 0
    assert "with pruned, dar of earlier commands" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["proxyformer"]["readings"] and record["seed"] == 1
    for name in ("model", "held_equal", "results", "dar"):
        assert record[name] == before[name]
    assert set(record["earlier"]) == {"pruned", "dar"} and record["earlier"]["dar"] == record["earlier"]["pruned"]
    assert [record["earlier"]["dar"][name] for name in ("time", "seed", "dtype")] == ["2000", 7, None]

    first = record
    assert cli.main(demo(text_file, tmp_path, "--systems", "dar")) == 0
    record = json.loads(path.read_text())
    assert record["dar"]["results"] and record["proxyformer"] == first["proxyformer"]
    assert record["earlier"]["pruned"] == first["earlier"]["pruned"] and set(record["earlier"]) == {
        "pruned", "proxyformer"
    }  # fmt: skip
    assert record["earlier"]["proxyformer"] == {name: first[name] for name in cli_demo.CIRCUMSTANCES}

    path.write_text("[]")
    capsys.readouterr()
    assert cli.main(demo(text_file, tmp_path, "--systems", "dar")) == 2
    assert f"{path} is no record of a demo: delete it, or give another --out" in capsys.readouterr().err
    assert path.read_text() == "[]"


def test_a_failure_does_not_replace_an_earlier_result(
    checkout: Path, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(demo: cli_demo.Demo) -> cli_demo.Section:
        raise ValueError("no luck")

    def works(demo: cli_demo.Demo) -> cli_demo.Section:
        return cli_demo.Section("drawn", "said", {"checkpoint": "new"})

    monkeypatch.setattr(cli_demo, "SECTIONS", {**cli_demo.SECTIONS, "dar": fails, "images": works})
    path = tmp_path / "comparison.json"
    before = {
        "time": "2000",
        "seed": 7,
        "results": [],
        "dar": {"checkpoint": "older"},
        "proxyformer": {"error": "old"},
    }
    path.write_text(json.dumps(before))
    for _ in range(2):  # what is kept stays kept
        assert cli.main(demo(text_file, tmp_path, "--systems", "dar,images")) == 1
        shown = capsys.readouterr().out
        assert "dar: failed, no luck" in shown and "failed: no luck" in shown
        assert "with dar of earlier commands" in shown
        record = json.loads(path.read_text())
        assert record["dar"] == {"checkpoint": "older"} and record["images"] == {"checkpoint": "new"}
        assert set(record["earlier"]) == {"dar"} and record["earlier"]["dar"]["seed"] == 7
        assert "proxyformer" not in record, "an earlier failure is no result"

    # Where there is nothing better, this command's failure is told, and the next one does not carry it on.
    failed = [{"name": "full", "error": "no"}]
    path.write_text(json.dumps({"results": failed, "dar": {"error": "old"}}))
    assert cli.main(demo(text_file, tmp_path, "--systems", "dar,images")) == 1
    record = json.loads(path.read_text())
    assert record["dar"] == {"error": "no luck"} and record["results"] == [] and "earlier" not in record
    assert cli.main(demo(text_file, tmp_path, "--systems", "images")) == 0
    record = json.loads(path.read_text())
    assert "dar" not in record and "earlier" not in record


def test_which_systems_and_caches(capsys: pytest.CaptureFixture[str], checkout: Path) -> None:
    parser = cli._build_parser()
    assert parser.parse_args(["demo", "--systems", "dar,pruned"]).systems == ["pruned", "dar"]
    assert cli.main(["demo", "--systems", "mamba"]) == 2
    assert "unknown system 'mamba'; known systems: pruned, proxyformer, dar, images" in capsys.readouterr().err
    args = parser.parse_args(["demo", "--caches", "all"])
    assert {"h2o", "kvzip", "proactive"} <= set(cli_demo._all_caches(args))
    assert not {"proxykv", "iam"} & set(cli_demo._all_caches(args))
    args = parser.parse_args(["demo", "--caches", "all", "--proxy", "p", "--mapper", "m"])
    assert {"proxykv", "iam"} <= set(cli_demo._all_caches(args))


def test_errors_of_the_module_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m nearfar.cli` has two copies of the module, and must know the errors of the one that is imported."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["nearfar", "demo", "--out", str(tmp_path / "file")])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"), pytest.raises(SystemExit) as leaving:
        runpy.run_module("nearfar.cli", run_name="__main__")
    assert leaving.value.code == 2 and "is a file; give a folder" in capsys.readouterr().err


# --- what is measured ------------------------------------------------------------------------------------------------


def test_far_caches_against_the_uncached_pass() -> None:
    model = tiny_dar()
    ids = torch.randint(3, 61, (50,), generator=torch.Generator().manual_seed(0))
    found = compare_far_caches(model, ids, chunk_tokens=7, decode_tokens=4, progress=False)
    with torch.no_grad():
        loss = model(ids[None], labels=ids[None], use_cache=False).loss
    assert found.uncached_perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    for result in found.results:
        assert result.perplexity == pytest.approx(found.uncached_perplexity, rel=1e-5)
        assert result.difference < 1e-5 and result.same_choice == 1.0
        assert len(result.continuation) == 5 and result.tokens_per_second > 0
    fast, small = found.results
    assert fast.continuation == small.continuation
    # float64: 3 layers of 9 numbers, and 4 heads of 4 rotary dimensions or a position of 4 bytes.
    assert fast.far_token_bytes == 3 * (9 + 16) * 8 and small.far_token_bytes == 3 * 9 * 8 + 4
    assert found.plain_token_bytes == 3 * 2 * 32 * 8
    assert f"{found.plain_token_bytes:,}" in format_far_caches(found)


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({"chunk_tokens": 0}, 50, "chunk_tokens must be at least 1"),
        ({"decode_tokens": 0}, 50, "decode_tokens must be at least 1"),
        ({}, 7, "none is beyond the window of 7"),
    ],
)
def test_far_caches_refuse(change: dict[str, int], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_far_caches(tiny_dar(), torch.ones(count, dtype=torch.long), **change)


def test_long_documents() -> None:
    model = tiny_proxyformer(dtype=torch.float32, **IDS)
    tokenizer = tiny_tokenizer()
    background = torch.tensor(tokenizer(english(200)).input_ids)
    (reading,) = read_long_documents(model, tokenizer, background, [400], 3, decode_tokens=2, progress=False)
    assert (reading.tokens, reading.asked) == (400, 3) and 0 <= reading.found <= 3
    assert reading.plain_bytes == plain_decoder_bytes(model, 400) == 400 * 3 * 2 * 32 * 4
    assert reading.cache_bytes < reading.plain_bytes
    assert reading.prefill_seconds > 0 and reading.token_seconds > 0
    with pytest.raises(ValueError, match="has no encode_history"):
        read_long_documents(tiny_dar(), tokenizer, background, [400])
    with pytest.raises(ValueError, match="decode_tokens must be at least 1"):
        read_long_documents(model, tokenizer, background, [400], decode_tokens=0)


def test_what_a_checkpoint_says_of_its_training(tmp_path: Path) -> None:
    assert training_words(tmp_path) is None
    record = {"trained_on_tokens": 1234, "perplexity": {"test": 20.125}, "vanilla": None}
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert training_words(tmp_path) == (
        "Its own record, not measured here: trained on 1,234 tokens, perplexity 20.12 on test."
    )
    record["vanilla"] = {"perplexity": {"test": 19.5}}
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert "20.12 (its vanilla twin: 19.50) on test" in str(training_words(tmp_path))
    (tmp_path / "training.json").write_text("[]")
    with pytest.raises(ValueError, match="is no record of"):
        training_words(tmp_path)


def test_a_record_without_caches(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [], model=None, dar={"tokens": 3})
    record = json.loads(path.read_text())
    assert record["results"] == [] and record["held_equal"] == {} and record["dar"] == {"tokens": 3}
