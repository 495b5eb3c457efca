"""Attention that also returns its log-sum-exp, so that attentions over disjoint sets of keys can be merged.

Attention over a union of key sets is the average of the attentions over each set, weighted by exp(log-sum-exp). Its
gradient needs none through the log-sum-exp: each set's ordinary backward pass, given the *merged* output and
log-sum-exp, returns that set's share (see `merge`).

Shapes: queries, keys, values and outputs are `(batch, heads, tokens, head dim)` with any strides whose last is 1;
log-sum-exps are `(batch, heads, tokens)` in float32 (float64 for float64 inputs), natural logarithm. `scaling`
multiplies the scores. Keys and values have as many heads as queries.
"""

from typing import Any

import torch
from torch.nn import functional as F

from .dar_near_kernel import near_kernel_available

aten = torch.ops.aten

# From this length on, planning a cuDNN kernel for a new shape (some 0.1 s, once a shape) pays even for one forward
# pass.
CUDNN_FORWARD_TOKENS = 16_384
# Below this length a FlashAttention kernel is as fast.
CUDNN_TRAINING_TOKENS = 512
# Queries a block of the windowed attention that is computed block by block.
SMALLEST_BLOCK = 16


def has_kernels(query: torch.Tensor) -> bool:
    """Whether this device and dtype have attention kernels; if not, ordinary operations or FlexAttention serve."""
    if query.device.type == "cpu":
        return True
    return near_kernel_available(query) and query.shape[-1] % 8 == 0


def merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint key sets from the attention over each.

    -inf marks a row that sees no key of a set.
    """
    lse = torch.logaddexp(first_lse, second_lse)
    # A row that sees no key at all: both parts are zero, and exp(-inf - -inf) would be NaN.
    finite = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    a, b = (first_lse - finite).exp()[..., None], (second_lse - finite).exp()[..., None]
    return (first * a + second * b).to(first.dtype), lse


# ---------------------------------------------------------------------------------------------------------------------
# Reference: ordinary operations, differentiable, any device and dtype
# ---------------------------------------------------------------------------------------------------------------------


def masked_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention where `visible` (bool, broadcastable to queries × keys); rows that see nothing give 0 and -inf."""
    scores = (query @ key.mT).to(statistics_dtype(query)) * scaling
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    finite = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    return (scores - finite[..., None]).exp().to(value.dtype) @ value, lse


def window_visible(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """`(queries, keys)`, bool: the queries are the last positions, and each sees itself and `window` - 1 before it."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


# ---------------------------------------------------------------------------------------------------------------------
# All keys, or causal over as many queries as keys
# ---------------------------------------------------------------------------------------------------------------------


def full_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query sees every key. Forward only."""
    if not has_kernels(query):
        everything = torch.ones(1, 1, dtype=torch.bool, device=query.device)
        return masked_reference(query, key, value, everything, scaling)
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=scaling)
        return out, lse
    out, lse, *_ = _flash_forward(query, key, value, scaling, causal=False)
    return out, lse


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, training: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Query i sees keys 0 … i. The third part is what `causal_attention_backward` needs besides."""
    if not has_kernels(query):
        size = query.shape[2]
        visible = window_visible(size, size, size, query.device)
        return *masked_reference(query, key, value, visible, scaling), ()
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)
        return out, lse, ()
    if prefers_cudnn(query, training):
        out, lse, *rest = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scaling
        )
        return out, lse.squeeze(-1), ("cudnn", *rest[:6])
    out, lse, *rest = _flash_forward(query, key, value, scaling, causal=True)
    return out, lse, ("flash", *rest)


def causal_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: tuple[Any, ...],
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; `out` and `lse` may be those of a merged attention."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, True, scale=scaling
        )
    kind, *rest = saved
    if kind == "cudnn":
        cumulative_q, cumulative_k, max_q, max_k, seed, offset = rest
        return aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, out, lse[..., None], seed, offset, None,
            cumulative_q, cumulative_k, max_q, max_k, 0.0, True, scale=scaling,
        )  # fmt: skip
    seed, unused = rest
    states = (x.transpose(1, 2) for x in (gradient, query, key, value, out))
    lengths = (query.shape[2], key.shape[2])
    gradients = aten._flash_attention_backward(
        *states, lse, None, None, *lengths, 0.0, True, seed, unused, scale=scaling
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def prefers_cudnn(query: torch.Tensor, training: bool) -> bool:
    """Whether cuDNN's kernel is the faster one for causal attention of this many tokens: on Hopper and later."""
    enough = query.shape[2] >= (CUDNN_TRAINING_TOKENS if training else CUDNN_FORWARD_TOKENS)
    return enough and query.shape[-1] <= 128 and _cudnn_serves(query.device.index or 0)


@torch.compiler.assume_constant_result
def _cudnn_serves(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] >= 9 and torch.backends.cuda.cudnn_sdp_enabled()


def _flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    causal: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention through torch; with fewer queries than keys, the queries are the last positions."""
    limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out, lse, seed, unused, _ = aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (query, key, value)), None, None, query.shape[2], key.shape[2], 0.0, causal,
        False, scale=scaling, **limits,
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, unused


def statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """In which softmax statistics of `x` are kept: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# A sliding window
# ---------------------------------------------------------------------------------------------------------------------


def window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries are the last of the keys' positions; each sees its own and the `window` - 1 before it.

    Time and memory grow with tokens × window.
    """
    if query.is_cuda and has_kernels(query):
        out, lse, *_ = _flash_forward(query, key, value, scaling, causal=True, window=window)
        return out, lse
    blocks = _Blocks(query, key, window)
    states = (blocks.cut_queries(query), blocks.cut_keys(key), blocks.cut_keys(value))
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *states, attn_mask=blocks.bias(query.dtype), scale=scaling
        )
    else:
        out, lse = masked_reference(*states, blocks.visible, scaling)
    return blocks.join_queries(out), blocks.join_queries(lse[..., None])[..., 0]


def window_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `window_attention` on a CPU; `out` and `lse` may be those of a merged attention."""
    blocks = _Blocks(query, key, window)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(blocks.cut_queries(gradient), blocks.cut_queries(query), blocks.cut_keys(key), blocks.cut_keys(value)),
        *(blocks.cut_queries(out), blocks.cut_queries(lse[..., None])[..., 0].contiguous()),
        0.0, False, attn_mask=blocks.bias(query.dtype), scale=scaling,
    )  # fmt: skip
    return blocks.join_queries(dq), blocks.join_keys(dk), blocks.join_keys(dv)


class _Blocks:
    """Cuts a windowed attention into blocks of queries, each with the block + window - 1 keys that it may see.

    A block becomes one "head" of one row of an ordinary attention: `(batch · heads, blocks, block, head dim)`.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, window: int) -> None:
        self.batch, self.heads, self.queries, _ = query.shape
        self.keys = key.shape[2]
        self.block = max(window, SMALLEST_BLOCK)
        self.count = -(-self.queries // self.block)
        self.before = window - 1  # keys that a block's first query sees before its own
        self.tail = self.count * self.block - self.queries
        # Keys in front of the first query, less than a block needs: the rest is padding that nobody sees.
        self.missing = self.before - (self.keys - self.queries)
        width = self.block + self.before
        row, column = torch.arange(self.block)[:, None], torch.arange(width)[None]
        within = (column >= row) & (column < row + window)
        start = torch.arange(self.count)[:, None, None] * self.block
        self.visible = (within[None] & (start + column[None] >= self.missing))[None].to(query.device)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)

    def cut_queries(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0, 0, self.tail))
        return x.reshape(self.batch * self.heads, self.count, self.block, x.shape[-1])

    def cut_keys(self, x: torch.Tensor) -> torch.Tensor:
        # A negative pad crops keys too far back for any query.
        x = F.pad(x, (0, 0, self.missing, self.tail)).flatten(0, 1)
        return x.unfold(1, self.block + self.before, self.block).transpose(-1, -2).contiguous()

    def join_queries(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.batch, self.heads, self.count * self.block, x.shape[-1])[:, :, : self.queries]

    def join_keys(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sum over the blocks that saw a key: its own, and the next one."""
        rows, count, _, dim = gradients.shape
        total = gradients.new_zeros(rows, count + 1, self.block, dim)
        total[:, :-1] += gradients[:, :, : self.block]
        total[:, 1:, : self.before] += gradients[:, :, self.block :]
        total = total.reshape(self.batch, self.heads, -1, dim)
        if self.missing < 0:
            total = F.pad(total, (0, 0, -self.missing, 0))
        return total[:, :, max(self.missing, 0) :][:, :, : self.keys]
