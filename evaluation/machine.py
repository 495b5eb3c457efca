"""What a measurement ran on, and how many threads it should run with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from nearfar import __version__

_PROBES = 12


def available_cores() -> int:
    """CPU cores this process may run on (its affinity, not what the machine holds)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name as the operating system tells it, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; without it a timer on a GPU stops before the work does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_average() -> float | None:
    """Programs that wanted a core during the last minute, on average; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def machine_report(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Hardware, threads and versions, JSON-ready, to be written next to every figure."""
    device = torch.device(device)
    versions = {
        "python": platform.python_version(),
        "nearfar": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }
    return {
        "cpu": cpu_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions,
    }


def machine_name(machine: dict[str, Any]) -> str:
    """The device that a report of the machine names: the accelerator, or else the processor."""
    device = str(machine.get("device") or "an unknown machine")
    return str(machine.get("cpu") or device) if device == "cpu" else device


def choose_threads(max_threads: int | None = None, advantage: float = 1.15) -> int:
    """Time one small layer with 1, 2, 4, … threads and return the fastest count that is worth it.

    On idle cores more threads are faster. On busy ones the threads of one matrix product wait for each other, and two
    can be tens of times slower than one. The probe takes a fraction of a second.

    Args:
        max_threads: highest count tried; if `None`, the available cores less one, because threads wait for the one
            whose core another program takes (on two cores shared with others, two threads took four times as long as
            one), and a probe cannot know what starts a minute later.
        advantage: a higher count is chosen only when it is at least this many times faster than the best lower one,
            because the other threads' cores are then busy for others.
    """
    limit = max(available_cores() - 1, 1) if max_threads is None else max_threads
    if limit < 1:
        raise ValueError(f"max_threads must be at least 1, got {max_threads}")
    if limit == 1:
        return 1
    before = torch.get_num_threads()
    hidden, weight = torch.randn(192, 576), torch.randn(576, 1536)
    chosen, best = 1, float("inf")
    counts = [1 << power for power in range(limit.bit_length()) if 1 << power < limit] + [limit]
    try:
        for count in counts:
            torch.set_num_threads(count)
            # Stalls are what is looked for, so it is the sum that counts, not a median that would hide them. A count
            # that has already lost is given up: on a busy machine it could take seconds to finish.
            total = 0.0
            for repeat in range(-1, _PROBES):
                start = time.perf_counter()
                for _ in range(4):  # a decoder layer's mixture: a matrix product, then a step over its elements
                    torch.nn.functional.silu(hidden @ weight)
                if repeat >= 0:  # the first one starts the threads
                    total += time.perf_counter() - start
                if total * advantage > best:
                    break
            else:
                chosen, best = count, total
    finally:
        torch.set_num_threads(before)
    return chosen
