"""The few names that differ between the transformers releases nearfar supports (>= 5.17, < 6).

Nothing else in the library looks at a version: what differs is asked of the object at hand, here.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast


def cache_argument(model: nn.Module) -> str:
    """Name of the keyword under which `model.forward` takes a cache.

    transformers renamed it from `past_key_values` to `cache` model by model during 5.x; `generate` accepts
    `past_key_values` throughout.

    Raises:
        TypeError: the model's forward pass takes no cache.
    """
    names: list[str] = []
    for cls in type(model).__mro__:
        forward = cls.__dict__.get("forward")
        if forward is not None:
            names = list(inspect.signature(forward).parameters)
            break
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise TypeError(
        f"{type(model).__name__}.forward takes neither `cache` nor `past_key_values`: it is not a decoder that "
        "generates with a key-value cache."
    )


def mask_arguments(function: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """The cache under the name that a mask-making function of transformers takes it."""
    name = "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"
    return {name: cache}


def name_attention(config: PreTrainedConfig, name: str) -> None:
    """`config._attn_implementation = name`, which a cache does twice a layer and token.

    The setter of transformers goes through a configuration's checks, tens of microseconds; where it would do no more
    than note the name, the name is noted.
    """
    if "_attn_implementation_internal" in config.__dict__ and not config.sub_configs:
        config.__dict__["_attn_implementation_internal"] = name
    else:
        config._attn_implementation = name


# The field of a model's output that holds the cache.
CACHE_FIELD = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def rename_cache(model_kwargs: dict[str, Any]) -> None:
    """Put the cache that `generate` was given, by either of its names, where this release looks for it."""
    for name in ("cache", "past_key_values"):
        if name != CACHE_FIELD and model_kwargs.get(name) is not None:
            model_kwargs[CACHE_FIELD] = model_kwargs.pop(name)
