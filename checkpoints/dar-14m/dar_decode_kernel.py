"""One decoding step over a `DARCache` in Triton: a split over the stored tokens, each read once for all heads.

As in multi-head latent attention, a tile of bottlenecks serves every head as keys and again as values; the rotated
part of the far keys, which differs by head, is met by queries laid out block-diagonally, so that one matrix product
serves all heads. Three launches a layer: prepare the query (and, in `fused_step`, rotate, make the far rotary key and
store the new token), far tokens in splits beside the ring of near ones, merge (with the output's projection). All
lengths may live on the device, so a captured step can be replayed. The slow counterparts are `absorbed_decode` and,
for storing, `DARCacheLayer.append`.
"""

# Kernels are typed by their launch, and a CPU build of torch comes without Triton.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from typing import TYPE_CHECKING, Any

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


def step_kernel_available(layer: "DARCacheLayer", states: torch.Tensor, far: "FarPairs") -> bool:
    """Whether `fused_step` serves: as `decode_kernel_available`, a layer that holds tokens, and no gradients.

    Compiled graphs store by ordinary operations, which they fuse themselves.
    """
    if triton is None or not states.is_cuda or torch.compiler.is_compiling():
        return False
    if not layer.is_initialized or layer.record_past or not (layer.is_static or layer.count):
        return False
    if torch.is_grad_enabled() and (states.requires_grad or far.bottleneck.requires_grad):
        return False
    if states.dtype not in (torch.float16, torch.bfloat16) or layer.far_rotary is None or layer.ring < 1:
        return False
    weight = far.weight
    if weight is None or not weight.dtype == far.bottleneck.dtype == layer.dtype == states.dtype:
        return False
    rotary = layer.far_rotary.shape[3]
    heads, both, size = weight.shape
    fits = heads <= MOST_HEADS and size <= 512 and 0 < heads * rotary <= WIDEST and both <= 512 and rotary % 2 == 0
    return fits and all(x is None or x.is_contiguous() for x in (weight, far.bias, states, far.bottleneck))


def fused_decode(layer: "DARCacheLayer", query: torch.Tensor, far: "FarPairs", scaling: float) -> torch.Tensor:
    """One query a row over everything stored, its own token included.

    The layer's buffers are contiguous, as it makes them.

    Args:
        layer: after the new token has been stored.
        query: `(batch, heads, 1, head dim)`, rotated.
        far: with `weight` and `bias`.
        scaling: multiplies the scores.

    Returns:
        `(batch, heads, 1, head dim)`.
    """
    assert layer.far_rotary is not None and far.weight is not None
    batch, heads, _, dim = query.shape
    query = query.reshape(batch, heads, dim).contiguous()
    weight = far.weight.contiguous()
    bias = weight if far.bias is None else far.bias.contiguous()
    room = _Room(layer, query, weight, query.device)
    _absorb_kernel[(batch * heads, room.steps)](
        query, weight, bias, room.absorbed, room.constant,
        HEADS=heads, SIZE=room.size, DIM=dim, ROTARY=room.rotary, DIM_PAD=room.dim_pad, STEP=room.step,
        HAS_BIAS=far.bias is not None, num_warps=4,
    )  # fmt: skip
    return _attend(layer, query, weight, bias, far.bias is not None, scaling, room)[:, :, None]


def fused_step(
    layer: "DARCacheLayer", states: torch.Tensor, far: "FarPairs", scaling: float, scratch: dict[Any, Any]
) -> torch.Tensor:
    """Store one new token a row and attend: rotary embedding, `append` and `fused_decode` in three launches.

    Args:
        layer: before the new token is stored; see `step_kernel_available`.
        states: the fused projection, `(batch, 1, heads · 3 · head dim)`, not rotated.
        far: with `weight` and `bias`; its bottleneck `(batch, 1, bottleneck size)` and angles are the new token's.
        scaling: multiplies the scores.
        scratch: keeps buffers from layer to layer of one forward pass.

    Returns:
        `(batch, 1, heads · head dim)`.
    """
    weight = far.weight
    assert weight is not None and layer.bottlenecks is not None and layer.far_rotary is not None
    batch, heads = states.shape[0], weight.shape[0]
    layer.note_step()
    key = (states.device, layer.capacity if layer.is_static else layer.count)
    found = scratch.get(key)
    if found is None:
        query = states.new_empty(batch, heads, weight.shape[1] // 2)
        angles = far.cos.contiguous(), far.sin.contiguous()
        found = scratch[key] = (query, _Room(layer, query, weight, states.device), *angles)
    query, room, cos, sin = found
    bias = weight if far.bias is None else far.bias
    lengths = room.peak if layer.lengths is None else layer.lengths
    _prepare_kernel[(batch * heads, room.steps)](
        states, far.bottleneck, weight, bias, cos, sin, lengths, layer.near_keys, layer.near_values,
        layer.bottlenecks, layer.far_rotary, room.absorbed, query, room.constant,
        layer.count, layer.capacity, layer.bottlenecks.shape[1],
        HEADS=heads, SIZE=room.size, DIM=room.dim, ROTARY=room.rotary, RING=layer.ring, DIM_PAD=room.dim_pad,
        HALF_PAD=room.half_pad, STEP=room.step, HAS_BIAS=far.bias is not None,
        RAGGED=layer.lengths is not None, SHARED=cos.shape[0] == 1, num_warps=4,
    )  # fmt: skip
    return _attend(layer, query, weight, bias, far.bias is not None, scaling, room).view(batch, 1, -1)


class _Room:
    """Sizes and buffers of a step that are the same in every layer."""

    def __init__(
        self, layer: "DARCacheLayer", query: torch.Tensor, weight: torch.Tensor, device: torch.device
    ) -> None:
        batch, heads, dim = query.shape
        self.size, self.dim = weight.shape[2], dim
        assert layer.far_rotary is not None
        self.rotary = rotary = layer.far_rotary.shape[3]
        # Triton's functions for these cost as much as a small launch: once a step rather than once a layer.
        power = triton.next_power_of_2
        self.size_pad, self.dim_pad, self.half_pad = power(self.size), power(dim), power(rotary // 2)
        self.head_pad, self.wide_pad = max(16, power(heads)), max(16, power(heads * rotary))
        longest = layer.capacity if layer.is_static else layer.count
        splits = max(1, min(triton.cdiv(PROGRAMS, batch), triton.cdiv(longest, 4 * TILE), 128))
        self.splits, self.split_pad = splits, power(splits)
        self.step, self.block = min(64, self.size_pad), min(32, self.dim_pad)
        self.steps, self.blocks = triton.cdiv(self.size, self.step), triton.cdiv(dim, self.block)
        single = torch.float32
        self.absorbed = torch.empty(batch, heads, self.size, dtype=query.dtype, device=device)
        self.constant = torch.empty(batch, heads, dtype=single, device=device)
        self.part = torch.empty(batch, splits, heads, self.size, dtype=single, device=device)
        self.peak = torch.empty(batch, splits + 1, heads, dtype=single, device=device)
        self.mass = torch.empty(batch, splits + 1, heads, dtype=single, device=device)
        self.near = torch.empty(batch, heads, dim, dtype=single, device=device)


def _attend(
    layer: "DARCacheLayer",
    query: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    has_bias: bool,
    scaling: float,
    room: _Room,
) -> torch.Tensor:
    """`(batch, heads, head dim)` from the rotated query and what it asks of bottlenecks."""
    batch, heads, dim = query.shape
    stored, turned = layer.bottlenecks, layer.far_rotary
    assert stored is not None and turned is not None
    size_pad = max(16, room.size_pad)
    lengths = room.peak if layer.lengths is None else layer.lengths
    _attend_kernel[(room.splits + heads, batch)](
        room.absorbed, room.constant, query, stored, turned, layer.near_keys, layer.near_values, room.near,
        room.part, room.peak, room.mass, lengths, layer.count, stored.shape[1], scaling, room.splits,
        HEADS=heads, SIZE=room.size, WINDOW=layer.window, RING=layer.ring, DIM=dim, DIM_PAD=room.dim_pad,
        ROTARY=room.rotary, HEAD_PAD=room.head_pad, SIZE_PAD=size_pad, WIDE_PAD=room.wide_pad, TILE=TILE,
        RAGGED=layer.lengths is not None, num_warps=4 if room.head_pad * size_pad <= 8192 else 8, num_stages=2,
    )  # fmt: skip
    out = torch.empty_like(query)
    _merge_kernel[(batch * heads, room.blocks)](
        room.part, room.near, room.peak, room.mass, weight, bias, out, room.splits,
        HEADS=heads, SIZE=room.size, DIM=dim, BLOCK=room.block, STEP=min(128, room.size_pad),
        SPLIT_PAD=room.split_pad, HAS_BIAS=has_bias, num_warps=4,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _absorb(
        q, weight, absorbed, pair, h, c,
        SIZE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, DIM_PAD: tl.constexpr,
    ):  # fmt: skip
        """Some numbers of A_Kᵀ q, over the dimensions without rotary embedding; `q` is zero in the others."""
        d = tl.arange(0, DIM_PAD)
        still = (d >= ROTARY) & (d < DIM)
        a = tl.load(
            weight + (h * 2 * DIM + d[:, None]) * SIZE + c[None, :],
            mask=still[:, None] & (c < SIZE)[None, :],
            other=0.0,
        )
        summed = tl.sum(q[:, None] * a.to(tl.float32), 0)
        tl.store(absorbed + pair * SIZE + c, summed.to(absorbed.dtype.element_ty), mask=c < SIZE)

    @triton.jit
    def _absorb_kernel(
        query, weight, bias, absorbed, constant,
        HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, DIM_PAD: tl.constexpr,
        STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        """A_Kᵀ q and q · b_K of one head of one row, over the dimensions without rotary embedding."""
        pair = tl.program_id(0).to(tl.int64)
        h = pair % HEADS
        d = tl.arange(0, DIM_PAD)
        still = (d >= ROTARY) & (d < DIM)
        q = tl.load(query + pair * DIM + d, mask=still, other=0.0).to(tl.float32)
        c = tl.program_id(1) * STEP + tl.arange(0, STEP)
        _absorb(q, weight, absorbed, pair, h, c, SIZE, DIM, ROTARY, DIM_PAD)
        if tl.program_id(1) == 0:
            shift = 0.0
            if HAS_BIAS:
                shift = tl.sum(q * tl.load(bias + h * 2 * DIM + d, mask=still, other=0.0).to(tl.float32), 0)
            tl.store(constant + pair, shift)

    @triton.jit(do_not_specialize=["count", "capacity", "stride"])
    def _prepare_kernel(
        states, bottleneck, weight, bias, cos, sin, lengths, keys, values, stored, turned, absorbed, query, constant,
        count, capacity, stride,
        HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, RING: tl.constexpr,
        DIM_PAD: tl.constexpr, HALF_PAD: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
        RAGGED: tl.constexpr, SHARED: tl.constexpr,
    ):  # fmt: skip
        """One head of one row: rotate, store the new token, absorb its query. `count` and `lengths` include it."""
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // HEADS, pair % HEADS
        last = count - 1
        if RAGGED:
            last = tl.load(lengths + b).to(tl.int32) - 1
        # A static layer's spare column takes what finds no room.
        column = (b * stride + tl.minimum(last, capacity)).to(tl.int64)
        source = states + pair * (3 * DIM)
        d = tl.arange(0, DIM_PAD)
        still = (d >= ROTARY) & (d < DIM)
        kind = query.dtype.element_ty
        q = tl.load(source + d, mask=still, other=0.0).to(tl.float32)
        c = tl.program_id(1) * STEP + tl.arange(0, STEP)
        _absorb(q, weight, absorbed, pair, h, c, SIZE, DIM, ROTARY, DIM_PAD)
        if h == 0:
            tl.store(stored + column * SIZE + c, tl.load(bottleneck + b * SIZE + c, mask=c < SIZE), mask=c < SIZE)
        if tl.program_id(1) == 0:
            shift = 0.0
            if HAS_BIAS:
                shift = tl.sum(q * tl.load(bias + h * 2 * DIM + d, mask=still, other=0.0).to(tl.float32), 0)
            tl.store(constant + pair, shift)
            slot = (pair * RING + last % RING) * DIM
            tl.store(query + pair * DIM + d, q.to(kind), mask=still)
            tl.store(keys + slot + d, tl.load(source + DIM + d, mask=still), mask=still)
            tl.store(values + slot + d, tl.load(source + 2 * DIM + d, mask=d < DIM), mask=d < DIM)
            r = tl.arange(0, HALF_PAD)
            half = r < ROTARY // 2
            at = r
            if not SHARED:
                at = b * ROTARY + r
            x = tl.load(cos + at, mask=half, other=0.0).to(tl.float32)
            y = tl.load(sin + at, mask=half, other=0.0).to(tl.float32)
            first = tl.load(source + r, mask=half, other=0.0).to(tl.float32)
            second = tl.load(source + ROTARY // 2 + r, mask=half, other=0.0).to(tl.float32)
            tl.store(query + pair * DIM + r, (first * x - second * y).to(kind), mask=half)
            tl.store(query + pair * DIM + ROTARY // 2 + r, (second * x + first * y).to(kind), mask=half)
            first = tl.load(source + DIM + r, mask=half, other=0.0).to(tl.float32)
            second = tl.load(source + DIM + ROTARY // 2 + r, mask=half, other=0.0).to(tl.float32)
            tl.store(keys + slot + r, (first * x - second * y).to(kind), mask=half)
            tl.store(keys + slot + ROTARY // 2 + r, (second * x + first * y).to(kind), mask=half)
            # The rotated part of the far key.
            first = tl.zeros([HALF_PAD], tl.float32)
            second = tl.zeros([HALF_PAD], tl.float32)
            for begin in range(0, SIZE, STEP):
                e = begin + tl.arange(0, STEP)
                n = tl.load(bottleneck + b * SIZE + e, mask=e < SIZE, other=0.0).to(tl.float32)
                mask = half[:, None] & (e < SIZE)[None, :]
                rows = weight + (h * 2 * DIM + r[:, None]) * SIZE + e[None, :]
                first += tl.sum(tl.load(rows, mask=mask, other=0.0).to(tl.float32) * n[None, :], 1)
                rows += ROTARY // 2 * SIZE
                second += tl.sum(tl.load(rows, mask=mask, other=0.0).to(tl.float32) * n[None, :], 1)
            if HAS_BIAS:
                first += tl.load(bias + h * 2 * DIM + r, mask=half, other=0.0).to(tl.float32)
                second += tl.load(bias + h * 2 * DIM + ROTARY // 2 + r, mask=half, other=0.0).to(tl.float32)
            target = turned + (column * HEADS + h) * ROTARY + r
            tl.store(target, (first * x - second * y).to(kind), mask=half)
            tl.store(target + ROTARY // 2, (second * x + first * y).to(kind), mask=half)

    @triton.jit(do_not_specialize=["count", "stride", "splits"])
    def _attend_kernel(
        absorbed, constant, query, stored, turned, keys, values, near, part, peak, mass, lengths,
        count, stride, scaling, splits,
        HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, DIM: tl.constexpr,
        DIM_PAD: tl.constexpr, ROTARY: tl.constexpr, HEAD_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
        WIDE_PAD: tl.constexpr, TILE: tl.constexpr, RAGGED: tl.constexpr,
    ):  # fmt: skip
        """The first `splits` programs of a row share its far tokens, the others take a head's ring each."""
        b = tl.program_id(1).to(tl.int64)
        split = tl.program_id(0)
        length = count
        if RAGGED:
            length = tl.load(lengths + b).to(tl.int32)
        scale = tl.cast(scaling, tl.float32) * 1.4426950408889634  # compiled graphs pass doubles
        if split < splits:
            _far_share(
                absorbed, constant, query, stored, turned, part, peak, mass, b, split, length, stride, scale, splits,
                HEADS, SIZE, WINDOW, DIM, ROTARY, HEAD_PAD, SIZE_PAD, WIDE_PAD, TILE,
            )  # fmt: skip
        else:
            _near_ring(
                query, keys, values, near, peak, mass, b, split - splits, length, scale, splits,
                HEADS, WINDOW, RING, DIM, DIM_PAD, 64,
            )  # fmt: skip

    @triton.jit
    def _far_share(
        absorbed, constant, query, stored, turned, part, peak, mass, b, split, length, stride, scale, splits,
        HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
        HEAD_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, WIDE_PAD: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """One share of one row's far tokens, for all heads; statistics in base 2."""
        far = tl.maximum(length - WINDOW, 0)
        share = tl.cdiv(tl.cdiv(far, splits), TILE) * TILE
        start = split * share
        stop = tl.minimum(start + share, far)
        h, c, w = tl.arange(0, HEAD_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, WIDE_PAD)
        t = tl.arange(0, TILE)
        here = h < HEADS
        q = tl.load(
            absorbed + (b * HEADS + h[:, None]) * SIZE + c[None, :],
            mask=here[:, None] & (c < SIZE)[None, :],
            other=0.0,
        )
        # Head h's rotary query stands in its own columns, with zeros in those of the others.
        own = (w[None, :] // ROTARY == h[:, None]) & here[:, None]
        turning = tl.load(query + (b * HEADS + h[:, None]) * DIM + (w % ROTARY)[None, :], mask=own, other=0.0)
        shift = tl.load(constant + b * HEADS + h, mask=here, other=0.0)
        top = tl.full([HEAD_PAD], float("-inf"), tl.float32)
        total = tl.zeros([HEAD_PAD], tl.float32)
        acc = tl.zeros([HEAD_PAD, SIZE_PAD], tl.float32)
        for begin in range(start, stop, TILE):
            token = begin + t
            within = token < stop
            place = b * stride + token.to(tl.int64)
            rows = tl.load(
                stored + place[:, None] * SIZE + c[None, :],
                mask=within[:, None] & (c < SIZE)[None, :], other=0.0,
            )  # fmt: skip
            far_keys = tl.load(
                turned + place[:, None] * (HEADS * ROTARY) + w[None, :],
                mask=within[:, None] & (w < HEADS * ROTARY)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(rows))
            scores = tl.dot(turning, tl.trans(far_keys), scores)
            scores = tl.where(within[None, :], (scores + shift[:, None]) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(rows.dtype), rows, acc * fade[:, None])
            top = higher
        at = (b * (splits + 1) + split) * HEADS + h
        tl.store(peak + at, top, mask=here)
        tl.store(mass + at, total, mask=here)
        tl.store(
            part + ((b * splits + split) * HEADS + h[:, None]) * SIZE + c[None, :],
            acc, mask=here[:, None] & (c < SIZE)[None, :],
        )  # fmt: skip

    @triton.jit
    def _near_ring(
        query, keys, values, near, peak, mass, b, h, length, scale, splits,
        HEADS: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
        TILE: tl.constexpr,
    ):  # fmt: skip
        """The ring of one head of one row."""
        pair = b * HEADS + h
        last = length - 1
        d = tl.arange(0, DIM_PAD)
        q = tl.load(query + pair * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([DIM_PAD], tl.float32)
        for begin in range(0, RING, TILE):
            slot = begin + tl.arange(0, TILE)
            distance = (last - slot) % RING  # of the newest position that belongs in the slot
            distance = tl.where(distance < 0, distance + RING, distance)
            held = (slot < RING) & (distance < WINDOW) & (distance <= last)
            mask = held[:, None] & (d < DIM)[None, :]
            at = (pair * RING + slot[:, None]) * DIM + d[None, :]
            k = tl.load(keys + at, mask=mask, other=0.0)
            v = tl.load(values + at, mask=mask, other=0.0)
            scores = tl.where(held, tl.sum(k.to(tl.float32) * q[None, :], 1) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level)
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade + tl.sum(weights[:, None] * v.to(tl.float32), 0)
            top = higher
        at = (b * (splits + 1) + splits) * HEADS + h
        tl.store(peak + at, top)
        tl.store(mass + at, total)
        tl.store(near + pair * DIM + d, acc, mask=d < DIM)

    @triton.jit(do_not_specialize=["splits"])
    def _merge_kernel(
        part, near, peak, mass, weight, bias, out, splits,
        HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
        SPLIT_PAD: tl.constexpr, HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        """All parts of one head of one row, and some dimensions of the projection from bottlenecks to values."""
        pair = tl.program_id(0).to(tl.int64)
        b, h = pair // HEADS, pair % HEADS
        s, d = tl.arange(0, SPLIT_PAD), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = (b * (splits + 1) + s) * HEADS + h
        tops = tl.load(peak + at, mask=s < splits, other=float("-inf"))
        masses = tl.load(mass + at, mask=s < splits, other=0.0)
        near_at = (b * (splits + 1) + splits) * HEADS + h
        near_top, near_mass = tl.load(peak + near_at), tl.load(mass + near_at)
        level = tl.maximum(near_top, tl.max(tops, 0))
        shares = tl.exp2(tops - level)
        near_share = tl.exp2(near_top - level)
        far_mass = tl.sum(masses * shares, 0)
        total = far_mass + near_mass * near_share
        o = tl.load(near + pair * DIM + d, mask=d < DIM, other=0.0) * near_share
        for begin in range(0, SIZE, STEP):
            c = begin + tl.arange(0, STEP)
            tile = tl.load(
                part + ((b * splits + s[:, None]) * HEADS + h) * SIZE + c[None, :],
                mask=(s < splits)[:, None] & (c < SIZE)[None, :], other=0.0,
            )  # fmt: skip
            summed = tl.sum(tile * shares[:, None], 0)
            a = tl.load(
                weight + (h * 2 * DIM + DIM + d[:, None]) * SIZE + c[None, :],
                mask=(d < DIM)[:, None] & (c < SIZE)[None, :], other=0.0,
            )  # fmt: skip
            o += tl.sum(a.to(tl.float32) * summed[None, :], 1)
        if HAS_BIAS:
            o += far_mass * tl.load(bias + h * 2 * DIM + DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
        tl.store(out + pair * DIM + d, (o / total).to(out.dtype.element_ty), mask=d < DIM)
