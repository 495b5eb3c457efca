"""HybridAxialMapper of ProxyKV (Section 4.1): a proxy's attention to importance scores of a target's key-value pairs.

One layer pair at a time, in three stages: two convolutions along the tokens mix the proxy's heads; an encoder reads
the tokens in context; then, token by token, each target head chooses among synthetic head tokens. Weights are shared
by all layer pairs. Shapes: features `(rows, H_s, tokens)`, logits `(rows, H_l, tokens)`.

With `proxy_layers="all"` a row is a context instead of a layer pair: features `(rows, L_s * H_s, tokens)`, logits
`(rows, L_l, H_l, tokens)`. With `proxy_states="values"` each of the L_s proxy layers has C channels in place of
H_s: the column sums and, after them, the proxy's values of the token.
"""

import itertools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_axial_mapper import HybridAxialMapperConfig
from .model_identity import embedding_fingerprint, model_name, same_model
from .prunable_models import text_config

# Added to a column sum before its logarithm; most tokens of a text receive 0.01 to 1 in a head.
LOG_FLOOR = 1e-4
# Windows read at once by `predict`, in tokens: bounds its memory whatever the length (a GPU: some 100 MB in half
# precision), and fills the device. Fewer where features are wider than the encoder.
BATCH_TOKENS, BATCH_TOKENS_CUDA = 8192, 65536
# In float16, values further from their mean (in standard deviations) would overflow the convolutions.
STATE_LIMIT = 1000.0


class HybridAxialMapper(PreTrainedModel):
    """Maps column sums of a proxy's attention to logits of a target's importance scores.

    Args:
        config: sizes; see `HybridAxialMapperConfig.for_models`.
    """

    config: HybridAxialMapperConfig
    config_class = HybridAxialMapperConfig
    base_model_prefix = "mapper"
    main_input_name = "features"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["MapperEncoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.model_tags = ["nearfar", "proxykv"]  # of the card that an upload gets
        config.check()
        disabled = config.disabled_stage
        self.stem = TokenProjection(config) if disabled == "convolutions" else ConvolutionStem(config)
        if disabled == "encoder":
            self.layers = nn.ModuleList([MeanOfTokens()])
        else:
            self.layers = nn.ModuleList(MapperEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.heads = HeadProjection(config) if disabled == "heads" else HeadAttention(config)
        # Values differ in size by orders of magnitude from channel to channel.
        states = config.input_channels - config.proxy_num_heads * config.proxy_num_layers
        self.state_norm = nn.BatchNorm1d(states, affine=False) if config.proxy_states != "none" else None
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def for_models(cls, proxy: PreTrainedModel, target: PreTrainedModel, **kwargs: Any) -> "HybridAxialMapper":
        """A random mapper for a pair of models, which it will recognise later.

        Args:
            kwargs: further fields of the configuration.

        Raises:
            TypeError, ValueError: a model whose cache cannot be pruned, or fields that cannot work.
        """
        identity: dict[str, Any] = {}
        for role, model in (("proxy", proxy), ("target", target)):
            identity[f"{role}_fingerprint"] = embedding_fingerprint(model)
            identity[f"{role}_name"] = model_name(model)
        return cls(HybridAxialMapperConfig.for_models(text_config(proxy), text_config(target), **identity | kwargs))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv1d):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
            if module.weight is not None:
                init.ones_(module.weight)
                init.zeros_(module.bias)
            if isinstance(module, nn.BatchNorm1d):
                assert module.running_mean is not None and module.running_var is not None
                assert module.num_batches_tracked is not None
                init.zeros_(module.running_mean)
                init.ones_(module.running_var)
                init.zeros_(module.num_batches_tracked)
        elif isinstance(module, HeadAttention):
            # Of unit size, so that heads tell their queries apart from the start.
            init.normal_(module.queries, mean=0.0, std=1.0)

    # --- one window --------------------------------------------------------------------------------------------------

    def forward(
        self, features: torch.Tensor, mask: torch.Tensor | None = None, layers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of one window of tokens for each row, a row being one layer pair of one context.

        Args:
            features: `(rows, H_s, tokens)`, attention summed over queries at the row's proxy layer; with
                `proxy_layers="all"` `(rows, L_s * C, tokens)`, layer by layer, C being `config.layer_channels`: H_s
                and what `config.proxy_states` adds.
            mask: `(rows, tokens)`, False at padding, which is not read; None for none. Every row has a token.
            layers: `(rows,)`, int64, the place of each row's target layer among those scored. Needed with
                `config.layer_queries` and paired layers, otherwise not looked at.

        Returns:
            `(rows, H_l, tokens)`, or `(rows, L_l, H_l, tokens)` with `proxy_layers="all"`: the importance of each
            pair as a logit, in the mapper's dtype; of no meaning at padding.

        Raises:
            ValueError: other shapes, or `layers` missing.
        """
        self._check_features(features, self.config.input_channels, 3)
        rows, _, tokens = features.shape
        if mask is not None and mask.shape != (rows, tokens):
            raise ValueError(f"mask must be of shape {(rows, tokens)} for these features, got {tuple(mask.shape)}.")
        if self.config.proxy_layers == "all":
            return self.heads.all_banks(self._encode(features, mask))
        if self.config.layer_queries and (layers is None or layers.shape != (rows,)):
            raise ValueError(
                f"A mapper with layer_queries needs layers of shape {(rows,)}, each row's target layer; got "
                f"{None if layers is None else tuple(layers.shape)}."
            )
        return self.heads(self._encode(features, mask), layers)

    def _encode(self, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Both stages along the tokens: `(rows, tokens, D_time)`."""
        dtype = self.norm.weight.dtype
        states = None
        if self.state_norm is not None:
            features, states = self._split(features)
        if self.config.feature_transform == "log":
            # In float32 at least: half precision neither holds a sink's sum nor tells small sums apart.
            wide = features if features.dtype == torch.float64 else features.float()
            features = (wide + LOG_FLOOR).log()
        elif dtype == torch.float16:
            features = features.clamp(max=torch.finfo(dtype).max)
        if states is not None and self.state_norm is not None:
            if dtype == torch.float16:
                states = states.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            normed = batch_norm(self.state_norm, states.to(dtype), mask)
            if dtype == torch.float16:
                normed = normed.clamp(-STATE_LIMIT, STATE_LIMIT)
            features = torch.cat([features.to(dtype), normed.to(dtype)], 1)
        # Token by token in memory from here on: sums and norms of all layers would take over the convolutions' order.
        hidden = self.stem(features.to(dtype), mask).mT.contiguous()
        hidden = hidden + sinusoidal_positions(hidden.shape[1], hidden.shape[2], hidden)
        attended = None if mask is None else mask.bool()[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, attended)
        return self.norm(hidden)

    def _split(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Column sums `(rows, L_s * H_s, tokens)`, and values, both layer by layer."""
        config = self.config
        layers = features.unflatten(1, (config.proxy_num_layers, config.layer_channels))
        sums, states = layers.tensor_split([config.proxy_num_heads], 2)
        return sums.flatten(1, 2), states.flatten(1, 2)

    def _check_features(self, features: torch.Tensor, channels: int, ndim: int) -> None:
        if features.ndim != ndim or features.shape[-2] != channels or not features.is_floating_point():
            states = "" if self.config.proxy_states == "none" else f" and proxy_states={self.config.proxy_states!r}"
            raise ValueError(
                f"features must be floating point with {ndim} dimensions and {channels} channels in the last but one, "
                f"for {self.config.proxy_num_heads} proxy heads{states}; got {features.dtype} of shape "
                f"{tuple(features.shape)}."
            )
        if not features.numel():
            raise ValueError(f"features are empty: shape {tuple(features.shape)}.")

    # --- a whole context ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self, features: torch.Tensor, *, batch_windows: int | None = None, return_logits: bool = False
    ) -> torch.Tensor:
        """Scores of all pairs of a context: windows of 2,048 tokens every 1,024, averaged where they overlap.

        The last window ends with the context. A proxy layer is read once, however many target layers it serves. Of a
        batch of contexts padded to one length, predict each by itself.

        Args:
            features: `(L_s, H_s, N)`, on the mapper's device; N of any size. With `config.proxy_states` C channels in
                place of H_s, as `proxy_features(..., states=config.proxy_states)` gives them.
            batch_windows: windows read at once, which bounds memory; by default what suits the device.
            return_logits: the averaged logits rather than their sigmoid. Both rank pairs alike.

        Returns:
            `(L_l, H_l, N)`, float32 (float64 for a float64 mapper), for the layers `config.scored_layers`; without
            `return_logits` in [0, 1], comparable over layers and heads.

        Raises:
            ValueError: other shapes; a mapper in training mode; `batch_windows` below 1.
        """
        config = self.config
        self._check_features(features, config.layer_channels, 3)
        if features.shape[0] != config.proxy_num_layers:
            raise ValueError(
                f"features must be of all {config.proxy_num_layers} proxy layers, got {features.shape[0]}."
            )
        if self.training:
            raise ValueError("predict is for inference: call mapper.eval() first.")
        if batch_windows is not None and batch_windows < 1:
            raise ValueError(f"batch_windows must be at least 1, got {batch_windows}.")
        tokens = features.shape[-1]
        starts, length = window_starts(tokens, config.window_tokens, config.window_stride)
        if batch_windows is None:
            most = BATCH_TOKENS_CUDA if features.is_cuda else BATCH_TOKENS
            assert config.intermediate_size is not None
            most //= max(1, config.input_channels // config.intermediate_size)
            batch_windows = max(1, most // length)

        pairs = config.layer_pairs
        dtype = torch.float64 if self.norm.weight.dtype == torch.float64 else torch.float32
        served: dict[int, list[int]] = {}  # proxy layer -> places of its target layers
        for place, layer in enumerate(pairs):
            served.setdefault(layer, []).append(place)
        jobs = [(layer, start) for layer in served for start in starts]
        out = torch.zeros(len(pairs), config.target_num_heads, tokens, dtype=dtype, device=features.device)
        if config.proxy_layers == "all":
            jobs = []
            for first in range(0, len(starts), batch_windows):
                batch_starts = starts[first : first + batch_windows]
                # Flattened after they are cut: those of a batch's row would be copied whole.
                crops = torch.stack([features[..., start : start + length].flatten(0, 1) for start in batch_starts])
                for row, start in zip(self.forward(crops), batch_starts, strict=True):
                    out[:, :, start : start + length] += row
        for first in range(0, len(jobs), batch_windows):
            batch = jobs[first : first + batch_windows]
            crops = torch.stack([features[layer, :, start : start + length] for layer, start in batch])
            hidden = self._encode(crops, None)
            if not config.layer_queries:
                logits = self.heads(hidden, None).to(dtype)
                for row, (layer, start) in zip(logits, batch, strict=True):
                    out[served[layer][0], :, start : start + length] += row
                continue
            for row, (layer, start) in zip(hidden, batch, strict=True):
                places = torch.tensor(served[layer], device=features.device)
                logits = self.heads(row.expand(len(places), -1, -1), places).to(dtype)
                out[places, :, start : start + length] += logits
        counts = torch.zeros(tokens, dtype=dtype, device=features.device)
        for start in starts:
            counts[start : start + length] += 1
        out /= counts
        if not config.layer_queries and config.proxy_layers == "paired":
            first_places = torch.tensor([served[layer][0] for layer in pairs], device=features.device)
            out = out[first_places]
        return out if return_logits else out.sigmoid()

    # --- which models ------------------------------------------------------------------------------------------------

    def check_compatible(
        self,
        proxy: nn.Module | None = None,
        target: nn.Module | None = None,
        *,
        allow_other_models: bool = False,
    ) -> None:
        """Refuse models that this mapper was not trained for.

        Models are told from others of their shape by their input embeddings; casts, quantised copies and light
        fine-tunes pass.

        Args:
            proxy, target: models, or configurations (of which only the shape is looked at); `None` is not looked at.
            allow_other_models: accept other models of the same shape.

        Raises:
            TypeError, ValueError: not a model whose cache can be pruned; another shape; another model.
        """
        self.config.check_compatible(
            None if proxy is None else text_config(proxy), None if target is None else text_config(target)
        )
        if allow_other_models:
            return
        for role, model in (("proxy", proxy), ("target", target)):
            known = getattr(self.config, f"{role}_fingerprint")
            if model is not None and known and same_model(known, embedding_fingerprint(model)) is False:
                name = getattr(self.config, f"{role}_name")
                raise ValueError(
                    f"This mapper was trained for the {role} {name or 'of other weights'}; the {role} given has the "
                    "same shape but other weights, so its attention means something else. Train a mapper for this "
                    "pair with `nearfar train-mapper`, or pass allow_other_models=True."
                )


def window_starts(tokens: int, window: int, stride: int) -> tuple[list[int], int]:
    """Where windows start, and how long each is: every `stride` tokens, the last one ending with the context."""
    if tokens <= window:
        return [0], tokens
    return [*range(0, tokens - window, stride), tokens - window], window


def sinusoidal_positions(tokens: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of positions 0 … tokens - 1, `(tokens, width)`, in the dtype and on the device of `like`."""
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    positions = torch.arange(tokens, dtype=exact, device=like.device)
    rates = torch.pow(10000.0, -torch.arange(0, width, 2, dtype=exact, device=like.device) / width)
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(like.dtype)


# --- stage 1 ---------------------------------------------------------------------------------------------------------


class ConvolutionStem(nn.Module):
    """Two convolutions over three tokens, each with batch normalisation and GELU (Eq. 2)."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        widths = (config.input_channels, config.hidden_size, config.hidden_size)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(inner, outer, kernel_size=3, padding=1) for inner, outer in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:])

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """`(rows, H_s, tokens)` to `(rows, D_time, tokens)`; padding is as if there were no token."""
        hidden = features
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            if mask is not None:
                hidden = hidden * mask[:, None].to(hidden.dtype)
            hidden = convolution(hidden)
            hidden = F.gelu(batch_norm(norm, hidden, mask))
        return hidden


def batch_norm(norm: nn.Module, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Batch normalisation of `(rows, channels, tokens)` whose statistics leave padding out; 0 there while training."""
    if mask is None or not norm.training:
        normed: torch.Tensor = norm(hidden)
        return normed
    tokens = hidden.mT
    kept = mask.bool()
    normed = norm(tokens[kept])
    return torch.zeros_like(tokens, dtype=normed.dtype).masked_scatter(kept[..., None], normed).mT


class TokenProjection(nn.Module):
    """In place of the stem where it is disabled: a linear map of each token's channels."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(config.input_channels, config.hidden_size)

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """See `ConvolutionStem.forward`."""
        hidden: torch.Tensor = self.projection(features.mT).mT
        return hidden


# --- stage 2 ---------------------------------------------------------------------------------------------------------


class MapperEncoderLayer(GradientCheckpointingLayer):
    """A transformer encoder layer: attention over all tokens of the window and an MLP, each normalised before."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.intermediate_size
        assert inner is not None
        self.num_heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.query_key_value = nn.Linear(size, 3 * size)
        self.attention_out = nn.Linear(size, size)
        self.mlp_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp_up = nn.Linear(size, inner)
        self.mlp_down = nn.Linear(inner, size)
        self.dropout = float(config.dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """`(rows, tokens, D_time)` to the same; `mask` is `(rows, 1, 1, tokens)`, False at padding."""
        rows, tokens, size = hidden.shape
        dropout = self.dropout if self.training else 0.0
        states = self.query_key_value(self.attention_norm(hidden)).view(rows, tokens, 3, self.num_heads, -1)
        query, key, value = states.permute(2, 0, 3, 1, 4)
        if self.config._attn_implementation == "eager":
            products = query @ key.mT / query.shape[-1] ** 0.5
            if mask is not None:
                products = products.masked_fill(~mask, torch.finfo(products.dtype).min)
            attended = F.dropout(products.softmax(-1), dropout) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        attended = self.attention_out(attended.transpose(1, 2).reshape(rows, tokens, size))
        hidden = hidden + F.dropout(attended, dropout)
        inner = F.dropout(F.gelu(self.mlp_up(self.mlp_norm(hidden))), dropout)
        return hidden + F.dropout(self.mlp_down(inner), dropout)


class MeanOfTokens(nn.Module):
    """In place of the encoder where it is disabled: a token reads the others as their mean."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """See `MapperEncoderLayer.forward`."""
        if mask is None:
            return hidden + hidden.mean(1, keepdim=True)
        kept = mask[:, 0, 0, :, None].to(hidden.dtype)
        return hidden + (hidden * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)


# --- stage 3 ---------------------------------------------------------------------------------------------------------


class HeadAttention(nn.Module):
    """Target heads choose among synthetic head tokens, token by token (Eq. 3), and a projection makes one logit.

    The queries do not depend on the token, nor does the projection, so both are multiplied into the projections that
    make keys and values: H_s · (H_l + 1) products a token and D_time rather than 2 · H_s · D_head.

    Attributes:
        queries: `(1 or L_l, H_l, D_head)`.
    """

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        slots = config.num_synthetic_heads
        assert slots is not None
        self.slots, self.head_dim = slots, config.head_dim
        banks = len(config.scored_layers) if config.layer_queries else 1
        self.queries = nn.Parameter(torch.empty(banks, config.target_num_heads, config.head_dim))
        self.key = nn.Linear(config.hidden_size, slots * config.head_dim)
        self.value = nn.Linear(config.hidden_size, slots * config.head_dim)
        self.out = nn.Linear(config.head_dim, 1)

    def forward(self, hidden: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """`(rows, tokens, D_time)` to logits `(rows, H_l, tokens)`; `layers` chooses each row's bank of queries."""
        rows, tokens, _ = hidden.shape
        values, weights, biases = self._read(hidden)
        banks, heads = self.queries.shape[:2]
        if banks == 1:
            products = F.linear(hidden, weights[0], biases[0, 0])
        else:
            assert layers is not None
            products = torch.baddbmm(biases[layers], hidden, weights[layers].mT)
        shares = products.view(rows, tokens, heads, self.slots).softmax(-1)
        return (shares @ values[..., None]).squeeze(-1).mT + self.out.bias

    def all_banks(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(rows, tokens, D_time)` to the logits of every bank, `(rows, banks, H_l, tokens)`."""
        rows, tokens, _ = hidden.shape
        values, weights, biases = self._read(hidden)
        banks, heads = self.queries.shape[:2]
        products = F.linear(hidden, weights.flatten(0, 1), biases.flatten())
        shares = products.view(rows, tokens, banks * heads, self.slots).softmax(-1)
        logits = (shares @ values[..., None]).squeeze(-1).mT + self.out.bias
        return logits.reshape(rows, banks, heads, tokens)

    def _read(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projected values `(rows, tokens, slots)`; what makes products of queries and keys, by bank: weights
        `(banks, H_l * slots, D_time)` and biases `(banks, 1, H_l * slots)`."""
        queries = self.queries / self.head_dim**0.5
        banks, heads, _ = queries.shape
        flat = queries.reshape(banks * heads, -1)
        key_weight = self.key.weight.view(self.slots, self.head_dim, -1)
        value_weight = self.value.weight.view(self.slots, self.head_dim, -1)
        reader = self.out.weight[0]
        values = F.linear(
            hidden,
            torch.einsum("d,sdw->sw", reader, value_weight),
            self.value.bias.view(self.slots, self.head_dim) @ reader,
        )
        weights = torch.einsum("hd,sdw->hsw", flat, key_weight).view(banks, heads * self.slots, -1)
        biases = (flat @ self.key.bias.view(self.slots, self.head_dim).mT).view(banks, 1, heads * self.slots)
        return values, weights, biases


class HeadProjection(nn.Module):
    """In place of the head attention where it is disabled: a linear map to one logit for each head of each bank."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        self.banks, self.num_heads = len(config.scored_layers) if config.layer_queries else 1, config.target_num_heads
        self.projection = nn.Linear(config.hidden_size, self.banks * self.num_heads)

    def forward(self, hidden: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """See `HeadAttention.forward`."""
        logits = self.all_banks(hidden)
        if self.banks == 1:
            return logits[:, 0]
        assert layers is not None
        return logits[torch.arange(len(logits), device=logits.device), layers]

    def all_banks(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HeadAttention.all_banks`."""
        return self.projection(hidden).mT.unflatten(1, (self.banks, self.num_heads))
