"""Blocks whose elements lie in the order in which a factorised compression joins them (ProxyFormer, Eq. 15 and 16).

`Compress` over several dimensions joins neighbours, which lie apart in memory: each level copies its input. With the
elements of a block sorted by level once, the same compression is one over a single dimension, whose levels are views.
A model sorts its pixels, of few channels, on the way in and on the way out, and its wide local stream never moves.
"""

import math
from collections.abc import Sequence

import torch

from .block_compression import join_blocks, split_blocks


def flat_factors(factors: Sequence[Sequence[int]]) -> list[tuple[int]]:
    """The factors of a compression of nested blocks: (2, 2) and (1, 4) are 4 and 4."""
    return [(math.prod(level),) for level in factors]


def nest_blocks(x: torch.Tensor, factors: Sequence[Sequence[int]]) -> torch.Tensor:
    """Partition a stream (Eq. 2) and sort each block's elements by level.

    `Compress(flat_factors(factors), …)` of the result is `Compress(factors, …)` of `split_blocks`, number by number.

    Args:
        x: `(batch, N_1, …, N_D, d)`; filled up with zeros to a multiple of the block.
        factors: one tuple (k_1, …, k_D) a level, the finest first; their product is the block.

    Returns:
        `(batch, blocks, elements of a block, d)`, blocks in the order of their places.

    Raises:
        ValueError: a stream of another number of dimensions.
    """
    dims = len(factors[0])
    block = tuple(math.prod(sides) for sides in zip(*factors, strict=True))
    blocks = split_blocks(x, block)
    counts = blocks.shape[1 : 1 + dims]
    levels = len(factors)
    # Each side of a block as (coarsest, …, finest) factor; then all sides' coarsest factors come first.
    sides = [level[dim] for dim in range(dims) for level in reversed(factors)]
    x = blocks.reshape(blocks.shape[0], *counts, *sides, blocks.shape[-1])
    first = 1 + dims
    order = [first + dim * levels + level for level in range(levels) for dim in range(dims)]
    x = x.permute(*range(first), *order, first + dims * levels)
    return x.reshape(x.shape[0], math.prod(counts), math.prod(block), x.shape[-1])


def unnest_blocks(x: torch.Tensor, factors: Sequence[Sequence[int]], sizes: Sequence[int]) -> torch.Tensor:
    """Undo `nest_blocks`.

    Args:
        x: `(batch, blocks, elements of a block, d)`.
        factors: as given to `nest_blocks`.
        sizes: `(N_1, …, N_D)`; what lies behind is cut off.

    Returns:
        `(batch, N_1, …, N_D, d)`.

    Raises:
        ValueError: sizes that make another number of blocks.
    """
    dims, levels = len(factors[0]), len(factors)
    block = tuple(math.prod(sides) for sides in zip(*factors, strict=True))
    counts = block_counts(sizes, block)
    if x.ndim != 4 or x.shape[1:3] != (math.prod(counts), math.prod(block)):
        raise ValueError(
            f"sizes {tuple(sizes)} make {math.prod(counts)} blocks of {math.prod(block)} elements, got a tensor of "
            f"shape {tuple(x.shape)}."
        )
    nested = [level[dim] for level in reversed(factors) for dim in range(dims)]
    first = 1 + dims
    x = x.reshape(x.shape[0], *counts, *nested, x.shape[-1])
    order = [first + level * dims + dim for dim in range(dims) for level in range(levels)]
    x = x.permute(*range(first), *order, first + dims * levels)
    return join_blocks(x.reshape(x.shape[0], *counts, *block, x.shape[-1]), sizes)


def block_counts(sizes: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Blocks along each dimension, the last one filled up."""
    return tuple(-(-size // side) for size, side in zip(sizes, block, strict=True))
