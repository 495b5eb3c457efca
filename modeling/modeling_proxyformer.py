"""ProxyFormer: blocks of tokens compressed into proxies, attention among proxies, and a stream that reads both.

An ordinary causal language model on the outside: a token sees the raw tokens of its own block and the proxies of all
blocks before. Shapes: hidden states `(batch, tokens, hidden size)`; equation numbers are the paper's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults

from ..configuration.configuration_proxyformer import ProxyFormerConfig
from .cache_proxy import ProxyCache
from .checkpointed_cache import cache_for_pass
from .chunked_loss import IGNORED
from .compat import CACHE_FIELD, mask_arguments, rename_cache
from .continued_positions import check_positions_continue
from .next_token_loss import NextTokenLoss
from .proxy_generation import ProxyFormerLayer
from .proxy_grid import Grid, input_columns
from .proxy_history import CausalConvolution, ProxyHistoryLayer
from .proxyformer_base import ProxyFormerPreTrainedModel
from .proxyformer_streams import ProxyFormerStreams
from .rms_norm import RMSNorm
from .sharded_calls import call_sharded


@dataclass
class ProxyFormerModelOutput(BaseModelOutputWithPast):
    """A decoder's output; `middle_hidden_state` is what the auxiliary head reads, after the middle layer."""

    middle_hidden_state: torch.Tensor | None = None


class ProxyFormerModel(ProxyFormerStreams):
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
            ValueError: ids outside the vocabulary, shapes that do not fit, packed rows, embeddings instead of ids, a
                cache with tokens where layers are checkpointed, positions that do not come after those of a cache.
            TypeError: a cache that cannot hold proxies.
        """
        cache = cache_for_pass(self, past_key_values if cache is None else cache)
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
            if cache is not None and cache.get_seq_length() > 0:
                _check_continued(position_ids, attention_mask, cache)
            hidden, middle, grid = self._two_streams(
                input_ids, attention_mask, cache, history_ids, history_attention_mask, condition_states, wanted, states
            )
        columns = input_ids.shape[1]
        hidden = self.norm(input_columns(hidden, grid, columns, wanted))
        middle = None if middle is None else input_columns(middle, grid, columns, wanted)
        return ProxyFormerModelOutput(
            last_hidden_state=hidden,
            middle_hidden_state=None if middle is None else self.middle_norm(middle),
            hidden_states=None if states is None else self._hidden_states(states, hidden, grid, columns, wanted),
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

    def _hidden_states(
        self,
        states: list[torch.Tensor],
        last: torch.Tensor,
        grid: Grid | None,
        columns: int,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """In the order of the input's columns; the last one normalised, as in transformers' own models."""
        found = [input_columns(x, grid, columns, None) for x in states[:-1]]
        return (*found, last if wanted is None else self.norm(input_columns(states[-1], grid, columns, None)))

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


def _check_continued(position_ids: torch.Tensor | None, mask: torch.Tensor | None, cache: Any) -> None:
    if position_ids is None or torch.compiler.is_compiling():
        return
    columns = position_ids.shape[-1]
    real = None if mask is None or mask.ndim != 2 or mask.shape[1] < columns else mask[:, -columns:].bool()
    check_positions_continue(position_ids, real, cache.lengths)


class ProxyFormerForCausalLM(ProxyFormerPreTrainedModel, NextTokenLoss, GenerationMixin):
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
        return call_sharded(self, "_encode_history", history_ids, attention_mask, condition_states)

    def _encode_history(self, *args: Any) -> ProxyCache:
        return self.model.encode_history(*args)

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
            kwargs: `shift_labels`, with `labels` and of their shape: what each column is to predict, in place of the
                label behind it. Sequences that are cut among processes are shifted before.

        Raises:
            ValueError: labels of another shape than `input_ids`.
        """
        output_hidden_states = kwargs.pop("output_hidden_states", None)
        # No argument of its own: a Trainer takes every argument with "label" in its name for one it must be given.
        shift_labels: torch.Tensor | None = kwargs.pop("shift_labels", None)
        only_loss = labels is not None and self.training and not self.config.logits_in_training
        wanted: torch.Tensor | None = None
        kept: torch.Tensor | None = None
        targets: torch.Tensor | None = None
        if labels is not None:
            for name, given in {"labels": labels, "shift_labels": shift_labels}.items():
                if given is not None and (input_ids is None or given.shape != input_ids.shape):
                    shape = None if input_ids is None else tuple(input_ids.shape)
                    raise ValueError(f"{name} must have the shape of input_ids, {shape}, got {tuple(given.shape)}.")
            targets = self._targets(labels, shift_labels)
            if labels.device.type == "cpu":
                read = labels if shift_labels is None else shift_labels
                self.model._check_vocabulary(read[read != IGNORED], "labels")
        if only_loss and not torch.compiler.is_compiling():
            assert targets is not None
            wanted = targets != IGNORED
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
            assert targets is not None
            loss = self._loss(hidden, outputs.middle_hidden_state, targets, wanted, num_items_in_batch)
        else:
            if kept is not None and input_ids is not None:
                hidden = self._kept_columns(hidden, kept, input_ids)
            logits = self.lm_head(hidden)
            if targets is not None:
                loss = self._loss_of_logits(logits, outputs.middle_hidden_state, targets, num_items_in_batch)
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
        rename_cache(model_kwargs)
        given = model_kwargs.get(CACHE_FIELD)
        chosen = generation_config.cache_implementation
        if self.config.has_proxies and given is None and generation_config.use_cache is not False:
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
