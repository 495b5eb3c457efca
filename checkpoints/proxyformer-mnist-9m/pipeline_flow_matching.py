"""A pipeline that draws images with a `ProxyFormerImageModel`, in the habit of diffusers.

It does not build on diffusers: its pipelines cannot load components whose code lies in the checkpoint, and its Euler
scheduler wants velocities on a scale from 1000 to 0, so that it would add a large dependency for one line of
arithmetic (`euler_step`).
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from .flow_sampling import euler_sample, guided
from .modeling_proxyformer_autoencoder import ProxyFormerAutoencoder
from .modeling_proxyformer_image import ProxyFormerImageModel

# The folder of the autoencoder beside a model of latents.
AUTOENCODER_FOLDER = "autoencoder"
# What the autoencoder is loaded with too; all else is of the model.
_LOADING = ("dtype", "torch_dtype", "revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
GUIDANCE = ("classifier_free", "middle")
OUTPUT_TYPES = ("pil", "uint8", "pt")


class FlowMatchingPipeline:
    """Draws images: `FlowMatchingPipeline.from_pretrained(folder)(num_images=16, class_labels=3)`.

    Where nearfar is not installed, `AutoModel.from_pretrained(folder, trust_remote_code=True).pipeline()` is the same.

    Args:
        model: of pixels, or of latents.
        autoencoder: of the latents, for such a model.

    Raises:
        ValueError: latents without an autoencoder, an autoencoder for pixels, or one of other latents.
    """

    def __init__(self, model: ProxyFormerImageModel, autoencoder: ProxyFormerAutoencoder | None = None) -> None:
        if model.config.latent and autoencoder is None:
            raise ValueError("The model draws latents (latent=True): give its autoencoder too.")
        if not model.config.latent and autoencoder is not None:
            raise ValueError("The model draws pixels (latent=False), which no autoencoder decodes.")
        if autoencoder is not None and autoencoder.config.latent_channels != model.config.in_channels:
            raise ValueError(
                f"The autoencoder has latents of {autoencoder.config.latent_channels} channels, the model draws "
                f"{model.config.in_channels}."
            )
        self.model = model.eval()
        self.autoencoder = None if autoencoder is None else autoencoder.eval()

    # --- saving and loading ------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> "FlowMatchingPipeline":
        """Load a pipeline.

        Args:
            name_or_path: a folder or a Hub repository of `save_pretrained` or `push_to_hub`.
            kwargs: to the model's `from_pretrained`; of them the autoencoder's gets `dtype`, `revision`, `token`,
                `cache_dir`, `local_files_only` and `trust_remote_code`.

        Raises:
            ValueError: a model of another kind.
            OSError: nothing there.
        """
        where = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        kind = PreTrainedConfig.get_config_dict(str(name_or_path), **where)[0].get("model_type")
        if kind != ProxyFormerImageModel.config_class.model_type:
            raise ValueError(f"{name_or_path} holds a model of type {kind!r}, not a ProxyFormer that draws images.")
        model = ProxyFormerImageModel.from_pretrained(str(name_or_path), **kwargs)
        shared = {name: kwargs[name] for name in _LOADING if name in kwargs}
        return cls(model, _load_autoencoder(str(name_or_path), **shared) if model.config.latent else None)

    @classmethod
    def of_model(cls, model: ProxyFormerImageModel) -> "FlowMatchingPipeline":
        """The pipeline of a model that has been loaded; a model of latents brings the autoencoder saved beside it.

        Raises:
            ValueError: a model of latents that was not loaded from anywhere.
        """
        if not model.config.latent:
            return cls(model)
        source = model.name_or_path
        if not source:
            raise ValueError(
                "The model draws latents and was not loaded from a folder or the Hub, where its autoencoder would be: "
                "make FlowMatchingPipeline(model, autoencoder)."
            )
        options: dict[str, Any] = {"dtype": model.dtype}
        if not os.path.isdir(source) and getattr(model.config, "_commit_hash", None):
            options["revision"] = model.config._commit_hash
        return cls(model, _load_autoencoder(source, **options).to(model.device))

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Save weights, configurations and code: the model's in the folder, the autoencoder's in one inside it."""
        self.model.save_pretrained(save_directory)
        if self.autoencoder is not None:
            self.autoencoder.save_pretrained(Path(save_directory) / AUTOENCODER_FOLDER)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload pipeline",
    ) -> str:
        """Save to a Hub repository, which is made if it is not there.

        Args:
            repo_id: `"owner/name"`.
            private: whether a new repository is private.
            token: of the Hub.
            commit_message: of the upload.

        Returns:
            The repository's address.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=commit_message)
        return str(address)

    def to(self, *args: Any, **kwargs: Any) -> "FlowMatchingPipeline":
        """Move both models, as `nn.Module.to`."""
        self.model.to(*args, **kwargs)
        if self.autoencoder is not None:
            self.autoencoder.to(*args, **kwargs)
        return self

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    # --- drawing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        num_images: int | None = None,
        class_labels: int | Sequence[int] | torch.Tensor | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        generator: torch.Generator | None = None,
        *,
        guidance_kind: str | None = None,
        text_states: torch.Tensor | None = None,
        text_attention_mask: torch.Tensor | None = None,
        image_size: Sequence[int] | int | None = None,
        batch_size: int | None = None,
        output_type: str = "pil",
        cuda_graph: bool = False,
        progress: bool = False,
    ) -> Any:
        """Draw images.

        Args:
            num_images: how many; `None` stands for one for each label or text, or for 1.
            class_labels: one for all, or one for each; `None` for no class.
            steps: of Euler's method; `None` stands for the configuration's, here and below.
            guidance: scale; 1 for none.
            generator: of the noise, on a CPU or the model's device. The same one draws the same noise, whatever
                `batch_size` is.
            guidance_kind: `"classifier_free"`, away from the estimate without class and text, at twice the cost; or
                `"middle"`, away from the middle head's estimate, at none.
            text_states, text_attention_mask: of each image; see the model.
            image_size: other than the model's, one number for all dimensions; for latents, the images' sizes.
            batch_size: images at once; `None` for all.
            output_type: `"pil"`, a list of PIL images, or for video one list of frames each; `"uint8"`, a tensor
                `(num_images, channels, N_1, …, N_D)`; `"pt"`, the same in -1 to 1, floating-point.
            cuda_graph: on a GPU, record a step once and replay it, for small batches.
            progress: show a progress bar.

        Returns:
            The images.

        Raises:
            ValueError: arguments out of range, or that do not go together; guidance without a condition.
        """
        config = self.model.config
        steps = config.sampling_steps if steps is None else steps
        kind = config.guidance if guidance_kind is None else guidance_kind
        given = class_labels is not None or text_states is not None
        if guidance is None:
            guidance = float(config.guidance_scale) if given or kind == "middle" else 1.0
        self._check(kind, guidance, given, output_type, steps, batch_size)
        labels = self._labels(class_labels)
        num_images = self._count(num_images, labels, text_states)
        if labels is not None:
            labels = labels.expand(num_images)
        sizes = self._sizes(image_size)
        exact = torch.promote_types(self.model.dtype, torch.float32)
        source = self.device if generator is None else generator.device
        noise = torch.randn(
            num_images, config.in_channels, *sizes[0], generator=generator, device=source, dtype=exact
        ).to(self.device)

        found = []
        size = batch_size or num_images
        starts = range(0, num_images, size)
        with tqdm(total=len(starts) * steps, desc="sampling", unit="step", disable=not progress, leave=False) as bar:
            for start in starts:
                part = slice(start, start + size)
                condition = {
                    "class_labels": None if labels is None else labels[part],
                    "text_states": (
                        None if text_states is None else text_states[part].to(self.device, self.model.dtype)
                    ),
                    "text_attention_mask": (
                        None if text_attention_mask is None else text_attention_mask[part].to(self.device)
                    ),
                }
                estimator = _Estimator(self.model, condition, kind, guidance)
                estimate = estimator.recorded(noise[part]) if cuda_graph else estimator
                images = euler_sample(estimate, noise[part], steps, lambda _: bar.update())
                if self.autoencoder is not None:
                    images = self.autoencoder.decode(images.to(self.autoencoder.dtype), sizes[1]).to(exact)
                found.append(images if output_type == "pt" else to_uint8(images))
        images = torch.cat(found)
        return to_pil(images) if output_type == "pil" else images

    def _check(
        self, kind: str, guidance: float, given: bool, output_type: str, steps: int, batch_size: int | None
    ) -> None:
        if kind not in GUIDANCE:
            raise ValueError(f"guidance_kind must be one of {', '.join(GUIDANCE)}, got {kind!r}.")
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}.")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if not 0 <= guidance < float("inf"):
            raise ValueError(f"guidance must be 0 or more, 1 for none, got {guidance}.")
        if guidance == 1:
            return
        if kind == "classifier_free" and not given:
            raise ValueError(
                f"Classifier-free guidance ({guidance}) steers towards class_labels or text_states, and neither was "
                "given; without them use guidance=1, or guidance_kind='middle'."
            )
        if kind == "middle" and not self.model.config.auxiliary_loss_weight:
            raise ValueError("The model has no middle head (auxiliary_loss_weight=0), which guidance 'middle' reads.")

    def _labels(self, labels: int | Sequence[int] | torch.Tensor | None) -> torch.Tensor | None:
        if labels is None:
            return None
        classes = self.model.config.num_classes
        if classes is None:
            raise ValueError("class_labels were given, and this model was made without classes (num_classes=None).")
        found = torch.as_tensor(labels)
        if found.is_floating_point() or found.ndim > 1 or found.numel() == 0:
            raise ValueError(f"class_labels must be a whole number or a list of them, got {labels!r}.")
        found = found.reshape(-1).long()
        if int(found.min()) < 0 or int(found.max()) >= classes:
            raise ValueError(f"class_labels must lie between 0 and {classes - 1}, got {found.tolist()}.")
        return found.to(self.device)

    def _count(self, number: int | None, labels: torch.Tensor | None, text: torch.Tensor | None) -> int:
        if number is None:
            number = max(1 if labels is None else len(labels), 1 if text is None else len(text))
        if number < 1:
            raise ValueError(f"num_images must be at least 1, got {number}.")
        if labels is not None and len(labels) not in (1, number):
            raise ValueError(f"class_labels must be one for all or {number}, one an image, got {len(labels)}.")
        if text is not None and len(text) != number:
            raise ValueError(f"text_states must be {number}, one an image, got {len(text)}.")
        return number

    def _sizes(self, wanted: Sequence[int] | int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of what the model draws, and of the images."""
        own = self.model.config.sizes
        if wanted is None:
            return own, own if self.autoencoder is None else self.autoencoder.config.sizes
        sizes = (wanted,) * len(own) if isinstance(wanted, int) else tuple(wanted)
        if len(sizes) != len(own) or min(sizes) < 1:
            raise ValueError(f"image_size must be {len(own)} sizes of at least 1, got {sizes}.")
        if self.autoencoder is None:
            return sizes, sizes
        stride = self.autoencoder.config.downsampling
        return tuple(-(-size // stride) for size in sizes), sizes


def _load_autoencoder(source: str, **options: Any) -> ProxyFormerAutoencoder:
    """The autoencoder beside a model; where this code came with a checkpoint, it will be saved with its code again."""
    kind = ProxyFormerAutoencoder
    if kind.__module__.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        kind.register_for_auto_class("AutoModel")
        kind.config_class.register_for_auto_class()
    return kind.from_pretrained(source, subfolder=AUTOENCODER_FOLDER, **options)


class _Estimator:
    """x_t and t to the guided estimate of x, in the dtype of x_t."""

    def __init__(
        self, model: ProxyFormerImageModel, condition: dict[str, torch.Tensor | None], kind: str, scale: float
    ) -> None:
        self.model, self.scale, self.kind = model, scale, kind
        self.doubled = scale != 1 and kind == "classifier_free"
        if self.doubled:
            condition = {name: None if x is None else torch.cat([x, x]) for name, x in condition.items()}
        self.condition = condition

    def __call__(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        given = x.to(self.model.dtype)
        condition: dict[str, Any] = self.condition
        if self.doubled:
            given = torch.cat([given, given])
            half = torch.arange(len(given), device=x.device) < len(x)
            condition = {**condition, "drop_condition": half}
        output = self.model(given, time.expand(len(given)), **condition)
        sample = output.sample.to(x.dtype)
        if self.doubled:
            without, given_condition = sample.chunk(2)
            return guided(without, given_condition, self.scale)
        if self.scale != 1:
            return guided(output.middle_sample.to(x.dtype), sample, self.scale)
        return sample

    def recorded(self, like: torch.Tensor) -> Any:
        """The same as a CUDA graph, for inputs of the shape of `like`.

        Raises:
            ValueError: not on a GPU.
        """
        if like.device.type != "cuda":
            raise ValueError(f"A CUDA graph needs a GPU, and the model is on {like.device}.")
        x, time = like.clone(), torch.zeros((), device=like.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are chosen and compiled
                self(x, time)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self(x, time)

        def replay(given: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            x.copy_(given)
            time.copy_(now)
            graph.replay()
            return found

        return replay


# ---------------------------------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------------------------------


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Images of -1 to 1 as 0 to 255, rounded, cut off where they are beyond."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def to_pil(images: torch.Tensor) -> list[Any]:
    """PIL images.

    Args:
        images: uint8, `(batch, channels, height, width)`, or `(batch, channels, frames, height, width)`; 1 or 3
            channels.

    Returns:
        A list of images, or of lists of frames.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: other shapes, which PIL has no images for.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("PIL images need Pillow: pip install pillow, or use output_type='uint8'.") from error
    if images.ndim not in (4, 5) or images.shape[1] not in (1, 3):
        raise ValueError(
            f"PIL has images of height and width with 1 or 3 channels, got shape {tuple(images.shape)}: use "
            "output_type='uint8' or 'pt'."
        )
    if images.ndim == 5:
        return [to_pil(video) for video in images.transpose(1, 2)]
    pixels = images.movedim(1, -1).squeeze(-1) if images.shape[1] == 1 else images.movedim(1, -1)
    return [Image.fromarray(image) for image in pixels.contiguous().cpu().numpy()]
