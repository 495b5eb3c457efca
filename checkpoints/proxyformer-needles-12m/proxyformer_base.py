"""What every ProxyFormer language model shares: how its weights are made and loaded, and what it may be run with."""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .configuration_proxyformer import ProxyFormerConfig
from .proxy_generation import ProxyFormerLayer
from .proxy_interaction import RecurrentInteraction
from .proxy_merge import ProxyMerge


class ProxyFormerPreTrainedModel(PreTrainedModel):
    """Weights and loading of all ProxyFormer language models."""

    config: ProxyFormerConfig
    config_class = ProxyFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ProxyFormerLayer", "ProxyHistoryLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: ProxyFormerConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        self.model_tags = ["nearfar", "proxyformer"]  # of the card that an upload gets

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the embeddings of both streams; arguments as in `PreTrainedModel`."""
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        base: Any = self.base_model
        known = getattr(base, "history_embed_tokens", None)
        if known is not None and known.num_embeddings != resized.num_embeddings:
            base.history_embed_tokens = self._get_resized_embeddings(
                known, resized.num_embeddings, mean_resizing=mean_resizing
            )
        return resized

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if getattr(module, "init_average", False):
                return  # its owner's
            scale = getattr(module, "init_scale", 1.0)
            init.normal_(module.weight, mean=0.0, std=scale / math.sqrt(module.in_features))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ProxyMerge):
            init.copy_(module.proj.weight, module.average_weight())
        elif isinstance(module, RecurrentInteraction):
            init.copy_(module.decay, module.initial_decay(module.decay.shape[0]))
        elif isinstance(module, ProxyFormerLayer) and module.has_proxies:
            init.zeros_(module.proxy_gate.weight)
            init.constant_(module.proxy_gate.bias, float(self.config.gate_bias))
