"""DAR (distance-adaptive representation): GPT-NeoX that sees the tokens beyond a window through a bottleneck.

Parameters keep GPT-NeoX's names, so that a Pythia checkpoint loads with only `bottleneck_down` and `bottleneck_up` of
each attention missing. Shapes: hidden states `(batch, tokens, hidden size)`.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GPTNeoXPreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXLayer, GPTNeoXRotaryEmbedding
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_dar import DARConfig
from .cache_dar import DARCache, DARCacheLayer
from .checkpointed_cache import cache_for_pass
from .compat import CACHE_FIELD, mask_arguments, rename_cache
from .continued_positions import check_positions_continue
from .dar_attention import FarPairs, dar_attention, projected_dar_attention, projects_itself
from .dar_cached_attention import FarAngles, cached_dar_attention, dense_cached_attention
from .dar_decode_kernel import fused_step, step_kernel_available
from .dar_far_weights import FarWeights, fuse_far_weights, is_plain, probe_far_weights
from .dar_flex_attention import flex_dar_attention, flex_serves, prefers_flex
from .dar_plan import AttentionPlan, plan_attention
from .dar_reference import dense_dar_attention
from .dar_rotary_kernel import rotary_kernel_available, turned_queries_and_keys
from .next_token_loss import NextTokenLoss
from .rotary_halves import rotate_halves


class DARAttention(GPTNeoXAttention):
    """GPT-NeoX's attention with a second path for tokens beyond the window (Eq. 1 to 4 of the paper)."""

    def __init__(self, config: DARConfig, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.window = config.near_window if config.has_bottleneck else None
        if not config.has_bottleneck:
            return
        assert config.bottleneck_size is not None
        self.bottleneck_down = nn.Linear(config.hidden_size, config.bottleneck_size, bias=False)
        self.bottleneck_up = nn.Linear(config.bottleneck_size, config.hidden_size, bias=False)
        self.squashes = config.bottleneck_activation == "sigmoid"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        layer_past: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        plan: AttentionPlan | None = None,
        angles: FarAngles | None = None,
        scratch: dict[Any, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; `plan`, `angles` and `scratch` are the model's, the rest is GPT-NeoX's.

        Returns:
            The projected output `(batch, tokens, hidden size)`, and with the eager implementation the weights.
        """
        if self.window is None:
            return super().forward(hidden_states, attention_mask, layer_past, position_embeddings, **kwargs)
        assert position_embeddings is not None
        plan = AttentionPlan() if plan is None else plan
        cos, sin = position_embeddings
        implementation = self.config._attn_implementation
        batch, tokens, _ = hidden_states.shape

        layer = None if layer_past is None else layer_past.layers[self.layer_idx]
        dropout = self.attention_dropout if self.training else 0.0
        if dropout and (layer is not None or implementation != "eager"):
            raise ValueError(
                f"attention_dropout={dropout} is only there with attn_implementation='eager' and without a cache: "
                "load the model with it, or set config.attention_dropout to 0."
            )

        kind = hidden_states.device.type
        if hidden_states.dtype == torch.float32 and torch.is_autocast_enabled(kind):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(kind))  # once for both projections
        states = self.query_key_value(hidden_states)
        bottleneck = self.bottleneck_down(hidden_states)
        if self.squashes:
            bottleneck = bottleneck.sigmoid()
        if layer is not None:
            layer.check_dtype_and_device(bottleneck)
        heads = states.shape[-1] // (3 * self.head_size)
        far = self._far_pairs(bottleneck, heads, cos, sin, layer)

        if implementation == "sdpa" and plan.is_plain:
            if layer is None and projects_itself(states, far, self.window):
                out = projected_dar_attention(states, far, self.window, self.scaling)
                return self.dense(out.transpose(1, 2).reshape(batch, tokens, -1)), None
            if layer is not None and tokens == 1 and step_kernel_available(layer, states, far):
                scratch = {} if scratch is None else scratch
                return self.dense(fused_step(layer, states, far, self.scaling, scratch)), None

        query, key, value = states.view(batch, tokens, heads, -1).transpose(1, 2).chunk(3, dim=-1)
        recorded = torch.is_grad_enabled() and states.requires_grad
        if implementation != "eager" and not recorded and rotary_kernel_available(states):
            query, key = turned_queries_and_keys(states, heads, cos, sin)
        else:
            query = rotate_halves(query, cos[:, None], sin[:, None])
            key = rotate_halves(key, cos[:, None], sin[:, None])
        weights: torch.Tensor | None = None
        if layer is not None and implementation == "eager":
            out, weights = dense_cached_attention(layer, query, key, value, far, self.scaling, plan, angles)
        elif layer is not None:
            out = cached_dar_attention(layer, query, key, value, far, self.scaling, plan, angles)
        elif implementation == "eager" or plan.mask is not None or (plan.needs_mask and not flex_serves(query)):
            out, weights = self._dense(query, key, value, far, plan, dropout)
        elif plan.needs_mask or prefers_flex(query, implementation):
            out = flex_dar_attention(query, key, value, *far.pairs(), self.window, self.scaling, plan)
        else:
            out = dar_attention(query, key, value, far, self.window, self.scaling, plan)
        out = out.transpose(1, 2).reshape(batch, tokens, -1)
        return self.dense(out), weights

    def _dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        far: FarPairs,
        plan: AttentionPlan,
        dropout: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.window is not None
        visible, bias = None, None
        if plan.mask is not None:
            visible, bias = (plan.mask, None) if plan.mask.dtype == torch.bool else (None, plan.mask)
        elif plan.sequence_ids is not None:
            visible = (plan.sequence_ids[:, :, None] == plan.sequence_ids[:, None, :])[:, None]
        elif plan.real is not None:
            visible = plan.real[:, None, None]
        return dense_dar_attention(
            query, key, value, *far.pairs(), self.window, self.scaling,
            ranks=plan.ranks, visible=visible, bias=bias, dropout=dropout,
        )  # fmt: skip

    def _far_pairs(
        self, bottleneck: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, layer: DARCacheLayer | None
    ) -> FarPairs:
        if layer is not None and layer.far_weights is not None and not torch.is_grad_enabled():
            return FarPairs(bottleneck, *layer.far_weights, cos, sin)
        plain = is_plain(self.query_key_value) and is_plain(self.bottleneck_up)
        if not plain and torch.is_grad_enabled() and layer is None:
            # Token by token, so that an adapter's dropout means what it does elsewhere.
            states = self.query_key_value(self.bottleneck_up(bottleneck)).unflatten(-1, (heads, -1)).transpose(1, 2)
            _, key, value = states.chunk(3, dim=-1)
            return FarPairs(bottleneck, None, None, cos, sin, rotate_halves(key, cos[:, None], sin[:, None]), value)
        weight, bias = self._far_weights(plain, heads, bottleneck)
        if layer is not None and not torch.is_grad_enabled():
            # A cache is of these weights and no others: what it holds was made with them.
            layer.far_weights = (weight, bias)
        return FarPairs(bottleneck, weight, bias, cos, sin)

    def _far_weights(self, plain: bool, heads: int, bottleneck: torch.Tensor) -> FarWeights:
        if plain:
            weight, bias = fuse_far_weights(self.query_key_value, self.bottleneck_up, heads)
        else:
            size = bottleneck.shape[-1]
            weight, bias = probe_far_weights(
                self.query_key_value, self.bottleneck_up, size, self.head_size, bottleneck
            )
        # Contiguous, as kernels read them.
        weight = weight.to(bottleneck.dtype).contiguous()
        return weight, None if bias is None else bias.to(bottleneck.dtype).contiguous()


class DARLayer(GPTNeoXLayer):
    """GPT-NeoX's layer around `DARAttention`."""

    def __init__(self, config: DARConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention = DARAttention(config, layer_idx)


class DARPreTrainedModel(GPTNeoXPreTrainedModel):
    """Weights and loading of all DAR models."""

    config: DARConfig
    config_class = DARConfig
    _no_split_modules: ClassVar[list[str]] = ["DARLayer"]
    # `sdpa` stands for the two-path attention, which runs FlashAttention and cuDNN kernels itself.
    _supports_flash_attn = False
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": DARLayer, "attentions": DARAttention}

    def __init__(self, config: DARConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        self.model_tags = ["nearfar", "dar"]  # of the card that an upload gets; a list of its own, as it is added to


class DARModel(DARPreTrainedModel):
    """A DAR decoder without head: token ids to hidden states.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: DARConfig) -> None:
        super().__init__(config)
        config.check()
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([DARLayer(config, index) for index in range(config.num_hidden_layers)])
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = GPTNeoXRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_in

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_in = value  # type: ignore[assignment]

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: `(batch, tokens)`; or `inputs_embeds` `(batch, tokens, hidden size)`.
            attention_mask: `(batch, tokens)` or, with cached tokens, `(batch, cached + tokens)`, 1 for real tokens.
                The window counts real tokens. Or `(batch or 1, heads or 1, tokens, tokens)`, bool or added to the
                scores, without a cache.
            position_ids: `(batch or 1, tokens)`. Without mask and cache, a position that does not follow the one
                before it starts another sequence in the same row.
            past_key_values, cache: a `DARCache` (or the `DynamicCache` of a model without bottleneck), under either
                name.
            use_cache: whether to make and fill a cache where none is given. None is made in training mode with
                gradients, nor for four-dimensional masks and packed rows, which a cache cannot hold. Gradients do not
                pass through a cache.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`, a mask of another shape, a cache of a
                model with another window, of other rows or another dtype, one with tokens where layers are
                checkpointed, or positions that do not come after those of a cache.
            TypeError: a cache that cannot hold bottlenecks.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_in(input_ids)
        batch, tokens = inputs_embeds.shape[:2]
        if tokens == 0:
            raise ValueError(
                f"The input has shape ({batch}, 0) and must have at least one token. generate feeds none where a "
                "prompt is shorter than what its cache has seen: reset() the cache before another text."
            )
        cache = cache_for_pass(self, past_key_values if cache is None else cache)
        seen = 0 if cache is None else cache.get_seq_length()
        plan = AttentionPlan()
        if self.config.has_bottleneck:
            self._check_cache(cache, batch)
            known = None if isinstance(seen, torch.Tensor) else seen
            plan = plan_attention(attention_mask, position_ids, batch, tokens, known, cache is not None)
            # A static cache counts on the device, and a step is not to wait for one.
            if known and tokens > 1 and not torch.compiler.is_compiling():
                check_positions_continue(position_ids, plan.real, cache.layers[0].row_lengths())
        if use_cache and cache is None and self._may_cache(plan):
            cache = DARCache(self.config) if self.config.has_bottleneck else DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = (torch.arange(tokens, device=inputs_embeds.device) + seen)[None]
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        mask = None
        shared: dict[str, Any] = {}
        if self.config.has_bottleneck:
            angles = self._far_angles(cache, inputs_embeds, position_ids, plan)
            shared = {"plan": plan, "angles": angles, "scratch": {}}
        else:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **mask_arguments(create_causal_mask, cache),
            )

        hidden_states = self.emb_dropout(inputs_embeds)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                layer_past=cache,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **shared,
                **kwargs,
            )
        # FSDP2 of torch < 2.13 casts the inputs of a group's first module only, and this one follows tied embeddings.
        hidden_states = self.final_layer_norm(hidden_states.to(self.final_layer_norm.weight.dtype))
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE_FIELD: cache})

    def _check_cache(self, cache: Any, batch: int) -> None:
        if cache is None:
            return
        if not getattr(cache, "keeps_bottlenecks", False):
            raise TypeError(
                f"A DAR model keeps far tokens as bottlenecks, and a {type(cache).__name__} holds keys and values: "
                "pass DARCache(model), or no cache and let the model make one."
            )
        window, layers = cache.layers[0].window, len(cache.layers)
        if (window, layers) != (self.config.near_window, len(self.layers)):
            raise ValueError(
                f"The cache is of a model with window {window} and {layers} layers, this one has window "
                f"{self.config.near_window} and {len(self.layers)} layers: make it with DARCache(model)."
            )
        rows = cache.layers[0].batch
        if rows not in (0, batch):
            raise ValueError(
                f"The cache holds {rows} row(s) and the input has {batch}: repeat it with batch_repeat_interleave, "
                "choose from it with batch_select_indices, or use another cache."
            )

    def _may_cache(self, plan: AttentionPlan) -> bool:
        """Whether a cache may be made that nobody asked for by name."""
        # Training reads none, and filling one would keep every layer's tokens once more; dropout has no place in one.
        if self.training and (torch.is_grad_enabled() or self.config.attention_dropout):
            return False
        return plan.mask is None and plan.sequence_ids is None

    def _far_angles(
        self, cache: Any, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
    ) -> FarAngles | None:
        """Angles of all tokens, for caches that rotate far keys anew."""
        if cache is None or cache.far_cache != "small":
            return None
        positions = cache.note_positions(position_ids, plan, inputs_embeds.shape[0])
        return FarAngles(*self.rotary_emb(inputs_embeds, position_ids=positions))


class DARForCausalLM(DARPreTrainedModel, NextTokenLoss, GenerationMixin):
    """A DAR decoder with a language-modelling head.

    Args:
        config: the model's configuration.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "gpt_neox.embed_in.weight"}
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}
    _pp_plan: ClassVar[dict[str, Any]] = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: DARConfig) -> None:
        super().__init__(config)
        self.gpt_neox = DARModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings  # type: ignore[assignment]

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token; arguments as in `DARModel.forward`.

        Args:
            labels: `(batch, tokens)`; the loss is that of predicting each from what comes before, -100 is left out.
                In training mode with `config.logits_in_training=False` only labelled positions have logits, a chunk
                at a time, and none are returned.
            logits_to_keep: logits of the last so many tokens only, or of these columns; 0 for all.
        """
        outputs = self.gpt_neox(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if labels is not None and self.training and not self.config.logits_in_training:
            targets = self._targets(labels, kwargs.get("shift_labels"))
            loss = self._loss(hidden_states, None, targets, None, kwargs.get("num_items_in_batch"))
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_FIELD: outputs.get(CACHE_FIELD)},
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Let `generate` make a `DARCache` where it would make a cache of keys and values."""
        rename_cache(model_kwargs)
        given = model_kwargs.get(CACHE_FIELD)
        chosen = generation_config.cache_implementation
        room = getattr(given, "max_tokens", None)
        if room is not None and room < max_cache_length:
            raise ValueError(
                f"The static DARCache holds {room} tokens a row, and this call may need {max_cache_length}: make it "
                "with a larger max_cache_len, or ask for fewer new tokens."
            )
        if given is None and self.config.has_bottleneck and generation_config.use_cache is not False:
            if chosen not in (None, "dynamic", "static"):
                raise ValueError(
                    f"cache_implementation={chosen!r} holds keys and values, which a DAR model does not keep: leave "
                    "it out, or use 'dynamic' or 'static'."
                )
            longest = None
            if chosen == "static":
                longest = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            cache = DARCache(self.config, max_cache_len=longest)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
            model_kwargs[CACHE_FIELD] = cache
            return None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> Any:
        """Called for static caches: the part of the mask about the new tokens, of a shape that does not grow."""
        if config.window_size is None:
            from transformers.masking_utils import create_masks_for_generate

            return create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs)
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]


class DARForSequenceClassification(DARPreTrainedModel):
    """A DAR decoder that classifies a sequence by its last token.

    Args:
        config: the model's configuration; `num_labels` classes, and `pad_token_id` for batches of more than one row.
    """

    def __init__(self, config: DARConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.gpt_neox = DARModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

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
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Classify; arguments as in `DARModel.forward`.

        Args:
            labels: `(batch,)`; classes for `num_labels` > 1, numbers for 1.

        Raises:
            ValueError: several rows, and the configuration has no `pad_token_id`.
        """
        outputs = self.gpt_neox(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        batch, tokens = logits.shape[:2]
        padding = self.config.pad_token_id
        if padding is None and batch != 1:
            raise ValueError("Several rows can only be classified with a pad_token_id in the configuration.")
        last = torch.full((batch,), tokens - 1, device=logits.device)
        real = None
        if attention_mask is not None and attention_mask.ndim == 2:
            real = attention_mask[:, -tokens:].bool()
        elif padding is not None and input_ids is not None:
            real = input_ids != padding
        if real is not None:  # the rightmost token that is no padding: right with padding on either side
            last = (torch.arange(tokens, device=logits.device) * real.to(logits.device)).argmax(-1)
        pooled = logits[torch.arange(batch, device=logits.device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_FIELD: outputs.get(CACHE_FIELD)},
        )


__all__ = ["DARForCausalLM", "DARForSequenceClassification", "DARModel", "DARPreTrainedModel"]
