"""Tiny random models of every family the caches are tested on."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 61
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """Configuration of a three-layer model of `family`."""
    gqa = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
    if family == "llama":
        return LlamaConfig(**gqa)
    if family == "qwen2":
        return Qwen2Config(**{**gqa, "use_sliding_window": False})
    if family == "qwen3":
        return Qwen3Config(**gqa)
    if family == "mistral":  # every layer slides
        return MistralConfig(**gqa, sliding_window=12)
    if family == "gemma3":  # hybrid: sliding, sliding, full
        types = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
        return Gemma3TextConfig(
            **{**gqa, "num_hidden_layers": 4}, sliding_window=9, layer_types=types, query_pre_attn_scalar=8
        )
    if family == "gpt_neox":
        return GPTNeoXConfig(**_COMMON, rotary_pct=0.5)
    raise ValueError(f"unknown family {family!r}")


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox")


def tiny_model(
    family: str = "llama", *, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    """A random model in eval mode, its weights large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25, generator=generator)
    return model.to(dtype).eval()


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without the special ones, `(batch, length)`."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
