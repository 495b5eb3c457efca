"""Configuration of the ProxyFormer autoencoder, whose latents a `ProxyFormerImageModel` can generate (JLT)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_proxyformer_image import check_compression, check_positive, layer_patches
from .remote_code import RemoteCodeConfig


@strict
class ProxyFormerAutoencoderConfig(RemoteCodeConfig, PreTrainedConfig):
    r"""Configuration of an autoencoder with ProxyFormer layers on both sides.

    Encoder: a convolution of stride `downsampling`, layers, `latent_channels` numbers a place, each channel normalised
    to mean 0 and variance 1. Decoder: layers, and the transposed convolution.

    Args:
        image_size: list [N_1, …, N_D], one to three dimensions; one number stands for a square image.
        in_channels: of the image.
        latent_channels: of the latent, whose sizes are N_i / `downsampling`, rounded up.
        downsampling: stride of the convolution.
        patch_size: of both sides' layers, in places of the latent: one number, or a list of one a dimension.
        encoder_local_size, encoder_hidden_size: width of the encoder's local stream and proxies.
        decoder_local_size, decoder_hidden_size: the decoder's.
        num_encoder_layers, num_decoder_layers: of each side.
        head_dim: of the attention among proxies, which has `hidden size // head_dim` heads.
        latent_noise: training adds noise of up to this, in standard deviations, to the latent before it is decoded;
            each image's amount is drawn uniformly.
        rope_base: of the rotary embedding of the proxies; `None` for none.

    Raises:
        ValueError: a value out of range.
    """

    model_type = "proxyformer_autoencoder"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_proxyformer_autoencoder.ProxyFormerAutoencoderConfig",
        "AutoModel": "modeling_proxyformer_autoencoder.ProxyFormerAutoencoder",
    }

    image_size: int | list[int] = 32
    in_channels: int = 3
    latent_channels: int = 4
    downsampling: int = 2
    patch_size: int | list[int] = 2
    encoder_local_size: int = 64
    encoder_hidden_size: int = 320
    decoder_local_size: int = 32
    decoder_hidden_size: int = 512
    num_encoder_layers: int = 4
    num_decoder_layers: int = 4
    head_dim: int = 64
    latent_noise: float | int = 0.1
    rope_base: float | int | None = 100.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.image_size, int):
            self.image_size = [self.image_size] * 2
        super().__post_init__(**kwargs)
        self.check()

    @property
    def sizes(self) -> tuple[int, ...]:
        """(N_1, …, N_D)."""
        assert not isinstance(self.image_size, int)
        return tuple(self.image_size)

    @property
    def latent_sizes(self) -> tuple[int, ...]:
        """Sizes of the latent of an image of `image_size`."""
        return tuple(-(-size // self.downsampling) for size in self.sizes)

    @property
    def patch(self) -> tuple[int, ...]:
        """(p_1, …, p_D)."""
        return layer_patches(self.patch_size, len(self.sizes), 1)[0]

    def check(self) -> None:
        """Raise a `ValueError` that names the first field with a value that cannot work."""
        check_positive(
            self, "in_channels", "latent_channels", "downsampling", "encoder_local_size", "encoder_hidden_size",
            "decoder_local_size", "decoder_hidden_size", "num_encoder_layers", "num_decoder_layers", "head_dim",
        )  # fmt: skip
        sizes = self.sizes
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise ValueError(f"image_size must be one to three sizes of at least 1, got {self.image_size}.")
        check_compression([self.patch], None, None, self.encoder_local_size, self.encoder_hidden_size)
        for name in ("encoder_hidden_size", "decoder_hidden_size"):
            if getattr(self, name) % self.head_dim:
                raise ValueError(
                    f"{name} must be a multiple of head_dim, got {getattr(self, name)} and {self.head_dim}."
                )
        if self.rope_base is not None and not self.rope_base > 1:
            raise ValueError(f"rope_base must be above 1, or None for no rotary embedding, got {self.rope_base}.")
        if self.rope_base is not None and self.head_dim < 2 * len(sizes):
            raise ValueError(
                f"A rotary embedding in {len(sizes)} dimensions needs a head_dim of at least {2 * len(sizes)}, got "
                f"{self.head_dim}."
            )
        if self.latent_noise < 0:
            raise ValueError(f"latent_noise must be 0 or more, got {self.latent_noise}.")
