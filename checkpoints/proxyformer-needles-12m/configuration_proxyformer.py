"""Configuration of ProxyFormer: blocks of tokens compressed into proxies, attention among proxies, two streams."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .remote_code import RemoteCodeConfig


@strict
class ProxyFormerConfig(RemoteCodeConfig, PreTrainedConfig):
    r"""Configuration of a ProxyFormer language model.

    The history stream holds `history_hidden_size` numbers a token; in each layer a block of `compression_ratio`
    tokens becomes one proxy of `proxy_hidden_size` numbers (Eq. 2 to 6 of the paper). The generation stream reads raw
    tokens of its own block and the proxies of all blocks before (Eq. 19 and 20).

    Args:
        vocab_size: of both embeddings.
        hidden_size: d, of the generation stream.
        history_hidden_size: d_h, of the history stream.
        proxy_hidden_size: d_proxy; `None` stands for `hidden_size`. Wider proxies reinvest what compression saves.
        num_hidden_layers, num_attention_heads: of both streams. `head_dim` `None` stands for
            `hidden_size // num_attention_heads`, and `intermediate_size` `None` for `3 * hidden_size`.
        compression_ratio: P, tokens a proxy; one number or one for each layer. Where it differs from the layer
            before, the proxies are extracted anew. `None` makes a plain decoder of the same size, without proxies.
        compression_factors: k_j of Eq. 15, whose product is P (plus `partition_overlap`); `None` chooses them. Ratios
            that differ between layers choose their own.
        compression_widths: d_0 … d_M of Eq. 16, from `history_hidden_size` to `proxy_hidden_size`; `None`: geometric.
        generation_block_size: C, tokens of a generation block, a multiple of every ratio; `None` stands for the
            largest ratio. A token sees the proxies of the blocks before its own.
        retained_blocks: r, how many blocks before its own a token also sees raw.
        partition_overlap: tokens before a block that its compression reads as well (overlapping partition); 0 for
            contiguous blocks.
        history_stem_layers: causal convolutions of 4 tokens on the history embeddings, which cross blocks.
        separate_proxy_kv: the generation stream reads proxies through projections of their own rather than through
            those of its own tokens.
        gate_bias: initial bias of the gates α of Eq. 20.
        proxy_query_scale: multiplies the queries that read proxies; a little above 1 sharpens very long histories.
        proxy_sharpen_from: a number of proxies, such as a history had at most in training. A query that sees n, more
            than this many, is multiplied by log n / log `proxy_sharpen_from`, against the dilution of its softmax;
            it can be set on a trained model. `None`: never.
        proxy_update: U of Eq. 3: `"residual"` (Eq. 8), `"gated"`, `"concatenate"`, `"replace"`.
        proxy_interaction: F of Eq. 4. `"bidirectional_attention"` and `"cross_attention"` (to `condition_states`)
            serve where histories are given whole, as `history_ids`.
        injection: Φ of Eq. 6: `"residual"` (Eq. 11), `"gated"` (12), `"affine"` (13), `"cross_attention"` (14).
        share_proxy_generation_weights: the attention among proxies uses the generation layer's attention and MLP.
        shared_embedding: one embedding of `hidden_size`, projected to `history_hidden_size` for the history.
        distance_ratios: `(distance, ratio)` pairs: the generation stream reads history further back than `distance`
            tokens through coarser proxies of `ratio` tokens; both multiples of the generation block.
        condition_size: width of `condition_states` for the cross-attention interaction.
        auxiliary_loss_weight: weight of the loss of the head after the middle layer; 0 for none.
        reversible_history: rebuild the history stream in the backward pass instead of keeping it (residual injection).
        history_chunk_blocks: blocks compressed and decompressed at a time, where memory is saved.
        loss_chunk_tokens: labelled positions whose logits are in memory at a time.
        logits_in_training: whether a training pass with labels also returns logits, as some trainers want, at the cost
            of their memory.
        rope_parameters: rotary embedding among raw tokens; `None` for none (the paper's NoPE).
        proxy_rope: rotary embedding also among proxies and where they are read; needs `rope_parameters`.
        released_features: what `ProxyCache` does with a block's local features once it is compressed.

    Raises:
        ValueError: a value out of range, ratios that do not factor, widths that do not match.
    """

    model_type = "proxyformer"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_proxyformer.ProxyFormerConfig",
        "AutoModel": "modeling_proxyformer.ProxyFormerModel",
        "AutoModelForCausalLM": "modeling_proxyformer.ProxyFormerForCausalLM",
    }
    # Attention of both streams, and how the generation stream reads proxies.
    adapter_targets: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj", "proxy_k_proj", "proxy_v_proj")
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 50257
    hidden_size: int = 512
    history_hidden_size: int = 64
    proxy_hidden_size: int | None = None
    num_hidden_layers: int = 10
    num_attention_heads: int = 8
    head_dim: int | None = None
    intermediate_size: int | None = None
    compression_ratio: int | list[int] | None = 64
    compression_factors: list[int] | None = None
    compression_widths: list[int] | None = None
    generation_block_size: int | None = None
    retained_blocks: int = 0
    partition_overlap: int = 0
    history_stem_layers: int = 2
    separate_proxy_kv: bool = True
    gate_bias: float | int = 0.0
    proxy_query_scale: float | int = 1.0
    proxy_sharpen_from: int | None = None
    proxy_update: Literal["residual", "gated", "concatenate", "replace"] = "residual"
    proxy_interaction: Literal[
        "causal_attention", "bidirectional_attention", "identity", "mlp", "recurrent", "cross_attention"
    ] = "causal_attention"
    injection: Literal["residual", "gated", "affine", "cross_attention"] = "residual"
    share_proxy_generation_weights: bool = False
    shared_embedding: bool = False
    distance_ratios: list[list[int]] | None = None
    condition_size: int | None = None
    auxiliary_loss_weight: float | int = 0.3
    reversible_history: bool = False
    history_chunk_blocks: int = 2048
    loss_chunk_tokens: int = 4096
    logits_in_training: bool = False
    rope_parameters: dict | None = None
    proxy_rope: bool = False
    released_features: Literal["drop", "keep", "offload", "quantize"] = "drop"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 1_048_576
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.proxy_hidden_size is None:
            self.proxy_hidden_size = self.hidden_size
        if self.head_dim is None:
            self.head_dim = max(1, self.hidden_size // max(1, self.num_attention_heads))
        if self.intermediate_size is None:
            self.intermediate_size = 3 * self.hidden_size
        if self.generation_block_size is None and self.compression_ratio is not None:
            ratio = self.compression_ratio
            self.generation_block_size = ratio if isinstance(ratio, int) else max(ratio, default=1)
        without_rope = self.rope_parameters is None
        super().__post_init__(**kwargs)
        if without_rope:
            self.rope_parameters = None  # transformers fills in its default
        self.check()

    # --- what follows from the fields --------------------------------------------------------------------------------

    @property
    def has_proxies(self) -> bool:
        """Whether the model compresses at all; otherwise it is a plain decoder."""
        return self.compression_ratio is not None

    @property
    def ratios(self) -> list[int]:
        """P^(l) of each layer.

        Raises:
            ValueError: a plain decoder, which has none.
        """
        if self.compression_ratio is None:
            raise ValueError("compression_ratio=None: a plain decoder, which has no proxies.")
        if isinstance(self.compression_ratio, int):
            return [self.compression_ratio] * self.num_hidden_layers
        return list(self.compression_ratio)

    @property
    def block_size(self) -> int:
        """C, tokens of a generation block."""
        if self.generation_block_size is None:
            raise ValueError("compression_ratio=None: a plain decoder, which has no blocks.")
        return self.generation_block_size

    @property
    def proxy_size(self) -> int:
        """d_proxy."""
        assert self.proxy_hidden_size is not None
        return self.proxy_hidden_size

    def check(self) -> None:
        """Raise a `ValueError` that names the first field with a value that ProxyFormer cannot work with."""
        for name in (
            "vocab_size", "hidden_size", "history_hidden_size", "proxy_hidden_size", "num_hidden_layers",
            "num_attention_heads", "head_dim", "intermediate_size", "history_chunk_blocks", "loss_chunk_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("retained_blocks", "partition_overlap", "history_stem_layers", "auxiliary_loss_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        if self.head_dim % 2 and self.rope_parameters is not None:  # type: ignore[operator]
            raise ValueError(f"A rotary embedding needs an even head_dim, got {self.head_dim}.")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ("default", "linear"):
            raise ValueError(f"rope_parameters['rope_type'] must be 'default' or 'linear', got {rope_type!r}.")
        if self.proxy_rope and self.rope_parameters is None:
            raise ValueError("proxy_rope=True needs rope_parameters, for instance {'rope_type': 'default', "
                             "'rope_theta': 10000.0}.")  # fmt: skip
        if self.proxy_sharpen_from is not None and self.proxy_sharpen_from < 2:
            raise ValueError(f"proxy_sharpen_from must be at least 2 proxies, got {self.proxy_sharpen_from}.")
        if not self.proxy_query_scale > 0:
            raise ValueError(f"proxy_query_scale must be above 0, got {self.proxy_query_scale}.")
        if self.has_proxies:
            self._check_compression()

    def _check_compression(self) -> None:
        ratios = self.ratios
        if len(ratios) != self.num_hidden_layers:
            raise ValueError(
                f"compression_ratio must be one number or one for each of the {self.num_hidden_layers} layers, got "
                f"{len(ratios)}: {ratios}."
            )
        if min(ratios) < 1:
            raise ValueError(f"compression_ratio must be at least 1 token a proxy, got {self.compression_ratio}.")
        for ratio in ratios:
            if self.block_size % ratio:
                raise ValueError(
                    f"generation_block_size must be a multiple of every compression ratio, got {self.block_size} and "
                    f"{ratio}."
                )
        if self.partition_overlap > min(ratios):
            raise ValueError(
                f"partition_overlap must not exceed the compression ratio, got {self.partition_overlap} and "
                f"{min(ratios)}."
            )
        window = ratios[0] + self.partition_overlap
        factors, widths = self.compression_factors, self.compression_widths
        if factors is not None:
            if len(set(ratios)) > 1:
                raise ValueError(
                    "compression_factors fit one ratio, and the layers have different ones: leave them out."
                )
            if not factors or min(factors) < 1 or math.prod(factors) != window:
                raise ValueError(
                    f"compression_factors must be whole numbers with the product {window} (compression_ratio "
                    f"{ratios[0]} + partition_overlap {self.partition_overlap}), got {factors}."
                )
        if widths is not None:
            if factors is not None and len(widths) != len(factors) + 1:
                raise ValueError(
                    f"compression_widths must be one more than compression_factors, got {len(widths)} and "
                    f"{len(factors)}."
                )
            if len(widths) < 2 or min(widths) < 1:
                raise ValueError(f"compression_widths must be two or more positive numbers, got {widths}.")
            if (widths[0], widths[-1]) != (self.history_hidden_size, self.proxy_hidden_size):
                raise ValueError(
                    f"compression_widths must lead from history_hidden_size = {self.history_hidden_size} to "
                    f"proxy_hidden_size = {self.proxy_hidden_size}, got {widths}."
                )
        if self.proxy_size % self.num_attention_heads and self.proxy_size != self.hidden_size:
            raise ValueError(
                f"proxy_hidden_size must be a multiple of num_attention_heads, got {self.proxy_size} and "
                f"{self.num_attention_heads}."
            )
        narrow = self.proxy_size % self.history_hidden_size or self.proxy_size == self.history_hidden_size
        if self.injection == "cross_attention" and narrow:
            raise ValueError(
                "injection='cross_attention' reads a proxy as key-value slots of history_hidden_size numbers: "
                f"{self.proxy_size} is not twice, three times, … {self.history_hidden_size}."
            )
        if self.reversible_history and self.injection != "residual":
            raise ValueError(
                "reversible_history=True rebuilds the history stream by subtraction and needs injection='residual', "
                f"got {self.injection!r}."
            )
        if self.reversible_history and (len(set(ratios)) > 1 or self.partition_overlap):
            raise ValueError("reversible_history=True needs one compression ratio and partition_overlap=0.")
        if self.share_proxy_generation_weights and (
            self.proxy_interaction != "causal_attention" or self.proxy_size != self.hidden_size
        ):
            raise ValueError(
                "share_proxy_generation_weights=True needs causal attention among proxies and proxies of hidden_size"
                f" = {self.hidden_size} numbers, got {self.proxy_interaction!r} and {self.proxy_size}."
            )
        if not self.separate_proxy_kv and self.proxy_size != self.hidden_size:
            raise ValueError(
                "separate_proxy_kv=False reads proxies through the generation stream's projections and needs "
                f"proxy_hidden_size = hidden_size, got {self.proxy_size} and {self.hidden_size}."
            )
        if (self.proxy_interaction == "cross_attention") != (self.condition_size is not None):
            raise ValueError(
                "condition_size goes with proxy_interaction='cross_attention', got "
                f"{self.condition_size} with {self.proxy_interaction!r}."
            )
        self._check_distances()

    def _check_distances(self) -> None:
        if not self.distance_ratios:
            return
        if len(set(self.ratios)) > 1:
            raise ValueError("distance_ratios need one compression ratio for all layers.")
        last_distance, last_ratio = 0, self.ratios[0]
        for pair in self.distance_ratios:
            if len(pair) != 2:
                raise ValueError(f"distance_ratios must be pairs of distance and ratio, got {pair}.")
            distance, ratio = pair
            if distance < 0 or distance % self.block_size:
                raise ValueError(
                    f"A distance must be 0 or more tokens and a multiple of the generation block of {self.block_size},"
                    f" got {distance}."
                )
            if ratio <= last_ratio or ratio % last_ratio:
                raise ValueError(
                    f"The ratios of distance_ratios must grow, each a multiple of the one before ({last_ratio}), got "
                    f"{ratio}."
                )
            if distance < last_distance or (distance == last_distance and last_distance):
                raise ValueError(f"The distances of distance_ratios must grow, got {self.distance_ratios}.")
            last_distance, last_ratio = distance, ratio
