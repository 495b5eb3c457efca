"""Configuration of DAR (distance-adaptive representation): GPT-NeoX whose far tokens are seen through a bottleneck."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import GPTNeoXConfig

from .remote_code import RemoteCodeConfig

BOTTLENECK_ACTIVATIONS = (None, "sigmoid")
# Rotary embeddings whose frequencies follow the running length: the angle of a far key is no function of its position.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@strict
class DARConfig(RemoteCodeConfig, GPTNeoXConfig):
    r"""Configuration of a DAR model; every field of `GPTNeoXConfig` keeps its name and meaning.

    A query at position i sees the token at position j through its full hidden state if i - j < `window_size`, and
    otherwise through h W_down W_up, where W_down has `bottleneck_size` columns (Eq. 1 to 3 of the paper).

    Args:
        window_size: w, in tokens, the query's own included; 0 lets even a token's own key pass the bottleneck. `None`
            makes an ordinary GPT-NeoX without bottleneck parameters (the paper's "Vanilla").
        bottleneck_size: d_down, from 1 to `hidden_size`; `None` stands for `hidden_size // 4`. With `hidden_size`
            nothing is reduced (the paper's no-bottleneck control).
        bottleneck_activation: applied to h W_down: `None` (linear, the paper's choice) or `"sigmoid"`.
        uniform_bottleneck: every token passes the bottleneck at every distance, whatever the window (the paper's
            "Uniform reduction").
        far_cache: what `DARCache` keeps of a far token by default. `"fast"`: its bottleneck and the rotated part of
            its keys; `"small"`: the bottleneck alone, the rotated part being computed anew in every step.
        logits_in_training: whether a training pass with labels also returns logits, as some trainers want; without,
            memory for them is needed only at labelled positions, `loss_chunk_tokens` at a time.
        loss_chunk_tokens: labelled positions whose logits are in memory at a time.

    Raises:
        ValueError: a value out of range; a rotary embedding whose frequencies follow the sequence length together with
            `far_cache="small"`.
    """

    model_type = "dar"
    # The files and classes that a saved checkpoint carries; see `remote_code`.
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_dar.DARConfig",
        "AutoModel": "modeling_dar.DARModel",
        "AutoModelForCausalLM": "modeling_dar.DARForCausalLM",
        "AutoModelForSequenceClassification": "modeling_dar.DARForSequenceClassification",
    }
    adapter_targets: ClassVar[tuple[str, ...]] = ("query_key_value", "bottleneck_down", "bottleneck_up")
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    # A split head needs an embedding split alike where the two are tied. transformers before GPT-NeoX's own plan names
    # it (5.17, say) takes the embedding of every model to be called `embed_tokens`.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **GPTNeoXConfig.base_model_tp_plan,
        "embed_in": "embedding_rowwise",
    }

    window_size: int | None = 128
    bottleneck_size: int | None = None
    bottleneck_activation: str | None = None
    uniform_bottleneck: bool = False
    far_cache: Literal["fast", "small"] = "fast"
    logits_in_training: bool = True
    loss_chunk_tokens: int = 4096

    def __post_init__(self, **kwargs: Any) -> None:
        if self.bottleneck_size is None:
            self.bottleneck_size = max(1, self.hidden_size // 4)
        super().__post_init__(**kwargs)
        (vars(self).get("base_model_tp_plan") or {}).pop("embed_tokens", None)  # those releases' rule
        self.check()

    def check(self) -> None:
        """Raise a `ValueError` that names the first field with a value DAR cannot work with."""
        if self.window_size is not None and self.window_size < 0:
            raise ValueError(
                f"window_size must be 0 or more tokens (None for an ordinary GPT-NeoX), got {self.window_size}."
            )
        size = self.bottleneck_size
        if size is None or not 1 <= size <= self.hidden_size:
            raise ValueError(f"bottleneck_size must lie between 1 and hidden_size = {self.hidden_size}, got {size}.")
        if self.bottleneck_activation not in BOTTLENECK_ACTIVATIONS:
            raise ValueError(
                f"bottleneck_activation must be None (linear) or 'sigmoid', got {self.bottleneck_activation!r}."
            )
        if self.loss_chunk_tokens < 1:
            raise ValueError(f"loss_chunk_tokens must be at least 1, got {self.loss_chunk_tokens}.")
        if self.uniform_bottleneck and self.window_size is None:
            raise ValueError("uniform_bottleneck=True needs a bottleneck, and window_size=None makes a model without.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}."
            )
        rope_type = self.rope_parameters.get("rope_type", "default")
        if self.far_cache == "small" and rope_type in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"far_cache='small' rotates far keys anew in every step, and rope_type={rope_type!r} changes its "
                "frequencies as the sequence grows: use far_cache='fast'."
            )

    @property
    def has_bottleneck(self) -> bool:
        """Whether the model has bottleneck parameters."""
        return self.window_size is not None

    @property
    def near_window(self) -> int:
        """The window that attention works with, in tokens: 0 for `uniform_bottleneck`.

        Raises:
            ValueError: the model has no bottleneck, so that its window is unbounded.
        """
        if self.window_size is None:
            raise ValueError("window_size=None: an ordinary GPT-NeoX, in which every token is near.")
        return 0 if self.uniform_bottleneck else self.window_size

    @property
    def rotary_dims(self) -> int:
        """How many of a head's dimensions the rotary embedding turns."""
        factor = self.rope_parameters.get("partial_rotary_factor", 1.0)
        return int(self.hidden_size // self.num_attention_heads * factor)
