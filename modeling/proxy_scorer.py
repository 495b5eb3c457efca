"""ProxyKV: a small model of the target's family reads the same prompt, and a mapper makes the target's scores of it.

::

    scorer = ProxyScorer(proxy, mapper)
    cache = scorer.prefill(input_ids, target_model_or_config=target, retention_ratio=0.3)
    target.generate(input_ids, past_key_values=cache)

`prefill` starts the proxy and returns; the cache waits for the scores where it needs them. Two regimes:

* "parallel": the proxy works in a thread of its own, on its own GPU, or on the target's in a stream of its own. The
  target loses no time if the proxy is done first, and holds its full cache until then.
* "sequential": the proxy reads the prompt first. The target then evicts layer by layer, and never holds more than what
  it keeps and one layer; the proxy's keys, values and activations are gone by then.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from .attention_features import CHUNK_TOKENS, proxy_features
from .cache_proxykv import ProxyKVCache
from .model_identity import scored_layers
from .pending_scores import LARGEST_SCORE, PendingScores
from .prunable_models import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Mode = Literal["parallel", "sequential"]
RETENTION_RATIO = 0.3
# The score of a prompt's prefix, far above what mappers give.
PREFIX_SCORE = LARGEST_SCORE / 2
# A model reads one prompt at a time: attention is routed through its configuration object.
_TURNS: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()


class PromptScorer(ABC):
    """A model beside the target that reads the target's prompts and scores their pairs.

    Args:
        proxy_model: reads the prompts; in evaluation mode, with a cache that `PrunedCache` supports.
        proxy_tokenizer, target_tokenizer: compared if given, both or none. Without them token ids are only checked
            against the size of the proxy's vocabulary.
        prefix_ids: what stands before the text in prompts that start with it (chat header, system prompt); it is kept,
            as KVzip keeps it. `RepeatPrompt.from_tokenizer(tokenizer).prefix` is a chat template's.

    Raises:
        TypeError, ValueError: not such a model; one tokenizer without the other, or two that differ.
    """

    cache_class: ClassVar[type[ProxyKVCache]]

    def __init__(
        self,
        proxy_model: "PreTrainedModel",
        proxy_tokenizer: "PreTrainedTokenizerBase | None" = None,
        target_tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        prefix_ids: Sequence[int] = (),
    ) -> None:
        if not isinstance(proxy_model, nn.Module):
            raise TypeError(f"proxy_model must be a transformers model, got {type(proxy_model).__name__}.")
        self.proxy_config = text_config(proxy_model)
        if proxy_model.training:
            raise ValueError("The proxy is in training mode: call proxy_model.eval() first.")
        if (proxy_tokenizer is None) != (target_tokenizer is None):
            raise ValueError("Give both proxy_tokenizer and target_tokenizer, or neither.")
        if proxy_tokenizer is not None and target_tokenizer is not None:
            check_same_vocabulary(proxy_tokenizer, target_tokenizer)
        self.proxy_model: Any = proxy_model
        self.prefix_ids = tuple(prefix_ids)
        self._stream: torch.cuda.Stream | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.proxy_model, 'name_or_path', '') or 'a proxy'})"

    @property
    def device(self) -> torch.device:
        """Where the proxy takes its tokens."""
        return self.proxy_model.get_input_embeddings().weight.device

    @abstractmethod
    def check_target(self, target_model_or_config: "nn.Module | PreTrainedConfig") -> None:
        """Raise TypeError or ValueError unless this scorer serves the target."""

    @abstractmethod
    def scores(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        config: PreTrainedConfig,
        chunk_tokens: int,
        pending: PendingScores,
    ) -> torch.Tensor:
        """The scores of a prompt.

        Args:
            input_ids: `(batch, n)`.
            attention_mask: `(batch, n)`, or None.
            config: the target's decoder configuration.
            chunk_tokens: most tokens to read in one pass.
            pending: takes the times of the parts.

        Returns:
            `(layers, batch, key-value heads, n)`, float, for the target's layers `scored_layers(config)`; any finite
            value at padding.
        """

    def prefill(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        target_model_or_config: "nn.Module | PreTrainedConfig",
        retention_ratio: float | None = None,
        budget: int | None = None,
        mode: Mode | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        **options: Any,
    ) -> ProxyKVCache:
        """Start scoring a prompt, and make the cache that the target reads it with.

        Args:
            input_ids: `(batch, n)`, exactly what the target will read.
            attention_mask: `(batch, n)`, 1 for tokens and 0 for padding.
            target_model_or_config: the target, or its own configuration object (not a copy).
            retention_ratio: share of the prompt's pairs to keep, in (0, 1]; 0.3 unless `budget` is given.
            budget: in place of it: pairs to keep, a layer and key-value head on average.
            mode: "parallel" or "sequential" (see the module). Default: "parallel" if the target is a model on another
                GPU than the proxy, otherwise "sequential", which holds the least memory.
            chunk_tokens: most tokens that the proxy reads in one pass.
            options: further arguments of the cache; see `ProxyKVCache` and `PrunedCache`.

        Returns:
            An empty cache for the target's `generate(..., past_key_values=cache)`.

        Raises:
            TypeError, ValueError: a target this scorer does not serve, a ratio out of range, ids that the proxy does
                not know, an unknown mode; nothing has been computed then.
            RuntimeError: the prompt could not be scored. In parallel mode the cache raises it, when it needs the
                scores.
        """
        if retention_ratio is None and budget is None:
            retention_ratio = RETENTION_RATIO
        self.check_target(target_model_or_config)
        cache = self.cache_class(target_model_or_config, retention_ratio=retention_ratio, budget=budget, **options)
        in_parallel = self._in_parallel(mode, target_model_or_config)
        cache.expect(self._start(cache, input_ids, attention_mask, chunk_tokens, in_parallel))
        return cache

    def start(
        self,
        cache: ProxyKVCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        mode: Mode = "sequential",
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> PendingScores:
        """Start scoring a prompt for an empty cache of the target.

        Args:
            cache: made for the target, for instance by `make_cache`.
            input_ids, attention_mask, mode, chunk_tokens: see `prefill`.

        Returns:
            The scores, which the cache expects. Other empty caches of the same target may expect them too.

        Raises:
            ValueError: the cache is not empty; otherwise as `prefill`.
        """
        if cache.get_seq_length() > 0:
            raise ValueError("The cache has read a prompt already: call reset() first, or use extend().")
        self.check_target(cache.config)
        pending = self._start(cache, input_ids, attention_mask, chunk_tokens, self._in_parallel(mode, cache.config))
        cache.expect(pending)
        return pending

    def extend(
        self,
        cache: ProxyKVCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        mode: Mode = "sequential",
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """Score a further turn. Without this call its tokens rank above the prompt's, by their age.

        The proxy has kept nothing, so it reads the whole conversation again. Pairs that the cache has scored keep
        their scores; tokens since the last eviction, such as the answer, are scored with the new turn.

        Args:
            cache: what `prefill` returned.
            input_ids: `(batch, n)`, all that the cache has seen and the new turn after it.
            attention_mask, mode, chunk_tokens: see `prefill`.

        Raises:
            ValueError: no more tokens than the cache has seen; otherwise as `prefill`.
        """
        if not isinstance(cache, ProxyKVCache):
            raise TypeError(f"extend takes what prefill returned, got {type(cache).__name__}.")
        _check_ids(input_ids, attention_mask)
        if input_ids.shape[1] <= cache.get_seq_length():
            raise ValueError(
                f"input_ids must be the whole conversation with the new turn: more than the {cache.get_seq_length()} "
                f"tokens that the cache has seen, got {input_ids.shape[1]}."
            )
        in_parallel = self._in_parallel(mode, cache.config)
        cache.expect(self._start(cache, input_ids, attention_mask, chunk_tokens, in_parallel))

    def _in_parallel(self, mode: Mode | None, target: "nn.Module | PreTrainedConfig") -> bool:
        if mode not in (None, "parallel", "sequential"):
            raise ValueError(f"mode must be parallel or sequential, got {mode!r}.")
        # Attention is routed through the configuration object, which two threads cannot share.
        same = text_config(target) is self.proxy_config
        if mode == "parallel" and same:
            raise ValueError(
                "The proxy and the target share one configuration object, so they cannot run at the same time: use "
                'mode="sequential", or load them separately.'
            )
        if mode is None:
            theirs = getattr(target, "device", None)
            return not same and isinstance(theirs, torch.device) and theirs.type == "cuda" and theirs != self.device
        return mode == "parallel"

    def _start(
        self,
        cache: ProxyKVCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        chunk_tokens: int,
        in_parallel: bool,
    ) -> PendingScores:
        _check_ids(input_ids, attention_mask)
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
        largest, vocabulary = int(input_ids.max()), self.proxy_model.get_input_embeddings().weight.shape[0]
        if largest >= vocabulary:
            raise ValueError(
                f"The prompt holds token id {largest}, and the proxy knows ids below {vocabulary}: proxy and target "
                "need the same tokenizer."
            )
        config = cache.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        pending = PendingScores(scored_layers(config), input_ids.shape[0], heads, input_ids.shape[1])

        turn = _TURNS.setdefault(self.proxy_model, threading.Lock())

        def work() -> torch.Tensor:
            with turn:
                scores = self.scores(input_ids, attention_mask, config, chunk_tokens, pending)
            self._keep_prefix(scores, input_ids, attention_mask)
            return scores

        if in_parallel and self.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        pending.compute(work, self.device, in_parallel=in_parallel, stream=self._stream)
        return pending

    def _keep_prefix(self, scores: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Raise the scores of the prefix, in rows that start with it."""
        length = len(self.prefix_ids)
        if not length:
            return
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        for row in range(input_ids.shape[0]):
            places = real[row].nonzero()[:length, 0]
            if tuple(input_ids[row].to(places.device)[places].tolist()) == self.prefix_ids:
                scores[:, row, :, places.to(scores.device)] = PREFIX_SCORE


class ProxyScorer(PromptScorer):
    """Scores prompts by a proxy's attention and a mapper trained for the pair of models.

    Args:
        proxy_model: a smaller model with the target's tokenizer; see `PromptScorer`.
        mapper: a `HybridAxialMapper` on the proxy's device, or anything with `check_compatible(proxy, target)` and
            `predict(features)`, from `(L_s, H_s, N)` to `(L_l, H_l, N)`, higher for pairs to keep: column sums of the
            proxy's attention (and its values, if `config.proxy_states` says so, see `proxy_features`) to scores of the
            target's key-value heads. L_l are the target's layers that are pruned, or all.
        proxy_tokenizer, target_tokenizer, prefix_ids: see `PromptScorer`.
        allow_other_models: accept models that the mapper was not trained for, of the same shape.

    Raises:
        TypeError, ValueError: see `PromptScorer`; a mapper without these methods, in training mode, on another device
            or for another proxy.
    """

    cache_class = ProxyKVCache

    def __init__(
        self,
        proxy_model: "PreTrainedModel",
        mapper: Any,
        proxy_tokenizer: "PreTrainedTokenizerBase | None" = None,
        target_tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        prefix_ids: Sequence[int] = (),
        allow_other_models: bool = False,
    ) -> None:
        super().__init__(proxy_model, proxy_tokenizer, target_tokenizer, prefix_ids=prefix_ids)
        for name in ("predict", "check_compatible"):
            if not callable(getattr(mapper, name, None)):
                raise TypeError(f"mapper must have {name}, as HybridAxialMapper has; got {type(mapper).__name__}.")
        if getattr(mapper, "training", False):
            raise ValueError("The mapper is in training mode: call mapper.eval() first.")
        theirs = getattr(mapper, "device", None)
        if isinstance(theirs, torch.device) and theirs != self.device:
            raise ValueError(f"The mapper is on {theirs} and the proxy on {self.device}: mapper.to({self.device!s}).")
        self.mapper, self.allow_other_models = mapper, allow_other_models
        self._check_pair(None)

    def _check_pair(self, target: "nn.Module | PreTrainedConfig | None") -> None:
        options = {"allow_other_models": True} if self.allow_other_models else {}
        self.mapper.check_compatible(self.proxy_model, target, **options)

    def check_target(self, target_model_or_config: "nn.Module | PreTrainedConfig") -> None:
        """Raise TypeError or ValueError unless the mapper was made for this target."""
        text_config(target_model_or_config)
        self._check_pair(target_model_or_config)

    def scores(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        config: PreTrainedConfig,
        chunk_tokens: int,
        pending: PendingScores,
    ) -> torch.Tensor:
        """See `PromptScorer.scores`."""
        device = self.device
        states: Any = getattr(getattr(self.mapper, "config", None), "proxy_states", "none")
        with pending.timed("proxy", device):
            features = proxy_features(self.proxy_model, input_ids, attention_mask, chunk_tokens, states)
        with pending.timed("mapper", device):
            if attention_mask is None or bool(attention_mask.all()):
                rows = [self._mapped(features[:, row], config) for row in range(features.shape[1])]
                return torch.stack(rows, 1)
            layers, tokens = len(pending.layers), pending.tokens
            out = torch.zeros(layers, pending.rows, pending.heads, tokens, device=device)
            for row, real in enumerate(attention_mask.to(device).bool()):
                # A mapper sees what it was trained on: a row without padding.
                out[:, row, :, real] = self._mapped(features[:, row, :, real], config).to(out.dtype)
            return out

    def _mapped(self, features: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
        """`(layers that are pruned, key-value heads, n)`."""
        scores = self.mapper.predict(features)
        layers = scored_layers(config)
        if not isinstance(scores, torch.Tensor) or scores.ndim != 3:
            found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ValueError(f"The mapper must return a tensor (layers, heads, tokens), got {found}.")
        return scores[layers] if scores.shape[0] == config.num_hidden_layers > len(layers) else scores


def check_same_vocabulary(
    proxy_tokenizer: "PreTrainedTokenizerBase", target_tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Raise ValueError, with examples, unless two tokenizers give every token the same id."""
    mine, theirs = proxy_tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if mine == theirs:
        return
    different = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
    examples = ", ".join(f"{token!r} ({mine.get(token)} and {theirs.get(token)})" for token in different[:3])
    raise ValueError(
        f"The proxy and the target have different tokenizers: {len(different)} of {len(mine.keys() | theirs.keys())} "
        f"tokens have different ids, such as {examples}. A proxy has to read the target's own token ids."
    )


def _check_ids(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.numel() == 0:
        found = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor (batch, n) with at least one token, got {found}.")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, got "
                f"{tuple(attention_mask.shape)}."
            )
        if not bool(attention_mask.bool().any(1).all()):
            raise ValueError("attention_mask has a row without any token.")
