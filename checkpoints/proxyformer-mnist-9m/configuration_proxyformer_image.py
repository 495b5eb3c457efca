"""Configuration of ProxyFormer for images, video and voxels: a local stream of pixels and proxies of patches."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .remote_code import RemoteCodeConfig


@strict
class ProxyFormerImageConfig(RemoteCodeConfig, PreTrainedConfig):
    r"""Configuration of a ProxyFormer that predicts images from noisy ones (Section 3.9), for flow matching.

    The local stream holds `local_hidden_size` numbers a pixel, at full resolution; in each layer a patch becomes one
    proxy of `hidden_size` numbers. Proxies attend to each other and to the condition, and are decompressed into the
    local stream (Eq. 2 to 6). Everything works in one, two or three dimensions; the length of `image_size` says which.

    Args:
        image_size: list [N_1, …, N_D], what the model is made for, such as `[32, 32]`, or `[8, 32, 32]` for 8 frames;
            one number stands for a square image. Other sizes can be given to the model.
        in_channels: of the image, or of the latent.
        patch_size: p, pixels of a patch along each dimension: one number, one a dimension (`[2, 4, 4]`), or, for
            layers that differ, a list of one such list for each layer; proxies are extracted anew where it changes.
            Sizes that p does not divide are filled up with zeros at the end, and the prediction is cut to size.
        local_hidden_size: d_fine, width of the local stream.
        hidden_size: d_proxy, width of the proxies.
        num_hidden_layers, num_attention_heads: of the model. `head_dim` `None` stands for
            `hidden_size // num_attention_heads`, and `intermediate_size` `None` for `3 * hidden_size`.
        compression_factors: one list [k_1, …, k_D] a level (Eq. 15), whose product is the patch; `None` chooses them.
        compression_widths: list of d_0 … d_M of Eq. 16, from `local_hidden_size` to `hidden_size`; `None`: geometric.
        proxy_update: U of Eq. 3.
        proxy_interaction: F of Eq. 4, bidirectional attention for all but experiments.
        injection: Φ of Eq. 6.
        local_convolution: side of a depthwise convolution in the local stream behind each injection, which crosses
            patches; odd, 0 for none (the paper's).
        rope_base: of the rotary embedding, whose frequencies the dimensions share; `None` for none.
        absolute_positions: add fixed sines and cosines of a patch's place to its first proxies. With neither, the
            model does not know where a patch is.
        num_classes: class labels 0 … `num_classes` - 1; one more embedding stands for "no class". `None`: no labels.
        class_tokens: states of a class that proxies attend to.
        text_hidden_size: width of `text_states`, for text conditions; `None`: no text.
        condition_size: width of the condition's states; `None` stands for `hidden_size`.
        condition_every: proxies attend to the condition in the first of each so many layers.
        time_features: sines and cosines that the time is turned into.
        auxiliary_loss_weight: weight of the loss of the head after the middle layer, which mid-to-final guidance also
            reads; 0 for none.
        latent: whether images are latents of a `ProxyFormerAutoencoder`, which is then saved beside the model.
        sampling_steps, guidance_scale, guidance: what a pipeline uses unless told otherwise.

    Raises:
        ValueError: a value out of range, patches that do not factor, widths that do not match.
    """

    model_type = "proxyformer_image"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_proxyformer_image.ProxyFormerImageConfig",
        "AutoModel": "modeling_proxyformer_image.ProxyFormerImageModel",
    }

    image_size: int | list[int] = 32
    in_channels: int = 3
    patch_size: int | list[int] | list[list[int]] = 4
    local_hidden_size: int = 64
    hidden_size: int = 512
    num_hidden_layers: int = 10
    num_attention_heads: int = 8
    head_dim: int | None = None
    intermediate_size: int | None = None
    compression_factors: list[list[int]] | None = None
    compression_widths: list[int] | None = None
    proxy_update: Literal["residual", "gated", "concatenate", "replace"] = "residual"
    proxy_interaction: Literal["bidirectional_attention", "identity", "mlp"] = "bidirectional_attention"
    injection: Literal["residual", "gated", "affine", "cross_attention"] = "residual"
    local_convolution: int = 0
    rope_base: float | int | None = 100.0
    absolute_positions: bool = True
    num_classes: int | None = None
    class_tokens: int = 4
    text_hidden_size: int | None = None
    condition_size: int | None = None
    condition_every: int = 2
    time_features: int = 256
    auxiliary_loss_weight: float | int = 0.5
    latent: bool = False
    sampling_steps: int = 50
    guidance_scale: float | int = 1.0
    guidance: Literal["classifier_free", "middle"] = "classifier_free"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.image_size, int):
            self.image_size = [self.image_size] * 2
        if self.head_dim is None:
            self.head_dim = max(1, self.hidden_size // max(1, self.num_attention_heads))
        if self.intermediate_size is None:
            self.intermediate_size = 3 * self.hidden_size
        if self.condition_size is None:
            self.condition_size = self.hidden_size
        super().__post_init__(**kwargs)
        self.check()

    # --- what follows from the fields --------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """(N_1, …, N_D)."""
        assert not isinstance(self.image_size, int)
        return tuple(self.image_size)

    @property
    def patches(self) -> list[tuple[int, ...]]:
        """(p_1, …, p_D) of each layer."""
        return layer_patches(self.patch_size, len(self.sizes), self.num_hidden_layers)

    @property
    def conditioned(self) -> bool:
        """Whether there is a class or a text to attend to."""
        return self.num_classes is not None or self.text_hidden_size is not None

    def check(self) -> None:
        """Raise a `ValueError` that names the first field with a value that cannot work."""
        check_positive(
            self, "in_channels", "local_hidden_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "head_dim", "intermediate_size", "condition_size", "condition_every", "class_tokens", "sampling_steps",
            "num_classes", "text_hidden_size", "time_features",
        )  # fmt: skip
        sizes = self.sizes
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise ValueError(f"image_size must be one to three sizes of at least 1, got {self.image_size}.")
        check_compression(
            self.patches, self.compression_factors, self.compression_widths, self.local_hidden_size, self.hidden_size
        )
        check_injection(self.injection, self.local_hidden_size, self.hidden_size)
        if self.local_convolution < 0 or (self.local_convolution and self.local_convolution % 2 == 0):
            raise ValueError(f"local_convolution must be 0 or odd, got {self.local_convolution}.")
        if self.rope_base is not None and not self.rope_base > 1:
            raise ValueError(f"rope_base must be above 1, or None for no rotary embedding, got {self.rope_base}.")
        if self.rope_base is not None and (self.head_dim or 0) < 2 * len(sizes):
            raise ValueError(
                f"A rotary embedding in {len(sizes)} dimensions needs a head_dim of at least {2 * len(sizes)}, got "
                f"{self.head_dim}."
            )
        if self.time_features % 2:
            raise ValueError(f"time_features must be even, half sines and half cosines, got {self.time_features}.")
        if self.auxiliary_loss_weight < 0:
            raise ValueError(f"auxiliary_loss_weight must be 0 or more, got {self.auxiliary_loss_weight}.")
        if self.guidance == "middle" and not self.auxiliary_loss_weight:
            raise ValueError("guidance='middle' reads the middle head, which auxiliary_loss_weight=0 leaves out.")


# ---------------------------------------------------------------------------------------------------------------------
# Checks that the autoencoder's configuration shares
# ---------------------------------------------------------------------------------------------------------------------


def check_positive(config: Any, *names: str) -> None:
    """Refuse values below 1; `None` passes.

    Raises:
        ValueError: naming the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def layer_patches(patch_size: int | list[int] | list[list[int]], dims: int, layers: int) -> list[tuple[int, ...]]:
    """The patch of each layer, whichever way it was written.

    Raises:
        ValueError: not one size a dimension, or not one patch a layer.
    """
    if isinstance(patch_size, int):
        patch_size = [patch_size] * dims
    nested = any(not isinstance(size, int) for size in patch_size)
    patches: list[Any] = list(patch_size) if nested else [patch_size] * layers
    for patch in patches:
        if isinstance(patch, int) or len(patch) != dims or min(patch) < 1:
            raise ValueError(
                f"patch_size must be a number, {dims} numbers (one a dimension of image_size), or a list of those for "
                f"each layer, all at least 1, got {patch_size}."
            )
    if len(patches) != layers:
        raise ValueError(f"patch_size names {len(patches)} patches for {layers} layers: {patch_size}.")
    return [tuple(patch) for patch in patches]


def check_compression(
    patches: list[tuple[int, ...]],
    factors: list[list[int]] | None,
    widths: list[int] | None,
    first: int,
    last: int,
) -> None:
    """Refuse factors and widths that do not make a proxy of a patch.

    Raises:
        ValueError: naming what does not fit.
    """
    if factors is not None:
        if len(set(patches)) > 1:
            raise ValueError("compression_factors fit one patch, and the layers have different ones: leave them out.")
        patch = patches[0]
        fits = bool(factors) and all(len(level) == len(patch) and min(level) >= 1 for level in factors)
        if not fits or tuple(math.prod(sides) for sides in zip(*factors, strict=True)) != patch:
            raise ValueError(
                f"compression_factors must be a list of levels, {len(patch)} numbers each, whose product is the patch "
                f"{list(patch)}, got {factors}."
            )
    if widths is not None:
        if factors is not None and len(widths) != len(factors) + 1:
            raise ValueError(
                f"compression_widths must be one more than compression_factors, got {len(widths)} and {len(factors)}."
            )
        if len(widths) < 2 or min(widths) < 1 or (widths[0], widths[-1]) != (first, last):
            raise ValueError(
                f"compression_widths must lead from the local stream's {first} to the proxies' {last}, got {widths}."
            )


def check_injection(injection: str, local: int, size: int) -> None:
    """Refuse widths that injection by cross-attention cannot read.

    Raises:
        ValueError: proxies that are no multiple of the local stream's width.
    """
    if injection == "cross_attention" and (size % local or size == local):
        raise ValueError(
            f"injection='cross_attention' reads a proxy as key-value slots of local_hidden_size numbers: {size} is "
            f"not twice, three times, … {local}."
        )
