"""Partition, compression and decompression in one to three dimensions, against loops over blocks and elements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from nearfar.modeling.block_compression import (
    Compress,
    Decompress,
    factor_block,
    join_blocks,
    level_widths,
    split_blocks,
)

EPS = 1e-6
# Sizes of the stream and of a block; none, some and all sizes are multiples of the block's.
SHAPES = [
    ((12,), (4,)),
    ((13,), (4,)),
    ((3,), (8,)),
    ((6, 8), (2, 4)),
    ((5, 7), (2, 4)),
    ((4, 7), (4, 3)),
    ((2, 4, 6), (2, 2, 2)),
    ((3, 4, 5), (2, 2, 4)),
]
# Factors and widths, from one projection to three levels, in one to three dimensions.
LEVELS: list[tuple[list[int] | list[tuple[int, ...]], list[int]]] = [
    ([6], [3, 7]),
    ([4, 2], [3, 5, 7]),
    ([2, 3, 2], [3, 4, 5, 6]),
    ([1, 2], [3, 3, 4]),
    ([(2, 3)], [3, 5]),
    ([(2, 2), (1, 3)], [3, 5, 4]),
    ([(1, 2), (2, 2), (3, 1)], [2, 5, 4, 6]),
    ([(1, 2, 2), (2, 2, 1)], [3, 4, 7]),
]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def places(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in sizes)))


def as_tuples(factors: list[int] | list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [(factor,) if isinstance(factor, int) else factor for factor in factors]


def normalise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean() + EPS).sqrt() * weight


def slow_compress(module: Compress, block: torch.Tensor, factors: list[tuple[int, ...]]) -> torch.Tensor:
    """One block `(p_1, …, p_D, d_0)` to `(d_M,)`, an element at a time (Eq. 16)."""
    sizes = tuple(block.shape[:-1])
    features = {place: normalise(block[place], module.norm.weight) for place in places(sizes)}
    for level, (factor, projection) in enumerate(zip(factors, module.projections, strict=True)):
        sizes = tuple(size // k for size, k in zip(sizes, factor, strict=True))
        joined = {}
        for place in places(sizes):
            parts = [
                features[tuple(i * k + j for i, k, j in zip(place, factor, inner, strict=True))]
                for inner in places(factor)
            ]
            joined[place] = projection.weight @ torch.cat([F.silu(part) if level else part for part in parts])
        features = joined
    (result,) = features.values()
    return result


def slow_decompress(module: Decompress, proxy: torch.Tensor, factors: list[tuple[int, ...]]) -> torch.Tensor:
    """`(d_M,)` to one block `(p_1, …, p_D, d_0)`, an element at a time (Eq. 17)."""
    sizes = (1,) * len(factors[0])
    features = {places(sizes)[0]: normalise(proxy, module.norm.weight)}
    for level, (factor, projection) in enumerate(zip(reversed(factors), module.projections, strict=True)):
        spread = {}
        for place in places(sizes):
            part = projection.weight @ (F.silu(features[place]) if level else features[place])
            pieces = part.chunk(math.prod(factor))
            for inner, piece in zip(places(factor), pieces, strict=True):
                spread[tuple(i * k + j for i, k, j in zip(place, factor, inner, strict=True))] = piece
        features = spread
        sizes = tuple(size * k for size, k in zip(sizes, factor, strict=True))
    return torch.stack([features[place] for place in places(sizes)]).view(*sizes, -1)


def randomise_norms(module: torch.nn.Module) -> None:
    """Weights of 1 would hide a norm's weight that is never used."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)


# ---------------------------------------------------------------------------------------------------------------------
# Partition
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "block"), SHAPES)
def test_partition_against_a_loop(sizes: tuple[int, ...], block: tuple[int, ...]) -> None:
    x = draw(2, *sizes, 3)
    counts = tuple(-(-size // side) for size, side in zip(sizes, block, strict=True))
    reference = torch.zeros(2, *counts, *block, 3, dtype=torch.float64)
    for place in places(sizes):
        outer = tuple(i // side for i, side in zip(place, block, strict=True))
        inner = tuple(i % side for i, side in zip(place, block, strict=True))
        reference[(slice(None), *outer, *inner)] = x[(slice(None), *place)]
    blocks = split_blocks(x, block)
    assert torch.equal(blocks, reference)
    assert torch.equal(join_blocks(blocks, sizes), x)


@pytest.mark.parametrize(("sizes", "block"), SHAPES)
def test_gradients_pass_the_partition(sizes: tuple[int, ...], block: tuple[int, ...]) -> None:
    x = draw(2, *sizes, 3).requires_grad_()
    towards = draw(2, *sizes, 3)
    (gradient,) = torch.autograd.grad(join_blocks(split_blocks(x, block) * 2, sizes), x, towards)
    assert torch.equal(gradient, 2 * towards)


def test_a_sequence_is_partitioned_without_a_copy() -> None:
    x = draw(2, 12, 3)
    blocks = split_blocks(x, (4,))
    assert blocks.data_ptr() == x.data_ptr()
    assert join_blocks(blocks, (12,)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("block", [(), (0,), (-2,), (2, 2)])
def test_partition_refuses_other_blocks(block: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="block"):
        split_blocks(draw(2, 12, 3), block)


@pytest.mark.parametrize("sizes", [(), (12, 1), (13,), (8,)])
def test_joining_refuses_other_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        join_blocks(split_blocks(draw(2, 12, 3), (4,)), sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Factors and widths
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ((64,), [(4,), (4,), (4,)]),
        ((32,), [(4,), (4,), (2,)]),
        ((2,), [(2,)]),
        ((1,), [(1,)]),
        ((7,), [(7,)]),
        ((10,), [(2,), (5,)]),
        ((4, 4), [(2, 2), (2, 2)]),
        ((2, 2), [(2, 2)]),
        ((8, 8), [(2, 2), (2, 2), (2, 2)]),
        ((2, 4, 4), [(1, 2, 2), (2, 2, 1), (1, 1, 2)]),
    ],
)
def test_default_factors(block: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    assert factor_block(block) == expected


@pytest.mark.parametrize("limit", [2, 4, 8])
def test_default_factors_multiply_to_the_block(limit: int) -> None:
    blocks = [(size,) for size in range(1, 130)] + [(a, b) for a in range(1, 13) for b in range(1, 13)]
    for block in [*blocks, (2, 4, 6), (3, 5, 7)]:
        factors = factor_block(block, limit)
        assert tuple(math.prod(sides) for sides in zip(*factors, strict=True)) == block
        for factor in factors:
            joined = math.prod(factor)
            is_prime = all(joined % k for k in range(2, joined))
            assert joined <= limit or is_prime
            assert joined > 1 or math.prod(block) == 1


def test_default_widths() -> None:
    assert level_widths(64, 512, 3) == [64, 128, 256, 512]
    assert level_widths(64, 512, 1) == [64, 512]
    assert level_widths(64, 512, 2) == [64, 184, 512]
    assert level_widths(64, 64, 3) == [64, 64, 64, 64]
    assert level_widths(512, 64, 3) == [512, 256, 128, 64]
    assert level_widths(3, 20, 2) == [3, 8, 20]
    for first, last, levels in itertools.product((1, 5, 64), (7, 100, 512), (1, 2, 5)):
        widths = level_widths(first, last, levels)
        assert len(widths) == levels + 1
        assert sorted(widths, reverse=first > last) == widths


def test_default_factors_and_widths_refuse_what_is_not_positive() -> None:
    for block in [(), (0,), (4, -1)]:
        with pytest.raises(ValueError, match="block"):
            factor_block(block)
    with pytest.raises(ValueError, match="limit"):
        factor_block((4,), 1)
    for bad in [(0, 4, 2), (4, 0, 2), (4, 4, 0)]:
        with pytest.raises(ValueError, match="at least 1"):
            level_widths(*bad)


# ---------------------------------------------------------------------------------------------------------------------
# Compression and decompression
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factors", "widths"), LEVELS)
def test_compression_against_a_loop(factors: list[int] | list[tuple[int, ...]], widths: list[int]) -> None:
    module = Compress(factors, widths, EPS).double()
    randomise_norms(module)
    x = draw(2, 3, *module.block, widths[0])
    out = module(x)
    assert out.shape == (2, 3, widths[-1])
    for i, j in itertools.product(range(2), range(3)):
        assert (out[i, j] - slow_compress(module, x[i, j], as_tuples(factors))).abs().max() <= 1e-12


@pytest.mark.parametrize(("factors", "widths"), LEVELS)
def test_decompression_against_a_loop(factors: list[int] | list[tuple[int, ...]], widths: list[int]) -> None:
    module = Decompress(factors, widths, EPS, 1.0).double()
    randomise_norms(module)
    proxies = draw(2, 3, widths[-1])
    out = module(proxies)
    assert out.shape == (2, 3, *module.block, widths[0])
    for i, j in itertools.product(range(2), range(3)):
        assert (out[i, j] - slow_decompress(module, proxies[i, j], as_tuples(factors))).abs().max() <= 1e-12


@pytest.mark.parametrize(("sizes", "block"), SHAPES)
def test_stream_to_proxies_and_back(sizes: tuple[int, ...], block: tuple[int, ...]) -> None:
    """A whole layer's way, with sizes that are no multiples: every block alone gives the same."""
    factors = factor_block(block)
    widths = level_widths(3, 8, len(factors))
    compress, decompress = Compress(factors, widths, EPS).double(), Decompress(factors, widths, EPS, 1.0).double()
    x = draw(2, *sizes, 3).requires_grad_()
    blocks = split_blocks(x, block)
    proxies = compress(blocks)
    assert proxies.shape == (*blocks.shape[: 1 + len(sizes)], 8)
    out = join_blocks(decompress(proxies), sizes)
    assert out.shape == x.shape
    reference = torch.zeros_like(out)
    for row in range(2):
        for outer in places(tuple(blocks.shape[1 : 1 + len(sizes)])):
            back = slow_decompress(decompress, slow_compress(compress, blocks[(row, *outer)], factors), factors)
            for inner in places(block):
                place = tuple(o * side + i for o, side, i in zip(outer, block, inner, strict=True))
                if all(p < size for p, size in zip(place, sizes, strict=True)):
                    reference[(row, *place)] = back[inner]
    assert (out - reference).abs().max() <= 1e-12
    out.sum().backward()
    assert x.grad is not None and (x.grad.abs().sum(-1) > 0).all()
    for parameter in [*compress.parameters(), *decompress.parameters()]:
        assert parameter.grad is not None and parameter.grad.abs().max() > 0


def test_gradients_by_finite_differences() -> None:
    compress, decompress = Compress([2, 2], [2, 3, 4]).double(), Decompress([2, 2], [2, 3, 4]).double()
    assert torch.autograd.gradcheck(lambda x: decompress(compress(x)), (draw(2, 4, 2).requires_grad_(),))


def test_factors_save_parameters() -> None:
    """Section 3.5: P = 64 in three levels has 0.31 M parameters a layer, one projection 2.10 M."""

    def weights(module: Compress | Decompress) -> int:
        return sum(parameter.numel() for parameter in module.projections.parameters())

    widths = [64, 64, 128, 512]
    assert weights(Compress([4, 4, 4], widths)) == 4 * 64 * 64 + 4 * 64 * 128 + 4 * 128 * 512 == 311_296
    assert weights(Decompress([4, 4, 4], widths)) == 311_296
    assert weights(Compress([64], [64, 512])) == weights(Decompress([64], [64, 512])) == 2_097_152


def test_one_level_is_a_plain_projection() -> None:
    module = Compress([6], [3, 7], EPS).double()
    x = draw(5, 6, 3)
    wanted = F.rms_norm(x, (3,), eps=EPS).flatten(1) @ module.projections[0].weight.T
    assert (module(x) - wanted).abs().max() <= 1e-12


def test_only_the_last_projection_of_decompression_is_scaled() -> None:
    module = Decompress([2, 2], [3, 4, 5], scale=0.25)
    assert [getattr(linear, "init_scale", 1.0) for linear in module.projections] == [1.0, 0.25]
    assert module.projections[-1].out_features == 2 * 3


@pytest.mark.parametrize("kind", [Compress, Decompress])
@pytest.mark.parametrize(
    ("factors", "widths", "message"),
    [
        ([], [4], "at least one level"),
        ([4, 0], [2, 3, 4], "positive size"),
        ([(2, 2), 4], [2, 3, 4], "same number of dimensions"),
        ([4, 4], [2, 3], "2 factors .* need 3 positive widths"),
        ([4], [2, 3, 4], "1 factors .* need 2 positive widths"),
        ([4], [0, 3], "positive widths"),
    ],
)
def test_factors_and_widths_that_do_not_fit(
    kind: type[Compress] | type[Decompress], factors: list[int], widths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(factors, widths)


def test_inputs_of_another_shape() -> None:
    for shape in [(2, 8, 4), (2, 4, 3), (4,)]:
        with pytest.raises(ValueError, match=r"must end in \(4, 4\)"):
            Compress([2, 2], [4, 5, 6])(torch.randn(shape))
    with pytest.raises(ValueError, match="6 wide"):
        Decompress([2, 2], [4, 5, 6])(torch.randn(2, 5))
