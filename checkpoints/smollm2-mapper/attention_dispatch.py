"""How a cache computes attention over its own keys, with no change to a model's classes or modules.

Every attention layer of transformers does three things in this order::

    keys, values = cache.update(keys, values, layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
    output, weights = attend(module, query, keys, values, mask, ...)

A cache whose heads hold different numbers of pairs cannot hand a rectangular tensor to the third step. Its `update`
calls `take_over`, which names an attention function of ours in the configuration for the one look-up of the second
step, and returns *handles* in place of keys and values. Our function puts the configuration back first thing, finds
the cache through the handle and lets it attend. A model used with another cache never meets any of this, unless two
threads run one model at the same time: then a forward pass may find the wrong function and stops with an error.

The function in the registry is named after the stock one it stands for (`nearfar|sdpa`), so that keys which are not
ours, should they ever reach it, go to the stock function unchanged.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .compat import name_attention

PREFIX = "nearfar|"
AttentionOutput = tuple[torch.Tensor, torch.Tensor | None]


class Attends(Protocol):
    """A cache layer that computes attention itself."""

    def attend(self, call: "AttentionCall") -> AttentionOutput: ...


@dataclass
class AttentionCall:
    """One attention layer's request.

    Attributes:
        module: the attention module that asks.
        query: `(batch, query heads, new tokens, head dim)`, rotated.
        keys, values: the new tokens' states, `(batch, key-value heads, new tokens, head dim)`, keys rotated.
        mask: whatever the model built for its attention implementation: None, a 2-D padding mask, a 4-D boolean or
            additive mask, or a flex `BlockMask`.
        scaling: factor on query-key products.
        position_ids: `(batch or 1, new tokens)`, the rotary positions, where the model passes them on.
        stock_name: the attention implementation the model is configured with.
        kwargs: the remaining keyword arguments, for the stock function.
    """

    module: nn.Module
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: Any
    scaling: float
    position_ids: torch.Tensor | None
    stock_name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def stock(self, keys: torch.Tensor, values: torch.Tensor, mask: Any) -> AttentionOutput:
        """The model's own attention function on rectangular keys and values `(batch, heads, length, dim)`."""
        function = _stock_function(self.module, self.stock_name)
        return function(self.module, self.query, keys, values, mask, **self.kwargs)


class CacheHandle(torch.Tensor):
    """Stands for a cache layer's keys (or values) on their way through a model's attention layer.

    It aliases the new tokens' states, so shape, dtype and device can be read; any computation on it is an error,
    because it would see the new tokens only.
    """

    owner: Attends
    states: torch.Tensor

    @classmethod
    def wrap(cls, states: torch.Tensor, owner: Attends) -> "CacheHandle":
        states = states.detach() if states.requires_grad else states
        handle = states.as_subclass(cls)
        handle.owner, handle.states = owner, states
        return handle

    def unwrap(self) -> torch.Tensor:
        """The new tokens' states as an ordinary tensor."""
        return self.states

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim", "__repr__", "__format__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"A model's attention layer called `{name}` on keys or values that belong to a nearfar cache, which "
            "computes attention itself. Either the model does not ask transformers' AttentionInterface for its "
            "attention function, or the cache was built from a copy of the model's configuration (build it from the "
            "model), or another thread runs the same model at the same time."
        )


def take_over(
    config: PreTrainedConfig, keys: torch.Tensor, values: torch.Tensor, owner: Attends
) -> tuple[CacheHandle, CacheHandle]:
    """Route the attention call that follows this `update` to `owner.attend`.

    Args:
        config: the configuration object that the model's attention modules hold.
        keys, values: the new tokens' states.
        owner: the cache layer.
    """
    current = config._attn_implementation or "eager"
    if not current.startswith(PREFIX):
        name_attention(config, _register(current))
    return CacheHandle.wrap(keys, owner), CacheHandle.wrap(values, owner)


@functools.lru_cache(maxsize=64)
def _register(stock_name: str) -> str:
    name = PREFIX + stock_name
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _attention_function(stock_name))
        if stock_name in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock_name])
    return name


def _attention_function(stock_name: str) -> Callable[..., AttentionOutput]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,  # as stock functions call it: some models pass it by name
        **kwargs: Any,
    ) -> AttentionOutput:
        config: Any = module.config
        name_attention(config, stock_name)
        if not isinstance(key, CacheHandle):
            return _stock_function(module, stock_name)(module, query, key, value, attention_mask, **kwargs)
        scaling = kwargs.get("scaling")
        call = AttentionCall(
            module=module,
            query=query,
            keys=key.unwrap(),
            values=value.unwrap() if isinstance(value, CacheHandle) else value,
            mask=attention_mask,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            position_ids=kwargs.get("position_ids"),
            stock_name=stock_name,
            kwargs=kwargs,
        )
        return key.owner.attend(call)

    return attention


@functools.lru_cache(maxsize=64)
def _scope(forward: Callable) -> dict[str, Any]:
    """The names of the file that a method comes from."""
    return inspect.unwrap(forward).__globals__


def _stock_function(module: nn.Module, name: str) -> Callable[..., AttentionOutput]:
    """The function the module would have called: its own file's registry and eager function come first."""
    scope = _scope(type(module).forward)
    registry = scope.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = scope.get("eager_attention_forward")
    if name == "eager" and eager is None:
        raise ValueError(f"{type(module).__name__} has no eager attention function next to it; use sdpa instead.")
    return registry.get_interface(name, eager)
