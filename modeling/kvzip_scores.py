"""KVzip's importance of key-value pairs: how much attention each one receives while the model repeats its context.

The reconstruction pass of Kim et al. (2025). The context is read once with a full cache. Then, for one chunk of about
2,000 tokens after the other, the model reads a request to repeat the context followed by the chunk itself::

    [context, in the cache] [\\n\\nRepeat the previous context exactly.] [end of turn, start of the answer] [chunk]

A pair's score is the largest attention probability that any of these tokens gives it, over the query heads of its
group too. The softmax runs over the first tokens of the context (sinks), the chunk's own pairs and the repeating
tokens; so a score does not depend on how long the rest of the context is.

The pass needs no question and judges a pair by use rather than by looks, but it costs several times the prefill.
`KeyPrototypes` therefore runs it offline, to learn what important pairs look like.

Beside the prefill the model's layers read every token once more, with the whole cache in place: twice the prefill's
attention. Memory beyond the full cache: where `chunk_attention` serves, that of a chunk; elsewhere one layer's keys
and values once more, and a mask. Without a kernel for scoring also a block of probabilities (`received_attention`).
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .attention_dispatch import AttentionCall, AttentionOutput, take_over
from .chat_frame import chat_frame
from .chunk_attention import chunk_attention, chunk_attention_available
from .compat import cache_argument
from .prunable_models import attention_types, refuse_unsupported, text_config
from .received_attention import highest_attention, received_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REPEAT_FIRST = "\n\nRepeat the previous context exactly."
REPEAT_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
# Tokens before a later chunk that its request quotes.
QUOTED_TOKENS = 8


# --- what the model is asked -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepeatPrompt:
    """Token ids of the request to repeat a context.

    Attributes:
        prefix: what stands before a context: the chat template's header, or a beginning-of-sequence token, or nothing.
        first: the request for the first chunk.
        later: the request for a later chunk, up to where the tokens before the chunk are quoted.
        suffix: what follows the request, up to where the answer starts.
    """

    prefix: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase") -> "RepeatPrompt":
        """The request in a tokenizer's chat template, or in plain text where it has none.

        Raises:
            ValueError: the chat template does not repeat the user's message exactly once.
        """

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False).input_ids)

        prefix, after = chat_frame(tokenizer)
        return cls(prefix, encode(REPEAT_FIRST), encode(REPEAT_LATER), encode(after))

    def ids(self, context: Sequence[int], start: int, stop: int, first: bool) -> list[int]:
        """The request for tokens `start … stop - 1` of `context`, with the answer itself."""
        if first:
            request = list(self.first)
        else:
            request = [*self.later, *context[max(0, start - QUOTED_TOKENS) : start]]
        return [*request, *self.suffix, *context[start:stop]]


# --- the pass --------------------------------------------------------------------------------------------------------


@dataclass
class Reconstruction:
    """Scores of one context's pairs, and what was read on the way.

    Attributes:
        scores: for each layer with full attention, `(1, key-value heads, n)`, float32 in [0, 1] (float64 for a
            float64 model); 1 for the prefix, which is kept.
        cache: the full cache of the context; `cache.layers[i].keys` is `(1, key-value heads, n, head dim)`.
        attention_max: with `prefill_statistics`, the largest attention probability each pair received while the
            context was read, shaped like `scores`; otherwise empty.
        attention_mass: likewise the sum of the probabilities, over queries and the query heads of the group.
    """

    scores: dict[int, torch.Tensor]
    cache: Cache
    attention_max: dict[int, torch.Tensor] = field(default_factory=dict)
    attention_mass: dict[int, torch.Tensor] = field(default_factory=dict)


@torch.no_grad()
def reconstruction_scores(
    model: "PreTrainedModel",
    context_ids: torch.Tensor | Sequence[int],
    prompt: RepeatPrompt,
    *,
    prefix_length: int = 0,
    chunk_tokens: int = 2000,
    sink_tokens: int = 4,
    prefill_statistics: bool = False,
) -> Reconstruction:
    """Read a context with a full cache and score its pairs by having it repeated.

    Args:
        model: a causal language model in evaluation mode, with a cache that `PrunedCache` supports. Of a hybrid model
            the layers with full attention are scored.
        context_ids: `(n,)` or `(1, n)`, the whole context, prefix included.
        prompt: see `RepeatPrompt.from_tokenizer`.
        prefix_length: first tokens that are not repeated (system prompt, chat header).
        chunk_tokens: most tokens to repeat in one pass; the context is cut into chunks as equal as possible.
        sink_tokens: first tokens of the context that take part in every softmax.
        prefill_statistics: also measure the attention received while the context is read.

    Raises:
        TypeError, ValueError: a model whose attention is not supported or that is in training mode; a context that is
            empty, has more than one row, or is no longer than its prefix; a chunk length below 1.
    """
    ids = _context_list(context_ids)
    if not 0 <= prefix_length < len(ids):
        raise ValueError(
            f"prefix_length must be in [0, {len(ids)}) for a context of {len(ids)} tokens, got {prefix_length}."
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    if sink_tokens < 0:
        raise ValueError(f"sink_tokens must not be negative, got {sink_tokens}.")
    if model.training:
        raise ValueError("The reconstruction pass is for inference: call model.eval() first.")
    config, phase = text_config(model), _Phase()
    cache = Cache(layers=_make_layers(config, phase))
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, _ScoredLayer)}
    device = model.get_input_embeddings().weight.device

    def read(tokens: list[int]) -> None:
        inputs = torch.tensor([tokens], device=device)
        model(inputs, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)

    phase.mode = "measure" if prefill_statistics else "store"
    read(ids)
    phase.mode = "repeat"
    for number, (start, stop) in enumerate(_chunks(prefix_length, len(ids), chunk_tokens)):
        phase.sinks, phase.start, phase.stop = min(sink_tokens, start), start, stop
        # Layers that are not scored take the repeating tokens in; their states are put back afterwards. They build new
        # tensors rather than write into old ones, so a copy of the references will do.
        sliding = {i: copy.copy(layer) for i, layer in enumerate(cache.layers) if i not in layers}
        read(prompt.ids(ids, start, stop, first=number == 0))
        for index, layer in sliding.items():
            cache.layers[index] = layer
    phase.mode = "store"
    for layer in layers.values():
        layer.scores[..., :prefix_length] = 1.0
    result = Reconstruction({index: layer.scores for index, layer in layers.items()}, cache)
    if prefill_statistics:
        result.attention_max = {index: layer.attention_max for index, layer in layers.items()}
        result.attention_mass = {index: layer.attention_mass for index, layer in layers.items()}
    return result


def _context_list(context_ids: torch.Tensor | Sequence[int]) -> list[int]:
    if isinstance(context_ids, torch.Tensor):
        if context_ids.ndim == 2 and context_ids.shape[0] != 1:
            raise ValueError(f"One context at a time, got a batch of {context_ids.shape[0]} rows.")
        context_ids = context_ids.reshape(-1).tolist()
    ids = [int(token) for token in context_ids]
    if not ids:
        raise ValueError("The context is empty: there is nothing to score.")
    return ids


def _chunks(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Cut `start … stop` into as few pieces of at most `most` as possible, as equal as possible."""
    count = math.ceil((stop - start) / most)
    edges = [start + round(i * (stop - start) / count) for i in range(count + 1)]
    return list(itertools.pairwise(edges))


# --- the cache that watches ------------------------------------------------------------------------------------------


@dataclass
class _Phase:
    """What the layers of one cache are to do with the tokens that come.

    Attributes:
        mode: "store" them; store them and "measure" the attention that they give; or "repeat": let them attend without
            storing them, and score the pairs of the chunk by the attention that they receive.
        sinks: first pairs that take part in the softmax of "repeat".
        start, stop: the chunk.
    """

    mode: Literal["store", "measure", "repeat"] = "store"
    sinks: int = 0
    start: int = 0
    stop: int = 0


class _ScoredLayer(DynamicLayer):
    """A full cache layer that watches the attention it receives.

    Attributes:
        scores, attention_max, attention_mass: see `Reconstruction`.
    """

    scores: torch.Tensor
    attention_max: torch.Tensor
    attention_mass: torch.Tensor

    def __init__(self, config: PreTrainedConfig, phase: _Phase, window: int | None) -> None:
        super().__init__()
        self.config, self.phase, self.window = config, phase, window
        self.is_sliding = window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.phase.mode == "store":
            return super().update(key_states, value_states)
        return take_over(self.config, key_states, value_states, self)

    def attend(self, call: AttentionCall) -> AttentionOutput:
        refuse_unsupported(call)
        if self.phase.mode == "measure":
            super().update(call.keys, call.values)
            columns = torch.arange(self.get_seq_length(), device=call.query.device)
            self.attention_max, self.attention_mass = received_attention(
                call.query, self.keys, call.scaling, columns, self.window
            )
            return call.stock(self.keys, self.values, call.mask)
        self._score(call)
        mask = call.mask
        if self._needs_no_mask(call.stock_name):
            if chunk_attention_available(call.query, call.values):
                out = chunk_attention(
                    call.query, self.keys, self.values, call.keys, call.values, call.scaling, many=True
                )
                return out.transpose(1, 2).contiguous(), None
            new, seen = call.query.shape[2], self.get_seq_length()
            mask = torch.ones(1, 1, new, seen + new, dtype=torch.bool, device=call.query.device).tril_(seen)
        return call.stock(torch.cat([self.keys, call.keys], dim=2), torch.cat([self.values, call.values], dim=2), mask)

    def _needs_no_mask(self, implementation: str | None) -> bool:
        """Whether the repeating tokens attend without the model's mask; there is one row, and nothing is padded."""
        return self.phase.mode == "repeat" and self.window is None and implementation == "sdpa"

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask that is not read is not made: it would be as wide as the context."""
        if self._needs_no_mask(self.config._attn_implementation):
            return query_length, self.get_seq_length()
        return super().get_mask_sizes(query_length)

    def _score(self, call: AttentionCall) -> None:
        phase, seen, device = self.phase, self.get_seq_length(), call.query.device
        read = [slice(0, phase.sinks), slice(phase.start, phase.stop)]
        keys = torch.cat([*(self.keys[:, :, part] for part in read), call.keys], dim=2)
        if self.window is None:
            highest = highest_attention(call.query, keys, call.scaling)
        else:
            own = torch.arange(seen, seen + call.query.shape[2], device=device)
            columns = torch.cat([*(torch.arange(seen, device=device)[part] for part in read), own])
            highest, _ = received_attention(call.query, keys, call.scaling, columns, self.window)
        if not hasattr(self, "scores"):
            self.scores = highest.new_zeros(*highest.shape[:2], seen)
        chunk = highest[..., phase.sinks : phase.sinks + phase.stop - phase.start]
        self.scores[..., phase.start : phase.stop] = chunk


def _make_layers(config: PreTrainedConfig, phase: _Phase) -> list[DynamicLayer]:
    """Watching layers where `PrunedCache` prunes, stock sliding-window layers elsewhere."""
    types, window = attention_types(config), getattr(config, "sliding_window", None)
    if "full_attention" not in types:
        return [_ScoredLayer(config, phase, window) for _ in types]
    return [
        _ScoredLayer(config, phase, None) if kind == "full_attention" else DynamicSlidingWindowLayer(window)
        for kind in types
    ]
