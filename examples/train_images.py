"""Train a ProxyFormer to draw images by flow matching: in pixels (JIT), or in the latents of an autoencoder (JLT).

    python examples/train_images.py --data mnist/ --image-size 32 --patch-size 4 --output runs/mnist

trains a model of pixels. For latents, an autoencoder first, and then a model over what it makes:

    python examples/train_images.py --stage autoencoder --data mnist/ --image-size 32 --output runs/mnist-autoencoder
    python examples/train_images.py --autoencoder runs/mnist-autoencoder/model --patch-size 2 --data mnist/ \\
        --output runs/mnist-latents

--data is a folder with idx files (MNIST's format, also .gz), a folder of images, in subfolders if they have classes,
or the id of a dataset, for which the `datasets` package is needed. It leaves in --output

    model/            averaged weights and code; loads with `FlowMatchingPipeline.from_pretrained`, or with
                      `trust_remote_code=True` where nearfar is not installed
    samples/          grids of samples along training, of an autoencoder images above what it makes of them
    training.jsonl    errors and speed along training; TensorBoard's files where that is installed
    run.json          settings, result

The same command with --resume goes on with a run that was interrupted (--save-every). On several GPUs each process
adds a batch of its own: `accelerate launch --num_processes 8 examples/train_images.py …`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import set_seed

from nearfar import (
    FlowMatchingPipeline,
    ProxyFormerAutoencoder,
    ProxyFormerAutoencoderConfig,
    ProxyFormerImageConfig,
    ProxyFormerImageModel,
    __version__,
)
from nearfar.evaluation.image_data import RESIZE, ImageData, load_images
from nearfar.evaluation.machine import machine_report
from nearfar.modeling.atomic_file import write_beside
from nearfar.training.flow_matching import TIMES, WEIGHTINGS
from nearfar.training.image_training import ImageTrainer, ImageTraining, last_checkpoint
from nearfar.training.main_process import run_main
from nearfar.training.run_folder import check_run, replaced_folder, write_run

LEARNING_RATES = {"muon": 3e-3, "mano": 6e-4, "adamw": 1e-3}
# What must be equal for a run to be gone on with.
SETTINGS = (
    "stage", "data", "split", "image_size", "channels", "resize", "max_images", "unconditional", "autoencoder",
    "patch_size", "local_hidden_size", "hidden_size", "layers", "heads", "local_convolution", "latent_channels",
    "steps", "seconds", "learning_rate", "batch_size", "optimizer", "seed",
)  # fmt: skip


def load_data(options: argparse.Namespace) -> ImageData:
    """The images; labels only for a model that is to draw by class."""
    channels = options.channels
    size: Any = options.image_size
    if options.autoencoder_model is not None:
        config = options.autoencoder_model.config
        channels, size = config.in_channels, config.sizes
    data = load_images(
        options.data,
        options.split,
        size=size,
        channels=channels,
        resize=options.resize,
        max_images=options.max_images,
    )
    if options.stage == "autoencoder" or options.unconditional:
        return ImageData(data.images, None, ())
    return data


def make_model(options: argparse.Namespace, data: ImageData) -> Any:
    """Random float32 weights."""
    set_seed(options.seed)
    channels, *sizes = data.images.shape[1:]
    if options.stage == "autoencoder":
        encoder = {} if options.local_hidden_size is None else {"encoder_local_size": options.local_hidden_size}
        if options.hidden_size is not None:
            encoder.update(encoder_hidden_size=options.hidden_size, decoder_hidden_size=options.hidden_size)
        layers = {} if options.layers is None else dict.fromkeys(
            ("num_encoder_layers", "num_decoder_layers"), options.layers
        )  # fmt: skip
        head_dim = {} if options.heads is None else {"head_dim": (options.hidden_size or 320) // options.heads}
        return ProxyFormerAutoencoder(
            ProxyFormerAutoencoderConfig(
                image_size=sizes,
                in_channels=channels,
                latent_channels=options.latent_channels,
                patch_size=options.patch_size or 2,
                **encoder,
                **layers,
                **head_dim,
            )
        )
    latent = options.autoencoder_model is not None
    if latent:
        config = options.autoencoder_model.config
        channels, sizes = config.latent_channels, list(config.latent_sizes)
    hidden = options.hidden_size or 256
    return ProxyFormerImageModel(
        ProxyFormerImageConfig(
            image_size=sizes,
            in_channels=channels,
            patch_size=options.patch_size or (2 if latent else 4),
            local_hidden_size=options.local_hidden_size or 64,
            hidden_size=hidden,
            num_hidden_layers=options.layers or 6,
            num_attention_heads=options.heads or max(1, hidden // 64),
            local_convolution=options.local_convolution,
            num_classes=len(data.classes) if data.labels is not None else None,
            latent=latent,
            sampling_steps=options.sampling_steps,
            guidance_scale=options.guidance if data.labels is not None else 1.0,
        )
    )


# --- a run -----------------------------------------------------------------------------------------------------------


def model_card(options: argparse.Namespace, model: Any, run: dict[str, Any], classes: Sequence[str]) -> str:
    """README.md of the checkpoint."""
    config, result = model.config, run["result"]
    name = options.output.name
    drawn = "latents of images" if getattr(config, "latent", False) else "images"
    lines = [
        "---",
        "library_name: transformers",
        *([] if options.stage == "autoencoder" else ["pipeline_tag: unconditional-image-generation"]),
        "tags:",
        "- proxyformer",
        "- nearfar",
        "---",
        "",
        f"# {name}",
        "",
    ]
    if options.stage == "autoencoder":
        lines += [
            f"A ProxyFormer autoencoder of {model.num_parameters():,} parameters: images of {list(config.sizes)} to "
            f"latents of {config.latent_channels} × {list(config.latent_sizes)}.",
        ]
    else:
        lines += [
            f"A ProxyFormer of {model.num_parameters():,} parameters that draws {drawn} of {list(config.sizes)} by "
            "flow matching (Section 3.9 of the ProxyFormer paper).",
        ]
    lines += [
        "",
        f"- trained on `{Path(options.data).name}`, split `{options.split}`, {result['steps']:,} steps of "
        f"{options.training.batch_size} images in {result['seconds']:,.0f} s on {run['machine']['device']}",
        f"- {options.training.optimizer} at {options.training.learning_rate:g}, averaged weights "
        f"({options.training.ema_decay:g}), seed {options.seed}; last error {result['error']:.4f}",
        f"- nearfar {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    ]
    if classes:
        lines += [f"- classes: {', '.join(f'{index} {label}' for index, label in enumerate(classes))}"]
    if options.stage == "model":
        labels = ", class_labels=list(range(10)) * 2" if len(classes) == 10 else ""
        lines += [
            "",
            "```python",
            "from transformers import AutoModel",
            "",
            f'pipe = AutoModel.from_pretrained("{name}", trust_remote_code=True).pipeline()',
            f"images = pipe(20{labels})",
            "```",
        ]
    return "\n".join(lines) + "\n"


def save(options: argparse.Namespace, trainer: ImageTrainer, dtype: torch.dtype) -> Any:
    """Averaged weights, code, and for latents the autoencoder, beside and then in the folder's place."""
    model = trainer.averaged().to(dtype)
    with replaced_folder(options.output / "model") as beside:
        if options.stage == "autoencoder":
            model.save_pretrained(beside)
        else:
            autoencoder = trainer.autoencoder
            FlowMatchingPipeline(model, None if autoencoder is None else autoencoder.to(dtype)).save_pretrained(beside)
    return model


def train(options: argparse.Namespace, trainer: ImageTrainer, data: ImageData) -> None:
    """Train, save, say what came out."""
    main_process = PartialState().is_main_process
    run: dict[str, Any] = {
        "command": options.command,
        "settings": options.settings,
        "machine": machine_report(trainer.device),
        "parameters": trainer.model.num_parameters(),
        "classes": list(data.classes),
        "result": None,
    }
    if main_process:
        write_run(options.output, run)
    result = trainer.train(last_checkpoint(options.output) if options.resume else None)
    if main_process:
        model = save(options, trainer, getattr(torch, options.save_dtype))
        run["result"] = result
        card = model_card(options, model, run, data.classes)
        write_beside(options.output / "model" / "README.md", lambda file: file.write_text(card, encoding="utf-8"))
        write_run(options.output, run)
        for leftover in options.output.glob("checkpoint-*"):
            shutil.rmtree(leftover)
        print(
            f"{result['steps']:,} steps in {result['seconds']:,.1f} s ({result['ended']}), "
            f"{result['images_per_second']:,.0f} images/s, error {result['error']:.4f}; {options.output / 'model'}"
        )
    PartialState().wait_for_everyone()


# --- arguments -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, from its checkpoint")
    parser.add_argument("--stage", choices=("model", "autoencoder"), default="model")
    parser.add_argument("--autoencoder", metavar="ID_OR_DIR", help="draw its latents instead of pixels")

    add = parser.add_argument_group("images").add_argument
    add("--data", required=True, metavar="DIR_OR_ID", help="idx files, a folder of images, or a dataset's id")
    add("--split", default="train")
    add("--image-size", type=int, help="of both sides (default: as they are)")
    add("--channels", type=int, choices=(1, 3), help="default: as they are")
    add("--resize", choices=RESIZE, default="scale", help="pad: zeros around smaller images")
    add("--max-images", type=int, help="the first so many")
    add("--unconditional", action="store_true", help="leave the labels unread")

    add = parser.add_argument_group("model").add_argument
    add("--patch-size", type=int, help="default: 4, for latents 2, for the autoencoder 2 of its latent")
    add("--hidden-size", type=int, help="of the proxies (default: 256; the autoencoder's 320 and 512)")
    add("--local-hidden-size", type=int, help="of the local stream (default: 64; the decoder's 32)")
    add("--layers", type=int, help="default: 6; the autoencoder's 4 on each side")
    add("--heads", type=int, help="default: of 64 numbers each")
    add("--local-convolution", type=int, default=0, metavar="SIDE", help="in the local stream; 0 for none")
    add("--latent-channels", type=int, default=4, help="of the autoencoder")
    add("--sampling-steps", type=int, default=50, help="of Euler's method, for the checkpoint and the grids")
    add("--guidance", type=float, default=1.5, help="likewise, with classes; 1 for none")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="default: 20,000, unless --seconds is given")
    add("--seconds", type=float, help="in place of steps; the learning rate follows the time")
    add("--batch-size", type=int, default=256, help="on each process")
    add("--optimizer", choices=tuple(LEARNING_RATES), default="muon", help="of matrices; AdamW for all else")
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in LEARNING_RATES.items())
    add("--learning-rate", type=float, help=f"highest (default: {rates})")
    add("--warmup-steps", type=int, default=100)
    add("--weight-decay", type=float, default=0.0)
    add("--ema", type=float, default=0.999, help="of the averaged weights, which are what is saved")
    add("--condition-dropout", type=float, default=0.1, help="share of images trained on without their class")
    add("--weighting", choices=WEIGHTINGS, default="image", help="of the squared error")
    add("--times", choices=TIMES, default="uniform", help="distribution of t")
    add("--flip", action="store_true", help="turn half of the images around, left to right")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=50, metavar="STEPS")
    add("--save-every", type=int, metavar="STEPS", help="checkpoints to resume from (default: none)")
    add("--sample-every", type=int, metavar="STEPS", help="grids of samples (default: one at the end)")

    add = parser.add_argument_group("machine").add_argument
    add("--bf16", action=argparse.BooleanOptionalAction, help="autocast; weights are float32 (default: on a GPU)")
    add("--save-dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights that are saved")
    add("--compile", action="store_true", help="torch.compile of the layers")
    add("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="record a step")
    add("--cpu", action="store_true", help="even if there is a GPU")
    add("--threads", type=int, help="CPU threads of each process")
    return parser


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other arguments.

    Raises:
        ValueError: arguments that do not go together, or out of range.
    """
    if options.autoencoder and options.stage == "autoencoder":
        raise ValueError("--autoencoder is for the model that draws its latents; --stage autoencoder makes one")
    if options.steps is None and options.seconds is None:
        options.steps = 20_000
    for name in ("patch_size", "hidden_size", "local_hidden_size", "layers", "heads", "image_size", "max_images"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.flip and options.autoencoder:
        raise ValueError("--flip turns pixels, and latents are made once: leave it out")
    options.bf16 = not options.cpu if options.bf16 is None else options.bf16
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    options.training = ImageTraining(
        steps=options.steps,
        seconds=options.seconds,
        batch_size=options.batch_size,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        ema_decay=options.ema,
        condition_dropout=options.condition_dropout,
        weighting=options.weighting,
        times=options.times,
        flip=options.flip,
        seed=options.seed,
        bf16=options.bf16,
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
        log_every=options.log_every,
        save_every=options.save_every,
        sample_every=options.sample_every,
    )
    options.settings = {name: getattr(options, name) for name in SETTINGS}
    options.autoencoder_model = None
    if options.autoencoder:
        kind = transformers.PreTrainedConfig.get_config_dict(options.autoencoder)[0].get("model_type")
        if kind != ProxyFormerAutoencoderConfig.model_type:
            raise ValueError(
                f"--autoencoder {options.autoencoder} holds a model of type {kind!r}, not "
                f"{ProxyFormerAutoencoderConfig.model_type!r}"
            )
        options.autoencoder_model = ProxyFormerAutoencoder.from_pretrained(options.autoencoder, dtype=torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    options.command = shlex.join(["train_images.py", *(sys.argv[1:] if argv is None else argv)])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # of loading and saving weights
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.cpu = options.cpu or not torch.accelerator.is_available()
    state = PartialState(cpu=options.cpu)
    try:
        resolve(options)
        if check_run(options.output, options.settings, options.resume):
            state.print(f"{options.output}: finished already")
            return 0
        data = load_data(options)
        trainer = ImageTrainer(
            make_model(options, data),
            data,
            options.output,
            options.training,
            autoencoder=options.autoencoder_model,
            cpu=options.cpu,
        )
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))
    state.wait_for_everyone()  # all have seen whether it is finished before the first one says that it has begun
    code = 0
    try:
        train(options, trainer, data)
    except FloatingPointError as error:
        if state.is_main_process:
            print(f"{options.output}: {error}", file=sys.stderr)
        code = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(run_main(main))
