"""KVzip + IAM, the baseline of ProxyKV: a proxy's KVzip scores, handed to the target's heads by a fixed alignment.

The proxy does for itself what KVzip does for a target: it reads the prompt, repeats it, and scores its own pairs
(`reconstruction_scores`). Each target layer takes the scores of one proxy layer, and each of its key-value heads those
of one head of that layer. Nothing is learned about tokens; that is the point of the comparison. Pairs are matched by
depth, or, as IAM does (Zhao et al., 2025), by how alike heads score a few texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from .cache_proxykv import ProxyKVCache
from .kvzip_scores import RepeatPrompt, reconstruction_scores
from .model_identity import scored_layers
from .pending_scores import PendingScores
from .proxy_scorer import PromptScorer
from .prunable_models import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class IAMCache(ProxyKVCache):
    """Pairs that a proxy's KVzip scores, statically aligned, say are important; `IAMScorer.prefill` makes one.

    It waits, evicts and treats later tokens as `ProxyKVCache` does, so a comparison of the two is one of the scores.
    """


@dataclass(frozen=True)
class HeadAlignment:
    """Which proxy layer and head stand for each of a target's.

    Attributes:
        layers: for each scored target layer, the index of a scored proxy layer.
        heads: for each of them, one of that layer's key-value heads for each of the target's.
    """

    layers: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    @classmethod
    def by_depth(
        cls,
        proxy_model_or_config: "nn.Module | PreTrainedConfig",
        target_model_or_config: "nn.Module | PreTrainedConfig",
    ) -> "HeadAlignment":
        """Layers at the same relative depth, ℓ_s = ⌈ℓ_l · L_s / L_l⌉ counted from 1, and heads likewise."""
        proxy, target = text_config(proxy_model_or_config), text_config(target_model_or_config)
        theirs, mine = scored_layers(proxy), scored_layers(target)
        layers = tuple(theirs[place] for place in _proportional(len(mine), len(theirs)))
        heads = tuple(_proportional(_heads(target), _heads(proxy)))
        return cls(layers, (heads,) * len(layers))

    @classmethod
    def fit(
        cls, proxy_scores: Sequence[dict[int, torch.Tensor]], target_scores: Sequence[dict[int, torch.Tensor]]
    ) -> "HeadAlignment":
        """The most alike layers, and inside them the most alike heads, by the scores of the same texts.

        Alike is the mean over texts of the correlation of log scores. A layer pair is as alike as the mean over target
        heads of their best head in the proxy layer.

        Args:
            proxy_scores, target_scores: for each text `reconstruction_scores(...).scores` of either model, of equal
                lengths.

        Raises:
            ValueError: no texts, or lengths that do not agree.
        """
        if not proxy_scores or len(proxy_scores) != len(target_scores):
            raise ValueError(
                f"Both models need scores of the same texts, at least one; got {len(proxy_scores)} and "
                f"{len(target_scores)}."
            )
        theirs, mine = sorted(proxy_scores[0]), sorted(target_scores[0])
        alike: torch.Tensor | float = 0.0
        for proxy, target in zip(proxy_scores, target_scores, strict=True):
            a = _standardised(torch.stack([target[layer][0] for layer in mine]))
            b = _standardised(torch.stack([proxy[layer][0] for layer in theirs]).to(a.device))
            if a.shape[-1] != b.shape[-1]:
                raise ValueError(f"A text has {b.shape[-1]} tokens for the proxy and {a.shape[-1]} for the target.")
            alike = alike + torch.einsum("ihn,jgn->ijhg", a, b)  # target and proxy layers, target and proxy heads
        assert isinstance(alike, torch.Tensor)
        best = alike.amax(3).mean(2).argmax(1).tolist()
        heads = [alike[place, layer].argmax(1).tolist() for place, layer in enumerate(best)]
        return cls(tuple(theirs[layer] for layer in best), tuple(tuple(row) for row in heads))

    def apply(self, scores: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's scores `(scored layers, key-value heads, n)` from the proxy's, `(1, heads, n)` a layer."""
        return torch.stack(
            [scores[layer][0][list(heads)] for layer, heads in zip(self.layers, self.heads, strict=True)]
        )

    def check(self, proxy: PreTrainedConfig, target: PreTrainedConfig) -> None:
        """Raise ValueError unless it is of these models' layers and heads."""
        known, wanted = set(scored_layers(proxy)), (len(scored_layers(target)), _heads(target))
        sizes = {len(row) for row in self.heads} or {0}
        if (len(self.layers), *sizes) != wanted or len(self.heads) != len(self.layers):
            raise ValueError(
                f"The alignment is of {len(self.layers)} layers with {sorted(sizes)} key-value heads, the target has "
                f"{wanted[0]} with {wanted[1]}."
            )
        if not set(self.layers) <= known or max(max(row) for row in self.heads) >= _heads(proxy):
            raise ValueError(
                f"The alignment names layers or heads that the proxy does not have: it has layers {sorted(known)} "
                f"with {_heads(proxy)} key-value heads."
            )


class IAMScorer(PromptScorer):
    """Scores prompts by a proxy's KVzip scores and a fixed alignment of heads; one row at a time.

    Args:
        proxy_model: see `PromptScorer`.
        prompt: the request to repeat; `RepeatPrompt.from_tokenizer(tokenizer)`.
        alignment: default: `HeadAlignment.by_depth`, for whichever target.
        prefix_length: first tokens of every prompt that are not repeated and stay (system prompt, chat header); None
            for `prompt.prefix`, in prompts that start with it.
        repeat_tokens: most tokens to repeat in one pass.
        proxy_tokenizer, target_tokenizer: see `PromptScorer`.
    """

    cache_class: ClassVar[type[ProxyKVCache]] = IAMCache

    def __init__(
        self,
        proxy_model: "PreTrainedModel",
        prompt: RepeatPrompt,
        alignment: HeadAlignment | None = None,
        *,
        prefix_length: int | None = 0,
        repeat_tokens: int = 2000,
        proxy_tokenizer: "PreTrainedTokenizerBase | None" = None,
        target_tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        super().__init__(proxy_model, proxy_tokenizer, target_tokenizer)
        if not isinstance(prompt, RepeatPrompt):
            raise TypeError(f"prompt must be a RepeatPrompt, got {type(prompt).__name__}.")
        self.prompt, self.alignment = prompt, alignment
        self.prefix_length, self.repeat_tokens = prefix_length, repeat_tokens

    def check_target(self, target_model_or_config: "nn.Module | PreTrainedConfig") -> None:
        """Raise TypeError or ValueError unless the alignment is of this target."""
        config = text_config(target_model_or_config)
        if self.alignment is not None:
            self.alignment.check(self.proxy_config, config)

    def scores(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        config: PreTrainedConfig,
        chunk_tokens: int,
        pending: PendingScores,
    ) -> torch.Tensor:
        """See `PromptScorer.scores`. The proxy reads a row in one pass, whatever `chunk_tokens`."""
        alignment = self.alignment or HeadAlignment.by_depth(self.proxy_config, config)
        shape = (len(pending.layers), pending.rows, pending.heads, pending.tokens)
        out = torch.zeros(shape, device=self.device)
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        with pending.timed("proxy", self.device):
            for row in range(pending.rows):
                context = input_ids[row][real[row]].tolist()
                length = self.prefix_length
                if length is None:
                    own = self.prompt.prefix
                    length = min(len(own), len(context) - 1) if tuple(context[: len(own)]) == own else 0
                found = reconstruction_scores(
                    self.proxy_model,
                    context,
                    self.prompt,
                    prefix_length=length,
                    chunk_tokens=self.repeat_tokens,
                )
                mapped = alignment.apply({layer: scores.to(out) for layer, scores in found.scores.items()})
                out[:, row, :, real[row].to(out.device)] = mapped
        return out


def _heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _proportional(count: int, others: int) -> list[int]:
    """For each of `count` things, one of `others` at the same share of the way: ⌈i · others / count⌉ from 1."""
    return [-(-(i + 1) * others // count) - 1 for i in range(count)]


def _standardised(scores: torch.Tensor) -> torch.Tensor:
    """Log scores `(…, n)` with mean 0 and length 1 over the last dimension."""
    logs = scores.double().clamp(min=1e-6).log()
    logs = logs - logs.mean(-1, keepdim=True)
    return logs / logs.norm(dim=-1, keepdim=True).clamp(min=1e-12)
