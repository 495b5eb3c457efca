"""`examples/finetune.py` on two processes that `accelerate launch` starts: the loss curves are those of one process.

Both models with DDP and FSDP2, and if deepspeed is installed with ZeRO-3 (slow): interrupted, gone on with from
sharded checkpoints, saved and loaded; and DAR with its tensor-parallel plan. The processes talk over gloo.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from finetune_files import command, curve, make_files
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM

ROOT = Path(__file__).parent.parent
NAMES = ("dar", "proxyformer")


def uneven_rows_of_two_processes() -> torch.Tensor:
    """Token ids of process, row, token: one block of 4 tokens, and more than five."""
    generator = torch.Generator().manual_seed(0)
    uneven = torch.zeros(2, 2, 21, dtype=torch.long)
    uneven[0, :, :3] = torch.randint(3, 61, (2, 3), generator=generator)
    uneven[1] = torch.randint(3, 61, (2, 21), generator=generator)
    return uneven


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_files(tmp_path_factory.mktemp("parallel"))
    commands = {name: command(folder, name, "--per-device-batch-size", 2) for name in NAMES}
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    torch.save(uneven_rows_of_two_processes(), folder / "uneven.pt")
    return folder


@pytest.fixture(scope="module")
def alone(files: Path) -> dict[str, Path]:
    """The same runs on one process, uninterrupted, a batch at once."""
    spec = importlib.util.spec_from_file_location("finetune_alone", ROOT / "examples" / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in NAMES:
        module.main([*command(files, name), "--output", str(files / f"alone-{name}")])
    return {name: files / f"alone-{name}" for name in NAMES}


def launch(files: Path, configuration: str, *modes: str, **environment: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", ROOT / "examples" / "accelerate" / f"{configuration}.yaml",
        "--num_processes", 2, "--main_process_port", port, ROOT / "tests" / "parallel_finetuning.py", files, *modes,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        list(map(str, arguments)),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-6000:]


def check_runs(files: Path, alone: dict[str, Path], mode: str, kind: str) -> dict[str, Any]:
    report = json.loads((files / f"{mode}.json").read_text(encoding="utf-8"))
    assert (report["type"], report["processes"]) == (kind, 2)
    for name in NAMES:
        folder = files / f"{mode}-{name}"
        assert curve(folder) == pytest.approx(curve(alone[name]), abs=1e-4), (mode, name)
        results = [json.loads((x / "run.json").read_text(encoding="utf-8"))["result"] for x in (folder, alone[name])]
        assert [result["processes"] for result in results] == [2, 1]
        assert results[0]["perplexity"]["held"] == pytest.approx(results[1]["perplexity"]["held"], rel=1e-4)
        # Put together from the shards, tied as before, and the same model.
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        loaded, expected = (
            AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (folder, alone[name])
        )
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        ids = torch.randint(3, 256, (2, 40), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert float(loaded(ids, labels=ids).loss) == pytest.approx(
                float(expected(ids, labels=ids).loss), abs=1e-3
            )
    return report


def check_tensors(files: Path) -> None:
    """A model split by its tensor-parallel plan is the whole one, in loss, gradients and generated tokens."""
    split = json.loads((files / "tensors.json").read_text(encoding="utf-8"))
    assert split["split"]
    assert split["answers"]
    assert max(split["loss"], split["gradients"]) < 1e-10


def uneven_by_hand(files: Path) -> dict[str, float]:
    """What two processes with rows of different lengths should find: the mean of both losses, and its gradients."""
    model = ProxyFormerForCausalLM.from_pretrained(files / "proxyformer", dtype=torch.float32).train()
    losses = []
    for ids in torch.load(files / "uneven.pt"):
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.where(ids != 0, -100)}
        losses.append(model(**inputs).loss)
    loss = torch.stack(losses).mean()
    loss.backward()
    loss = loss.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"loss": float(loss), "gradients": sum(float(gradient.abs().sum()) for gradient in gradients)}


def test_fsdp2_ddp_and_tensor_parallelism(files: Path, alone: dict[str, Path]) -> None:
    launch(files, "fsdp2", "fsdp2", "ddp", "tensors")
    by_hand = uneven_by_hand(files)
    sharded = check_runs(files, alone, "fsdp2", "FSDP")
    copied = check_runs(files, alone, "ddp", "MULTI_CPU")
    for report in (sharded, copied):
        assert report["uneven"] == pytest.approx(by_hand, rel=1e-4)
    assert sharded["generated"]
    assert "FSDP2 has spread over the devices" in sharded["refused"]["share_proxy_generation_weights"]
    assert "models that are sharded" in sharded["refused"]["reversible_history"]
    check_tensors(files)


@pytest.mark.parametrize("tied", [False, True])
def test_every_rule_of_dars_tensor_parallel_plan_names_a_module(tied: bool) -> None:
    model = tiny_dar(tie_word_embeddings=tied)
    modules = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()}
    assert set(model.tp_plan) <= modules
    # Split alike, or the two could not be one tensor.
    assert model.tp_plan["lm_head"] == "colwise_gather_output"
    assert model.tp_plan["gpt_neox.embed_in"] == "embedding_rowwise"


def test_proxyformer_declares_no_tensor_parallel_plan() -> None:
    assert ProxyFormerConfig.base_model_tp_plan is None
    assert not ProxyFormerForCausalLM._tp_plan


@pytest.mark.slow
def test_ddp_by_its_own_configuration(files: Path, alone: dict[str, Path]) -> None:
    launch(files, "ddp", "ddp")
    check_runs(files, alone, "ddp", "MULTI_CPU")


@pytest.mark.slow
def test_zero3(files: Path, alone: dict[str, Path]) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    launch(files, "zero3", "zero3", DS_ACCELERATOR="cpu")
    report = check_runs(files, alone, "zero3", "DEEPSPEED")
    assert report["uneven"]["loss"] == pytest.approx(uneven_by_hand(files)["loss"], rel=1e-4)
