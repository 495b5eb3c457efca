"""Column sums of a causal softmax in Triton: what `query_summed_attention` computes, without an N × N matrix.

Two kernels. The first finds each query's log-sum-exp, where the forward pass has not: a block of queries goes over the
keys that it sees. The second sums the probabilities: a block of keys goes over the queries that see it, recomputes
their scores and keeps one running sum a key and place in the block of queries, added up at the end; or the largest
probability, which is what KVzip asks for. Products of half precision are accumulated in float32, float32 is multiplied
in full precision. Tiles that are masked throughout are not visited, and without a window only those on the diagonal
are masked at all. The slow counterparts, and the definitions, are `query_summed_attention_reference` in
`attention_features` and `received_attention`.
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
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_DIM = 256


def summed_attention_kernel_available(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the kernels serve: Triton on an Ampere GPU or later, states in one dtype, float32 or half precision."""
    return (
        triton is not None
        and query.is_cuda
        and query.dtype == key.dtype
        and query.dtype in DTYPES
        and query.shape[-1] <= LARGEST_DIM
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    )


def summed_attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    window: int | None = None,
    lse: torch.Tensor | None = None,
    largest: bool = False,
) -> torch.Tensor:
    """See `query_summed_attention`; float32 results.

    Args:
        query: `(batch, query heads, q, head dim)`.
        key: `(batch, key-value heads, n, head dim)`; the queries are the last q of the n tokens.
        scaling, valid, window, lse: as there.
        largest: the largest probability that a key receives in place of the sum.

    Returns:
        `(batch, query heads, n)`, float32.
    """
    batch, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1:3]
    query, key = _last_is_dense(query), _last_is_dense(key)
    pad = max(16, triton.next_power_of_2(dim))
    rows, columns, warps = _tiles(query.dtype, pad)
    shape = (heads, heads // key_heads, queries, keys, keys if window is None else window, scaling * LOG2E)
    flags = valid if valid is None else valid.contiguous().view(torch.uint8)
    sizes = {"DIM": dim, "PAD": pad, "WINDOWED": window is not None, "VALID": flags is not None}
    strides = (*query.stride()[:3], *key.stride()[:3])
    if lse is None:
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
        _lse_kernel[(triton.cdiv(queries, columns), batch * heads)](
            query, key, lse if flags is None else flags, lse, *strides, *shape,
            **sizes, ROWS=columns, COLUMNS=rows, num_warps=warps, num_stages=2,
        )  # fmt: skip
    else:
        lse = lse.float().contiguous()
    if valid is not None:
        # A query of which exp(score - lse) is 0 gives nothing away.
        lse = lse.masked_fill(~valid[:, None, keys - queries :], torch.inf)
    sums = torch.empty(batch, heads, keys, dtype=torch.float32, device=query.device)
    _column_kernel[(triton.cdiv(keys, columns), batch * heads)](
        query, key, lse if flags is None else flags, lse, sums, *strides, *shape,
        **sizes, LARGEST=largest, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return sums


def _last_is_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(dtype: torch.dtype, pad: int) -> tuple[int, int, int]:
    """Side that moves along, side that stays, and warps.

    Running sums stay in registers, and tiles take at most 64 KB of shared memory, which every current GPU has.
    """
    if dtype == torch.float32 and pad > 128:
        return 16, 32, 4
    if dtype == torch.float32 or pad > 128:
        return 32, 64, 4
    return 64, 128, 8


if triton is not None:

    @triton.jit
    def _tile(pointer, stride, begin, count, SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
        """Tokens `begin … begin + SIZE - 1` of one head, `(SIZE, PAD)`; zero from token `count` on."""
        t, d = tl.arange(0, SIZE), tl.arange(0, PAD)
        # The offset of the tile may exceed 31 bits; offsets inside it cannot.
        pointer += tl.cast(begin, tl.int64) * stride
        mask = (begin + t < count)[:, None] & (d < DIM)[None, :]
        return tl.load(pointer + t[:, None] * stride + d[None, :], mask=mask, other=0.0)

    @triton.jit
    def _lse_kernel(
        query, key, flags, lse,
        qb, qh, qt, kb, kh, kt,
        heads, group, queries, keys, window, scale,
        DIM: tl.constexpr, PAD: tl.constexpr, WINDOWED: tl.constexpr, VALID: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One block of one head's queries; statistics in base 2. Rows are queries, columns are keys."""
        head = tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        start = tl.program_id(0) * ROWS
        before = keys - queries
        row, c = start + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        key += b * kb + (h // group) * kh
        q = _tile(query + b * qb + h * qh, qt, start, queries, ROWS, DIM, PAD)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        first = 0
        if WINDOWED:
            first = tl.maximum(before + start - window + 1, 0) // COLUMNS * COLUMNS
        stop = tl.minimum(before + start + ROWS, keys)
        for begin in range(first, stop, COLUMNS):
            column = begin + c
            k = _tile(key, kt, begin, keys, COLUMNS, DIM, PAD)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            distance = (before + row)[:, None] - column[None, :]
            seen = distance >= 0
            if WINDOWED:
                seen &= distance < window
            if VALID:
                flag = tl.load(flags + b * keys + column, mask=column < keys, other=0)
                seen &= (flag != 0)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            mass = mass * tl.exp2(peak - level) + tl.sum(tl.exp2(scores - level[:, None]), 1)
            peak = higher
        # Padding may have seen nothing: -inf, which is overwritten before it is read.
        found = tl.where(mass > 0.0, peak + tl.log2(mass), float("-inf"))
        tl.store(lse + head * queries + row, found * 0.6931471805599453, mask=row < queries)

    @triton.jit
    def _column_block(
        acc, k, column, query, lse, qt, begin, stop, before, queries, window, scale,
        DIM: tl.constexpr, PAD: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
        LARGEST: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """acc and the probabilities that queries `begin … stop - 1` give to the keys, `(COLUMNS, ROWS)`."""
        r = tl.arange(0, ROWS)
        for position in range(begin, stop, ROWS):
            row = position + r
            q = _tile(query, qt, position, queries, ROWS, DIM, PAD)
            # Beyond the last query: exp2(-inf) = 0.
            level = tl.load(lse + row, mask=row < queries, other=float("inf")) * 1.4426950408889634
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            weights = tl.exp2(scores - level[None, :])
            if MASKED:
                distance = (before + row)[None, :] - column[:, None]
                seen = distance >= 0
                if WINDOWED:
                    seen &= distance < window
                weights = tl.where(seen, weights, 0.0)
            if LARGEST:
                acc = tl.maximum(acc, weights)
            else:
                acc += weights
        return acc

    @triton.jit
    def _column_kernel(
        query, key, flags, lse, sums,
        qb, qh, qt, kb, kh, kt,
        heads, group, queries, keys, window, scale,
        DIM: tl.constexpr, PAD: tl.constexpr, WINDOWED: tl.constexpr, VALID: tl.constexpr, LARGEST: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One block of keys for one query head. Rows are queries, columns are keys."""
        head = tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        start = tl.program_id(0) * COLUMNS
        before = keys - queries
        column = start + tl.arange(0, COLUMNS)
        query += b * qb + h * qh
        lse += head * queries
        k = _tile(key + b * kb + (h // group) * kh, kt, start, keys, COLUMNS, DIM, PAD)
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        # Queries from the block's first key on see some of it; those from its last key on see all of it, up to where
        # the first key leaves the window.
        first = tl.maximum(start - before, 0) // ROWS * ROWS
        whole = tl.cdiv(tl.maximum(start + COLUMNS - 1 - before, 0), ROWS) * ROWS
        stop = queries
        if WINDOWED:
            stop = tl.minimum(queries, start + COLUMNS - 1 + window - before)
            acc = _column_block(
                acc, k, column, query, lse, qt, first, stop, before, queries, window, scale,
                DIM, PAD, WINDOWED, True, LARGEST, ROWS,
            )  # fmt: skip
        else:
            acc = _column_block(
                acc, k, column, query, lse, qt, first, tl.minimum(whole, stop), before, queries, window, scale,
                DIM, PAD, WINDOWED, True, LARGEST, ROWS,
            )  # fmt: skip
            acc = _column_block(
                acc, k, column, query, lse, qt, tl.maximum(first, whole), stop, before, queries, window, scale,
                DIM, PAD, WINDOWED, False, LARGEST, ROWS,
            )  # fmt: skip
        if LARGEST:
            total = tl.max(acc, 1)
        else:
            total = tl.sum(acc, 1)
        if VALID:
            flag = tl.load(flags + b * keys + column, mask=column < keys, other=0)
            total = tl.where(flag != 0, total, 0.0)
        tl.store(sums + head * keys + column, total, mask=column < keys)
