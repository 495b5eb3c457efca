"""Any cache by name, filled with a context and asked about it: what all benchmarks of this folder share.

A `ContextReader` belongs to one model and one choice of cache. `read` makes a cache and fills it, in the way that its
policy wants (one forward pass, KVzip's two, a proxy model first); `answer` decodes greedily from it and
leaves it as it was, so that several questions can be asked about one context.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nearfar.evaluation.machine import synchronize
from nearfar.evaluation.restoring import eviction_held, restored
from nearfar.modeling.budgets import check_budget
from nearfar.modeling.cache_iam import IAMScorer
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, cache_nbytes, check_options, make_cache
from nearfar.modeling.compat import CACHE_FIELD, cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt
from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
from nearfar.modeling.proxy_scorer import PromptScorer, ProxyScorer, check_same_vocabulary
from nearfar.modeling.pruned_cache import SINK_TOKENS, PrunedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

FULL = "full"
# Caches that a second model fills in for; they are made for each prompt, so the registry cannot hold them.
SCORED_BY_A_PROXY = {"proxykv": "ProxyKV", "iam": "KVzip + IAM"}
# Models that compress by themselves, and make their own cache.
OWN_CACHE_MODELS = ("dar", "proxyformer")


def known_caches() -> list[str]:
    """Names that a `CacheChoice` may have."""
    return [*CACHES, *(name for name in SCORED_BY_A_PROXY if name not in CACHES)]


def cache_label(name: str) -> str:
    """The name people use."""
    return SCORED_BY_A_PROXY.get(name) or (CACHES[name].label if name in CACHES else name)


@dataclass(frozen=True)
class CacheChoice:
    """A cache by name, and how much it keeps.

    Attributes:
        name: one of `known_caches()`. "full" is the cache that the model makes itself: every pair of a transformer,
            and what a DAR or a ProxyFormer keeps.
        budget, retention_ratio: exactly one of them; neither for "full".
        options: further arguments of that cache. Those of "proxykv" include `proxy` and `mapper`, those of "iam"
            `proxy`: loaded models, folders or Hub ids.

    Raises:
        ValueError: an unknown name; no budget or two; a proxy or mapper that is missing.
        TypeError: an option that the cache does not take.
    """

    name: str = FULL
    budget: int | None = None
    retention_ratio: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in known_caches():
            raise ValueError(f"unknown cache {self.name!r}; known caches: {', '.join(known_caches())}")
        if self.name == FULL:
            if self.budget is not None or self.retention_ratio is not None or self.options:
                raise ValueError('the cache "full" prunes nothing: it takes no budget, ratio or option')
            return
        factory = CACHES[self.name].factory if self.name in CACHES else None
        pruned = isinstance(factory, type) and issubclass(factory, PrunedCache)
        sinks = self.options.get("sink_tokens", SINK_TOKENS if pruned else 0)
        check_budget(self.budget, self.retention_ratio, sinks, self.options.get("recent_tokens"))
        models = ("proxy", "mapper")[: 2 if self.name == "proxykv" else 1] if self.name in SCORED_BY_A_PROXY else ()
        for needed in models:
            if not self.options.get(needed):
                raise ValueError(f"the cache {self.name} needs {needed}=, a folder or Hub id")
        if self.name in CACHES:
            check_options(self.name, [option for option in self.options if option not in models])

    @property
    def label(self) -> str:
        """Name and size, such as `snapkv 0.3`."""
        if self.name == FULL:
            return FULL
        return f"{self.name} {self.retention_ratio:g}" if self.budget is None else f"{self.name} {self.budget}"

    def settings(self) -> dict[str, Any]:
        """JSON-ready."""
        options = {name: value if _plain(value) else str(value) for name, value in sorted(self.options.items())}
        return {
            "cache": self.name,
            "budget": self.budget,
            "retention_ratio": self.retention_ratio,
            "cache_options": options,
        }


def _tokenizer_of(proxy: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(proxy)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the proxy {proxy} has no tokenizer to compare with the target's ({error}): save the target's beside it "
            "if they are the same, or give the loaded model"
        ) from error
    return tokenizer


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass
class ReadContext:
    """A context that has been read.

    Attributes:
        cache: what holds it.
        logits: `(batch, vocabulary)` of each row's last token; None where the model compressed its history without
            making any.
        seconds: reading, scoring and eviction.
        mask: `(batch, n)`, bool, where each row's tokens stand; None when all are real.
        lengths: real tokens of each row.
    """

    cache: Cache
    logits: torch.Tensor | None
    seconds: float
    mask: torch.Tensor | None
    lengths: torch.Tensor

    def nbytes(self) -> int:
        """Bytes of the cache's tensors."""
        return cache_nbytes(self.cache)

    def kept_pairs(self) -> int | None:
        """Key-value pairs held; None where the cache does not hold pairs."""
        try:
            return cache_kept_pairs(self.cache)
        except (TypeError, AttributeError):
            return None


class ContextReader:
    """Fills caches of one kind with contexts, and asks about them.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: the model's.
        choice: which cache.

    Raises:
        ValueError: a model that makes its own cache, asked for another one; a model in training mode; a proxy, given
            by its name, with another tokenizer, or without one.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, choice: CacheChoice | None = None
    ) -> None:
        choice = CacheChoice() if choice is None else choice
        if model.training:
            raise ValueError("the model is in training mode, call model.eval() first")
        kind = getattr(model.config, "model_type", "")
        if kind in OWN_CACHE_MODELS and choice.name != FULL:
            raise ValueError(
                f"a {kind} model compresses by itself and makes its own cache: only the cache full, not {choice.name}"
            )
        self.model, self.tokenizer, self.choice = model, tokenizer, choice
        self.options = {key: value for key, value in choice.options.items() if key not in ("proxy", "mapper")}
        self._parameters = _forward_parameters(model)
        self._cache_name = cache_argument(model)
        proxies = getattr(model.config, "compression_ratio", "unknown") is not None
        self._encode = getattr(model, "encode_history", None) if proxies else None
        self._scorer = self._make_scorer() if choice.name in SCORED_BY_A_PROXY else None
        ends = [tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
        self.ends = {end for ids in ends for end in (ids if isinstance(ids, (list, tuple)) else [ids])} - {None}

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return self.model.get_input_embeddings().weight.device

    @property
    def prunes(self) -> bool:
        """Whether anything is left out of the cache that the model would keep."""
        return self.choice.name != FULL

    def _make_scorer(self) -> PromptScorer:
        proxy = self.choice.options["proxy"]
        if isinstance(proxy, str):
            from transformers import AutoModelForCausalLM

            check_same_vocabulary(_tokenizer_of(proxy), self.tokenizer)
            dtype = self.model.get_input_embeddings().weight.dtype
            proxy = AutoModelForCausalLM.from_pretrained(proxy, dtype=dtype).to(self.device).eval()
        prompt = RepeatPrompt.from_tokenizer(self.tokenizer)
        if self.choice.name == "iam":
            return IAMScorer(proxy, prompt, prefix_length=None)
        mapper = self.choice.options["mapper"]
        if isinstance(mapper, str):
            mapper = HybridAxialMapper.from_pretrained(mapper, dtype="float32").to(self.device).eval()
        return ProxyScorer(proxy, mapper, prefix_ids=prompt.prefix)

    # -- reading ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cache_for(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Cache | None:
        """The cache that `generate` is to be given together with `input_ids`, or None if it should make its own.

        A `KVzipCache` comes with all tokens but the last in it; the others come empty.

        Args:
            input_ids: `(batch, n)`.
            attention_mask: `(batch, n)`, left-padded.
        """
        choice = self.choice
        if choice.name == FULL:
            return None
        sizes: dict[str, Any] = {"budget": choice.budget, "retention_ratio": choice.retention_ratio}
        if self._scorer is not None:
            return self._scorer.prefill(
                input_ids, attention_mask, target_model_or_config=self.model, **sizes, **self.options
            )
        cache = make_cache(choice.name, self.model, **sizes, **self.options)
        if isinstance(cache, KVzipCache):
            mask = None if attention_mask is None else attention_mask[:, :-1]
            if input_ids.shape[1] < 2 or (mask is not None and not bool(mask.bool().any(1).all())):
                return None  # one token: nothing to repeat, and nothing to prune either
            # All but the last token, whose logits are wanted.
            cache.compress_context(self.model, input_ids[:, :-1], self.tokenizer, attention_mask=mask)
        return cache

    @torch.no_grad()
    def read(
        self,
        input_ids: torch.Tensor | Sequence[int],
        attention_mask: torch.Tensor | None = None,
        *,
        logits: bool = True,
    ) -> ReadContext:
        """Make a cache, and fill it with one or more contexts.

        Args:
            input_ids: `(batch, n)`, padded on the left, or the ids of one context.
            attention_mask: `(batch, n)`, 1 for tokens and 0 for padding.
            logits: whether the last token's are wanted. Without them a ProxyFormer compresses the context only.

        Raises:
            ValueError: no token; whatever the cache refuses.
        """
        ids = torch.as_tensor(input_ids, dtype=torch.long)
        ids = (ids[None] if ids.ndim == 1 else ids).to(self.device)
        if ids.shape[1] == 0:
            raise ValueError("the context is empty")
        mask = None if attention_mask is None else attention_mask.to(self.device).bool()
        if mask is not None and bool(mask.all()):
            mask = None
        lengths = torch.full((ids.shape[0],), ids.shape[1], device=self.device) if mask is None else mask.sum(1)
        synchronize(self.device)
        start = time.perf_counter()
        last = None
        if not self.prunes and self._encode is not None and not logits:
            cache = self._encode(ids, mask)
        else:
            cache = self.cache_for(ids, None if mask is None else mask.long())
            read = 0 if cache is None else cache.get_seq_length()
            arguments: dict[str, Any] = {}
            if mask is not None:
                arguments = {
                    "attention_mask": mask.long(),
                    **self._positions((mask.cumsum(1) - 1).clamp(min=0)[:, read:]),
                }
            last, cache = self._forward(ids[:, read:], cache, **arguments)
            if isinstance(cache, KVzipCache):
                cache.compress()  # the last token counts towards the budget too
        synchronize(self.device)
        return ReadContext(cache, last, time.perf_counter() - start, mask, lengths)

    def _positions(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"position_ids": positions} if "position_ids" in self._parameters else {}

    def _forward(self, ids: torch.Tensor, cache: Cache | None, **arguments: Any) -> tuple[torch.Tensor, Cache]:
        """The last token's logits, and the cache."""
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        if cache is not None:
            arguments[self._cache_name] = cache
        output = self.model(input_ids=ids, use_cache=True, **arguments)
        if cache is None:
            cache = next(
                (output[name] for name in (CACHE_FIELD, self._cache_name) if output.get(name) is not None), None
            )
            if cache is None:
                raise TypeError(f"{type(self.model).__name__} returns no cache")
        return output.logits[:, -1], cache

    @torch.no_grad()
    def continue_with(self, read: ReadContext, ids: torch.Tensor, *, evict: bool = False) -> torch.Tensor:
        """Logits `(batch, m, vocabulary)` of tokens that follow; the cache takes them up.

        Args:
            ids: `(batch, m)`; shorter rows are filled up on the right with any token.
            evict: let the cache evict after this pass as it does while text streams in. Otherwise the pass sees the
                context as it was left, and all of `ids`.
        """
        arguments: dict[str, Any] = {self._cache_name: read.cache}
        if read.mask is not None:
            more = torch.ones_like(ids, dtype=torch.bool)
            read.mask = torch.cat([read.mask, more], 1)
            positions = read.lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
            arguments |= {"attention_mask": read.mask.long(), **self._positions(positions)}
        read.lengths = read.lengths + ids.shape[1]
        if evict:
            return self.model(input_ids=ids, use_cache=True, **arguments).logits
        with eviction_held(read.cache):
            return self.model(input_ids=ids, use_cache=True, **arguments).logits

    # -- asking -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def answer(
        self, read: ReadContext, question_ids: Sequence[int], max_new_tokens: int, *, one_line: bool = False
    ) -> list[int]:
        """Greedy decoding after one context (batch 1) and a question; the cache is restored afterwards.

        Nothing is evicted while the question is read and answered: what is measured is the compressed context.

        Args:
            question_ids: may be empty, if the context was read with its logits.
            one_line: end after the first line with something in it.

        Returns:
            At most `max_new_tokens` ids, up to an end token, which is left out.
        """
        written: list[int] = []
        cache, last = read.cache, read.logits
        with restored(cache), eviction_held(cache):
            ids = torch.tensor([list(question_ids)], dtype=torch.long, device=self.device)
            for _ in range(max_new_tokens):
                if ids.shape[1]:
                    last, cache = self._forward(ids, cache)
                if last is None:
                    raise ValueError("no question was given and the context was read without its logits")
                token = int(last[0].argmax())
                if token in self.ends:
                    break
                written.append(token)
                if one_line and "\n" in self.tokenizer.decode(written).lstrip("\n"):
                    break
                ids = torch.tensor([[token]], dtype=torch.long, device=self.device)
        return written


def _forward_parameters(model: torch.nn.Module) -> set[str]:
    for cls in type(model).__mro__:
        if "forward" in cls.__dict__:
            return set(inspect.signature(cls.__dict__["forward"]).parameters)
    return set()
