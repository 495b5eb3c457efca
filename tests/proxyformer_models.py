"""Tiny random ProxyFormers."""

from typing import Any

import torch

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM


def tiny_proxyformer_config(**changes: Any) -> ProxyFormerConfig:
    """Three layers of 4 heads of 8 dimensions, blocks of 4 tokens."""
    options: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "history_hidden_size": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "compression_ratio": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }
    return ProxyFormerConfig(**options)


def tiny_proxyformer(*, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> ProxyFormerForCausalLM:
    """A random model in eval mode, its weights large enough for proxies to matter."""
    torch.manual_seed(seed)
    model = ProxyFormerForCausalLM(tiny_proxyformer_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "proxy_gate" in name else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(dtype).eval()
