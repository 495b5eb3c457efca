"""One pass over a layer's keys and values for `FeatureMap`, in Triton: reads each pair once, writes only the outputs.

Done with ordinary operations, un-rotating float32 copies of the keys, norms and products touch the states some twenty
times and start as many kernels; at 32,000 tokens of an 8B model that is a third of the layer's own time. The slow
counterpart, and the definition, is `FeatureMap.__call__` in `prototype_scoring`.
"""

# Kernels are typed by their launch, and a CPU build of torch comes without Triton.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import TYPE_CHECKING

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

if TYPE_CHECKING:
    from .prototype_scoring import FeatureMap

# Tokens a program.
BLOCK = 32
# Largest tile of weights (dimension × outputs, padded): about 70 KB of shared memory, which every current GPU has.
LARGEST_TILE = 4096


def fused_features_available(keys: torch.Tensor, values: torch.Tensor, outputs: int) -> bool:
    """Whether `fused_features` serves: few outputs, on a GPU with Triton, states in float32 or half precision."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    if triton is None or not keys.is_cuda or keys.dtype not in dtypes or values.dtype not in dtypes:
        return False
    return _pad(max(keys.shape[-1], values.shape[-1])) * _pad(outputs) <= LARGEST_TILE


def fused_features(
    features: "FeatureMap",
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    rotary_scaling: float,
) -> torch.Tensor:
    """`features` of rotated keys.

    Args:
        features: on the states' device, in float32.
        keys, values: `(batch, heads, n, dim)`, as cached.
        positions: `(batch or 1, n)`, int64.
        frequencies: `(rotary dim / 2,)`, inverse frequencies of the rotary embedding.
        rotary_scaling: the factor on its cosines and sines.

    Returns:
        `(batch, n, outputs)`, float32.
    """
    batch, heads, n, dim = keys.shape
    half, outputs = frequencies.shape[0], features.bias.shape[0]
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    positions = positions.expand(batch, n)
    out = torch.empty(batch, n, outputs, dtype=torch.float32, device=keys.device)
    _feature_kernel[(triton.cdiv(n, BLOCK), batch)](
        keys, values, positions, frequencies.to(keys.device, torch.float32), out,
        features.keys, features.values, features.key_norms, features.value_norms, features.position, features.bias,
        n, features.max_position, 1.0 / rotary_scaling,
        *keys.stride()[:3], *values.stride()[:3], *positions.stride(),
        HEADS=heads, DIM=dim, HALF=half, VALUE_DIM=values.shape[-1], OUTPUTS=outputs, BLOCK=BLOCK,
        HALF_PAD=_pad(half), REST_PAD=_pad(dim - 2 * half), VALUE_PAD=_pad(values.shape[-1]), OUT_PAD=_pad(outputs),
        num_warps=4,
    )  # fmt: skip
    return out


def _pad(size: int) -> int:
    # Sides of a matrix product are powers of two and at least 16.
    return max(16, triton.next_power_of_2(size))


if triton is not None:

    @triton.jit
    def _tile_product(
        acc, tile, weights, first, count, o, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PAD: tl.constexpr
    ):
        """acc + tile · weights[:, first : first + count]ᵀ, with weights `(OUTPUTS, COLUMNS)`."""
        d = tl.arange(0, PAD)
        mask = (d < count)[:, None] & (o < OUTPUTS)[None, :]
        weight = tl.load(weights + o[None, :] * COLUMNS + first + d[:, None], mask=mask, other=0.0)
        return tl.dot(tile, weight, acc, input_precision="ieee")

    @triton.jit
    def _norm_product(acc, squares, weights, head, o, OUTPUTS: tl.constexpr, HEADS: tl.constexpr):
        weight = tl.load(weights + o * HEADS + head, mask=o < OUTPUTS, other=0.0)
        return acc + 0.5 * tl.log(tl.maximum(squares, 1e-36))[:, None] * weight[None, :]

    @triton.jit
    def _feature_kernel(
        keys, values, positions, frequencies, out,
        key_weight, value_weight, key_norms, value_norms, place_weight, bias,
        tokens, max_position, inverse_scaling,
        key_batch, key_head, key_token, value_batch, value_head, value_token, position_batch, position_token,
        HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, VALUE_DIM: tl.constexpr, OUTPUTS: tl.constexpr,
        BLOCK: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
        OUT_PAD: tl.constexpr,
    ):  # fmt: skip
        """One block of one row's tokens; all offsets in int64, for long prompts of large batches."""
        row = tl.program_id(1).to(tl.int64)
        t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        f, r, d, o = tl.arange(0, HALF_PAD), tl.arange(0, REST_PAD), tl.arange(0, VALUE_PAD), tl.arange(0, OUT_PAD)
        here = t < tokens
        position = tl.load(positions + row * position_batch + t * position_token, mask=here, other=0)
        frequency = tl.load(frequencies + f, mask=f < HALF, other=0.0)
        angle = position.to(tl.float32)[:, None] * frequency[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        place = tl.log(1.0 + tl.minimum(tl.maximum(position, 0), max_position).to(tl.float32))
        acc = tl.load(bias + o, mask=o < OUTPUTS, other=0.0)[None, :]
        acc = acc + place[:, None] * tl.load(place_weight + o, mask=o < OUTPUTS, other=0.0)[None, :]
        for head in range(HEADS):
            key = keys + row * key_batch + head * key_head + t[:, None] * key_token
            mask = here[:, None] & (f < HALF)[None, :]
            first = tl.load(key + f[None, :], mask=mask, other=0.0).to(tl.float32)
            second = tl.load(key + HALF + f[None, :], mask=mask, other=0.0).to(tl.float32)
            turned = (first * cos + second * sin) * inverse_scaling
            acc = _tile_product(acc, turned, key_weight, head * DIM, HALF, o, OUTPUTS, HEADS * DIM, HALF_PAD)
            squares = tl.sum(turned * turned, axis=1)
            turned = (second * cos - first * sin) * inverse_scaling
            acc = _tile_product(acc, turned, key_weight, head * DIM + HALF, HALF, o, OUTPUTS, HEADS * DIM, HALF_PAD)
            squares += tl.sum(turned * turned, axis=1)
            if DIM > 2 * HALF:  # dimensions that are not rotated
                mask = here[:, None] & (r < DIM - 2 * HALF)[None, :]
                rest = tl.load(key + 2 * HALF + r[None, :], mask=mask, other=0.0).to(tl.float32)
                start = head * DIM + 2 * HALF
                acc = _tile_product(acc, rest, key_weight, start, DIM - 2 * HALF, o, OUTPUTS, HEADS * DIM, REST_PAD)
                squares += tl.sum(rest * rest, axis=1)
            acc = _norm_product(acc, squares, key_norms, head, o, OUTPUTS, HEADS)
            value = values + row * value_batch + head * value_head + t[:, None] * value_token
            mask = here[:, None] & (d < VALUE_DIM)[None, :]
            state = tl.load(value + d[None, :], mask=mask, other=0.0).to(tl.float32)
            start = head * VALUE_DIM
            acc = _tile_product(acc, state, value_weight, start, VALUE_DIM, o, OUTPUTS, HEADS * VALUE_DIM, VALUE_PAD)
            acc = _norm_product(acc, tl.sum(state * state, axis=1), value_norms, head, o, OUTPUTS, HEADS)
        target = out + (row * tokens + t)[:, None] * OUTPUTS + o[None, :]
        tl.store(target, acc, mask=here[:, None] & (o < OUTPUTS)[None, :])
