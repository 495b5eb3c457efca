"""The near path of DAR attention in Triton, merged with the far path in the same pass.

A sliding window of 128 tokens is little arithmetic, so its cost is what it reads and writes. Merged here, the near
path's own output and log-sum-exp are never written, the far path's are read once, and in the backward pass the
queries' two gradients are added where the second is computed. All three gradients go into one tensor laid out as
GPT-NeoX's fused projection, so that nothing is put together afterwards. The slow counterpart is `window_attention` and
`merge` in `attention_with_lse`.
"""

# Kernels are typed by their launch, and a CPU build of torch comes without Triton.
# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

LOG2E = 1.4426950408889634


def near_kernel_available(query: torch.Tensor) -> bool:
    """Whether the kernels serve: half precision on a GPU with Triton, heads of at most 256 dimensions."""
    return (
        triton is not None
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
    )


def near_merged_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: torch.Tensor,
    far_lse: torch.Tensor,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windowed attention, merged with the far path's output of queries `window` … L-1.

    Args:
        query, key, value: `(batch, heads, L, head dim)`.
        far: `(batch, heads, L - window, head dim)`; `far_lse` `(batch, heads, L - window)`, float32.
        window: tokens, the query's own included, at least 1.
        scaling: multiplies the scores.

    Returns:
        The merged output of the queries' shape, and log-sum-exp `(batch, heads, L)`, float32.
    """
    batch, heads, tokens, dim = query.shape
    query, key, value, far = (_last_is_dense(x) for x in (query, key, value, far))
    far_lse = far_lse.contiguous()
    out = query.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
    rows, columns, stages = _tiles(dim)
    _forward_kernel[(triton.cdiv(tokens, rows), batch * heads)](
        query, key, value, far, far_lse, out, lse,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *far.stride()[:3], *out.stride()[:3],
        heads, tokens, window, scaling * LOG2E,
        DIM=dim, PAD=triton.next_power_of_2(dim), ROWS=rows, COLUMNS=columns, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out, lse


def near_merged_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq_far: torch.Tensor,
    window: int,
    scaling: float,
) -> torch.Tensor:
    """Gradients of queries (both paths), near keys and near values, in this order `(batch, L, heads, 3, head dim)`.

    Args:
        gradient: of the merged output, `(batch, heads, L, head dim)`.
        query, key, value, window, scaling: as in `near_merged_forward`.
        out, lse: what it returned.
        dq_far: the queries' gradient through the far path, `(batch, heads, L - window, head dim)`.
    """
    batch, heads, tokens, dim = query.shape
    gradient, query, key, value, dq_far = (_last_is_dense(x) for x in (gradient, query, key, value, dq_far))
    found = query.new_empty(batch, tokens, heads, 3, dim)
    delta = torch.empty_like(lse)
    rows, columns, stages = _tiles(dim)
    pad = triton.next_power_of_2(dim)
    _query_gradient_kernel[(triton.cdiv(tokens, rows), batch * heads)](
        gradient, query, key, value, out, lse, dq_far, found, delta,
        *gradient.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        *dq_far.stride()[:3],
        heads, tokens, window, scaling * LOG2E, scaling,
        DIM=dim, PAD=pad, ROWS=rows, COLUMNS=columns, num_warps=4, num_stages=stages,
    )  # fmt: skip
    # Keys are the tall side now: each block of them is met by the queries of the next `window` tokens.
    _pair_gradient_kernel[(triton.cdiv(tokens, rows), batch * heads)](
        gradient, query, key, value, lse, delta, found,
        *gradient.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        heads, tokens, window, scaling * LOG2E, scaling,
        DIM=dim, PAD=pad, ROWS=columns, COLUMNS=rows, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return found


def _last_is_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(dim: int) -> tuple[int, int, int]:
    """Side of the tall and of the narrow block, and loads in flight.

    Small blocks: taller ones meet more pairs outside the window and spill registers (on an H200 the keys' gradients
    took five times as long with 128 keys by 64 queries and four warps).
    """
    return (64, 32, 3) if dim <= 128 else (64, 32, 2)


if triton is not None:

    @triton.jit
    def _tile(pointer, stride, tokens, t, d, DIM: tl.constexpr):
        """Rows `t` of one head, `(rows, PAD)`; zero behind the last token and the last dimension."""
        return tl.load(
            pointer + t[:, None] * stride + d[None, :], mask=(t < tokens)[:, None] & (d < DIM)[None, :], other=0.0
        )

    @triton.jit
    def _forward_kernel(
        query, key, value, far, far_lse, out, lse,
        qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, ob, oh, ot,
        heads, tokens, window, scale,
        DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One block of queries; statistics in base 2."""
        scale = tl.cast(scale, tl.float32)  # compiled graphs pass numbers in double precision
        head = tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        start = tl.program_id(0) * ROWS
        row, d = start + tl.arange(0, ROWS), tl.arange(0, PAD)
        key += b * kb + h * kh
        value += b * vb + h * vh
        q = _tile(query + b * qb + h * qh, qt, tokens, row, d, DIM)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PAD], tl.float32)
        first = tl.maximum(start - window + 1, 0) // COLUMNS * COLUMNS
        for begin in range(first, tl.minimum(start + ROWS, tokens), COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            k = _tile(key, kt, tokens, column, d, DIM)
            v = _tile(value, vt, tokens, column, d, DIM)
            distance = row[:, None] - column[None, :]
            scores = tl.dot(q, tl.trans(k)) * scale
            scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(peak - level)
            mass = mass * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
            peak = higher
        t = row - window
        has = (t >= 0) & (row < tokens)
        n = tokens - window
        far_peak = tl.load(far_lse + head * n + t, mask=has, other=float("-inf")) * 1.4426950408889634
        f = tl.load(
            far + b * fb + h * fh + t[:, None] * ft + d[None, :], mask=has[:, None] & (d < DIM)[None, :], other=0.0
        )
        level = tl.maximum(peak, far_peak)
        near_share, far_share = tl.exp2(peak - level), tl.exp2(far_peak - level)
        total = mass * near_share + far_share
        merged = (acc * near_share[:, None] + f.to(tl.float32) * far_share[:, None]) / total[:, None]
        inside = row < tokens
        tl.store(lse + head * tokens + row, (level + tl.log2(total)) * 0.6931471805599453, mask=inside)
        tl.store(
            out + b * ob + h * oh + row[:, None] * ot + d[None, :],
            merged.to(out.dtype.element_ty),
            mask=inside[:, None] & (d < DIM)[None, :],
        )

    @triton.jit
    def _query_gradient_kernel(
        gradient, query, key, value, out, lse, dq_far, found, delta,
        gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, fb, fh, ft,
        heads, tokens, window, scale, scaling,
        DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One block of queries: delta = Σ gradient · output, and their gradient through both paths."""
        scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)
        head = tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        start = tl.program_id(0) * ROWS
        row, d = start + tl.arange(0, ROWS), tl.arange(0, PAD)
        key += b * kb + h * kh
        value += b * vb + h * vh
        inside = row < tokens
        q = _tile(query + b * qb + h * qh, qt, tokens, row, d, DIM)
        g = _tile(gradient + b * gb + h * gh, gt, tokens, row, d, DIM)
        o = _tile(out + b * ob + h * oh, ot, tokens, row, d, DIM)
        share = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + head * tokens + row, share, mask=inside)
        level = tl.load(lse + head * tokens + row, mask=inside, other=0.0) * 1.4426950408889634
        acc = tl.zeros([ROWS, PAD], tl.float32)
        first = tl.maximum(start - window + 1, 0) // COLUMNS * COLUMNS
        for begin in range(first, tl.minimum(start + ROWS, tokens), COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            k = _tile(key, kt, tokens, column, d, DIM)
            v = _tile(value, vt, tokens, column, d, DIM)
            distance = row[:, None] - column[None, :]
            weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - level[:, None])
            weights = tl.where((distance >= 0) & (distance < window), weights, 0.0)
            slope = weights * (tl.dot(g, tl.trans(v)) - share[:, None])
            acc = tl.dot(slope.to(k.dtype), k, acc)
        t = row - window
        has = ((t >= 0) & inside)[:, None] & (d < DIM)[None, :]
        f = tl.load(dq_far + b * fb + h * fh + t[:, None] * ft + d[None, :], mask=has, other=0.0)
        at = ((b * tokens + row) * heads + h) * (3 * DIM)
        tl.store(
            found + at[:, None] + d[None, :],
            (acc * scaling + f.to(tl.float32)).to(found.dtype.element_ty),
            mask=inside[:, None] & (d < DIM)[None, :],
        )

    @triton.jit
    def _pair_gradient_kernel(
        gradient, query, key, value, lse, delta, found,
        gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt,
        heads, tokens, window, scale, scaling,
        DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One block of keys and values, over the queries of the next `window` tokens."""
        scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)
        head = tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        start = tl.program_id(0) * COLUMNS
        column, d = start + tl.arange(0, COLUMNS), tl.arange(0, PAD)
        query += b * qb + h * qh
        gradient += b * gb + h * gh
        k = _tile(key + b * kb + h * kh, kt, tokens, column, d, DIM)
        v = _tile(value + b * vb + h * vh, vt, tokens, column, d, DIM)
        key_acc = tl.zeros([COLUMNS, PAD], tl.float32)
        value_acc = tl.zeros([COLUMNS, PAD], tl.float32)
        for begin in range(start // ROWS * ROWS, tl.minimum(start + COLUMNS + window - 1, tokens), ROWS):
            row = begin + tl.arange(0, ROWS)
            inside = row < tokens
            q = _tile(query, qt, tokens, row, d, DIM)
            g = _tile(gradient, gt, tokens, row, d, DIM)
            level = tl.load(lse + head * tokens + row, mask=inside, other=0.0) * 1.4426950408889634
            share = tl.load(delta + head * tokens + row, mask=inside, other=0.0)
            distance = row[None, :] - column[:, None]
            seen = (distance >= 0) & (distance < window) & inside[None, :]
            weights = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) * scale - level[None, :]), 0.0)
            value_acc = tl.dot(weights.to(g.dtype), g, value_acc)
            slope = weights * (tl.dot(v, tl.trans(g)) - share[None, :])
            key_acc = tl.dot(slope.to(q.dtype), q, key_acc)
        mask = (column < tokens)[:, None] & (d < DIM)[None, :]
        at = (((b * tokens + column) * heads + h) * (3 * DIM))[:, None] + d[None, :]
        tl.store(found + at + DIM, (key_acc * scaling).to(found.dtype.element_ty), mask=mask)
        tl.store(found + at + 2 * DIM, value_acc.to(found.dtype.element_ty), mask=mask)
