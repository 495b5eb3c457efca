"""A model spread over several devices, on a machine with none: its tensors are fake ones, shapes and devices only.

Operations on tensors of two devices fail as they do on real ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel


def alternate(model: PreTrainedModel, devices: int = 2) -> dict[str, str]:
    """A device map with the smallest parts that accelerate makes of a model, on the devices in turns."""

    def split(module: nn.Module, name: str) -> Iterator[str]:
        children = dict(module.named_children())
        if not children or type(module).__name__ in (model._no_split_modules or ()):
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                yield name
            return
        yield from (f"{name}.{key}".strip(".") for key in (*module._parameters, *module._buffers))
        for key, child in children.items():
            yield from split(child, f"{name}.{key}".strip("."))

    parts = list(split(model, ""))
    return {name: f"cpu:{number % devices}" for number, name in enumerate(parts)}


@contextmanager
def spread(model: PreTrainedModel, device_map: dict[str, str]) -> Iterator[None]:
    """Within it the model is dispatched by the map, as `from_pretrained(…, device_map=…)` does it."""
    with FakeTensorMode():
        for name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    path = f"{name}.{key}".strip(".")
                    device = next(where for part, where in device_map.items() if f"{path}.".startswith(f"{part}."))
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    tensors[key] = nn.Parameter(moved) if isinstance(tensor, nn.Parameter) else moved
        devices = {"": next(iter(device_map.values())), **device_map}
        with patch("accelerate.hooks.set_module_tensor_to_device"):  # they are there, and fake ones it cannot move
            attach_align_device_hook_on_blocks(model, devices, offload=dict.fromkeys(device_map, False))
        yield
