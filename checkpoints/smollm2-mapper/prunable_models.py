"""Which models a `PrunedCache` can serve; everything else is refused with a reason."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from .attention_dispatch import AttentionCall


def text_config(model_or_config: nn.Module | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration object that the decoder's attention modules hold.

    Raises:
        TypeError: neither a transformers model nor a configuration.
        ValueError: a model whose cache cannot be pruned.
    """
    config = model_or_config if isinstance(model_or_config, PreTrainedConfig) else None
    if config is None:
        config = getattr(model_or_config, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"Expected a transformers model or its configuration, got {type(model_or_config).__name__}.")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder-decoder: its cache cannot be pruned.")
    config = config.get_text_config(decoder=True)
    attention_types(config)
    for name in ("attn_logit_softcapping", "attention_sink", "kv_sharing_modes", "num_kv_shared_layers"):
        if getattr(config, name, None):
            raise ValueError(
                f"{config.model_type!r} sets {name}={getattr(config, name)!r}: attention over pruned pairs does not "
                "support it, so its cache cannot be pruned."
            )
    return config


def attention_types(config: PreTrainedConfig) -> list[str]:
    """Each layer's kind, "full_attention" or "sliding_attention".

    Raises:
        ValueError: the model has layers of another kind.
    """
    count = getattr(config, "num_hidden_layers", None)
    if count is None or getattr(config, "num_attention_heads", None) is None:
        raise ValueError(f"{config.model_type!r} has no attention layers: there is no key-value cache to prune.")
    types = getattr(config, "layer_types", None)
    if types is None:
        windowed = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if windowed else "full_attention"] * count
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(
            f"{config.model_type!r} has layers of type {', '.join(others)}: only full and sliding-window attention "
            "can be pruned."
        )
    return list(types)


def refuse_unsupported(call: AttentionCall) -> None:
    if call.module.training:
        raise ValueError("A pruned cache is for inference: call model.eval() first.")
    if torch.is_grad_enabled() and call.query.requires_grad:
        raise ValueError(
            "Gradients do not reach what a cache has stored, so those computed through it would be wrong: run the "
            "model inside torch.no_grad()."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if call.kwargs.get(name) is not None:
            raise ValueError(
                f"{type(call.module).__name__} passes {name} to its attention function: attention over pruned pairs "
                "does not support it, so this model's cache cannot be pruned."
            )
