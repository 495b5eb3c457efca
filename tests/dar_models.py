"""Tiny random DAR models."""

from typing import Any

import torch

from nearfar import DARConfig, DARForCausalLM


def tiny_dar_config(**changes: Any) -> DARConfig:
    """Three layers of 4 heads of 8 dimensions, half of them rotary."""
    options: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rotary_pct": 0.5,
        "window_size": 7,
        "bottleneck_size": 9,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }
    return DARConfig(**options)


def tiny_dar(
    *, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> DARForCausalLM:
    """A random model in eval mode, its weights large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    model = DARForCausalLM(tiny_dar_config(**changes))
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.25 if parameter.ndim == 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(dtype).eval()
