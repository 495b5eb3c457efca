"""Undoing and redoing rotary position embedding on cached keys (RoPE, half-rotation convention).

Cached keys are rotated at their true positions, and the positions are known; so a cache can look at a key as it was
before rotation (what prototypes are fitted on), or move it to another position (re-rotated StreamingLLM).
"""

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Families whose modeling file rotates the first half of the rotary dimensions against the second half. Others
# (GPT-J, Cohere) interleave them, and cannot be told apart by their configuration.
HALF_ROTATION = frozenset(
    """llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text gemma3 gpt_neox phi phi3 olmo
    olmo2 stablelm starcoder2 smollm3 granite dar""".split()  # noqa: SIM905
)
# Frequencies that follow the running sequence length: a cached key's rotation is no function of its position alone.
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


class KeyRotation:
    """Rotates keys of any layer of one model by whole positions.

    Args:
        config: the model's text configuration.

    Raises:
        ValueError: a model family with another rotary convention, or frequencies that depend on the length.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        if config.model_type not in HALF_ROTATION:
            raise ValueError(
                f"The rotary convention of model type {config.model_type!r} is not known; known are: "
                f"{', '.join(sorted(HALF_ROTATION))}."
            )
        parameters = config.rope_parameters
        layer_types = getattr(config, "layer_types", None)
        by_type = isinstance(next(iter(parameters.values()), None), dict)
        self._layer_types: list[str] | None = list(layer_types) if by_type and layer_types else None
        self._frequencies: dict[str | None, tuple[torch.Tensor, float]] = {}
        for layer_type in sorted(set(self._layer_types)) if self._layer_types else [None]:
            chosen = parameters[layer_type] if layer_type is not None else parameters
            self._frequencies[layer_type] = _frequencies(config, chosen, layer_type)
        # 0 where a layer has no rotary embedding, as every fourth of SmolLM3: angles of nothing there.
        self._turns: list[int] | None = getattr(config, "no_rope_layers", None)
        self._no_angles: torch.Tensor | None = None

    def frequencies(self, layer_idx: int, device: torch.device) -> tuple[torch.Tensor, float]:
        """A layer's inverse frequencies `(rotary dim / 2,)`, float32, and the model's factor on cos and sin."""
        layer_type = self._layer_types[layer_idx] if self._layer_types else None
        frequencies, scaling = self._frequencies[layer_type]
        if self._turns and not self._turns[layer_idx]:
            if self._no_angles is None or self._no_angles.device != device:
                self._no_angles = torch.zeros_like(frequencies, device=device)
            return self._no_angles, 1.0
        if frequencies.device != device:  # kept where they are used: a copy to a GPU costs more than a use
            frequencies = frequencies.to(device)
            self._frequencies[layer_type] = (frequencies, scaling)
        return frequencies, scaling

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Move keys on by `positions` places.

        Args:
            keys: `(batch, heads, n, head dim)`.
            positions: `(batch or 1, n)`, whole numbers, negative to move back.
            layer_idx: which layer's frequencies.

        Returns:
            Keys of the same shape, in float32 (float64 stays).
        """
        frequencies, _ = self.frequencies(layer_idx, keys.device)
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        angles = positions[:, None, :, None].to(dtype) * frequencies.to(dtype)
        cos, sin = angles.cos(), angles.sin()
        half = frequencies.shape[0]
        turning, rest = keys.to(dtype).split([2 * half, keys.shape[-1] - 2 * half], dim=-1)
        swapped = torch.roll(turning, half, -1)
        turned = (turning * torch.cat([cos, cos], -1)).addcmul_(swapped, torch.cat([-sin, sin], -1))
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Keys as they were before the rotary embedding at `positions` `(batch or 1, n)`; float32 (float64 stays)."""
        plain = self.rotate(keys, -positions, layer_idx)
        frequencies, scaling = self.frequencies(layer_idx, keys.device)
        if scaling != 1.0:
            width = 2 * frequencies.shape[0]
            plain = torch.cat([plain[..., :width] / scaling, plain[..., width:]], dim=-1)
        return plain


def _frequencies(config: PreTrainedConfig, parameters: dict, layer_type: str | None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `(rotary dim / 2,)`, float32, and the factor on cos and sin."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type in LENGTH_DEPENDENT:
        raise ValueError(
            f"rope_type {rope_type!r} changes its frequencies with the sequence length, so cached keys cannot be "
            "rotated again; use a cache that keeps keys as they are."
        )
    if rope_type == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), **kwargs)
    return frequencies.float(), float(scaling)
