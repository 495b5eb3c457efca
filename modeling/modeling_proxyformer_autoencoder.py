"""The ProxyFormer autoencoder, whose latents a `ProxyFormerImageModel` can generate (JLT, Section 5.1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..configuration.configuration_proxyformer_autoencoder import ProxyFormerAutoencoderConfig
from .block_compression import join_blocks, split_blocks
from .image_layers import ImageStack, LocalHead, initialise_image_module, pixel_embedding


@dataclass
class ProxyFormerAutoencoderOutput(ModelOutput):
    """What an autoencoder makes of images.

    Args:
        loss: mean absolute error, a scalar.
        sample: `(batch, channels, N_1, …, N_D)`, the images again.
        latents: `(batch, latent channels, …)`, before noise was added.
    """

    loss: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    latents: torch.Tensor | None = None


class ProxyFormerAutoencoder(PreTrainedModel):
    """Images to latents of half their sizes, and back.

    Args:
        config: the model's configuration.
    """

    config: ProxyFormerAutoencoderConfig
    config_class = ProxyFormerAutoencoderConfig
    base_model_prefix = "autoencoder"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ImageLayer"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: ProxyFormerAutoencoderConfig) -> None:
        super().__init__(config)
        config.check()
        dims = len(config.sizes)
        self.stride = (config.downsampling,) * dims
        pixels = config.in_channels * config.downsampling**dims
        self.encoder_embedding = pixel_embedding(pixels, config.encoder_local_size)
        self.encoder = self._side(config.encoder_local_size, config.encoder_hidden_size, config.num_encoder_layers)
        self.latent_head = LocalHead(config.encoder_local_size, config.latent_channels, config.rms_norm_eps)
        self.latent_head.output_head.init_scale = 1.0  # type: ignore[assignment]
        self.latent_norm = nn.BatchNorm1d(config.latent_channels, affine=False, momentum=0.01)
        self.decoder_embedding = pixel_embedding(config.latent_channels, config.decoder_local_size)
        self.decoder = self._side(config.decoder_local_size, config.decoder_hidden_size, config.num_decoder_layers)
        self.pixel_head = LocalHead(config.decoder_local_size, pixels, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _side(self, local: int, size: int, layers: int) -> ImageStack:
        config = self.config
        return ImageStack(
            [config.patch] * layers,
            local,
            size,
            size // config.head_dim,
            config.head_dim,
            3 * size,
            eps=config.rms_norm_eps,
            rope_base=config.rope_base,
        )

    def _init_weights(self, module: nn.Module) -> None:
        initialise_image_module(module)

    def encode(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Latents of images, of mean 0 and variance 1 a channel.

        Statistics of the channels are those of the batch while training, else running means of training.

        Args:
            pixel_values: `(batch, channels, N_1, …, N_D)`, -1 to 1. What the stride does not divide is filled up with
                zeros at the end.

        Returns:
            `(batch, latent channels, ⌈N_1 / stride⌉, …)`.

        Raises:
            ValueError: wrong numbers of dimensions or channels.
            TypeError: images that are not floating-point.
        """
        self._check("pixel_values", pixel_values, self.config.in_channels)
        dims = len(self.stride)
        blocks = split_blocks(pixel_values.movedim(1, -1), self.stride).flatten(1 + dims)
        last = len(self.encoder.layers) - 1
        (found,) = self.encoder(blocks, partial(self.encoder_embedding), [(last, partial(self.latent_head))])
        found = found.movedim(-1, 1)
        return self.latent_norm(found.flatten(2)).view_as(found)

    def decode(self, latents: torch.Tensor, sizes: tuple[int, ...] | None = None) -> torch.Tensor:
        """Images of latents.

        Args:
            latents: `(batch, latent channels, …)`.
            sizes: (N_1, …, N_D) of the images, which are cut to it; `None` stands for the configuration's where they
                have these latent sizes, and for whole strides otherwise.

        Returns:
            `(batch, channels, N_1, …, N_D)`, about -1 to 1.

        Raises:
            ValueError: wrong numbers of dimensions or channels, or sizes that have other latent sizes.
            TypeError: latents that are not floating-point.
        """
        self._check("latents", latents, self.config.latent_channels)
        places = tuple(latents.shape[2:])
        if sizes is None:
            fits = places == self.config.latent_sizes
            sizes = self.config.sizes if fits else tuple(size * self.config.downsampling for size in places)
        last = len(self.decoder.layers) - 1
        heads = [(last, partial(self.pixel_head))]
        (found,) = self.decoder(latents.movedim(1, -1), partial(self.decoder_embedding), heads)
        blocks = found.unflatten(-1, (*self.stride, self.config.in_channels))
        return join_blocks(blocks, sizes).movedim(-1, 1)

    def forward(
        self, pixel_values: torch.Tensor, return_dict: bool | None = None, **kwargs: Any
    ) -> ProxyFormerAutoencoderOutput | tuple[torch.Tensor, ...]:
        """Encode, add noise while training, decode.

        Args:
            pixel_values: `(batch, channels, N_1, …, N_D)`, -1 to 1.
            return_dict: `False` for a tuple.

        Returns:
            The loss (L1), the images again and their latents.

        Raises:
            ValueError: wrong numbers of dimensions or channels.
            TypeError: images that are not floating-point, or unexpected arguments.
        """
        if kwargs:
            raise TypeError(f"{type(self).__name__} got unexpected arguments: {', '.join(kwargs)}.")
        latents = self.encode(pixel_values)
        given = latents
        if self.training and self.config.latent_noise:
            # The standard deviation of a channel is 1.
            amount = torch.rand(latents.shape[0], *[1] * (latents.ndim - 1), device=latents.device)
            noise = torch.randn(latents.shape, device=latents.device) * amount * self.config.latent_noise
            given = latents + noise.to(latents.dtype)
        sample = self.decode(given, tuple(pixel_values.shape[2:]))
        exact = torch.promote_types(sample.dtype, torch.float32)
        loss = (sample.to(exact) - pixel_values.to(sample.device, exact)).abs().mean()
        output = ProxyFormerAutoencoderOutput(loss=loss, sample=sample, latents=latents)
        return output.to_tuple() if return_dict is False else output

    def _check(self, name: str, x: torch.Tensor, channels: int) -> None:
        dims = len(self.stride)
        if x.ndim != dims + 2 or 0 in x.shape:
            raise ValueError(f"{name} must have shape (batch, channels, {dims} sizes), got {tuple(x.shape)}.")
        if x.shape[1] != channels:
            raise ValueError(f"{name} must have {channels} channels, got {x.shape[1]}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {x.dtype}.")
