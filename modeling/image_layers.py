"""Layers of ProxyFormer in one, two or three dimensions (Eq. 2 to 6, Section 3.9), and a stack of them.

Shapes: the local stream `(batch, patches, elements of a patch, d_fine)`, its elements in the order of `nested_blocks`;
proxies `(batch, patches, d)`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .axial_positions import AxialRotary, sinusoidal_grid
from .block_compression import Compress, Decompress, factor_block, level_widths
from .condition_attention import ConditionAttention
from .nested_blocks import block_counts, flat_factors, nest_blocks, unnest_blocks
from .proxy_injection import Injection
from .proxy_interaction import make_interaction
from .proxy_update import ProxyUpdate
from .rms_norm import RMSNorm

# `(…, features)` to `(…, other features)`.
ElementwiseMap = Callable[[torch.Tensor], torch.Tensor]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ImageLayer(GradientCheckpointingLayer):
    """Compress, update, attend to the condition and to each other, decompress, inject.

    The time scales and shifts what each stream receives: the compressed patches, and what is injected.

    Args:
        factors: levels of the compression, one tuple (k_1, …, k_D) each.
        widths: d_fine, …, d.
        heads, head_dim, intermediate: of the interaction.
        starts_anew: whether the proxies are extracted anew instead of updated.
        eps: of all norms.
        out_scale: `init_scale` of projections into residual streams.
        update, interaction, injection: kinds of U, F and Φ.
        time_size: width of the time's embedding; `None` for no time.
        condition_size: width of the condition that this layer attends to; `None` for none.
        convolution: side of the depthwise convolution behind the injection; 0 for none.
    """

    def __init__(
        self,
        factors: Sequence[Sequence[int]],
        widths: Sequence[int],
        heads: int,
        head_dim: int,
        intermediate: int,
        starts_anew: bool,
        eps: float = 1e-6,
        out_scale: float = 1.0,
        update: str = "residual",
        interaction: str = "bidirectional_attention",
        injection: str = "residual",
        time_size: int | None = None,
        condition_size: int | None = None,
        convolution: int = 0,
    ) -> None:
        super().__init__()
        local, size = widths[0], widths[-1]
        self.factors = [tuple(level) for level in factors]
        self.starts_anew = starts_anew
        flat = flat_factors(self.factors)
        self.compress = Compress(flat, widths, eps)
        self.update = ProxyUpdate(update, size)
        self.condition_attention: ConditionAttention | None = None
        if condition_size is not None:
            self.condition_attention = ConditionAttention(size, heads, head_dim, condition_size, eps, out_scale)
        self.interaction = make_interaction(interaction, size, heads, head_dim, intermediate, eps, out_scale)
        self.injection = Injection(injection, local, size, eps)
        self.decompress: Decompress | None = None
        if self.injection.uses_delta:
            self.decompress = Decompress(flat, widths, eps, 2 * out_scale)
        self.time_proj: nn.Linear | None = None
        if time_size is not None:
            outputs = 2 * size + (2 * local if self.injection.uses_delta else 0)
            self.time_proj = nn.Linear(time_size, outputs)
            self.time_proj.init_scale = 0.2  # type: ignore[assignment]
        self.convolution: LocalConvolution | None = None
        if convolution:
            self.convolution = LocalConvolution(len(self.factors[0]), local, convolution, eps, out_scale)
        self._widths = (size, local)

    @property
    def patch(self) -> tuple[int, ...]:
        """(p_1, …, p_D)."""
        return tuple(math.prod(sides) for sides in zip(*self.factors, strict=True))

    def forward(
        self,
        local: torch.Tensor,
        proxies: torch.Tensor | None,
        time: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
        condition_valid: torch.Tensor | None = None,
        rotary: AxialRotary | None = None,
        places: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            local: `(batch, patches, elements, d_fine)`.
            proxies: of the layer before, `(batch, patches, d)`, or `None`.
            time: `(batch, time size)`.
            condition: `(batch, states, condition size)`, for a layer that attends to it.
            condition_valid: `(batch, states)`, bool; `None` for all.
            rotary: turns queries and keys of the proxies.
            places: `(patches, d)`, added where proxies are extracted anew.
            sizes: (N_1, …, N_D), filled up; needed for a convolution.

        Returns:
            The local stream and the proxies.
        """
        compressed = self.compress(local)
        scale = shift = None
        if self.time_proj is not None:
            if time is None:
                raise ValueError("The layer was made for a time, which is missing.")
            size, width = self._widths
            split = [size, size, width, width] if self.decompress is not None else [size, size]
            parts = self.time_proj(time)[:, None].split(split, dim=-1)
            compressed = torch.addcmul(parts[1], compressed, 1 + parts[0])
            if self.decompress is not None:
                scale, shift = parts[2][:, None], parts[3][:, None]
        if places is not None and self.starts_anew:
            compressed = compressed + places.to(compressed.dtype)
        proxies = self.update(None if self.starts_anew else proxies, compressed)
        if self.condition_attention is not None:
            proxies, _ = self.condition_attention(proxies, condition=condition, condition_valid=condition_valid)
        proxies, _ = self.interaction(proxies, rotary=rotary)
        delta = None
        if self.decompress is not None:
            delta = self.decompress(proxies)
            if scale is not None and shift is not None:
                delta = torch.addcmul(shift, delta, 1 + scale)
        local = self.injection(local, delta, proxies)
        if self.convolution is not None:
            assert sizes is not None
            spatial = self.convolution(unnest_blocks(local, self.factors, sizes))
            local = nest_blocks(spatial, self.factors)
        return local, proxies


class LocalConvolution(nn.Module):
    """A depthwise convolution and a projection with a residual, which cross the borders of patches.

    Args:
        dims: D.
        width: d_fine.
        side: of the convolution, odd.
        eps: of the norm.
        out_scale: `init_scale` of the projection.
    """

    def __init__(self, dims: int, width: int, side: int, eps: float, out_scale: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=eps)
        self.mix = _CONVOLUTIONS[dims - 1](width, width, side, padding=side // 2, groups=width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.output.init_scale = out_scale  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, N_1, …, N_D, d_fine)` to the same."""
        mixed = self.mix(self.norm(x).movedim(-1, 1)).movedim(1, -1)
        return x + self.output(F.silu(mixed))


class ImageStack(nn.Module):
    """Layers over one image, from the embedded local stream on.

    Args:
        patches: (p_1, …, p_D) of each layer.
        local: d_fine.
        size: d.
        heads, head_dim, intermediate: of the interactions.
        eps: of all norms.
        rope_base: of the rotary embedding of proxies, or `None`.
        absolute_positions: add sines of a patch's place to new proxies.
        factors, widths: of the compression; `None` chooses them.
        condition_every: the condition is attended to in the first of each so many layers.
        update, interaction, injection, time_size, condition_size, convolution: see `ImageLayer`.
    """

    def __init__(
        self,
        patches: Sequence[tuple[int, ...]],
        local: int,
        size: int,
        heads: int,
        head_dim: int,
        intermediate: int,
        eps: float = 1e-6,
        rope_base: float | None = 100.0,
        absolute_positions: bool = True,
        factors: Sequence[Sequence[int]] | None = None,
        widths: Sequence[int] | None = None,
        condition_every: int = 1,
        update: str = "residual",
        interaction: str = "bidirectional_attention",
        injection: str = "residual",
        time_size: int | None = None,
        condition_size: int | None = None,
        convolution: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim, self.size = head_dim, size
        self.rope_base = rope_base if interaction == "bidirectional_attention" else None
        self.absolute_positions = absolute_positions
        # Each side is filled up to what all patches divide.
        self.side_multiples = tuple(math.lcm(*sides) for sides in zip(*patches, strict=True))
        layers = []
        for index, patch in enumerate(patches):
            levels = [tuple(level) for level in factors] if factors is not None else factor_block(patch)
            chosen = widths
            if chosen is None or len(chosen) != len(levels) + 1:
                chosen = level_widths(local, size, len(levels))
            layers.append(
                ImageLayer(
                    levels,
                    chosen,
                    heads,
                    head_dim,
                    intermediate,
                    starts_anew=index == 0 or patches[index - 1] != patch,
                    eps=eps,
                    out_scale=1.0 / math.sqrt(2 * len(patches)),
                    update=update,
                    interaction=interaction,
                    injection=injection,
                    time_size=time_size,
                    condition_size=condition_size if index % condition_every == 0 else None,
                    convolution=convolution,
                )
            )
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        x: torch.Tensor,
        embed: ElementwiseMap,
        heads: Sequence[tuple[int, ElementwiseMap]],
        time: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
        condition_valid: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Read an image and write what heads make of the local stream.

        Args:
            x: `(batch, N_1, …, N_D, channels)`.
            embed: channels to d_fine, element by element; not a module itself, which accelerate would move to the
                device of this one, away from its own inputs.
            heads: pairs of a layer's index and what reads the local stream behind it, element by element; no module
                either.
            time, condition, condition_valid: see `ImageLayer`.

        Returns:
            For each head `(batch, N_1, …, N_D, its channels)`, without what was filled up.
        """
        sizes = tuple(x.shape[1:-1])
        filled = tuple(-(-size // side) * side for size, side in zip(sizes, self.side_multiples, strict=True))
        for dim, (size, wanted) in enumerate(zip(reversed(sizes), reversed(filled), strict=True)):
            if wanted > size:
                x = F.pad(x, [0, 0] * (dim + 1) + [0, wanted - size])
        # Channels are few: they are sorted here rather than the local stream that is made of them.
        stacked: list[ImageLayer] = list(self.layers)  # type: ignore[arg-type]
        factors = stacked[0].factors
        local = embed(nest_blocks(x, factors))
        found: list[torch.Tensor] = []
        proxies: torch.Tensor | None = None
        rotary: AxialRotary | None = None
        places: torch.Tensor | None = None
        for index, layer in enumerate(stacked):
            if layer.starts_anew:
                if layer.factors != factors:
                    local = nest_blocks(unnest_blocks(local, factors, filled), layer.factors)
                    factors = layer.factors
                counts = block_counts(filled, layer.patch)
                dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
                if self.rope_base is not None:
                    rotary = AxialRotary(counts, self.head_dim, self.rope_base, x.device, dtype)
                if self.absolute_positions:
                    places = sinusoidal_grid(counts, self.size, x.device, dtype)
            local, proxies = layer(
                local, proxies, time, condition if layer.condition_attention is not None else None,
                condition_valid, rotary, places, filled,
            )  # fmt: skip
            for place, head in heads:
                if place == index:
                    found.append(unnest_blocks(head(local), factors, sizes if filled == sizes else filled))
        if filled != sizes:
            for dim, size in enumerate(sizes, start=1):
                found = [y.narrow(dim, 0, size) for y in found]
        return found


class LocalHead(nn.Module):
    """RMSNorm and a projection of the local stream, element by element.

    Args:
        width: d_fine.
        channels: of the result.
        eps: of the norm.
    """

    def __init__(self, width: int, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=eps)
        self.output_head = nn.Linear(width, channels)
        self.output_head.init_scale = 0.1  # type: ignore[assignment]

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        """`(…, d_fine)` to `(…, channels)`."""
        return self.output_head(self.norm(local))


@torch.no_grad()
def initialise_image_module(module: nn.Module, embedding_range: float = 0.02) -> None:
    """Weights of a new module, for `_init_weights`: N(0, `init_scale` / √inputs), biases 0 or N(0, `bias_scale`)."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        inputs = math.prod(module.weight.shape[1:])
        init.normal_(module.weight, mean=0.0, std=getattr(module, "init_scale", 1.0) / math.sqrt(inputs))
        if module.bias is not None:
            scale = getattr(module, "bias_scale", 0.0)
            if scale:
                init.normal_(module.bias, mean=0.0, std=scale)
            else:
                init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        init.normal_(module.weight, mean=0.0, std=embedding_range)
    elif isinstance(module, nn.RMSNorm):
        init.ones_(module.weight)
    elif isinstance(module, nn.BatchNorm1d):
        init.zeros_(module.running_mean)
        init.ones_(module.running_var)
        init.zeros_(module.num_batches_tracked)


def pixel_embedding(channels: int, width: int) -> nn.Linear:
    """A 1 × 1 convolution. Its random biases keep, behind a norm, how bright a pixel is and not only its sign."""
    linear = nn.Linear(channels, width)
    linear.bias_scale = 1.0  # type: ignore[assignment]
    return linear
