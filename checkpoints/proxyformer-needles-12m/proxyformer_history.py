"""ProxyFormer's passes over the history stream: token ids to proxies of every layer, and from there into a cache.

Shapes: ids `(batch, tokens)`, local features `(batch, tokens, d_h)`, proxies `(batch, proxies, d_proxy)`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .cache_proxy import ProxyCache
from .proxy_buffers import rows_tensor
from .proxy_grid import read_rows
from .proxy_history import STEM_TOKENS, HistoryResult
from .proxy_rotary import RotaryAngles
from .proxyformer_base import ProxyFormerPreTrainedModel
from .proxyformer_record import note_context
from .reversible_history import reversible_history
from .sharded_calls import call_sharded

# Parts of a history layer that a reversible history computes again.
_RECOMPUTED = ("compress", "decompress")


class ProxyFormerHistory(ProxyFormerPreTrainedModel):
    """The history stream of a ProxyFormer; the modules are made by `ProxyFormerModel`."""

    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    history_projection: nn.Linear
    history_embed_tokens: nn.Embedding
    history_stem: nn.ModuleList
    history_layers: nn.ModuleList

    def _check_vocabulary(self, ids: torch.Tensor, name: str) -> None:
        # On a GPU looking at values waits for it; there an id out of range ends in an assertion of the embedding.
        if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"{name} must lie between 0 and vocab_size - 1 = {self.config.vocab_size - 1}, got "
                f"{low if low < 0 else high}."
            )

    def _check_cache(self, cache: Any) -> None:
        if cache is None:
            return
        if not getattr(cache, "keeps_proxies", False):
            raise TypeError(
                f"A ProxyFormer keeps proxies of its history, and a {type(cache).__name__} has keys and values: pass "
                "ProxyCache(model), or no cache and let the model make one."
            )
        if len(cache.layers) != len(self.layers):
            raise ValueError(
                f"The cache is of a model with {len(cache.layers)} layers, this one has {len(self.layers)}: make it "
                "with ProxyCache(model)."
            )

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        return F.rms_norm(hidden, hidden.shape[-1:], eps=self.config.rms_norm_eps)

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        assert self.config.rope_parameters is not None and self.config.head_dim is not None
        return RotaryAngles(self.config.rope_parameters, positions, self.config.head_dim, dtype)

    @property
    def _stem_tokens(self) -> int:
        """How many tokens the history's stem looks back."""
        return (STEM_TOKENS - 1) * self.config.history_stem_layers

    def _embed_history(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Local features at layer 0, `(batch, tokens, d_h)`; zero at padding."""
        if self.config.shared_embedding:
            local = self.history_projection(self._embed(ids))
        else:
            local = self.history_embed_tokens(ids)
        local = F.rms_norm(local, local.shape[-1:], eps=self.config.rms_norm_eps)
        kept = None if real is None else real[..., None].to(local.dtype)
        local = local if kept is None else local * kept
        for convolution in self.history_stem:
            local = convolution(local)
            local = local if kept is None else local * kept
        return local

    def _history(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        halo: int,
        past: list[Any] | None = None,
        before: list[torch.Tensor | None] | None = None,
        condition: torch.Tensor | None = None,
        begin: list[list[int]] | None = None,
        keeps_states: bool = False,
        keeps_local: bool = False,
    ) -> HistoryResult:
        """Run the history stream over whole blocks.

        Args:
            ids: `(batch, halo + tokens)`, tokens a multiple of every ratio.
            real: `(batch, halo + tokens)`, bool, or `None` if all are.
            halo: tokens before the first block, for the stem.
            past: for each layer what its interaction keeps of earlier proxies.
            before: for each layer the local features of the tokens before.
            condition: for the cross-attention interaction.
            begin: for each layer and row, how many proxies there are already.
            keeps_states: whether what the interactions keep is asked for.
            keeps_local: whether the local stream at the end is asked for.
        """
        count = len(self.layers)
        past = [None] * count if past is None else past
        tails = [None] * count if before is None else before
        tokens = ids.shape[1] - halo
        blocks_real = None if real is None else real[:, halo:]
        states: list[Any] = [()] * count
        angles = [
            self._proxy_angles(layer, tokens, None if begin is None else begin[index])
            for index, layer in enumerate(self.layers)
        ]
        valid = [
            None if blocks_real is None else blocks_real.unflatten(1, (-1, ratio)).any(-1)
            for ratio in self.config.ratios
        ]
        config = self.config
        simple = config.injection == "residual" and len(set(config.ratios)) == 1 and not config.partition_overlap
        # Going through a layer's parts passes its hooks by, of which sharded and dispatched models have some.
        hooked = any(layer._forward_pre_hooks or hasattr(layer, "_hf_hook") for layer in self.history_layers)
        reversible = config.reversible_history and torch.is_grad_enabled()
        if reversible:
            self._check_reversible(hooked)
        if simple and not hooked and (reversible or not torch.is_grad_enabled()):

            def interact(index: int, proxies: torch.Tensor | None, compressed: torch.Tensor) -> torch.Tensor:
                layer: Any = self.history_layers[index]
                found, state = layer.interact(proxies, compressed, blocks_real, past[index], condition, angles[index])
                if keeps_states:  # this function lives until the backward pass, and with it what it can reach
                    states[index] = state
                return found

            proxies, local = reversible_history(
                self.history_layers, ids, real, halo, self._stem_tokens, self._embed_history,
                self._history_embedding_parameters(), config.history_chunk_blocks, interact,
            )  # fmt: skip
            return HistoryResult(proxies, valid, states, [None] * count, local if keeps_local else None)

        local = self._embed_history(ids, real)[:, halo:]
        found: list[torch.Tensor] = []
        after: list[torch.Tensor | None] = []
        current: torch.Tensor | None = None
        for index, layer in enumerate(self.history_layers):
            after.append(local[:, tokens - config.partition_overlap :] if config.partition_overlap else None)
            local, current, state = layer(
                local, current, blocks_real, tails[index], past[index], condition, angles[index]
            )
            if keeps_states:
                states[index] = state
            found.append(current)
        return HistoryResult(found, valid, states, after, local)

    def _check_reversible(self, hooked: bool) -> None:
        if hooked:
            raise ValueError(
                "reversible_history=True takes the history layers apart, which models that are sharded or dispatched "
                "to several devices cannot have: set config.reversible_history = False and use checkpointing."
            )
        parts = [*self.history_stem, *(getattr(layer, n) for layer in self.history_layers for n in _RECOMPUTED)]
        for part in parts:
            for module in () if part is None else part.modules():
                if isinstance(module, nn.Dropout) and module.p and module.training:
                    raise ValueError(
                        "reversible_history=True computes the history stream again in the backward pass, and dropout "
                        "would be another one then: set the dropout (of LoRA, for instance) to 0 or "
                        "config.reversible_history = False."
                    )

    def _history_embedding_parameters(self) -> list[nn.Parameter]:
        owner = self.embed_tokens if self.config.shared_embedding else self.history_embed_tokens
        found = [*owner.parameters(), *self.history_stem.parameters()]
        return found + (list(self.history_projection.parameters()) if self.config.shared_embedding else [])

    def _proxy_angles(self, layer: Any, tokens: int, begin: list[int] | None) -> RotaryAngles | None:
        if not self.config.proxy_rope:
            return None
        weight = self.embed_tokens.weight
        place = torch.arange(tokens // layer.ratio, device=weight.device)[None]
        if begin is not None:
            place = place + rows_tensor(begin, weight.device)[:, None]
        return self._angles((place + 1) * layer.ratio - 1, weight.dtype)

    def encode_history(
        self,
        history_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        condition_states: torch.Tensor | None = None,
        cache: Any = None,
        count_columns: bool = True,
    ) -> ProxyCache:
        """Compress a history whole, so that the next token begins a new block and sees all of it.

        Args:
            history_ids: `(batch, tokens)`.
            attention_mask: `(batch, tokens)`, 1 for real tokens.
            condition_states: `(batch, states, condition size)`, for the cross-attention interaction.
            cache: an empty `ProxyCache` to fill; by default a new one.
            count_columns: whether the history counts as input seen, as `generate` wants if it is given history and
                question together.

        Raises:
            ValueError: a plain decoder, ids outside the vocabulary, a mask of another shape, a cache with tokens.
        """
        if not self.config.has_proxies:
            raise ValueError("compression_ratio=None: a plain decoder has no history to compress.")
        cache = ProxyCache(self.config) if cache is None else cache
        self._check_cache(cache)
        if cache.get_seq_length() or any(cache.lengths):
            raise ValueError("encode_history needs an empty cache: call cache.reset(), or make another.")
        if self.config.partition_overlap and attention_mask is not None:
            self._check_even(read_rows(history_ids, attention_mask, 0, "history_attention_mask").counts)
        with torch.no_grad():
            result, counts, _ = self._encode(
                history_ids, attention_mask, condition_states, True, cache.released.wanted
            )
            cache.start(len(counts), self.config.block_size, self._stem_tokens, history_ids.device)
            self._store_history(cache, result, counts)
            rows = read_rows(history_ids, attention_mask, 0, "history_attention_mask")
            note_context(cache, rows.ids, counts)
        cache.lengths = list(counts)
        cache.counter.columns = history_ids.shape[1] if count_columns else 0
        return cache

    def _encode(
        self,
        history_ids: torch.Tensor,
        mask: torch.Tensor | None,
        condition: torch.Tensor | None,
        keeps_states: bool = False,
        keeps_local: bool = False,
    ) -> tuple[HistoryResult, list[int], torch.Tensor]:
        """The history stream over whole rows, the last block filled up with padding; counts and ids of rows."""
        if history_ids.ndim != 2 or history_ids.shape[1] == 0:
            raise ValueError(
                f"history_ids must have shape (histories, tokens), at least one token, got {tuple(history_ids.shape)}."
            )
        self._check_vocabulary(history_ids, "history_ids")
        rows = read_rows(history_ids, mask, 0, "history_attention_mask")
        unit = max(self.config.ratios) if len(set(self.config.ratios)) == 1 else self.config.block_size
        missing = -rows.ids.shape[1] % unit
        ids, real = rows.ids, None
        if missing or len(set(rows.counts)) > 1:
            ids = F.pad(ids, (0, missing))
            counts = rows_tensor(rows.counts, ids.device)
            real = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        result = self._history(ids, real, 0, condition=condition, keeps_states=keeps_states, keeps_local=keeps_local)
        if real is not None:
            _cut(result, [-(-max(rows.counts) // ratio) for ratio in self.config.ratios])
        return result, rows.counts, rows.ids

    def _store_history(self, cache: ProxyCache, result: HistoryResult, counts: list[int]) -> None:
        """Append what the history stream made of `counts[row]` tokens of each row."""
        layer: Any
        for index, layer in enumerate(self.layers):
            stored = cache.layers[index]
            proxies = [-(-count // layer.ratio) for count in counts]
            call_sharded(layer, "store_proxies", result.proxies[index], proxies, stored)
            state = result.states[index]
            if len(state) == 2:
                stored.interaction.append(torch.cat(state, dim=-1), proxies)
            elif len(state) == 1:
                stored.hidden = state[0].detach()
            tail = result.tails[index]
            if tail is not None:
                stored.before = tail.detach()
        if cache.released.wanted and result.local is not None:
            cache.released.append(result.local, counts)

    def _check_even(self, counts: list[int]) -> None:
        if self.config.partition_overlap and min(counts) != max(counts):
            raise ValueError(
                "partition_overlap with rows of unequal length is not served by a ProxyCache: give rows of equal "
                "length, one at a time if need be, or use_cache=False."
            )


def _cut(result: HistoryResult, counts: list[int]) -> None:
    """Leave out proxies behind the longest row's end: layers of small ratios have some in a filled-up block."""
    for index, count in enumerate(counts):
        result.proxies[index] = result.proxies[index][:, :count]
        valid = result.valid[index]
        result.valid[index] = None if valid is None else valid[:, :count]
        if len(result.states[index]) == 2:
            key, value = result.states[index]
            result.states[index] = (key[:, :, :count], value[:, :, :count])
