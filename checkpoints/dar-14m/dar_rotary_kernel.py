"""Rotary embedding for DAR's training step in Triton: one launch each, in the layouts that the projections have.

By ordinary operations a partial rotary embedding costs some ten launches, each of which reads and writes whole
queries or keys. Here queries and keys leave the fused projection rotated in one pass; far keys and the gradients are
turned in place, which touches the rotary dimensions alone; and the far pairs' two gradients are put together, turned
back and padded in one pass. Angles are applied in float32 and rounded once. The slow counterpart is `rotate_halves` in
`rotary_halves`.
"""

# Kernels are typed by their launch, and a CPU build of torch comes without Triton.
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

# Heads of tokens a program.
ROWS = 64


def rotary_kernel_available(x: torch.Tensor) -> bool:
    """Whether the kernels serve: half precision on a GPU with Triton."""
    return triton is not None and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def turned_queries_and_keys(
    states: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, each `(batch, heads, tokens, head dim)`, from GPT-NeoX's fused projection.

    Args:
        states: `(batch, tokens, heads · 3 · head dim)`.
        heads: attention heads.
        cos, sin: `(batch or 1, tokens, rotary dims)`, both halves alike.
    """
    batch, tokens, width = states.shape
    dim = width // (3 * heads)
    turned = states.new_empty(batch, tokens, 2, heads, dim)
    rows = batch * tokens * heads
    _split_kernel[(triton.cdiv(rows, ROWS), 2)](
        states.contiguous(), turned, cos.contiguous(), sin.contiguous(), rows, tokens,
        HEADS=heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), SHARED=cos.shape[0] == 1, **_sizes(cos),
    )  # fmt: skip
    query, key = turned.transpose(1, 3).unbind(2)
    return query, key


def turn_in_place(
    x: torch.Tensor, parts: int, cos: torch.Tensor, sin: torch.Tensor, backwards: bool = False
) -> torch.Tensor:
    """Turn the first `parts` vectors of each head by the angles of its token, in place.

    Args:
        x: `(batch, tokens, heads, vectors a head, head dim)`, contiguous.
        parts: vectors to turn.
        cos, sin: `(batch or 1, tokens, rotary dims)`, both halves alike.
        backwards: turn the other way; up to a factor in the angles, the transpose and so the gradient.

    Returns:
        `x`.
    """
    batch, tokens, heads, vectors, dim = x.shape
    rows = batch * tokens * heads * parts
    if rows and cos.shape[-1]:
        _turn_kernel[(triton.cdiv(rows, ROWS),)](
            x, cos.contiguous(), sin.contiguous(), rows, tokens,
            HEADS=heads, PARTS=parts, VECTORS=vectors, DIM=dim, SHARED=cos.shape[0] == 1, BACKWARDS=backwards,
            **_sizes(cos),
        )  # fmt: skip
    return x


def join_pair_gradients(
    key: torch.Tensor, value: torch.Tensor, tokens: int, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Gradients of far pairs before rotation, from those of rotated keys and of values.

    Args:
        key, value: `(batch, heads, seen, head dim)`, of the first `seen` tokens.
        tokens: of the result; the gradient is zero behind the first `seen`.
        cos, sin: `(batch or 1, tokens, rotary dims)`, both halves alike.

    Returns:
        `(batch, tokens, heads, 2, head dim)`.
    """
    batch, heads, seen, dim = key.shape
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    joined = key.new_empty(batch, tokens, heads, 2, dim)
    rows = batch * tokens * heads
    _join_kernel[(triton.cdiv(rows, ROWS),)](
        key, value, joined, cos.contiguous(), sin.contiguous(), rows, tokens, seen,
        *key.stride()[:3], *value.stride()[:3],
        HEADS=heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), SHARED=cos.shape[0] == 1, **_sizes(cos),
    )  # fmt: skip
    return joined


def _sizes(cos: torch.Tensor) -> dict[str, int]:
    rotary = cos.shape[-1]
    return {"ROTARY": rotary, "HALF_PAD": triton.next_power_of_2(max(rotary // 2, 1)), "ROWS": ROWS}


if triton is not None:

    @triton.jit
    def _angles(cos, sin, token, tokens, c, mask, ROTARY: tl.constexpr, SHARED: tl.constexpr):
        """Cosines and sines of the first half, `(rows, HALF_PAD)`, in float32."""
        at = token
        if SHARED:
            at = token % tokens
        at = at[:, None] * ROTARY + c[None, :]
        a = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        return a, tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _split_kernel(
        states, turned, cos, sin, rows, tokens,
        HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr,
        SHARED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Queries (program 0 of the second axis) or keys (1) of a block of rows, a row being one head of one token."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        part = tl.program_id(1)
        token, head = row // HEADS, row % HEADS
        source = (states + row * (3 * DIM) + part * DIM)[:, None]
        target = (turned + ((token * 2 + part) * HEADS + head) * DIM)[:, None]
        inside = (row < rows)[:, None]
        c, d = tl.arange(0, HALF_PAD), tl.arange(0, DIM_PAD)
        mask = inside & (c < ROTARY // 2)[None, :]
        a, b = _angles(cos, sin, token, tokens, c, mask, ROTARY, SHARED)
        first = tl.load(source + c[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + ROTARY // 2 + c[None, :], mask=mask, other=0.0).to(tl.float32)
        kind = turned.dtype.element_ty
        tl.store(target + c[None, :], (first * a - second * b).to(kind), mask=mask)
        tl.store(target + ROTARY // 2 + c[None, :], (second * a + first * b).to(kind), mask=mask)
        still = inside & ((d >= ROTARY) & (d < DIM))[None, :]
        tl.store(target + d[None, :], tl.load(source + d[None, :], mask=still, other=0.0), mask=still)

    @triton.jit
    def _turn_kernel(
        x, cos, sin, rows, tokens,
        HEADS: tl.constexpr, PARTS: tl.constexpr, VECTORS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
        HALF_PAD: tl.constexpr, SHARED: tl.constexpr, BACKWARDS: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """A block of rows, a row being one vector of one head of one token; each thread reads what it writes."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place, part = row // PARTS, row % PARTS
        at = (x + place * (VECTORS * DIM) + part * DIM)[:, None]
        c = tl.arange(0, HALF_PAD)
        mask = (row < rows)[:, None] & (c < ROTARY // 2)[None, :]
        a, b = _angles(cos, sin, place // HEADS, tokens, c, mask, ROTARY, SHARED)
        if BACKWARDS:
            b = -b
        first = tl.load(at + c[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + ROTARY // 2 + c[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(at + c[None, :], (first * a - second * b).to(x.dtype.element_ty), mask=mask)
        tl.store(at + ROTARY // 2 + c[None, :], (second * a + first * b).to(x.dtype.element_ty), mask=mask)

    @triton.jit
    def _join_kernel(
        key, value, joined, cos, sin, rows, tokens, seen, kb, kh, kt, vb, vh, vt,
        HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr,
        SHARED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """A block of rows, a row being one head of one token."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        token, head = row // HEADS, row % HEADS
        batch, t = token // tokens, token % tokens
        here = (t < seen)[:, None]
        inside = (row < rows)[:, None]
        k = (key + batch * kb + head * kh + t * kt)[:, None]
        v = (value + batch * vb + head * vh + t * vt)[:, None]
        target = (joined + row * (2 * DIM))[:, None]
        c, d = tl.arange(0, HALF_PAD), tl.arange(0, DIM_PAD)
        turning = inside & (c < ROTARY // 2)[None, :]
        a, b = _angles(cos, sin, token, tokens, c, turning, ROTARY, SHARED)
        first = tl.load(k + c[None, :], mask=turning & here, other=0.0).to(tl.float32)
        second = tl.load(k + ROTARY // 2 + c[None, :], mask=turning & here, other=0.0).to(tl.float32)
        kind = joined.dtype.element_ty
        tl.store(target + c[None, :], (first * a + second * b).to(kind), mask=turning)
        tl.store(target + ROTARY // 2 + c[None, :], (second * a - first * b).to(kind), mask=turning)
        still = inside & ((d >= ROTARY) & (d < DIM))[None, :]
        tl.store(target + d[None, :], tl.load(k + d[None, :], mask=still & here, other=0.0), mask=still)
        every = inside & (d < DIM)[None, :]
        tl.store(target + DIM + d[None, :], tl.load(v + d[None, :], mask=every & here, other=0.0), mask=every)
