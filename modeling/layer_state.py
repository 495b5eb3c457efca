"""Copying a cache layer's contents: snapshots, deep copies, and what it all weighs."""

from dataclasses import dataclass
from typing import Any

import torch

from .ragged_layer import RaggedLayer


@dataclass
class CacheSnapshot:
    """A cache's contents at one moment, independent of the cache; see `PrunedCache.snapshot`."""

    layers: list[Any]
    row_budgets: list[int] | None
    budgets_settled: bool


def all_tensors(layers: list[Any]) -> list[torch.Tensor]:
    """Each tensor once, also where layers share it."""
    held: dict[int, torch.Tensor] = {}
    for layer in layers:
        tensors: list[torch.Tensor] = []
        if isinstance(layer, RaggedLayer):
            tensors = layer.tensors()
        elif layer.is_initialized:
            tensors = [layer.keys, layer.values]
        held.update({id(tensor): tensor for tensor in tensors})
    return list(held.values())


def copy_layer_state(layer: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """A layer's contents, independent of the layer, for `put_layer_state`; pairs come unquantised.

    Args:
        layer: a cache layer.
        copies: one dictionary for all layers of a cache, so that what they share is copied once.
    """
    if isinstance(layer, RaggedLayer):
        with layer.awake():
            store = layer.store.clone() if layer.is_initialized else None
        extra = {name: _copied(tensor, copies) for name, tensor in layer.extra.items()}
        return store, layer.seen, layer.evicted, extra, layer.device
    if not layer.is_initialized:
        return None
    return layer.keys.clone(), layer.values.clone(), layer.cumulative_length


def put_layer_state(layer: Any, state: Any, copy: bool = True, copies: dict[int, torch.Tensor] | None = None) -> None:
    """Fill a layer from `copy_layer_state`; without `copy` it takes the state's own tensors."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return _copied(tensor, copies) if copy else tensor

    if isinstance(layer, RaggedLayer):
        store, layer.seen, layer.evicted, extra, layer.device = state
        if store is None:
            layer.reset()
            return
        layer.store = store.clone() if copy else store
        layer.extra = {name: own(tensor) for name, tensor in extra.items()}
        layer.is_initialized, layer.resting, layer.asleep = True, None, False
        layer.rest()
    elif state is None:
        layer.reset()
    else:
        if not layer.is_initialized:
            layer.lazy_initialization(state[0], state[1])
        layer.keys, layer.values, layer.cumulative_length = own(state[0]), own(state[1]), state[2]


def _copied(tensor: torch.Tensor, copies: dict[int, torch.Tensor] | None) -> torch.Tensor:
    """A copy, the same one for the same tensor where there are `copies`."""
    if copies is None:
        return tensor.clone()
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.clone()
    return copies[id(tensor)]
