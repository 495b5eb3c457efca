"""The history stream of ProxyFormer: local features of every token, and the proxies that each layer makes of them.

Shapes: local features `(batch, tokens, d_h)`, proxies `(batch, proxies, d_proxy)`. Equation numbers are the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from .block_compression import Compress, Decompress, factor_block, level_widths
from .proxy_block import AttentionBlock
from .proxy_injection import Injection
from .proxy_interaction import CausalAttentionInteraction, ProxyInteraction, make_interaction
from .proxy_rotary import RotaryAngles
from .proxy_update import ProxyUpdate
from .rms_norm import RMSNorm

STEM_TOKENS = 4


class CausalConvolution(GradientCheckpointingLayer):
    """Mixes each token's features with those of the three before it, across blocks; zero stays zero.

    Args:
        size: d_h.
        eps: of the normalisation.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps=eps)
        self.mix = nn.Linear(STEM_TOKENS * size, 2 * size, bias=False)
        self.output = nn.Linear(2 * size, size, bias=False)
        self.output.init_scale = 0.5  # type: ignore[assignment]

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        tokens = local.shape[1]
        padded = F.pad(self.norm(local), (0, 0, STEM_TOKENS - 1, 0))
        neighbours = torch.cat([padded[:, start : start + tokens] for start in range(STEM_TOKENS)], dim=-1)
        return local + self.output(F.silu(self.mix(neighbours)))


class ProxyHistoryLayer(GradientCheckpointingLayer):
    """One layer of the history stream: compress, update, interact, decompress, inject (Eq. 2 to 6).

    Args:
        config: a `ProxyFormerConfig`.
        layer_idx: which layer; the last one injects nothing, since nobody reads its local stream.
        lender: an attention block of the generation stream that serves the proxies too; `None` for one of their own.
    """

    def __init__(self, config: Any, layer_idx: int, lender: AttentionBlock | None = None) -> None:
        super().__init__()
        ratios = config.ratios
        self.ratio = ratios[layer_idx]
        self.overlap = config.partition_overlap
        self.starts_anew = layer_idx == 0 or ratios[layer_idx - 1] != self.ratio
        eps, local, size = config.rms_norm_eps, config.history_hidden_size, config.proxy_size
        scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)

        factors, widths = compression_levels(config, self.ratio + self.overlap)
        self.compress = Compress(factors, widths, eps)
        self.update = ProxyUpdate(config.proxy_update, size)
        self.interaction: ProxyInteraction
        if lender is not None:
            self.interaction = BorrowedAttention(lender)
        else:
            self.interaction = make_interaction(
                config.proxy_interaction,
                size=size,
                heads=config.num_attention_heads,
                head_dim=config.head_dim,
                intermediate=config.intermediate_size if size == config.hidden_size else 3 * size,
                eps=eps,
                out_scale=scale,
                condition_size=config.condition_size,
            )
        self.injection: Injection | None = None
        self.decompress: Decompress | None = None
        if layer_idx < config.num_hidden_layers - 1:
            self.injection = Injection(config.injection, local, size, eps)
            if self.injection.uses_delta:
                factors, widths = compression_levels(config, self.ratio)
                self.decompress = Decompress(factors, widths, eps, 2 * scale)

    def summarise(self, local: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """c of Eq. 3: `(batch, tokens, d_h)`, and the `overlap` tokens before, to `(batch, proxies, d_proxy)`."""
        if not self.overlap:
            return self.compress(local.unflatten(1, (-1, self.ratio)))
        if before is None:
            before = local.new_zeros(local.shape[0], self.overlap, local.shape[2])
        windows = torch.cat([before, local], dim=1).unfold(1, self.ratio + self.overlap, self.ratio)
        return self.compress(windows.transpose(-1, -2))

    def inject(self, local: torch.Tensor, proxies: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """X^(l) of Eq. 6: local features `(batch, tokens, d_h)` with what the proxies say of them; 0 at padding."""
        if self.injection is None:
            return local
        blocks = local.unflatten(1, (-1, self.ratio))
        delta = torch.zeros_like(blocks) if self.decompress is None else self.decompress(proxies)
        local = self.injection(blocks, delta, proxies).flatten(1, 2)
        return local if real is None else local * real[..., None].to(local.dtype)

    def forward(
        self,
        local: torch.Tensor,
        proxies: torch.Tensor | None,
        real: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
        past: tuple[torch.Tensor | None, ...] | None = None,
        condition: torch.Tensor | None = None,
        angles: RotaryAngles | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the layer.

        Args:
            local: `(batch, tokens, d_h)`, tokens a multiple of the layer's ratio.
            proxies: of the layer before, `(batch, proxies, d_proxy)`, or `None`.
            real: `(batch, tokens)`, bool, where there is padding.
            before: local features of the `overlap` tokens before these.
            past: what the interaction keeps of earlier proxies.
            condition: `(batch, states, condition size)`.
            angles: of the proxies' positions, where attention turns them.

        Returns:
            Local features, proxies, and what the interaction keeps of these proxies.
        """
        compressed = self.summarise(local, before)
        proxies, state = self.interact(proxies, compressed, real, past, condition, angles)
        return self.inject(local, proxies, real), proxies, state

    def interact(
        self,
        proxies: torch.Tensor | None,
        compressed: torch.Tensor,
        real: torch.Tensor | None,
        past: tuple[torch.Tensor | None, ...] | None,
        condition: torch.Tensor | None,
        angles: RotaryAngles | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """H̄ of Eq. 4 from the proxies of the layer before and c."""
        updated = self.update(None if self.starts_anew else proxies, compressed)
        valid = None if real is None else real.unflatten(1, (-1, self.ratio)).any(-1)
        if past is None and isinstance(self.interaction, CausalAttentionInteraction) and self.interaction.causal:
            valid = None  # padding is behind all real proxies, where no causal query looks
        return self.interaction(
            updated,
            past=past,
            valid=valid,
            condition=condition,
            positions=None if angles is None else angles.positions,
            rotary=None if angles is None else angles.turn,
        )


class BorrowedAttention(CausalAttentionInteraction):
    """Causal attention among proxies with the weights of a block that belongs to another module."""

    def __init__(self, lender: AttentionBlock) -> None:
        ProxyInteraction.__init__(self)
        self._lender = (lender,)  # in a tuple, so that its parameters are listed once, where they belong

    @property
    def block(self) -> AttentionBlock:  # type: ignore[override]
        lender = self._lender[0]
        if hasattr(lender.q_proj.weight, "full_tensor"):
            raise ValueError(
                "share_proxy_generation_weights=True: a history layer uses weights of a generation layer, which FSDP2 "
                "has spread over the devices at that time. Train with DDP or DeepSpeed ZeRO-3, or without sharing."
            )
        return lender


def compression_levels(config: Any, block: int) -> tuple[Sequence[tuple[int, ...]], Sequence[int]]:
    """Factors and widths of the compression of `block` tokens (Eq. 15 and 16)."""
    given = config.compression_factors
    if given is not None and math.prod(given) == block:
        factors: Sequence[tuple[int, ...]] = [(factor,) for factor in given]
    else:
        factors = factor_block((block,))
    widths = config.compression_widths
    if widths is None or len(widths) != len(factors) + 1:
        widths = level_widths(config.history_hidden_size, config.proxy_size, len(factors))
    return factors, widths


@dataclass
class HistoryResult:
    """What the history stream made of some blocks.

    Args:
        proxies: H̄ of each layer, `(batch, proxies, d_proxy)`.
        valid: for each layer `(batch, proxies)`, which proxies stand for a real token; `None` if all do.
        states: for each layer what its interaction keeps.
        tails: for each layer the local features that the next block's compression reads, `(batch, overlap, d_h)`.
        local: the local stream at the end, `(batch, tokens, d_h)`; `None` where it has not been kept.
    """

    proxies: list[torch.Tensor]
    valid: list[torch.Tensor | None]
    states: list[tuple[torch.Tensor, ...]]
    tails: list[torch.Tensor | None]
    local: torch.Tensor | None
