"""Telling models apart: is this the model that something was fitted on?"""

import os

import torch
from torch import nn
from transformers import PreTrainedConfig

from .prunable_models import attention_types

# A sample of the input embedding, 8 × 8 numbers. As relative distance, casts to half precision stay below 0.01, 4-bit
# quantisation and light fine-tuning below 0.2; two different models are about 1.4 apart.
FINGERPRINT_SIZE, FINGERPRINT_VOCABULARY, SAME_MODEL_DISTANCE = 8, 4096, 0.25


def scored_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that a `PrunedCache` prunes: those with full attention, or all where every layer has a window."""
    types = attention_types(config)
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    return full or list(range(len(types)))


def shape_of(config: PreTrainedConfig) -> str:
    """In words, what decides the shape of a model's key-value cache."""
    query_heads = config.num_attention_heads
    return shape_text(
        config.model_type,
        scored_layers(config),
        getattr(config, "num_key_value_heads", None) or query_heads,
        getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def shape_text(model_type: str, layers: list[int], heads: int, head_dim: int) -> str:
    """The words of `shape_of`."""
    which = f"layers 0–{layers[-1]}" if layers == list(range(len(layers))) else f"full attention in layers {layers}"
    return f"model type {model_type!r}, {which}, {heads} key-value heads of {head_dim}"


def embedding_fingerprint(model_or_config: nn.Module | PreTrainedConfig) -> list[list[float]]:
    """A few numbers of the model's input embedding; empty if they cannot be read (a configuration, meta weights)."""
    get = getattr(model_or_config, "get_input_embeddings", None)
    weight = getattr(get(), "weight", None) if get is not None else None
    if not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.is_floating_point() or weight.ndim != 2:
        return []
    # Rows of low ids: vocabularies are resized at the end.
    step = max(1, min(weight.shape[0], FINGERPRINT_VOCABULARY) // FINGERPRINT_SIZE)
    sample = weight.detach()[::step][:FINGERPRINT_SIZE, :FINGERPRINT_SIZE].double().cpu()
    return [[float(f"{value:.5g}") for value in row] for row in sample.tolist()]


def same_model(mine: list[list[float]], theirs: list[list[float]]) -> bool | None:
    """Whether two fingerprints are one model's; None when one of them is missing."""
    if not mine or not theirs:
        return None
    a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return a.shape == b.shape and bool((a - b).norm() <= SAME_MODEL_DISTANCE * a.norm())


def model_name(model: nn.Module) -> str | None:
    """What a model is called: its Hub id, or its folder without the place, which means nothing elsewhere."""
    name = getattr(model, "name_or_path", "") or None
    return os.path.basename(os.path.abspath(name)) if name and os.path.isdir(name) else name
