"""What `tests/test_finetune_parallel.py` shows with CPUs, on two GPUs over NCCL."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_files import command, make_files
from test_finetune_parallel import (
    NAMES,
    ROOT,
    check_runs,
    check_tensors,
    launch,
    uneven_by_hand,
    uneven_rows_of_two_processes,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_files(tmp_path_factory.mktemp("gpus"))
    options = ("--per-device-batch-size", 2, "--precision", "float32")
    commands = {name: [x for x in command(folder, name, *options) if x != "--cpu"] for name in NAMES}
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    torch.save(uneven_rows_of_two_processes(), folder / "uneven.pt")
    return folder


@pytest.fixture(scope="module")
def alone(files: Path) -> dict[str, Path]:
    """The same runs on one process and the CPU, uninterrupted."""
    spec = importlib.util.spec_from_file_location("finetune_alone", ROOT / "examples" / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in NAMES:
        module.main([*command(files, name), "--output", str(files / f"alone-{name}")])
    return {name: files / f"alone-{name}" for name in NAMES}


def test_fsdp2_and_ddp(files: Path, alone: dict[str, Path]) -> None:
    launch(files, "fsdp2", "fsdp2", "ddp")
    by_hand = uneven_by_hand(files)
    for report in (check_runs(files, alone, "fsdp2", "FSDP"), check_runs(files, alone, "ddp", "MULTI_GPU")):
        assert report["uneven"] == pytest.approx(by_hand, rel=1e-3)


def test_tensor_parallelism(files: Path) -> None:
    launch(files, "ddp", "tensors")
    check_tensors(files)


def test_ddp_by_its_own_configuration(files: Path, alone: dict[str, Path]) -> None:
    launch(files, "ddp", "ddp")
    check_runs(files, alone, "ddp", "MULTI_GPU")
