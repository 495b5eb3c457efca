"""Configuration of HybridAxialMapper: from a proxy model's attention to importance scores of a target's pairs."""

from typing import Any, ClassVar, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .remote_code import RemoteCodeConfig

# What is read of a proxy's states beside its attention.
ProxyStates = Literal["none", "values"]
PROXY_STATES: tuple[ProxyStates, ...] = get_args(ProxyStates)


@strict
class HybridAxialMapperConfig(RemoteCodeConfig, PreTrainedConfig):
    r"""Configuration of the mapper of ProxyKV (Section 4.1).

    Defaults are the paper's where it gives them. With them a mapper from 32 to 8 heads has 22 M parameters, which
    agrees with the checkpoints of about 100 MB in Appendix F; the 15 M of Section 4.1 does not agree with six layers
    of width 512 and an inner width of 2,048.

    Args:
        proxy_num_layers: L_s, layers of the proxy.
        proxy_num_heads: H_s, query heads of a proxy layer.
        target_num_layers: L_l, layers of the target, windowed ones included.
        target_num_heads: H_l, key-value heads of a target layer.
        target_layers: indices of the target's layers that are scored, ascending: of a hybrid model those with full
            attention. `None` stands for all.
        num_synthetic_heads: head tokens that the target queries choose from; `None` stands for `proxy_num_heads`.
        hidden_size: D_time.
        num_hidden_layers, num_attention_heads: of the encoder. `intermediate_size` `None` stands for
            `4 * hidden_size`.
        head_dim: D_head of target queries and synthetic head tokens.
        dropout: in the encoder, while training.
        feature_transform: `"none"` feeds the column sums as they are, as the paper writes it; `"log"` feeds
            log(10⁻⁴ + sum), which tames attention sinks (thousands beside fractions).
        proxy_layers: `"paired"` maps one proxy layer at a time, that of the target layer's depth, as in the paper;
            `"all"` reads all of them at once, `L_s * H_s` channels, and maps them to all target layers: more to judge
            a token by, and one pass of the encoder instead of one for each proxy layer. It needs `layer_queries`.
        proxy_states: `"none"`, as in the paper, reads the column sums alone. `"values"` also reads the proxy's values
            of each token: how much attention a token got says little about what it is. It needs `proxy_layers="all"`.
        proxy_state_size: numbers in a token's values in a proxy layer, key-value heads times head dimension; needed
            with `proxy_states="values"`.
        layer_queries: a bank of target queries for each target layer. Without it (the paper) target layers that share
            a proxy layer get the same scores. The encoder runs as often either way.
        disabled_stage: for ablations, one of the three stages in the simplest form that keeps the shapes (the paper's
            Appendix C: an identity or a mean): `"convolutions"`, a projection of each token by itself; `"encoder"`,
            the mean over all tokens added to each; `"heads"`, a projection to one logit for each target head.
        window_tokens, window_stride: tokens read at once, and between the starts of two windows; scores are averaged
            where windows overlap.
        proxy_model_type, target_model_type: families, for `check_compatible`; `None` accepts any.
        proxy_fingerprint, target_fingerprint: a few numbers of the models' input embeddings, or empty.
        proxy_name, target_name: where the models were loaded from, for messages.

    Raises:
        ValueError: a value out of range.
    """

    model_type = "hybrid_axial_mapper"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_axial_mapper.HybridAxialMapperConfig",
        "AutoModel": "modeling_axial_mapper.HybridAxialMapper",
    }

    proxy_num_layers: int = 16
    proxy_num_heads: int = 32
    target_num_layers: int = 32
    target_num_heads: int = 8
    target_layers: list[int] | None = None
    num_synthetic_heads: int | None = None
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    head_dim: int = 64
    dropout: float | int = 0.1
    feature_transform: Literal["none", "log"] = "none"
    proxy_layers: Literal["paired", "all"] = "paired"
    proxy_states: ProxyStates = "none"
    proxy_state_size: int | None = None
    layer_queries: bool = False
    disabled_stage: Literal["convolutions", "encoder", "heads"] | None = None
    window_tokens: int = 2048
    window_stride: int = 1024
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    proxy_model_type: str | None = None
    target_model_type: str | None = None
    proxy_fingerprint: list[list[float]] | None = None
    target_fingerprint: list[list[float]] | None = None
    proxy_name: str | None = None
    target_name: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_synthetic_heads is None:
            self.num_synthetic_heads = self.proxy_num_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.target_layers is None:
            self.target_layers = list(range(self.target_num_layers))
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def for_models(
        cls, proxy_config: PreTrainedConfig, target_config: PreTrainedConfig, **kwargs: Any
    ) -> "HybridAxialMapperConfig":
        """The configuration that serves a pair of models.

        Args:
            proxy_config, target_config: of causal language models, or of models that contain one.
            kwargs: further fields.

        Raises:
            TypeError: not configurations.
            ValueError: a configuration without attention layers, or of an encoder-decoder.
        """
        sizes = {**_proxy_sizes(proxy_config), **_target_sizes(target_config)}
        return cls(**{**sizes, **kwargs})

    # --- what follows from the fields --------------------------------------------------------------------------------

    @property
    def layer_channels(self) -> int:
        """Numbers that the features hold of a token in a proxy layer: column sums first, then its values."""
        return token_channels(self.proxy_num_heads, self.proxy_states, self.proxy_state_size)

    @property
    def input_channels(self) -> int:
        """Numbers of a token that are read at once."""
        return self.layer_channels * (self.proxy_num_layers if self.proxy_layers == "all" else 1)

    @property
    def scored_layers(self) -> list[int]:
        """Indices of the target's layers that are scored."""
        assert self.target_layers is not None
        return self.target_layers

    @property
    def layer_pairs(self) -> list[int]:
        """For each scored target layer the index of its proxy layer: ℓ_s = ⌈ℓ_l · L_s / L_l⌉, counted from 1 there."""
        return [-(-(layer + 1) * self.proxy_num_layers // self.target_num_layers) - 1 for layer in self.scored_layers]

    def check(self) -> None:
        """Raise a `ValueError` that names the first field with a value that cannot work."""
        for name in (
            "proxy_num_layers", "proxy_num_heads", "target_num_layers", "target_num_heads", "num_synthetic_heads",
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim",
            "window_tokens", "window_stride",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}."
            )
        if self.hidden_size % 2:
            raise ValueError(f"Sinusoidal positions need an even hidden_size, got {self.hidden_size}.")
        if self.window_stride > self.window_tokens:
            raise ValueError(
                f"window_stride must not exceed window_tokens, or tokens would be left out; got {self.window_stride} "
                f"and {self.window_tokens}."
            )
        if self.proxy_layers == "all" and not self.layer_queries:
            raise ValueError(
                'proxy_layers="all" needs layer_queries=True, or all target layers would get the same scores.'
            )
        if self.proxy_states != "none" and self.proxy_layers != "all":
            raise ValueError(
                f'proxy_states={self.proxy_states!r} needs proxy_layers="all": the weights that paired layers share '
                "cannot read values, whose directions mean something else in each layer."
            )
        if self.proxy_states != "none" and not (self.proxy_state_size and self.proxy_state_size > 0):
            raise ValueError(
                f"proxy_states={self.proxy_states!r} needs proxy_state_size, key-value heads times head dimension, "
                f"the same in all layers of the proxy; got {self.proxy_state_size}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}.")
        layers = self.scored_layers
        if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.target_num_layers:
            raise ValueError(
                f"target_layers must be ascending indices below target_num_layers = {self.target_num_layers}, got "
                f"{layers}."
            )

    # --- the models it serves ----------------------------------------------------------------------------------------

    def check_compatible(
        self, proxy_config: PreTrainedConfig | None = None, target_config: PreTrainedConfig | None = None
    ) -> None:
        """Refuse models of another shape or family than this mapper was made for.

        Args:
            proxy_config, target_config: see `for_models`; `None` is not looked at.

        Raises:
            TypeError: not configurations.
            ValueError: another shape or family, with both shapes in the message.
        """
        for role, given in (("proxy", proxy_config), ("target", target_config)):
            if given is None:
                continue
            theirs = _proxy_sizes(given) if role == "proxy" else _target_sizes(given)
            mine = {name: getattr(self, name) for name in theirs}
            if self.proxy_states == "none":  # where values are not read, their size does not matter
                for sizes in (mine, theirs):
                    sizes.pop("proxy_state_size", None)
            if mine[f"{role}_model_type"] is None:
                mine[f"{role}_model_type"] = theirs[f"{role}_model_type"]
            if mine != theirs:
                name = getattr(self, f"{role}_name")
                named = f" ({name})" if name else ""
                raise ValueError(
                    f"This mapper was made for a {role}{named} with {_words(role, mine)}; the {role} given has "
                    f"{_words(role, theirs)}. Train a mapper for this pair of models with `nearfar train-mapper`."
                )


def token_channels(heads: int, states: str, size: int | None) -> int:
    """Numbers that features hold of a token in a proxy layer with so many query heads and values of `size` numbers."""
    return heads + (size or 0 if states == "values" else 0)


def state_size(config: PreTrainedConfig) -> int | None:
    """Numbers in the values of a token in one layer, all key-value heads together; None where layers differ."""
    if getattr(config, "is_heterogeneous", False):  # its configuration as a whole has no sizes then
        sizes = {state_size(config.per_layer_config[layer]) for layer in range(config.num_hidden_layers)}
        return sizes.pop() if len(sizes) == 1 else None
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name in ("v_head_dim", "head_dim"):
        if getattr(config, name, None):
            return heads * int(getattr(config, name))
    return heads * int(config.hidden_size // config.num_attention_heads)


def _decoder_config(role: str, config: PreTrainedConfig) -> PreTrainedConfig:
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"{role}_config must be a transformers configuration, got {type(config).__name__}.")
    if config.is_encoder_decoder:
        raise ValueError(f"The {role} is an encoder-decoder ({config.model_type!r}); a mapper serves decoders.")
    config = config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "num_attention_heads"):
        if getattr(config, name, None) is None:
            raise ValueError(f"The {role} ({config.model_type!r}) has no {name}: it has no attention to map.")
    return config


def _proxy_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    config = _decoder_config("proxy", config)
    return {
        "proxy_model_type": config.model_type,
        "proxy_num_layers": config.num_hidden_layers,
        "proxy_num_heads": config.num_attention_heads,
        "proxy_state_size": state_size(config),
    }


def _target_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    config = _decoder_config("target", config)
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * count
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    return {
        "target_model_type": config.model_type,
        "target_num_layers": count,
        "target_num_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "target_layers": full or list(range(count)),  # where every layer has a window, all are scored
    }


def _words(role: str, sizes: dict[str, Any]) -> str:
    if role == "proxy":
        heads = f"{sizes['proxy_num_heads']} query heads"
        if "proxy_state_size" in sizes:
            heads += f", values of {sizes['proxy_state_size'] or 'differing'} numbers a token"
    else:
        scored = len(sizes["target_layers"])
        heads = (
            f"{scored} of them scored (indices {sizes['target_layers']}), {sizes['target_num_heads']} key-value heads"
        )
    return f"model type {sizes[f'{role}_model_type']!r}, {sizes[f'{role}_num_layers']} layers, {heads}"
