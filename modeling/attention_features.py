"""ProxyKV's features: the attention that each token receives in a proxy model, summed over the queries.

    X[b, l, h, n] = Σ_q softmax(Q Kᵀ · scaling)[b, l, h, q, n]                        (the ProxyKV paper, Section 3)

for every layer l and query head h of the proxy. The N × N probabilities are never held. A softmax needs only the
log-sum-exp of each query's scores, which FlashAttention returns; so one recomputation of Q Kᵀ, summed over its
columns, is enough. On a GPU that is a kernel (`attention_features_kernel`); elsewhere the attention's own output and
the column sums come from the same blocks of probabilities.

The proxy reads its prompt in chunks, so that activations are those of one chunk. What it holds beside its weights are
its keys and values until the last chunk, and the features themselves: `4 · layers · heads · N` bytes a row; with the
values of each token, `4 · layers · (heads + key-value heads · head dim) · N`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..configuration.configuration_axial_mapper import PROXY_STATES, ProxyStates, state_size, token_channels
from .attention_dispatch import AttentionCall, AttentionOutput, take_over
from .attention_features_kernel import summed_attention_kernel, summed_attention_kernel_available
from .attention_with_lse import statistics_dtype
from .compat import cache_argument
from .prunable_models import attention_types, refuse_unsupported, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention probabilities held at once: small enough for a CPU's caches, large enough to fill a GPU.
BLOCK_ELEMENTS = {"cpu": 1 << 21}
BLOCK_ELEMENTS_DEFAULT = 1 << 26
# Fewer queries than this make matrix products slow: then fewer heads are taken at a time.
FEWEST_ROWS = 64
# Tokens of the prompt that a proxy reads in one pass.
CHUNK_TOKENS = 4096


# --- column sums of one attention ------------------------------------------------------------------------------------


def query_summed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    window: int | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention probability that each key receives, summed over the queries.

    Args:
        query: `(batch, query heads, q, head dim)`, rotated; they are the last q of the keys' tokens (usually all).
        key: `(batch, key-value heads, n, head dim)`, n at least q; query heads are a multiple of key-value heads.
        scaling: factor on query-key products.
        valid: `(batch, n)`, bool, False for padding, which neither gives nor receives attention.
        window: tokens that a query sees, its own included; None for all.
        lse: `(batch, query heads, q)`, natural log-sum-exp of the scaled scores that each query sees, as the forward
            pass returned it; computed here if None. Entries of padding are not read.

    Returns:
        `(batch, query heads, n)`, float32 (float64 for float64 queries). Over n they add up to the number of valid
        queries.

    Raises:
        ValueError: shapes that do not fit, or a window below 1.
    """
    _check_attention(query, key, valid, window, lse)
    if summed_attention_kernel_available(query, key):
        return summed_attention_kernel(query, key, scaling, valid, window, lse)
    return query_summed_attention_reference(query, key, scaling, valid, window, lse)


def query_summed_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    window: int | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """`query_summed_attention` with ordinary operations, in any dtype, a block of queries at a time."""
    sums, *_ = _blockwise(query, key, None, scaling, valid, window, lse)
    return sums


def attention_and_column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention, and `query_summed_attention` of the same queries and keys.

    Args:
        value: `(batch, key-value heads, n, value dim)`; the others as in `query_summed_attention`.

    Returns:
        Output `(batch, query heads, q, value dim)` in the queries' dtype (0 for padding), and the column sums.
    """
    if not summed_attention_kernel_available(query, key):
        sums, out = _blockwise(query, key, value, scaling, valid, window, None)
        assert out is not None
        return out, sums
    if valid is None and _flash_serves(query, value):
        limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        # Causal, with fewer queries than keys, aligns the last query with the last key; grouped heads are supported.
        states = (x.transpose(1, 2) for x in (query, key, value))
        flash, lse, *_ = torch.ops.aten._flash_attention_forward(
            *states, None, None, query.shape[2], key.shape[2], 0.0, True, False, scale=scaling, **limits
        )
        return flash.transpose(1, 2), query_summed_attention(query, key, scaling, None, window, lse)
    out = _masked_sdpa(query, key, value, scaling, valid, window)
    return out, query_summed_attention(query, key, scaling, valid, window)


def _flash_serves(query: torch.Tensor, value: torch.Tensor) -> bool:
    dim = query.shape[-1]
    return query.dtype in (torch.float16, torch.bfloat16) and dim == value.shape[-1] and dim % 8 == 0 and dim <= 256


def _masked_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    (batch, heads, q, _), n = query.shape, key.shape[2]
    group = heads // key.shape[1]
    columns = torch.arange(n, device=query.device)
    own = columns[n - q :, None]
    visible = columns <= own
    if window is not None:
        visible &= columns > own - window
    visible = visible.expand(batch, 1, q, n)
    if valid is not None:
        # A row of the mask that is all False would give NaN: padding sees itself, and its output is cleared below.
        visible = visible & (valid[:, None, None, :] | (columns == own))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return out if valid is None else out * valid[:, None, n - q :, None]


@dataclass
class _Block:
    """Probabilities of some heads' queries: `(heads, group, rows, columns)`."""

    heads: slice
    rows: slice
    columns: slice
    probabilities: torch.Tensor


def _blockwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    scaling: float,
    valid: torch.Tensor | None,
    window: int | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Column sums `(batch, query heads, n)`, and the attention's output if there are values."""
    (batch, query_heads, q, _), (_, heads, n, _) = query.shape, key.shape
    group, dtype = query_heads // heads, statistics_dtype(query)
    sums = torch.zeros(batch * heads, group, n, dtype=dtype, device=query.device)
    out = states = None
    if value is not None:
        states = value.reshape(batch * heads, n, value.shape[-1])
        out = torch.empty(batch * heads, group, q, value.shape[-1], dtype=query.dtype, device=query.device)
    for block in _probability_blocks(query, key, scaling, valid, window, lse):
        sums[block.heads, :, block.columns] += block.probabilities.sum(2)
        if out is not None and states is not None:
            seen = states[block.heads, block.columns]
            weights = block.probabilities.flatten(1, 2)
            # On a CPU, half-precision products are slow.
            weights = weights.to(seen.dtype) if query.is_cuda else weights
            result = torch.bmm(weights, seen.to(weights.dtype))
            out[block.heads, :, block.rows] = result.view(*block.probabilities.shape[:3], -1).to(out.dtype)
    shaped = None if out is None else out.view(batch, query_heads, q, -1)
    return sums.view(batch, query_heads, n), shaped


def _probability_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None,
    window: int | None,
    lse: torch.Tensor | None,
) -> Iterator[_Block]:
    (batch, query_heads, q, dim), (_, heads, n, _) = query.shape, key.shape
    group, before = query_heads // heads, n - q
    if query.dtype in (torch.float16, torch.bfloat16) and not query.is_cuda:
        query, key = query.float(), key.float()
    queries = query.reshape(batch * heads, group, q, dim)
    keys = key.reshape(batch * heads, n, dim)
    real = None if valid is None else valid.repeat_interleave(heads, 0)
    given = None if lse is None else lse.reshape(batch * heads, group, q, 1)
    widest = n if window is None else min(n, 2 * window + FEWEST_ROWS)
    elements = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS_DEFAULT)
    at_once = max(1, elements // (group * FEWEST_ROWS * widest))
    block = max(1, elements // (group * min(at_once, batch * heads) * widest))
    if window is not None:
        block = min(block, max(window, FEWEST_ROWS))  # taller blocks meet more and more pairs outside the window
    columns = torch.arange(n, device=query.device)
    for head in range(0, batch * heads, at_once):
        some = slice(head, head + at_once)
        for first in range(0, q, block):
            end = min(first + block, q)
            low = 0 if window is None else max(0, before + first - window + 1)
            seen = before + end
            rows = queries[some, :, first:end].flatten(1, 2)
            logits = _products(rows, keys[some, low:seen].mT).mul_(scaling)
            logits = logits.view(-1, group, end - first, seen - low)
            # Without a window only the block's own columns can lie in a query's future.
            maybe_hidden = before + first if window is None else low
            theirs, own = columns[maybe_hidden:seen], columns[before + first : seen, None]
            hidden = theirs > own
            if window is not None:
                hidden |= theirs <= own - window
            logits[..., maybe_hidden - low :].masked_fill_(hidden, -torch.inf)
            if real is not None:
                logits.masked_fill_(~real[some, None, None, low:seen], -torch.inf)
            if given is None:
                probabilities = logits.softmax(-1)
            else:
                probabilities = (logits - given[some, :, first:end]).exp_()
            if real is not None:  # padding gives nothing, whatever it saw
                probabilities.masked_fill_(~real[some, None, before + first : seen, None], 0.0)
            yield _Block(some, slice(first, end), slice(low, seen), probabilities)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`(heads, rows, n)` in float32 (float64 stays); on CUDA half-precision inputs are not converted first."""
    if queries.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries, keys)


def _check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    valid: torch.Tensor | None,
    window: int | None,
    lse: torch.Tensor | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query and key must be (batch, heads, tokens, head dim) with equal batch and head dim, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}."
        )
    (batch, query_heads, q, _), (_, heads, n, _) = query.shape, key.shape
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {heads} key-value heads.")
    if q > n:
        raise ValueError(f"There are {q} queries but only {n} keys: the queries must be the last of the keys' tokens.")
    if valid is not None and (valid.dtype != torch.bool or valid.shape != (batch, n)):
        raise ValueError(f"valid must be bool of shape {(batch, n)}, got {valid.dtype} {tuple(valid.shape)}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the query's own token), got {window}.")
    if lse is not None and lse.shape != (batch, query_heads, q):
        raise ValueError(f"lse must have shape {(batch, query_heads, q)}, got {tuple(lse.shape)}.")


# --- one prefill of a proxy ------------------------------------------------------------------------------------------


@torch.no_grad()
def proxy_features(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    states: ProxyStates = "none",
) -> torch.Tensor:
    """Read a prompt with a proxy model and return the attention that each token receives, and its values if wanted.

    The language-model head does not run, and the proxy's keys and values are let go at the end.

    Args:
        model: a decoder of transformers in evaluation mode, of a kind that `PrunedCache` supports. Layers with a
            sliding window count the attention inside it.
        input_ids: `(batch, n)`, int64, on any device.
        attention_mask: `(batch, n)`, 1 for tokens and 0 for padding.
        chunk_tokens: most tokens to read in one pass; the result does not depend on it.
        states: what follows the column sums of each token: nothing, or its values, key-value head by head.

    Returns:
        `(layers, batch, query heads + numbers of the values, n)`, float32 (float64 for a float64 model), on the device
        of the model's input embedding; 0 for padding.

    Raises:
        TypeError, ValueError: a model whose attention is not supported or that is in training mode; ids that are not
            `(batch, n)` with n at least 1; a mask of another shape; a chunk length below 1; unknown states, or values
            of a model whose layers have values of different sizes.
    """
    _check_prompt(input_ids, attention_mask, chunk_tokens)
    if states not in PROXY_STATES:
        raise ValueError(f"states must be one of {', '.join(PROXY_STATES)}, got {states!r}.")
    if model.training:
        raise ValueError("Features are read in evaluation mode: call model.eval() first.")
    config = text_config(model)
    size = state_size(config) if states == "values" else 0
    if size is None:
        raise ValueError(
            f"The layers of this {config.model_type!r} have values of different sizes, which cannot be features: give "
            'states="none".'
        )
    device = model.get_input_embeddings().weight.device
    ids = input_ids.to(device)
    batch, n = ids.shape
    valid, positions = None, torch.arange(n, device=device).expand(batch, n)
    if attention_mask is not None and not bool(attention_mask.all()):
        valid = attention_mask.to(device).bool()
        positions = (valid.cumsum(1) - 1).clamp(min=0)
    body = model.base_model
    dtype = torch.float64 if model.get_input_embeddings().weight.dtype == torch.float64 else torch.float32
    channels = token_channels(config.num_attention_heads, states, size)
    shape = (config.num_hidden_layers, batch, channels, n)
    reading = _Reading(config, torch.zeros(shape, dtype=dtype, device=device), valid)
    cache = Cache(layers=_make_layers(reading))
    for first in range(0, n, chunk_tokens):
        chunk = slice(first, min(first + chunk_tokens, n))
        # No mask: the layers know which tokens are padding, and all that the model would do with it is widen it.
        body(
            input_ids=ids[:, chunk],
            position_ids=positions[:, chunk],
            use_cache=True,
            **{cache_argument(body): cache},
        )
    return reading.features


def _check_prompt(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, chunk_tokens: int) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[1] == 0:
        found = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor (batch, n) with n at least 1, got {found}.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(attention_mask.shape)}."
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")


@dataclass
class _Reading:
    """What the layers of one prefill share.

    Attributes:
        config: the configuration that the model's attention modules hold.
        features: `(layers, batch, channels, n)`, filled as the layers attend.
        valid: `(batch, n)`, bool, False for padding; None when there is none.
    """

    config: PreTrainedConfig
    features: torch.Tensor
    valid: torch.Tensor | None

    def store_values(self, layer: int, first: int, values: torch.Tensor) -> None:
        """Put the values of new tokens, `(batch, heads, new, dim)`, the first at column `first`, if wanted."""
        room = self.features[layer, :, self.config.num_attention_heads :, first : first + values.shape[2]]
        if not room.shape[1]:
            return
        flat = values.mT.flatten(1, 2)  # channels of a head together
        if flat.shape[1] != room.shape[1]:
            raise ValueError(
                f"Values of layer {layer} have {flat.shape[1]} numbers a token and the configuration says "
                f'{room.shape[1]}: they cannot be features of this {self.config.model_type!r}; give states="none".'
            )
        room.copy_(flat)
        if self.valid is not None:
            room.masked_fill_(~self.valid[:, None, first : first + values.shape[2]], 0.0)


def _make_layers(reading: _Reading) -> list["_ReadingLayer"]:
    window = getattr(reading.config, "sliding_window", None)
    return [
        _ReadingLayer(reading, index, window if kind == "sliding_attention" else None)
        for index, kind in enumerate(attention_types(reading.config))
    ]


class _ReadingLayer(DynamicLayer):
    """A cache layer that attends itself and adds the attention its tokens receive to the features.

    A full layer holds one buffer of the prompt's length, a sliding one the last `window - 1` tokens.
    """

    is_initialized: bool

    def __init__(self, reading: _Reading, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self.reading, self.layer_idx, self.window = reading, layer_idx, window
        self.is_sliding = window is not None
        self.seen = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return take_over(self.reading.config, key_states, value_states, self)

    def attend(self, call: AttentionCall) -> AttentionOutput:
        refuse_unsupported(call)
        n = call.keys.shape[2]
        before = self.seen if self.window is None else min(self.seen, self.window - 1)
        self.reading.store_values(self.layer_idx, self.seen, call.values)
        keys, values = self._with_past(call.keys, call.values)
        self.seen += n
        columns = slice(self.seen - n - before, self.seen)
        valid = self.reading.valid
        if valid is not None:
            valid = valid[:, columns].to(call.query.device)
        out, sums = attention_and_column_sums(call.query, keys, values, call.scaling, valid, self.window)
        features = self.reading.features
        features[self.layer_idx, :, : sums.shape[1], columns] += sums.to(features.device)
        return out.transpose(1, 2).contiguous(), None

    def _with_past(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the new tokens may see, their own included."""
        total, end = self.reading.features.shape[-1], self.seen + keys.shape[2]
        if self.seen == 0 and end == total:  # the only chunk: nothing has to be stored
            return keys, values
        if not self.is_initialized:
            self.is_initialized = True
            room = total if self.window is None else 0
            self.keys = keys.new_empty(*keys.shape[:2], room, keys.shape[3])
            self.values = values.new_empty(*values.shape[:2], room, values.shape[3])
        if self.window is None:
            self.keys[:, :, self.seen : end] = keys
            self.values[:, :, self.seen : end] = values
            return self.keys[:, :, :end], self.values[:, :, :end]
        keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        first = max(0, keys.shape[2] - self.window + 1)
        # Copies: a view would hold on to all of the chunk's states.
        self.keys, self.values = keys[:, :, first:].clone(), values[:, :, first:].clone()
        return keys, values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The model's own mask is not read, so it need not be wide."""
        return query_length, self.seen
