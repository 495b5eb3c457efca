"""ProxyFormer for images, video and voxels: predicts an image from a noisy one, for flow matching (Section 3.9).

A noisy image x_t = (1 - t) ε + t x goes in, an estimate of x comes out; `pipeline_flow_matching` draws images with it.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from ..configuration.configuration_proxyformer_image import ProxyFormerImageConfig
from .image_layers import ElementwiseMap, ImageStack, LocalHead, initialise_image_module, pixel_embedding
from .time_embedding import TimeEmbedding

if TYPE_CHECKING:
    from .pipeline_flow_matching import FlowMatchingPipeline


@dataclass
class ProxyFormerImageOutput(ModelOutput):
    """Estimates of the image.

    Args:
        sample: `(batch, channels, N_1, …, N_D)`, of the last layer.
        middle_sample: the same of the head behind the middle layer; `None` without one.
    """

    sample: torch.Tensor | None = None
    middle_sample: torch.Tensor | None = None


class ProxyFormerImageModel(PreTrainedModel):
    """Estimates an image from a noisy one, a time, and a class or a text.

    Args:
        config: the model's configuration.
    """

    config: ProxyFormerImageConfig
    config_class = ProxyFormerImageConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ImageLayer", "TimeEmbedding"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: ProxyFormerImageConfig) -> None:
        super().__init__(config)
        config.check()
        assert config.head_dim and config.intermediate_size and config.condition_size
        width = config.local_hidden_size
        self.input_embedding = pixel_embedding(config.in_channels, width)
        self.time_embedding = TimeEmbedding(config.time_features, config.hidden_size)
        if config.num_classes is not None:
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.class_tokens * config.condition_size)
        if config.text_hidden_size is not None:
            self.text_projection = nn.Linear(config.text_hidden_size, config.condition_size, bias=False)
            self.no_text = nn.Parameter(torch.zeros(config.condition_size))
        self.stack = ImageStack(
            config.patches,
            width,
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.intermediate_size,
            eps=config.rms_norm_eps,
            rope_base=config.rope_base,
            absolute_positions=config.absolute_positions,
            factors=config.compression_factors,
            widths=config.compression_widths,
            condition_every=config.condition_every,
            update=config.proxy_update,
            interaction=config.proxy_interaction,
            injection=config.injection,
            time_size=config.hidden_size,
            condition_size=config.condition_size if config.conditioned else None,
            convolution=config.local_convolution,
        )
        self.head = LocalHead(width, config.in_channels, config.rms_norm_eps)
        if config.auxiliary_loss_weight:
            self.middle_head = LocalHead(width, config.in_channels, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        initialise_image_module(module, self.config.initializer_range)
        if isinstance(getattr(module, "no_text", None), nn.Parameter):
            init.normal_(module.no_text, mean=0.0, std=self.config.initializer_range)

    @property
    def middle_layer(self) -> int:
        """Index of the layer whose local stream the middle head reads."""
        return max(self.config.num_hidden_layers // 2 - 1, 0)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        pixel_values: torch.Tensor,
        time: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        text_states: torch.Tensor | None = None,
        text_attention_mask: torch.Tensor | None = None,
        drop_condition: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ProxyFormerImageOutput | tuple[torch.Tensor, ...]:
        """Estimate images.

        Args:
            pixel_values: `(batch, channels, N_1, …, N_D)`, noisy images x_t, about -1 to 1. Sizes other than the
                configuration's are read too; what no patch divides is filled up with zeros, and cut off again.
            time: `(batch,)`, 0 for noise to 1 for an image.
            class_labels: `(batch,)`, 0 … `num_classes`, the last for "no class"; `None`: no class for any image.
            text_states: `(batch, tokens, text hidden size)`, of a text encoder; `None`: no text.
            text_attention_mask: `(batch, tokens)`, 1 for real tokens.
            drop_condition: `(batch,)`, bool: images whose class and text are left out, for classifier-free guidance.
            return_dict: `False` for a tuple.

        Returns:
            `sample` and, with a middle head, `middle_sample`, each of the shape of `pixel_values`.

        Raises:
            ValueError: wrong numbers of dimensions or channels, times or labels out of range (looked at on a CPU
                only), conditions that the model was not made for.
            TypeError: images that are not floating-point.
        """
        if kwargs:
            raise TypeError(f"{type(self).__name__} got unexpected arguments: {', '.join(kwargs)}.")
        time = self._check(pixel_values, time)
        condition, valid = self._condition(
            pixel_values, class_labels, text_states, text_attention_mask, drop_condition
        )
        last = self.config.num_hidden_layers - 1
        heads: list[tuple[int, ElementwiseMap]] = [(last, partial(self.head))]
        if self.config.auxiliary_loss_weight:
            heads.insert(0, (self.middle_layer, partial(self.middle_head)))
        embedded = self.time_embedding(time)
        embed = partial(self.input_embedding)
        found = self.stack(pixel_values.movedim(1, -1), embed, heads, embedded, condition, valid)
        found = [x.movedim(-1, 1) for x in found]
        output = ProxyFormerImageOutput(sample=found[-1], middle_sample=found[0] if len(found) > 1 else None)
        return output.to_tuple() if return_dict is False else output

    def _check(self, pixels: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The time, once the images have been looked at."""
        dims, channels = len(self.config.sizes), self.config.in_channels
        if pixels.ndim != dims + 2 or 0 in pixels.shape:
            raise ValueError(
                f"pixel_values must have shape (batch, channels, {dims} sizes) for this model of image_size "
                f"{list(self.config.sizes)}, got {tuple(pixels.shape)}."
            )
        if pixels.shape[1] != channels:
            raise ValueError(f"The model reads images of {channels} channels, got {pixels.shape[1]}.")
        if not pixels.is_floating_point():
            raise TypeError(f"pixel_values must be floating-point, about -1 to 1, got {pixels.dtype}.")
        time = torch.as_tensor(time, device=pixels.device)
        if not time.is_floating_point():
            time = time.to(torch.float32)
        if time.ndim == 0:
            time = time.expand(pixels.shape[0])
        if time.shape != pixels.shape[:1]:
            raise ValueError(f"time must have shape ({pixels.shape[0]},), one an image, got {tuple(time.shape)}.")
        if _values_are_seen(time) and not bool(((time >= 0) & (time <= 1)).all()):
            raise ValueError(f"time must lie between 0 (noise) and 1 (image), got {time.tolist()}.")
        return time

    def _condition(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor | None,
        text: torch.Tensor | None,
        text_mask: torch.Tensor | None,
        drop: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """States `(batch, states, condition size)` and which are real; `None` where the model has no condition."""
        config, batch = self.config, pixels.shape[0]
        if labels is not None and config.num_classes is None:
            raise ValueError("class_labels were given, and this model was made without classes (num_classes=None).")
        if text is not None and config.text_hidden_size is None:
            raise ValueError("text_states were given, and this model was made without text (text_hidden_size=None).")
        if text_mask is not None and text is None:
            raise ValueError("text_attention_mask goes with text_states, which are missing.")
        if drop is not None and drop.shape != (batch,):
            raise ValueError(f"drop_condition must have shape ({batch},), got {tuple(drop.shape)}.")
        states: list[torch.Tensor] = []
        valid: list[torch.Tensor] = []
        if config.num_classes is not None:
            # The embedding may lie on another device.
            states.append(self._class_states(labels, drop, batch, pixels.device).to(pixels.device))
            valid.append(torch.ones(states[0].shape[:2], dtype=torch.bool, device=pixels.device))
        if config.text_hidden_size is not None:
            found, real = self._text_states(text, text_mask, drop, batch)
            states.append(found)
            valid.append(real)
        if not states:
            return None, None
        # Attention without a mask is faster, where every state is real.
        masked = text is not None and (text_mask is not None or drop is not None)
        return torch.cat(states, dim=1), torch.cat(valid, dim=1) if masked else None

    def _class_states(
        self, labels: torch.Tensor | None, drop: torch.Tensor | None, batch: int, device: torch.device
    ) -> torch.Tensor:
        none = self.config.num_classes
        assert none is not None
        if labels is None:
            labels = torch.full((batch,), none, dtype=torch.long, device=device)
        labels = torch.as_tensor(labels, device=device)
        if labels.shape != (batch,) or labels.is_floating_point():
            raise ValueError(
                f"class_labels must be whole numbers of shape ({batch},), one an image, got {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        # An embedding on a GPU ends in an assertion there; looking at the values first would wait for it.
        if _values_are_seen(labels) and (int(labels.min()) < 0 or int(labels.max()) > none):
            raise ValueError(
                f"class_labels must lie between 0 and {none - 1}, or be {none} for no class, got {labels.tolist()}."
            )
        if drop is not None:
            labels = torch.where(drop, none, labels)
        return self.class_embedding(labels).unflatten(-1, (self.config.class_tokens, -1))

    def _text_states(
        self, text: torch.Tensor | None, mask: torch.Tensor | None, drop: torch.Tensor | None, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if text is None:
            states = self.no_text.expand(batch, 1, -1)
            return states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        if text.ndim != 3 or (text.shape[0], text.shape[2]) != (batch, self.config.text_hidden_size):
            raise ValueError(
                f"text_states must have shape (batch, tokens, text_hidden_size) = ({batch}, tokens, "
                f"{self.config.text_hidden_size}), got {tuple(text.shape)}."
            )
        if mask is not None and mask.shape != text.shape[:2]:
            raise ValueError(f"text_attention_mask must have shape {tuple(text.shape[:2])}, got {tuple(mask.shape)}.")
        states = self.text_projection(text).to(text.device)
        real = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask.bool()
        # A text that is left out, and one without a real token, are one time the state of no text.
        left_out = ~real.any(dim=1)
        if drop is not None:
            left_out = left_out | drop
        states = torch.where(left_out[:, None, None], self.no_text.to(states), states)
        first = torch.arange(text.shape[1], device=text.device) == 0
        return states, torch.where(left_out[:, None], first, real)

    # --- images ------------------------------------------------------------------------------------------------------

    def pipeline(self) -> "FlowMatchingPipeline":
        """What draws images with this model; latents with the autoencoder that was saved beside it.

        Raises:
            ValueError: a model of latents that was not loaded from a folder or the Hub.
        """
        from .pipeline_flow_matching import FlowMatchingPipeline

        return FlowMatchingPipeline.of_model(self)


def _values_are_seen(x: torch.Tensor) -> bool:
    """Whether looking at a tensor's values costs nothing: on a CPU, outside of a compiler."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()
