"""Blocks of a local stream into one proxy each, and back (ProxyFormer, Section 3.2 and 3.5, Eq. 2, 7, 10, 15-17).

Everything works on any number of dimensions: text has one, images two, video and voxels three.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .rms_norm import RMSNorm

# ---------------------------------------------------------------------------------------------------------------------
# Partition
# ---------------------------------------------------------------------------------------------------------------------


def split_blocks(x: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """Partition a stream into blocks that do not overlap (Eq. 2).

    Args:
        x: `(batch, N_1, …, N_D, d)`.
        block: sizes `(p_1, …, p_D)` of a block.

    Returns:
        `(batch, m_1, …, m_D, p_1, …, p_D, d)` with `m_i = ceil(N_i / p_i)`; places behind the end of `x` are zeros. A
        view of `x` where it has one dimension and needs no padding.

    Raises:
        ValueError: `block` does not have one positive size for each dimension of `x`.
    """
    block = _sizes("block", block)
    if x.ndim != len(block) + 2:
        raise ValueError(
            f"A block of {len(block)} dimensions {block} splits (batch, {len(block)} sizes, d), got a tensor of shape "
            f"{tuple(x.shape)}."
        )
    sizes = x.shape[1:-1]
    missing = [-size % side for size, side in zip(sizes, block, strict=True)]
    if any(missing):
        # F.pad counts from the last dimension on, which is d.
        x = F.pad(x, [0, 0] + [pad for after in reversed(missing) for pad in (0, after)])
    counts = [(size + after) // side for size, after, side in zip(sizes, missing, block, strict=True)]
    return _fold(x, counts, block, leading=1)


def join_blocks(blocks: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Undo `split_blocks`.

    Args:
        blocks: `(batch, m_1, …, m_D, p_1, …, p_D, d)`.
        sizes: `(N_1, …, N_D)` of the stream; what lies behind is cut off.

    Returns:
        `(batch, N_1, …, N_D, d)`.

    Raises:
        ValueError: `sizes` does not fit: other dimensions, or other numbers of blocks than `ceil(N_i / p_i)`.
    """
    sizes = tuple(sizes)
    dims = len(sizes)
    if not dims or blocks.ndim != 2 * dims + 2:
        raise ValueError(
            f"sizes {sizes} name {dims} dimensions, so blocks must have {2 * dims + 2}: (batch, numbers of blocks, "
            f"sides of a block, d); got shape {tuple(blocks.shape)}."
        )
    counts, block = tuple(blocks.shape[1 : 1 + dims]), tuple(blocks.shape[1 + dims : -1])
    expected = tuple(-(-size // side) for size, side in zip(sizes, block, strict=True))
    if counts != expected:
        raise ValueError(f"sizes {sizes} make {expected} blocks of {block}, got {counts} blocks.")
    x = _unfold(blocks, counts, block, leading=1)
    for dim, size in enumerate(sizes, start=1):
        x = x.narrow(dim, 0, size)
    return x


def _fold(x: torch.Tensor, counts: Sequence[int], block: Sequence[int], leading: int) -> torch.Tensor:
    """`(leading dims, m_1·p_1, …, m_D·p_D, d)` to `(leading dims, m_1, …, m_D, p_1, …, p_D, d)`."""
    dims = len(block)
    pairs = [side for pair in zip(counts, block, strict=True) for side in pair]
    x = x.reshape(*x.shape[:leading], *pairs, x.shape[-1])
    if dims == 1:
        return x
    first = range(leading, leading + 2 * dims, 2)
    return x.permute(*range(leading), *first, *(place + 1 for place in first), leading + 2 * dims)


def _unfold(x: torch.Tensor, counts: Sequence[int], block: Sequence[int], leading: int) -> torch.Tensor:
    """`(leading dims, m_1, …, m_D, p_1, …, p_D, d)` to `(leading dims, m_1·p_1, …, m_D·p_D, d)`."""
    dims = len(block)
    if dims > 1:
        places = [place for i in range(dims) for place in (leading + i, leading + dims + i)]
        x = x.permute(*range(leading), *places, leading + 2 * dims)
    return x.reshape(
        *x.shape[:leading], *(count * side for count, side in zip(counts, block, strict=True)), x.shape[-1]
    )


def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Positive sizes as a tuple.

    Raises:
        ValueError: none, or one that is not positive.
    """
    sizes = tuple(sizes)
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"{name} must hold one positive size for each dimension, got {sizes}.")
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Factors and widths
# ---------------------------------------------------------------------------------------------------------------------


def factor_block(block: Sequence[int], limit: int = 4) -> list[tuple[int, ...]]:
    """Default factors of a block for `Compress` (Eq. 15): 64 is 4 · 4 · 4, and 8 × 8 is three times 2 × 2.

    Args:
        block: sizes `(p_1, …, p_D)`.
        limit: elements that one level joins at most, unless a size has a prime factor above it.

    Returns:
        Factors `(k_1, …, k_D)`, the level nearest to the local stream first; a block of one element has one level
        of ones.

    Raises:
        ValueError: `block` without a positive size for each dimension, or a limit below 2.
    """
    left = list(_sizes("block", block))
    if limit < 2:
        raise ValueError(f"limit must be at least 2, got {limit}.")
    levels: list[tuple[int, ...]] = []
    while not levels or any(size > 1 for size in left):
        level = [1] * len(left)
        while True:
            # The longest side first keeps levels as near to cubes as the block allows.
            dim = max(range(len(left)), key=lambda i: left[i])
            prime = next((k for k in range(2, math.isqrt(left[dim]) + 1) if left[dim] % k == 0), left[dim])
            started = math.prod(level) > 1
            if prime == 1 or (started and math.prod(level) * prime > limit):
                break
            level[dim] *= prime
            left[dim] //= prime
        levels.append(tuple(level))
    return levels


def level_widths(first: int, last: int, levels: int) -> list[int]:
    """Default widths of `Compress`, in equal ratios from `first` to `last`: 64, 128, 256, 512.

    Args:
        first, last: `d_h` and `d_p`, kept as they are.
        levels: number of levels M.

    Returns:
        `levels + 1` widths; those between are multiples of 8 where they are above 16.

    Raises:
        ValueError: a width or a number of levels below 1.
    """
    if min(first, last, levels) < 1:
        raise ValueError(f"Widths and levels must be at least 1, got first {first}, last {last}, levels {levels}.")
    widths = [first]
    for level in range(1, levels):
        exact = first * (last / first) ** (level / levels)
        rounded = 8 * round(exact / 8) if exact > 16 else round(exact)
        widths.append(min(max(rounded, min(first, last)), max(first, last)))
    return [*widths, last]


def _levels(
    factors: Sequence[int | Sequence[int]], widths: Sequence[int]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Factors as tuples, and the block that they multiply to.

    Raises:
        ValueError: no factors, factors of several dimensions, sizes below 1, or not one width more than factors.
    """
    if not factors:
        raise ValueError("factors must name at least one level; one level with the whole block is a plain projection.")
    levels = [_sizes("factors", (factor,) if isinstance(factor, int) else factor) for factor in factors]
    if len({len(level) for level in levels}) > 1:
        raise ValueError(f"All factors must have the same number of dimensions, got {levels}.")
    if len(widths) != len(levels) + 1 or min(widths) < 1:
        raise ValueError(
            f"{len(levels)} factors {levels} need {len(levels) + 1} positive widths (d_h, …, d_p), got {list(widths)}."
        )
    return levels, tuple(math.prod(sides) for sides in zip(*levels, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Compression and decompression
# ---------------------------------------------------------------------------------------------------------------------


class Compress(nn.Module):
    """A block of local features to one vector (Eq. 15-16); with one factor it is Eq. 7.

    RMSNorm, then level by level: `k_j` neighbours are joined along the channels and projected to `d_j`, with a SiLU
    between two levels and none behind the last.

    Args:
        factors: `k_1, …, k_M`, the level nearest to the local stream first; each an int, or a tuple of one size a
            dimension. Their product is the block.
        widths: `d_0, …, d_M`, from the local stream's to the proxies'.
        eps: of the norm.

    Raises:
        ValueError: factors and widths that do not fit each other.
    """

    def __init__(self, factors: Sequence[int | Sequence[int]], widths: Sequence[int], eps: float = 1e-6) -> None:
        super().__init__()
        self.factors, self.block = _levels(factors, widths)
        self.widths = tuple(widths)
        self.norm = RMSNorm(widths[0], eps=eps)
        self.projections = nn.ModuleList(
            nn.Linear(math.prod(factor) * width, wider, bias=False)
            for factor, width, wider in zip(self.factors, widths[:-1], widths[1:], strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compress blocks.

        Args:
            x: `(…, p_1, …, p_D, d_0)`.

        Returns:
            `(…, d_M)`.

        Raises:
            ValueError: blocks of another shape.
        """
        dims = len(self.block)
        expected = (*self.block, self.widths[0])
        if tuple(x.shape[-dims - 1 :]) != expected:
            raise ValueError(f"Blocks to compress must end in {expected}, got shape {tuple(x.shape)}.")
        leading = x.ndim - dims - 1
        sizes = self.block
        x = self.norm(x)
        for level, (factor, projection) in enumerate(zip(self.factors, self.projections, strict=True)):
            if level:
                x = F.silu(x)
            sizes = tuple(size // k for size, k in zip(sizes, factor, strict=True))
            x = projection(_fold(x, sizes, factor, leading).flatten(leading + dims))
        return x.flatten(leading)


class Decompress(nn.Module):
    """One vector back to a block of local features (Eq. 10 and 17), the mirror of `Compress`.

    Args:
        factors, widths: as given to `Compress`, in the same order.
        eps: of the norm.
        scale: `init_scale` of the last projection, for the model's initialisation; a small one makes a new model's
            local stream start near the identity.

    Raises:
        ValueError: factors and widths that do not fit each other.
    """

    def __init__(
        self,
        factors: Sequence[int | Sequence[int]],
        widths: Sequence[int],
        eps: float = 1e-6,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.factors, self.block = _levels(factors, widths)
        self.widths = tuple(widths)
        self.norm = RMSNorm(widths[-1], eps=eps)
        # In the order in which they run: from the proxy down to the local stream.
        self.projections = nn.ModuleList(
            nn.Linear(wider, math.prod(factor) * width, bias=False)
            for factor, width, wider in reversed(list(zip(self.factors, widths[:-1], widths[1:], strict=True)))
        )
        self.projections[-1].init_scale = scale  # type: ignore[assignment]

    def forward(self, proxies: torch.Tensor) -> torch.Tensor:
        """Decompress proxies.

        Args:
            proxies: `(…, d_M)`.

        Returns:
            `(…, p_1, …, p_D, d_0)`.

        Raises:
            ValueError: proxies of another width.
        """
        if proxies.shape[-1] != self.widths[-1]:
            raise ValueError(
                f"Proxies to decompress must be {self.widths[-1]} wide, got shape {tuple(proxies.shape)}."
            )
        leading = proxies.ndim - 1
        sizes: tuple[int, ...] = (1,) * len(self.block)
        x = self.norm(proxies).view(*proxies.shape[:-1], *sizes, self.widths[-1])
        narrower = reversed(self.widths[:-1])
        levels = zip(reversed(self.factors), narrower, self.projections, strict=True)
        for level, (factor, width, projection) in enumerate(levels):
            if level:
                x = F.silu(x)
            x = projection(x).unflatten(-1, (*factor, width))
            x = _unfold(x, sizes, factor, leading)
            sizes = tuple(size * k for size, k in zip(sizes, factor, strict=True))
        return x
