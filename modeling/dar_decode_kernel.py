"""One decoding step over a `DARCache` in Triton: a split over the stored tokens, each read once for all heads.

As in multi-head latent attention, a tile of bottlenecks serves every head as keys and again as values; the rotated
part of the far keys, which differs by head, is met by queries laid out block-diagonally, so that one matrix product
serves all heads. Four launches: absorb the query, far tokens in splits, the ring of near ones, merge (with the
output's projection). All lengths may live on the device, so a captured step can be replayed. The slow counterpart is
`absorbed_decode`.
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
    from .cache_dar import DARCacheLayer
    from .dar_attention import FarPairs

# Tokens a tile, and the widest tile of bottlenecks or rotary keys: beyond, a program would not fit a multiprocessor.
TILE, WIDEST, MOST_HEADS = 32, 1024, 32
# Programs that keep a large GPU busy.
PROGRAMS = 264


def decode_kernel_available(layer: "DARCacheLayer", query: torch.Tensor, far: "FarPairs") -> bool:
    """Whether the kernels serve: half precision on a GPU with Triton, fast far cache, sizes within their tiles."""
    if triton is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if layer.far_rotary is None or layer.bottlenecks is None or far.weight is None or layer.ring < 1:
        return False
    heads, size, rotary = query.shape[1], layer.bottlenecks.shape[2], layer.far_rotary.shape[3]
    return heads <= MOST_HEADS and size <= 512 and 0 < heads * rotary <= WIDEST and query.shape[3] <= 256


def fused_decode(layer: "DARCacheLayer", query: torch.Tensor, far: "FarPairs", scaling: float) -> torch.Tensor:
    """One query a row over everything stored, its own token included.

    Args:
        layer: after the new token has been stored.
        query: `(batch, heads, 1, head dim)`, rotated.
        far: with `weight` and `bias`.
        scaling: multiplies the scores.

    Returns:
        `(batch, heads, 1, head dim)`.
    """
    stored, turned = layer.bottlenecks, layer.far_rotary
    assert stored is not None and turned is not None and far.weight is not None
    assert layer.near_keys is not None and layer.near_values is not None
    batch, heads, _, dim = query.shape
    size, rotary = stored.shape[2], turned.shape[3]
    query = query.reshape(batch, heads, dim)
    query = query if query.stride(-1) == 1 else query.contiguous()
    weight = far.weight.contiguous()
    bias = weight if far.bias is None else far.bias.contiguous()
    device, single = query.device, torch.float32
    absorbed = torch.empty(batch, heads, size, dtype=query.dtype, device=device)
    constant = torch.empty(batch, heads, dtype=single, device=device)
    size_pad, has_bias = triton.next_power_of_2(size), far.bias is not None
    dim_pad = triton.next_power_of_2(dim)
    _absorb_kernel[(batch * heads,)](
        query, weight, bias, absorbed, constant, *query.stride()[:2], heads, size,
        DIM=dim, ROTARY=rotary, DIM_PAD=dim_pad, STEP=min(128, size_pad), HAS_BIAS=has_bias, num_warps=4,
    )  # fmt: skip

    longest = layer.capacity if layer.is_static else layer.count
    splits = max(1, min(triton.cdiv(PROGRAMS, batch), triton.cdiv(longest, 4 * TILE), 128))
    part = torch.empty(batch, splits, heads, size, dtype=single, device=device)
    peak = torch.empty(batch, splits + 1, heads, dtype=single, device=device)
    mass = torch.empty(batch, splits + 1, heads, dtype=single, device=device)
    near = torch.empty(batch, heads, dim, dtype=single, device=device)
    lengths = layer.lengths if layer.lengths is not None else peak
    ragged = layer.lengths is not None
    head_pad = max(16, triton.next_power_of_2(heads))
    wide_pad = max(16, triton.next_power_of_2(heads * rotary))
    _far_kernel[(splits, batch)](
        absorbed, constant, query, stored, turned, part, peak, mass, lengths, layer.count,
        *query.stride()[:2], *stored.stride()[:2], *turned.stride()[:2],
        heads, size, layer.window, scaling, splits,
        ROTARY=rotary, HEAD_PAD=head_pad, SIZE_PAD=max(16, size_pad), WIDE_PAD=wide_pad, TILE=TILE, RAGGED=ragged,
        num_warps=4 if head_pad * size_pad <= 8192 else 8, num_stages=2,
    )  # fmt: skip
    _near_kernel[(batch * heads,)](
        query, layer.near_keys, layer.near_values, near, peak, mass, lengths, layer.count,
        *query.stride()[:2], *layer.near_keys.stride()[:3], *layer.near_values.stride()[:3],
        heads, layer.ring, layer.window, scaling, splits,
        DIM=dim, DIM_PAD=dim_pad, TILE=64, RAGGED=ragged, num_warps=4,
    )  # fmt: skip
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=device)
    _merge_kernel[(batch * heads,)](
        part, near, peak, mass, weight, bias, out, heads, size, splits,
        DIM=dim, DIM_PAD=dim_pad, STEP=min(128, size_pad), SPLIT_PAD=triton.next_power_of_2(splits), HAS_BIAS=has_bias,
        num_warps=4,
    )  # fmt: skip
    return out[:, :, None]


if triton is not None:

    @triton.jit
    def _absorb_kernel(
        query, weight, bias, absorbed, constant, qb, qh, heads, size,
        DIM: tl.constexpr, ROTARY: tl.constexpr, DIM_PAD: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        """A_Kᵀ q and q · b_K of one head of one row, over the dimensions without rotary embedding."""
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // heads, pair % heads
        d = tl.arange(0, DIM_PAD)
        still = (d >= ROTARY) & (d < DIM)
        q = tl.load(query + b * qb + h * qh + d, mask=still, other=0.0).to(tl.float32)
        for begin in range(0, size, STEP):
            c = begin + tl.arange(0, STEP)
            a = tl.load(
                weight + (h * 2 * DIM + d[:, None]) * size + c[None, :],
                mask=still[:, None] & (c < size)[None, :],
                other=0.0,
            )
            tl.store(
                absorbed + pair * size + c,
                tl.sum(q[:, None] * a.to(tl.float32), 0).to(absorbed.dtype.element_ty),
                mask=c < size,
            )
        shift = 0.0
        if HAS_BIAS:
            shift = tl.sum(q * tl.load(bias + h * 2 * DIM + d, mask=still, other=0.0).to(tl.float32), 0)
        tl.store(constant + pair, shift)

    @triton.jit(do_not_specialize=["count"])
    def _far_kernel(
        absorbed, constant, query, stored, turned, part, peak, mass, lengths, count,
        qb, qh, sb, st, tb, tt, heads, size, window, scaling, splits,
        ROTARY: tl.constexpr, HEAD_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, WIDE_PAD: tl.constexpr,
        TILE: tl.constexpr, RAGGED: tl.constexpr,
    ):  # fmt: skip
        """One share of one row's far tokens, for all heads; statistics in base 2."""
        b = tl.program_id(1).to(tl.int64)
        split = tl.program_id(0)
        length = count
        if RAGGED:
            length = tl.load(lengths + b).to(tl.int32)
        far = tl.maximum(length - window, 0)
        share = tl.cdiv(tl.cdiv(far, splits), TILE) * TILE
        first = split * share
        stop = tl.minimum(first + share, far)
        h, c, w = tl.arange(0, HEAD_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, WIDE_PAD)
        t = tl.arange(0, TILE)
        here = h < heads
        q = tl.load(
            absorbed + (b * heads + h[:, None]) * size + c[None, :],
            mask=here[:, None] & (c < size)[None, :],
            other=0.0,
        )
        # Head h's rotary query stands in its own columns, with zeros in those of the others.
        own = (w[None, :] // ROTARY == h[:, None]) & here[:, None]
        turning = tl.load(query + b * qb + h[:, None] * qh + (w % ROTARY)[None, :], mask=own, other=0.0)
        shift = tl.load(constant + b * heads + h, mask=here, other=0.0)
        top = tl.full([HEAD_PAD], float("-inf"), tl.float32)
        total = tl.zeros([HEAD_PAD], tl.float32)
        acc = tl.zeros([HEAD_PAD, SIZE_PAD], tl.float32)
        scale = tl.cast(scaling, tl.float32) * 1.4426950408889634  # compiled graphs pass doubles
        for begin in range(first, stop, TILE):
            token = begin + t
            within = token < stop
            rows = tl.load(
                stored + b * sb + token[:, None].to(tl.int64) * st + c[None, :],
                mask=within[:, None] & (c < size)[None, :], other=0.0,
            )  # fmt: skip
            keys = tl.load(
                turned + b * tb + token[:, None].to(tl.int64) * tt + w[None, :],
                mask=within[:, None] & (w < heads * ROTARY)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(rows))
            scores = tl.dot(turning, tl.trans(keys), scores)
            scores = tl.where(within[None, :], (scores + shift[:, None]) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(rows.dtype), rows, acc * fade[:, None])
            top = higher
        at = (b * (splits + 1) + split) * heads + h
        tl.store(peak + at, top, mask=here)
        tl.store(mass + at, total, mask=here)
        tl.store(
            part + ((b * splits + split) * heads + h[:, None]) * size + c[None, :],
            acc, mask=here[:, None] & (c < size)[None, :],
        )  # fmt: skip

    @triton.jit(do_not_specialize=["count"])
    def _near_kernel(
        query, keys, values, near, peak, mass, lengths, count,
        qb, qh, kb, kh, kt, vb, vh, vt, heads, ring, window, scaling, splits,
        DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, RAGGED: tl.constexpr,
    ):  # fmt: skip
        """The ring of one head of one row."""
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // heads, pair % heads
        length = count
        if RAGGED:
            length = tl.load(lengths + b).to(tl.int32)
        last = length - 1
        d = tl.arange(0, DIM_PAD)
        q = tl.load(query + b * qb + h * qh + d, mask=d < DIM, other=0.0).to(tl.float32)
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([DIM_PAD], tl.float32)
        scale = tl.cast(scaling, tl.float32) * 1.4426950408889634  # compiled graphs pass doubles
        for begin in range(0, ring, TILE):
            slot = begin + tl.arange(0, TILE)
            distance = (last - slot) % ring  # of the newest position that belongs in the slot
            distance = tl.where(distance < 0, distance + ring, distance)
            held = (slot < ring) & (distance < window) & (distance <= last)
            mask = held[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + b * kb + h * kh + slot[:, None] * kt + d[None, :], mask=mask, other=0.0)
            v = tl.load(values + b * vb + h * vh + slot[:, None] * vt + d[None, :], mask=mask, other=0.0)
            scores = tl.where(held, tl.sum(k.to(tl.float32) * q[None, :], 1) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level)
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade + tl.sum(weights[:, None] * v.to(tl.float32), 0)
            top = higher
        at = (b * (splits + 1) + splits) * heads + h
        tl.store(peak + at, top)
        tl.store(mass + at, total)
        tl.store(near + pair * DIM + d, acc, mask=d < DIM)

    @triton.jit
    def _merge_kernel(
        part, near, peak, mass, weight, bias, out, heads, size, splits,
        DIM: tl.constexpr, DIM_PAD: tl.constexpr, STEP: tl.constexpr, SPLIT_PAD: tl.constexpr, HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        """All parts of one head of one row, and the projection from bottlenecks to values."""
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // heads, pair % heads
        s, d = tl.arange(0, SPLIT_PAD), tl.arange(0, DIM_PAD)
        at = (b * (splits + 1) + s) * heads + h
        tops = tl.load(peak + at, mask=s < splits, other=float("-inf"))
        masses = tl.load(mass + at, mask=s < splits, other=0.0)
        near_at = (b * (splits + 1) + splits) * heads + h
        near_top, near_mass = tl.load(peak + near_at), tl.load(mass + near_at)
        level = tl.maximum(near_top, tl.max(tops, 0))
        shares = tl.exp2(tops - level)
        near_share = tl.exp2(near_top - level)
        far_mass = tl.sum(masses * shares, 0)
        total = far_mass + near_mass * near_share
        o = tl.load(near + pair * DIM + d, mask=d < DIM, other=0.0) * near_share
        for begin in range(0, size, STEP):
            c = begin + tl.arange(0, STEP)
            tile = tl.load(
                part + ((b * splits + s[:, None]) * heads + h) * size + c[None, :],
                mask=(s < splits)[:, None] & (c < size)[None, :], other=0.0,
            )  # fmt: skip
            summed = tl.sum(tile * shares[:, None], 0)
            a = tl.load(
                weight + (h * 2 * DIM + DIM + d[:, None]) * size + c[None, :],
                mask=(d < DIM)[:, None] & (c < size)[None, :], other=0.0,
            )  # fmt: skip
            o += tl.sum(a.to(tl.float32) * summed[None, :], 1)
        if HAS_BIAS:
            o += far_mass * tl.load(bias + h * 2 * DIM + DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
        tl.store(out + pair * DIM + d, (o / total).to(out.dtype.element_ty), mask=d < DIM)
