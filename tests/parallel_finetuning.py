"""What `tests/test_finetune_parallel.py` starts with `accelerate launch`, on two processes.

    accelerate launch … tests/parallel_finetuning.py FOLDER MODE [MODE …]

On GPUs it does the same over NCCL, given commands without --cpu. A mode is `ddp`, `fsdp2`, `zero3` or `tensors`, the
tensor-parallel plan that DAR declares. FOLDER holds the tiny models `dar` and `proxyformer`, `commands.json` with
arguments of examples/finetune.py for each, and `uneven.pt`; it gets what the runs leave in `FOLDER/MODE-NAME`, and
`MODE.json` from process 0.
"""

import contextlib
import gc
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

import nearfar
from nearfar.training.perplexity_log import PerplexityLog

ROOT = Path(__file__).parent.parent
ON_CPU = not torch.cuda.is_available()


class InterruptedRun(Exception):
    pass


@contextlib.contextmanager
def stand_in_for_devices() -> Iterator[None]:
    """Let accelerate, which leaves CPUs out of FSDP and DeepSpeed, do over gloo what it does over NCCL."""
    names = ("__init__", "_prepare_backend", "set_device")
    kept = {name: getattr(PartialState, name) for name in names}

    def begin(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        kept["__init__"](self, **kwargs)

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    for name, function in zip(names, (begin, prepare_backend, set_device), strict=True):
        setattr(PartialState, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(PartialState, name, function)


def interrupted_and_resumed(main: Any, command: list[str]) -> None:
    """Stop one step after the first checkpoint, in all processes, and go on from that checkpoint."""
    end = PerplexityLog.on_step_end

    def interrupt(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end(self, args, state, control, **kwargs)
        if state.global_step == 3:
            raise InterruptedRun

    PerplexityLog.on_step_end = interrupt  # type: ignore[method-assign]
    try:
        main(command)
    except InterruptedRun:
        pass
    else:
        raise AssertionError("the run was not interrupted")
    finally:
        PerplexityLog.on_step_end = end  # type: ignore[method-assign]
    gc.collect()
    main([*command, "--resume"])


def uneven_rows(folder: Path, mode: str) -> dict[str, float]:
    """A step in which one process has rows of one block, without a history, and the other of several.

    Returns:
        The mean of the processes' losses, and but for ZeRO-3 the sum of the absolute values of all gradients.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    if mode == "zero3":
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"  # the configuration leaves it to the Trainer
        plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1, gradient_clipping=1.0)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        accelerator = Accelerator(deepspeed_plugin=plugin)
    else:
        accelerator = Accelerator(cpu=ON_CPU and mode == "ddp")
    model: Any = nearfar.ProxyFormerForCausalLM.from_pretrained(folder / "proxyformer", dtype=torch.float32).train()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.load(folder / "uneven.pt")[accelerator.process_index].to(accelerator.device)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}
    loss = model(labels=ids.where(ids != 0, -100), **inputs).loss
    accelerator.backward(loss)
    found = {"loss": float(accelerator.gather(loss.detach()[None]).mean())}
    if mode != "zero3":
        gradients = [p.grad for p in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        found["gradients"] = sum(float(getattr(g, "full_tensor", lambda g=g: g)().abs().sum()) for g in gradients)
    model.eval()
    with torch.no_grad():  # sharded models gather weights here too
        model(**inputs)
    return found


def refused(folder: Path, option: str) -> str:
    """What a sharded ProxyFormer with an option that needs a layer's weights outside of that layer says."""
    config = nearfar.ProxyFormerConfig.from_pretrained(folder / "proxyformer")
    setattr(config, option, True)
    accelerator = Accelerator()
    model = nearfar.ProxyFormerForCausalLM(config)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        model(input_ids=torch.ones(1, 12, dtype=torch.long, device=accelerator.device), use_cache=False)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{option} went through")


def generated(folder: Path) -> bool:
    """Whether a sharded ProxyFormer writes what a whole one writes, also after a history, over several blocks."""
    accelerator = Accelerator()
    models: list[Any] = [
        nearfar.ProxyFormerForCausalLM.from_pretrained(folder / "proxyformer", dtype=torch.float32).eval()
        for _ in range(2)
    ]
    whole, sharded = models[0].to(accelerator.device), models[1]
    sharded, _ = accelerator.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    ids = torch.randint(3, 256, (2, 21), generator=torch.Generator().manual_seed(0)).to(accelerator.device)
    settings = {"max_new_tokens": 6, "do_sample": False}
    answers = [
        (
            model.generate(ids, **settings),
            model.generate(ids[:, :5], history_ids=ids, **settings),
            model.generate(torch.cat([ids, ids[:, :5]], 1), past_key_values=model.encode_history(ids), **settings),
        )
        for model in (whole, sharded)
    ]
    return all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """A model whose projections are split over the processes, against the same one whole."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    two = DistributedConfig(tp_size=2)
    split = AutoModelForCausalLM.from_pretrained(folder / "dar", dtype=torch.float64, distributed_config=two)
    device = next(split.parameters()).device
    one = AutoModelForCausalLM.from_pretrained(folder / "dar", dtype=torch.float64).to(device)
    ids = torch.randint(3, 256, (2, 23), generator=torch.Generator().manual_seed(0)).to(device)
    loss, expected = whole(split.train()(ids, labels=ids).loss), one.train()(ids, labels=ids).loss
    loss.backward()
    expected.backward()
    gradients = [
        float((whole(q.grad) - p.grad).abs().max())  # type: ignore[arg-type, operator]
        for p, q in zip(one.parameters(), split.parameters(), strict=True)
    ]
    answers = [model.eval().generate(ids, max_new_tokens=8, do_sample=False) for model in (one, split)]
    kinds = {name: type(value).__name__ for name, value in split.named_parameters()}
    return {
        "loss": abs(float(loss.detach() - expected.detach())),
        "gradients": max(gradients),
        "answers": torch.equal(*answers),
        "split": kinds["gpt_neox.layers.0.attention.query_key_value.weight"] == "DTensor",
    }


def run(folder: Path, mode: str) -> None:
    if mode == "tensors":
        report: dict[str, Any] = tensor_parallel(folder)
        if int(os.environ["RANK"]) == 0:
            (folder / "tensors.json").write_text(json.dumps(report))
        return
    finetune = runpy.run_path(str(ROOT / "examples" / "finetune.py"))["main"]
    commands = json.loads((folder / "commands.json").read_text())
    for name, command in commands.items():
        command += ["--output", str(folder / f"{mode}-{name}")]
        if mode == "ddp":
            finetune(command)
        else:  # checkpoints hold a shard of each process
            interrupted_and_resumed(finetune, command)
        gc.collect()
    report = {"uneven": uneven_rows(folder, mode)}
    state = AcceleratorState()
    report["type"] = state.distributed_type.value
    report["processes"] = state.num_processes
    if mode == "fsdp2":
        options = ("share_proxy_generation_weights", "reversible_history")
        report["generated"] = generated(folder)
        report["refused"] = {option: refused(folder, option) for option in options}
    if state.is_main_process:
        (folder / f"{mode}.json").write_text(json.dumps(report))


def main() -> None:
    folder, *modes = sys.argv[1:]
    torch.set_num_threads(1)
    # Several runs in these processes: their group stays.
    torch.distributed.destroy_process_group = lambda *args: None  # type: ignore[assignment]
    for mode in modes:
        os.environ["ACCELERATE_USE_FSDP"] = str(mode == "fsdp2").lower()
        AcceleratorState._reset_state(reset_partial_state=True)
        with stand_in_for_devices() if ON_CPU and mode != "ddp" else contextlib.nullcontext():
            run(Path(folder), mode)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
