"""The ProxyFormer benchmarks from end to end on tiny shapes, and how they search, fail and hold things equal."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def _script(name: str) -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


memory, decode = _script("proxyformer_memory"), _script("proxyformer_decode")

MACHINE = ["--device", "cpu", "--threads", "1"]
TINY = ["--hidden-size", "32", "--history-hidden-size", "8", "--layers", "2", "--heads", "4", "--vocabulary", "61"]
SIZES = ["--ratio", "4", "--decoder-tokens", "24", "--short-history", "32", "--long-history", "50",
         "--generated-tokens", "6", "--lengths", "64,16,128,256", "--longest", "128", "--steps", "1"]  # fmt: skip


def arguments(*more: str) -> argparse.Namespace:
    args = memory.parse([*TINY, *SIZES, *MACHINE, *more])
    memory.fill_in(args, torch.device("cpu"))
    return args


# --- memory ----------------------------------------------------------------------------------------------------------


def test_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*memory.DEFAULT_ROWS, "decoder-longest"]
    assert names == list(memory.ROWS)
    names = [name for name in names if not memory.ROWS[name].captured]
    assert memory.main([*TINY, *SIZES, *MACHINE, "--rows", ",".join(names), "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "proxyformer_memory.json").read_text())
    rows = {row["row"]: row for row in record["rows"]}
    assert list(rows) == names
    assert all(row["error"] is None and row["steps_per_second"] > 0 for row in rows.values())
    assert all(row["peak_gb"] is None for row in rows.values()), "a CPU has no such figure"
    lengths = {"decoder": (0, 24), "decoder-history": (32, 6), "proxy-long-plain": (50, 6), "proxy-longest": (128, 6)}
    for name, (history, generated) in lengths.items():
        row = rows[name]
        assert (row["history"], row["generated"]) == (history, generated)
        assert row["tokens_per_second"] == pytest.approx((history + generated) * row["steps_per_second"])
    assert rows["proxy-longest"]["tried"] == {"16": "trains", "64": "trains", "128": "trains"}
    shown = capsys.readouterr().out
    assert "Held equal: one sequence, d = 32, 2 layers" in shown
    assert "both predict the same 5 tokens" in shown
    assert "no limit on memory" in shown


def test_rows_keep_what_they_say() -> None:
    args = arguments()
    for row in memory.ROWS.values():
        labelled = memory.make_inputs(row, 32, args, torch.device("cpu"))["labels"].shape[1]
        model = memory.make_model(row, args, torch.device("cpu"), labelled)
        assert model.training
        assert model.config.has_proxies == row.name.startswith("proxy")
        assert model.config.reversible_history == (row.name in ("proxy-short", "proxy-long", "proxy-longest"))
        # Its name from transformers 5.24 on, and before.
        name = next(x for x in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(model, x))
        assert getattr(model, name) == ("checkpointed" in row.name or row.name == "decoder-longest")
        # Only the paper's baseline holds all logits at once.
        assert (model.config.loss_chunk_tokens == 24) == (row.name == "decoder")


def test_histories_have_the_same_predicted_tokens() -> None:
    """In both models all generated tokens but the first are predicted, from the same ids."""
    args, cpu = arguments(), torch.device("cpu")
    proxy = memory.make_inputs(memory.ROWS["proxy-short"], 32, args, cpu)
    plain = memory.make_inputs(memory.ROWS["decoder-history"], 32, args, cpu)
    assert torch.equal(plain["input_ids"], torch.cat([proxy["history_ids"].long(), proxy["input_ids"]], 1))
    predicted = plain["labels"][:, 1:]
    assert predicted[predicted != -100].tolist() == proxy["labels"][0, 1:].tolist()
    every = memory.make_inputs(memory.ROWS["decoder"], 32, args, cpu)
    assert every["labels"].shape == (1, 24) and (every["labels"] != -100).all()


@pytest.mark.parametrize("name", ["decoder-history-captured", "proxy-short-captured"])
def test_captured_rows_compute_the_model_s_loss(name: str) -> None:
    args, cpu, row = arguments(), torch.device("cpu"), memory.ROWS[name]
    inputs = memory.make_inputs(row, 32, args, cpu)
    model = memory.make_model(row, args, cpu, inputs["labels"].shape[1]).double()
    known = memory.known_loss(model, inputs, args.generated_tokens, args.auxiliary_loss_weight)
    assert known.item() == pytest.approx(model(**inputs, use_cache=False).loss.item(), rel=1e-6)


def test_captured_rows_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["--rows", "proxy-short-captured", "--device", "cpu"]) == 2
    assert "proxy-short-captured needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_longest(count: int) -> None:
    lengths = list(range(10, 10 + count))
    for limit in range(9, 11 + count):
        tried: list[int] = []

        def trial(length: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(length)
            return length <= limit

        expected = max((length for length in lengths if length <= limit), default=None)
        assert memory.longest(lengths, trial) == expected
        assert len(tried) == len(set(tried)), "no length is tried twice"


def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = memory.step_times

    def limited(row: Any, history: int, *more: Any) -> Any:
        if row.name == "decoder":
            raise RuntimeError("a kernel does not take this shape")
        if history > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
        return steps(row, history, *more)

    monkeypatch.setattr(memory, "step_times", limited)
    assert memory.main([*TINY, *SIZES, *MACHINE, "--rows", "decoder,proxy-long,proxy-short"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if line[:1] == ["decoder"])[6] == "failed"
    assert ["proxy-long:", "CUDA", "out", "of", "memory."] in [line[:5] for line in lines]
    assert next(line for line in lines if line[:1] == ["proxy-short"])[5] == "–"  # no figure, and no failure
    found = memory.measure(memory.ROWS["proxy-long"], 50, 1, arguments(), torch.device("cpu"))
    assert found["error"] == "out of memory"
    assert found["message"].startswith("CUDA out of memory")
    best = memory.measure_longest(memory.ROWS["proxy-longest"], arguments(), torch.device("cpu"))
    assert (best["history"], best["error"]) == (16, None)
    assert best["tried"] == {"16": "trains", "64": "out of memory"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rows", "decoder,proxy"], "proxy is none of decoder,"),
        (["--lengths", "1k"], "--lengths takes whole numbers"),
        (["--memory-gb", "0"], "--memory-gb must be above 0"),
        (["--longest", "8"], "must name positive histories"),
        (["--generated-tokens", "1"], "--generated-tokens must be at least 2, got 1"),
        (["--heads", "0"], "--heads must be at least 1, got 0"),
    ],
)
def test_memory_arguments(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert memory.main([*TINY, *SIZES, *MACHINE, *more]) == 2
    except SystemExit as leaving:
        assert leaving.code == 2
    assert message in capsys.readouterr().err


# --- decode ----------------------------------------------------------------------------------------------------------


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "--ratio", "4", "--history", "64,128", "--repeats", "1", "--longest-decoder", "100"]
    assert decode.main([*command, *MACHINE, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "proxyformer_decode.json").read_text())
    rows = {(row["system"], row["history"]): row for row in record["rows"]}
    assert len(rows) == 4
    assert rows["plain decoder", 128]["error"] == "skipped: --longest-decoder 100"
    pair = 2 * 2 * 32 * 4  # keys and values, layers, width, float32
    plain = rows["plain decoder", 64]
    assert plain["cache_bytes"] == 64 * pair
    assert plain["cache_bytes_after"] == (64 + 12) * pair
    near, far = rows["ProxyFormer", 64], rows["ProxyFormer", 128]
    # Each proxy's keys and values twice, for the proxies after it and for the tokens; and some room to grow.
    assert 2 * 32 * pair <= far["cache_bytes"] <= 3 * 32 * pair
    assert near["cache_bytes"] < 0.65 * far["cache_bytes"]
    for row in (plain, near, far):
        assert row["steps"] == 12
        assert row["worst_ms"] >= row["mean_ms"] > 0
        assert row["prefill_s"] > 0
    assert "skipped: --longest-decoder 100" in capsys.readouterr().out


def test_decode_crosses_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main([*TINY, *MACHINE, "--ratio", "4", "--steps", "7"])
    assert "--steps must be at least 2 P = 8" in capsys.readouterr().err
    assert decode.main([*TINY, *MACHINE, "--ratio", "4", "--history", "0"]) == 2
    assert "--history takes positive lengths" in capsys.readouterr().err
