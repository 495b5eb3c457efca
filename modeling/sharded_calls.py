"""Methods of a model that FSDP2 has sharded, other than `forward`."""

from typing import Any

from torch import nn


def call_sharded(module: nn.Module, name: str, *args: Any) -> Any:
    """Call a method of a module; if FSDP2 has sharded the module, with its weights gathered as for `forward`."""
    if hasattr(module, "unshard") and name not in vars(module):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(module, name)
    return getattr(module, name)(*args)
