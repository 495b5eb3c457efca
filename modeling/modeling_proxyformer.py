"""ProxyFormer: blocks of tokens compressed into proxies, attention among proxies, and a stream that reads both.

An ordinary causal language model on the outside: a token sees the raw tokens of its own block and the proxies of all
blocks before. Shapes: hidden states `(batch, tokens, hidden size)`; equation numbers are the paper's.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults

from ..configuration.configuration_proxyformer import ProxyFormerConfig
from .cache_proxy import ProxyCache
from .chunked_loss import IGNORED, chunked_cross_entropy
from .compat import CACHE_FIELD, mask_arguments
from .proxy_buffers import rows_tensor
from .proxy_generation import GenerationView, ProxyFormerLayer, last_on_grid
from .proxy_grid import Grid, Rows, join_pending, make_grid, read_rows
from .proxy_history import STEM_TOKENS, CausalConvolution, HistoryResult, ProxyHistoryLayer
from .proxy_interaction import RecurrentInteraction
from .proxy_merge import ProxyMerge
from .proxy_reading import Visibility
from .proxy_rotary import RotaryAngles
from .reversible_history import reversible_history
from .rms_norm import RMSNorm

logger = logging.get_logger(__name__)

# Parts of a history layer that a reversible history computes again.
_RECOMPUTED = ("compress", "decompress")


@dataclass
class ProxyFormerModelOutput(BaseModelOutputWithPast):
    """A decoder's output; `middle_hidden_state` is what the auxiliary head reads, after the middle layer."""

    middle_hidden_state: torch.Tensor | None = None


class ProxyFormerPreTrainedModel(PreTrainedModel):
    """Weights and loading of all ProxyFormer language models."""

    config: ProxyFormerConfig
    config_class = ProxyFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ProxyFormerLayer", "ProxyHistoryLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the embeddings of both streams; arguments as in `PreTrainedModel`."""
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        base: Any = self.base_model
        known = getattr(base, "history_embed_tokens", None)
        if known is not None and known.num_embeddings != resized.num_embeddings:
            base.history_embed_tokens = self._get_resized_embeddings(
                known, resized.num_embeddings, mean_resizing=mean_resizing
            )
        return resized

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if getattr(module, "init_average", False):
                return  # its owner's
            scale = getattr(module, "init_scale", 1.0)
            init.normal_(module.weight, mean=0.0, std=scale / math.sqrt(module.in_features))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ProxyMerge):
            init.copy_(module.proj.weight, module.average_weight())
        elif isinstance(module, RecurrentInteraction):
            init.copy_(module.decay, module.initial_decay(module.decay.shape[0]))
        elif isinstance(module, ProxyFormerLayer) and module.has_proxies:
            init.zeros_(module.proxy_gate.weight)
            init.constant_(module.proxy_gate.bias, float(self.config.gate_bias))


class ProxyFormerModel(ProxyFormerPreTrainedModel):
    """Both streams without a head: token ids to hidden states of the generation stream.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: ProxyFormerConfig) -> None:
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ProxyFormerLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.auxiliary_loss_weight:
            self.middle_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.has_proxies:
            if config.shared_embedding:
                self.history_projection = nn.Linear(config.hidden_size, config.history_hidden_size, bias=False)
            else:
                self.history_embed_tokens = nn.Embedding(config.vocab_size, config.history_hidden_size)
            self.history_stem = nn.ModuleList(
                [
                    CausalConvolution(config.history_hidden_size, config.rms_norm_eps)
                    for _ in range(config.history_stem_layers)
                ]
            )
            lend = config.share_proxy_generation_weights
            self.history_layers = nn.ModuleList(
                [
                    ProxyHistoryLayer(config, index, layer.block if lend else None)  # type: ignore[arg-type]
                    for index, layer in enumerate(self.layers)
                ]
            )
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

    # --- forward ----------------------------------------------------------------------------------------------------

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        history_ids: torch.Tensor | None = None,
        history_attention_mask: torch.Tensor | None = None,
        condition_states: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ProxyFormerModelOutput:
        """Run both streams.

        Args:
            input_ids: `(batch, tokens)`.
            attention_mask: `(batch, tokens)` or, with cached tokens, `(batch, cached + tokens)`, 1 for real tokens;
                padding may lie anywhere.
            position_ids: not needed; a token's position is its place among its row's real tokens.
            inputs_embeds: refused: the history stream embeds token ids a second time.
            past_key_values, cache: a `ProxyCache` (a plain decoder's: `DynamicCache`), under either name.
            use_cache: whether to make and fill a cache where none is given; none is made where gradients are recorded,
                which a cache would cut off.
            history_ids: `(histories, history tokens)`: the paper's two-input form. They are compressed whole, the last
                block filled up, and all of `input_ids` sees their proxies. `batch` is a multiple of `histories`; row i
                reads history i // (batch / histories).
            history_attention_mask: `(histories, history tokens)`, 1 for real tokens.
            condition_states: `(histories or batch, states, condition size)`, for the cross-attention interaction.
            wanted: `(batch, tokens)`, bool: hidden states of these columns only, `(number, hidden size)`, in order of
                rows; blocks without a wanted column cost nothing on the generation side.
            output_hidden_states: whether to return the embeddings and what comes out of each layer (of the last one
                normalised), `(batch, tokens, hidden size)` each; all blocks are computed then.

        Returns:
            `last_hidden_state` `(batch, tokens, hidden size)` (or of the wanted columns), `middle_hidden_state` the
            same after the middle layer, and the cache.

        Raises:
            ValueError: ids outside the vocabulary, shapes that do not fit, packed rows, embeddings instead of ids.
            TypeError: a cache that cannot hold proxies.
        """
        cache = past_key_values if cache is None else cache
        input_ids = self._checked_ids(input_ids, inputs_embeds)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        self._check_others(history_ids, history_attention_mask, condition_states, kwargs)
        states: list[torch.Tensor] | None = [] if output_hidden_states else None
        if not self.config.has_proxies:
            if history_ids is not None:
                raise ValueError("A plain decoder (compression_ratio=None) takes its history in front of input_ids.")
            hidden, middle, cache = self._plain(input_ids, attention_mask, position_ids, cache, use_cache, states)
            grid: Grid | None = None
        else:
            if cache is None or cache.get_seq_length() == 0:
                _check_positions(position_ids, attention_mask)
            if use_cache and cache is None and not torch.is_grad_enabled():
                cache = ProxyCache(self.config)
            self._check_cache(cache)
            hidden, middle, grid = self._two_streams(
                input_ids, attention_mask, cache, history_ids, history_attention_mask, condition_states, wanted, states
            )
        columns = input_ids.shape[1]
        hidden = _columns(hidden, grid, columns, wanted)
        middle = None if middle is None else _columns(middle, grid, columns, wanted)
        return ProxyFormerModelOutput(
            last_hidden_state=self.norm(hidden),
            middle_hidden_state=None if middle is None else self.middle_norm(middle),
            hidden_states=None if states is None else self._hidden_states(states, grid, columns),
            **{CACHE_FIELD: cache},
        )

    def _checked_ids(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if inputs_embeds is not None or input_ids is None:
            raise ValueError(
                "ProxyFormer needs input_ids: its history stream embeds token ids a second time, so inputs_embeds "
                "alone are not enough."
            )
        if input_ids.is_floating_point():
            raise TypeError(f"input_ids must be whole numbers, got {input_ids.dtype}.")
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must have shape (batch, tokens), at least one token, got {tuple(input_ids.shape)}."
            )
        self._check_vocabulary(input_ids, "input_ids")
        return input_ids

    def _hidden_states(self, states: list[torch.Tensor], grid: Grid | None, columns: int) -> tuple[torch.Tensor, ...]:
        """In the order of the input's columns; the last one normalised, as in transformers' own models."""
        found = [_columns(x, grid, columns, None) for x in states]
        return (*found[:-1], self.norm(found[-1]))

    def _check_others(
        self,
        history_ids: torch.Tensor | None,
        history_mask: torch.Tensor | None,
        condition: torch.Tensor | None,
        others: dict[str, Any],
    ) -> None:
        """Refuse what would be left unread."""
        if history_mask is not None and history_ids is None:
            raise ValueError("history_attention_mask goes with history_ids, which are missing.")
        if condition is not None and self.config.condition_size is None:
            raise ValueError(
                "condition_states are read by proxy_interaction='cross_attention' alone; this model has "
                f"{self.config.proxy_interaction!r}."
            )
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if others.get(name) is not None:
                raise ValueError(f"{name} packs several sequences into a row: give each a row of its own.")

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

    def _plain(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Any,
        use_cache: bool | None,
        states: list[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """A decoder with full causal attention and the same layers."""
        if use_cache and cache is None and not (self.training and torch.is_grad_enabled()):
            cache = DynamicCache(config=self.config)
        hidden = self._embed(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **mask_arguments(create_causal_mask, cache),
        )
        angles = None
        if self.config.rope_parameters is not None:
            if position_ids is None:
                seen = 0 if cache is None else cache.get_seq_length()
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + seen
            angles = self._angles(position_ids, hidden.dtype)
        middle = None
        for index, layer in enumerate(self.layers):
            if states is not None:
                states.append(hidden)
            hidden = layer(hidden, None, None, cache, mask, angles)
            middle = hidden if self._is_middle(index) else middle
        if states is not None:
            states.append(hidden)
        return hidden, middle, cache

    def _is_middle(self, index: int) -> bool:
        """Whether the auxiliary head reads what comes out of this layer."""
        return bool(self.config.auxiliary_loss_weight) and index == max(len(self.layers) // 2 - 1, 0)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        return F.rms_norm(hidden, hidden.shape[-1:], eps=self.config.rms_norm_eps)

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        assert self.config.rope_parameters is not None and self.config.head_dim is not None
        return RotaryAngles(self.config.rope_parameters, positions, self.config.head_dim, dtype)

    # --- history ----------------------------------------------------------------------------------------------------

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
            _note_context(cache, rows.ids, counts)
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
            layer.store_proxies(result.proxies[index], proxies, stored)
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

    # --- both streams -----------------------------------------------------------------------------------------------

    def _two_streams(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        history_ids: torch.Tensor | None,
        history_mask: torch.Tensor | None,
        condition: torch.Tensor | None,
        wanted: torch.Tensor | None,
        states: list[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Grid]:
        config = self.config
        wanted = None if states is not None else wanted
        batch, block = input_ids.shape[0], config.block_size
        groups = 1
        if history_ids is not None:
            if history_ids.ndim != 2 or history_ids.shape[0] == 0 or batch % history_ids.shape[0]:
                raise ValueError(
                    f"The rows of input_ids must be a multiple of those of history_ids, got {batch} and "
                    f"{tuple(history_ids.shape)}."
                )
            groups = batch // history_ids.shape[0]
            if cache is not None:
                self.encode_history(history_ids, history_mask, condition, cache, count_columns=False)
                cache.batch_repeat_interleave(groups)
        seen = 0 if cache is None else cache.get_seq_length()
        rows = read_rows(input_ids, attention_mask, seen)
        if cache is not None:
            cache.start(batch, block, self._stem_tokens, input_ids.device)
        fill = [0] * batch if cache is None else list(cache.fill)
        known = [0] * batch if cache is None else list(cache.retained)
        last = [max(have + new - 1, 0) // block for have, new in zip(fill, rows.counts, strict=True)]
        if max(last):
            self._check_blocks(cache, last)
        sequence = join_pending(None if cache is None else cache.pending, fill, rows)

        history: HistoryResult | None = None
        ahead: list[list[int]] = [[0] * batch for _ in self.layers]  # proxies there are before block 0
        lengths = [0] * batch
        valid: list[torch.Tensor | None] | None = None
        if cache is not None:
            ahead = [cache.num_proxies(index) for index in range(len(self.layers))]
            lengths = [length - have for length, have in zip(cache.lengths, fill, strict=True)]
        elif history_ids is not None:
            history, told, told_ids = self._encode(history_ids, history_mask, condition, max(last) > 0)
            lengths = [length for length in told for _ in range(groups)]
            ahead = [[-(-length // ratio) for length in lengths] for ratio in config.ratios]
            valid = history.valid
            if max(last):
                context = _context(told_ids, told, self._stem_tokens).repeat_interleave(groups, dim=0)
                history = self._continue_history(history, groups, sequence, context, last, condition, ahead)
                valid = None
        if max(last) and (cache is not None or history_ids is None):
            history = self._compress(cache, sequence, last, condition, ahead)
        unread = history is None and cache is None and self._waits_for_others()
        if unread:  # one block that nobody sees: other processes may have rows with a history
            history = self._history(input_ids.new_zeros(batch, block), None, 0, condition=condition)

        step = cache is not None and input_ids.shape[1] == 1 and min(rows.counts) == 1
        hidden_ids, grid = self._grid(rows, sequence, fill, last, wanted, cache is not None, step)
        visible = self._visible(grid, ahead, last, cache, valid, step)
        if unread:
            visible = {ratio: Visibility(counts=torch.zeros_like(grid.numbers)) for ratio in visible}
        view = GenerationView(
            grid=grid,
            block=block,
            retained=config.retained_blocks,
            angles=self._raw_angles(grid, lengths, fill, step),
            turns_proxies=config.proxy_rope,
            visible=visible,
            fill=fill,
            known=known,
            last=last,
            step=step,
            recomputes=config.reversible_history and self.training,
        )
        hidden = self._embed(hidden_ids)
        middle = None
        for index, layer in enumerate(self.layers):
            proxies = None if history is None or cache is not None else history.proxies[index]
            if states is not None:
                states.append(hidden)
            hidden = layer(hidden, proxies, view, cache)
            middle = hidden if self._is_middle(index) else middle
        if states is not None:
            states.append(hidden)
        if cache is not None:
            _note_tokens(cache, sequence, rows, fill, known, last, grid, block, config.retained_blocks, step)
            cache.counter.columns += input_ids.shape[1]
        return hidden, middle, grid

    def _check_blocks(self, cache: Any, last: list[int]) -> None:
        """Before blocks of the generation region itself are compressed."""
        first: Any = self.history_layers[0]
        if not first.interaction.causal:
            raise ValueError(
                f"proxy_interaction={self.config.proxy_interaction!r} lets proxies see later ones, so that it serves "
                "histories given whole, as history_ids, in front of one generation block of at most "
                f"{self.config.block_size} tokens."
            )
        if cache is None:
            return
        self._check_even(last)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.history_layers.parameters()):
            logger.warning_once("Gradients stop at a ProxyCache: none reaches the history stream through one.")

    def _compress(
        self, cache: Any, sequence: torch.Tensor, last: list[int], condition: torch.Tensor | None,
        ahead: list[list[int]],
    ) -> HistoryResult:  # fmt: skip
        """Run the blocks that are finished through the history stream; store what comes of them, with a cache."""
        block = self.config.block_size
        tokens = max(last) * block
        ids = sequence[:, :tokens]
        even = min(last) == max(last)
        real = None
        if not even:
            ends = rows_tensor(last, ids.device)[:, None] * block
            real = torch.arange(tokens, device=ids.device) < ends
        if cache is None:
            return self._history(ids, real, 0, condition=condition)
        halo = 0
        if self._stem_tokens and any(cache.lengths):
            ids, real, halo = _with_context(ids, real, cache.context)
        result = self._history(
            ids, real, halo, [layer.interaction_past() for layer in cache.layers],
            [layer.before for layer in cache.layers], condition, ahead, True, cache.released.wanted,
        )  # fmt: skip
        self._store_history(cache, result, [number * block for number in last])
        return result

    def _continue_history(
        self,
        history: HistoryResult,
        groups: int,
        sequence: torch.Tensor,
        context: torch.Tensor,
        last: list[int],
        condition: torch.Tensor | None,
        ahead: list[list[int]],
    ) -> HistoryResult:
        """A given history, and behind it the blocks that the generation region itself has finished; differentiable."""
        if any(valid is not None and not bool(valid.all()) for valid in history.valid) or min(last) != max(last):
            raise ValueError(
                "A generation region of more than one block behind histories of unequal length needs a cache: call "
                "the model with use_cache=True, or give rows of equal length."
            )
        if self.config.partition_overlap:
            raise ValueError(
                "partition_overlap and a generation region of more than one block need the plain form: put the "
                "history in front of input_ids."
            )

        def repeated(x: torch.Tensor) -> torch.Tensor:
            return x if groups == 1 else x.repeat_interleave(groups, dim=0)

        past = [
            (*(repeated(x) for x in state), None) if len(state) == 2 else tuple(repeated(x) for x in state) or None
            for state in history.states
        ]
        ids = sequence[:, : max(last) * self.config.block_size]
        real, halo = None, 0
        if self._stem_tokens:
            ids, real, halo = _with_context(ids, real, context)
        condition = None if condition is None else repeated(condition)
        new = self._history(ids, real, halo, past, condition=condition, begin=ahead)
        proxies = [
            torch.cat([repeated(old), fresh], dim=1) for old, fresh in zip(history.proxies, new.proxies, strict=True)
        ]
        return HistoryResult(proxies, [None] * len(proxies), new.states, new.tails, None)

    def _grid(
        self,
        rows: Rows,
        sequence: torch.Tensor,
        fill: list[int],
        last: list[int],
        wanted: torch.Tensor | None,
        cached: bool,
        step: bool,
    ) -> tuple[torch.Tensor, Grid]:
        if step:
            numbers = rows_tensor(last, rows.ids.device)[:, None]
            return rows.ids[:, :1], Grid(1, 1, None, numbers, False, True, None, None)
        retained = self.config.retained_blocks
        if torch.compiler.is_compiling():
            wanted = None
        grid = make_grid(rows, fill, self.config.block_size, retained * len(self.layers), wanted, cached, retained > 0)
        return grid.gather_ids(sequence), grid

    def _raw_angles(self, grid: Grid, lengths: list[int], fill: list[int], step: bool) -> RotaryAngles | None:
        if self.config.rope_parameters is None:
            return None
        weight = self.embed_tokens.weight
        if step:
            positions = rows_tensor([a + b for a, b in zip(lengths, fill, strict=True)], weight.device)[:, None]
        else:
            begin = rows_tensor(lengths, weight.device)[:, None]
            place = torch.arange(grid.width, device=weight.device)
            positions = begin + (grid.numbers[:, :, None] * self.config.block_size + place).flatten(1)
        return self._angles(positions, weight.dtype)

    def _visible(
        self,
        grid: Grid,
        ahead: list[list[int]],
        last: list[int],
        cache: Any,
        valid: list[torch.Tensor | None] | None,
        step: bool,
    ) -> dict[int, Visibility]:
        """For each ratio, which proxies the grid's tokens see."""
        found = {}
        block = self.config.block_size
        for index, ratio in enumerate(self.config.ratios):
            if ratio in found:
                continue
            each = block // ratio
            have = ahead[index]
            even = min(have) == max(have) and min(last) == max(last)
            if even and (step or grid.only_last):
                found[ratio] = Visibility()
            elif valid is not None and grid.blocks == 1:
                mask = valid[index]
                found[ratio] = Visibility(valid=None if mask is None else mask.sum(1))
            else:
                begin = rows_tensor(have, grid.numbers.device)[:, None]
                begin = begin[:1] if min(have) == max(have) else begin
                counts = begin + grid.numbers * each
                plain = grid.complete and not any(have)
                found[ratio] = Visibility(counts=counts, step=each if plain else 0)
        return found

    def _waits_for_others(self) -> bool:
        """Whether other processes wait until every layer has been run, and in training has had gradients."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        trains = self.training and torch.is_grad_enabled()
        return trains or any(layer._forward_pre_hooks for layer in self.history_layers)  # of sharded layers


def _check_positions(position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    if position_ids is None or position_ids.shape[1] < 2 or torch.compiler.is_compiling():
        return
    columns = position_ids.shape[1]
    if mask is None or mask.ndim != 2 or mask.shape[1] < columns:
        real = torch.ones_like(position_ids, dtype=torch.bool)
    else:
        real = mask[:, -columns:].bool()
    behind = (position_ids - real.cumsum(1)).expand_as(real)
    first = behind.gather(1, real.int().argmax(1, keepdim=True))
    if bool(((behind != first) & real).any()):
        raise ValueError(
            "position_ids pack several sequences into a row, and a ProxyFormer's row is one sequence: give each its "
            "own row, with an attention_mask."
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


def _columns(hidden: torch.Tensor, grid: Grid | None, columns: int, wanted: torch.Tensor | None) -> torch.Tensor:
    """Hidden states of the input's columns, from where they lie on the grid."""
    places = None if grid is None else grid.places
    if wanted is not None:
        row, column = wanted.nonzero(as_tuple=True)
        return hidden[row, column if places is None else places.expand(hidden.shape[0], -1)[row, column]]
    if places is None:
        return hidden[:, :columns]
    index = places.expand(hidden.shape[0], -1)[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, index)


def _context(ids: torch.Tensor, counts: list[int], stem: int) -> torch.Tensor:
    """The last `stem` ids of each row `(batch, stem)`, -1 where there are none."""
    place = torch.arange(stem, device=ids.device) - stem + rows_tensor(counts, ids.device)[:, None]
    found = ids.gather(1, place.clamp(0, ids.shape[1] - 1))
    return torch.where(place >= 0, found, -1)


def _note_context(cache: Any, ids: torch.Tensor, counts: list[int]) -> None:
    """Remember the last ids of `(batch, longest)`, of which each row has `counts[row]`."""
    stem = cache.context.shape[1]
    if stem == 0:
        return
    joined = torch.cat([cache.context, ids], dim=1)
    place = torch.arange(stem, device=ids.device) + rows_tensor(counts, ids.device)[:, None]
    cache.context = joined.gather(1, place)


def _with_context(
    ids: torch.Tensor, real: torch.Tensor | None, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Blocks with the tokens before them in front, and which of all these are there."""
    if real is None:
        real = torch.ones_like(ids, dtype=torch.bool)
    return torch.cat([context.clamp(min=0), ids], dim=1), torch.cat([context >= 0, real], dim=1), context.shape[1]


def _note_tokens(
    cache: Any,
    sequence: torch.Tensor,
    rows: Rows,
    fill: list[int],
    known: list[int],
    last: list[int],
    grid: Grid,
    block: int,
    retained: int,
    step: bool,
) -> None:
    """Bring a cache's record of its rows up to date."""
    begins = [number * block for number in last]
    _note_context(cache, sequence, begins)
    totals = [have + new for have, new in zip(fill, rows.counts, strict=True)]
    place = torch.arange(block, device=sequence.device) + rows_tensor(begins, sequence.device)[:, None]
    cache.pending = sequence.gather(1, place.clamp(max=sequence.shape[1] - 1))
    cache.fill = [total - begin for total, begin in zip(totals, begins, strict=True)]
    cache.lengths = [have + new for have, new in zip(cache.lengths, rows.counts, strict=True)]
    if retained:
        computed = last if step else last_on_grid(grid, last)
        starts = [0] * len(last) if step or grid.first is None else grid.first
        cache.retained = [
            min(retained, (before if start == 0 else 0) + done)
            for before, done, start in zip(known, computed, starts, strict=True)
        ]


def _is_plain(head: Any) -> bool:
    """Whether a head is a matrix on this device that nothing is hooked to."""
    bias = getattr(head, "bias", None)
    return (
        type(head) is nn.Linear
        and bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.is_floating_point()
        and not head.weight.is_meta
        and not (head._forward_pre_hooks or head._forward_hooks or hasattr(head, "_hf_hook"))
    )


class ProxyFormerForCausalLM(ProxyFormerPreTrainedModel, GenerationMixin):
    """A ProxyFormer with a language-modelling head.

    Args:
        config: the model's configuration.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ProxyFormerConfig) -> None:
        super().__init__(config)
        self.model = ProxyFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings  # type: ignore[assignment]

    def encode_history(
        self,
        history_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        condition_states: torch.Tensor | None = None,
    ) -> ProxyCache:
        """Compress a history once, to be asked about often; see `ProxyFormerModel.encode_history`."""
        return self.model.encode_history(history_ids, attention_mask, condition_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        history_ids: torch.Tensor | None = None,
        history_attention_mask: torch.Tensor | None = None,
        condition_states: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token; arguments as in `ProxyFormerModel.forward`.

        Args:
            labels: `(batch, tokens)`; the loss is that of predicting each from what comes before, -100 is left out,
                with the auxiliary head's loss added at its weight in training mode. There only labelled positions have
                logits, a chunk at a time, and none are returned, unless `config.logits_in_training`.
            logits_to_keep: logits of the last so many columns only, or of these columns; 0 for all.
            num_items_in_batch: labels of all accumulated batches, by which the loss is divided instead of by its own.

        Raises:
            ValueError: labels of another shape than `input_ids`.
        """
        output_hidden_states = kwargs.pop("output_hidden_states", None)
        only_loss = labels is not None and self.training and not self.config.logits_in_training
        wanted: torch.Tensor | None = None
        kept: torch.Tensor | None = None
        if labels is not None and (input_ids is None or labels.shape != input_ids.shape):
            shape = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"labels must have the shape of input_ids, {shape}, got {tuple(labels.shape)}.")
        if labels is not None and labels.device.type == "cpu":
            self.model._check_vocabulary(labels[labels != IGNORED], "labels")
        if only_loss and not torch.compiler.is_compiling():
            assert labels is not None
            wanted = torch.zeros_like(labels, dtype=torch.bool)
            wanted[:, :-1] = labels[:, 1:] != IGNORED
        elif labels is None and input_ids is not None and not (isinstance(logits_to_keep, int) and not logits_to_keep):
            columns = torch.zeros(input_ids.shape[1], dtype=torch.bool, device=input_ids.device)
            place = torch.arange(input_ids.shape[1], device=input_ids.device)
            kept = place[-logits_to_keep:] if isinstance(logits_to_keep, int) else place[logits_to_keep]
            columns[kept] = True
            wanted = columns.expand_as(input_ids)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            use_cache=use_cache,
            history_ids=history_ids,
            history_attention_mask=history_attention_mask,
            condition_states=condition_states,
            wanted=wanted,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if only_loss:
            assert labels is not None
            loss = self._loss(hidden, outputs.middle_hidden_state, labels, wanted, num_items_in_batch)
        else:
            if kept is not None and input_ids is not None:
                hidden = self._kept_columns(hidden, kept, input_ids)
            logits = self.lm_head(hidden)
            if labels is not None:
                loss = self._loss_of_logits(logits, outputs.middle_hidden_state, labels, num_items_in_batch)
                if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep:
                    last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
                    logits = logits[:, last]
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE_FIELD: outputs.get(CACHE_FIELD)}
        )

    @staticmethod
    @torch.compiler.disable
    def _kept_columns(hidden: torch.Tensor, kept: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """`(batch, kept, hidden size)` in the order asked for, from states in the order of columns."""
        states = hidden.view(input_ids.shape[0], -1, hidden.shape[-1])
        chosen, order = kept.unique(return_inverse=True)
        return states if len(chosen) == len(kept) and bool((chosen == kept).all()) else states[:, order]

    def _loss(
        self,
        hidden: torch.Tensor,
        middle: torch.Tensor | None,
        labels: torch.Tensor,
        wanted: torch.Tensor | None,
        num_items: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """Cross-entropy of the next token from the last head and the auxiliary one, mean over labels."""
        if wanted is not None:
            targets = labels[:, 1:][wanted[:, :-1]]
        else:
            hidden, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            middle = None if middle is None else middle[:, :-1].flatten(0, 1)
        divisor = self._divisor(targets, num_items)
        loss = self._sum_of_losses(hidden, targets) / divisor
        weight = float(self.config.auxiliary_loss_weight)
        if middle is not None and weight:
            loss = loss + weight * self._sum_of_losses(middle, targets) / divisor
        return loss

    def _loss_of_logits(
        self,
        logits: torch.Tensor,
        middle: torch.Tensor | None,
        labels: torch.Tensor,
        num_items: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """The same from logits that are there already; the auxiliary head counts in training only."""
        targets = labels[:, 1:].flatten()
        divisor = self._divisor(targets, num_items)
        scores = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum") / divisor
        weight = float(self.config.auxiliary_loss_weight)
        if middle is not None and weight and self.training:
            loss = loss + weight * self._sum_of_losses(middle[:, :-1].flatten(0, 1), targets) / divisor
        return loss

    @staticmethod
    def _divisor(targets: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor | int:
        if num_items is None:
            return (targets != IGNORED).sum().clamp(min=1)
        return num_items.to(targets.device) if isinstance(num_items, torch.Tensor) else num_items

    def _sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropy of `(n, hidden size)` against `(n,)`, a chunk of labelled positions at a time."""
        chunk = self.config.loss_chunk_tokens
        if _is_plain(self.lm_head):
            return chunked_cross_entropy(hidden, self.lm_head.weight, targets, chunk)
        # Adapters, quantised and dispatched heads are called, not taken apart.
        labelled = targets != IGNORED
        hidden, targets = hidden[labelled], targets[labelled]
        total = hidden.sum() * 0.0
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            found = checkpoint(self._chunk_loss, hidden[part], targets[part], use_reentrant=False)
            assert isinstance(found, torch.Tensor)
            total = total + found
        return total

    def _chunk_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, reduction="sum")

    # --- generate ---------------------------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Let `generate` make a `ProxyCache` where it would make a cache of keys and values."""
        given = [model_kwargs.get(name) for name in ("cache", "past_key_values")]
        chosen = generation_config.cache_implementation
        if (
            self.config.has_proxies
            and all(cache is None for cache in given)
            and generation_config.use_cache is not False
        ):
            if chosen not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation={chosen!r} holds keys and values of all tokens, which a ProxyFormer does "
                    "not keep: leave it out."
                )
            if getattr(generation_config, "is_assistant", False):
                raise ValueError("A ProxyFormer cannot draft for assisted decoding: its cache takes no tokens back.")
            model_kwargs[CACHE_FIELD] = ProxyCache(self.config)
            return None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers; a history given as `history_ids` is compressed in the first step only."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        cache = next((inputs[name] for name in ("cache", "past_key_values") if inputs.get(name) is not None), None)
        if cache is not None and cache.get_seq_length() > 0:
            for name in ("history_ids", "history_attention_mask"):
                inputs.pop(name, None)
        return inputs
