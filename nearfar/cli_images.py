"""`nearfar sample-images` and `nearfar eval images`. Importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading
from nearfar.cli_arguments import add_command, comma_separated, natural_int, positive_int, random_seed, temperature
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads
from nearfar.cli_messages import UserError
from nearfar.cli_output import check_out

if TYPE_CHECKING:
    import torch

    from nearfar.evaluation.image_data import ImageData
    from nearfar.modeling.pipeline_flow_matching import FlowMatchingPipeline

SAMPLE_EXAMPLES = """\
examples:
  nearfar sample-images --model runs/mnist/model --out grid.png
      Ten images of each class, a class a column.
  nearfar sample-images --model runs/mnist/model --classes 3,3,7 --num-images 3 --guidance 2 --seed 1 --out three.png
"""
EVAL_EXAMPLES = """\
examples:
  nearfar eval images runs/mnist/model --data mnist/ --classifier runs/mnist-classifier
      Accuracy of a classifier on 10,000 samples, and the distance of its features from the test set's.
  nearfar eval images runs/cifar/model --data uoft-cs/cifar10 --num-images 50000 --reference-split train --fid
      FID and Inception Score against the training set.
"""


def add_images(commands: Any) -> None:
    """Add `sample-images`."""
    parser = add_command(
        commands,
        "sample-images",
        _sample,
        help="draw images with a ProxyFormer, as a grid",
        description="Draw images by flow matching and write them as one; of a model with classes, a class a column.",
    )
    parser.epilog = SAMPLE_EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, metavar="DIR_OR_ID", help="of examples/train_images.py")
    parser.add_argument("--out", required=True, metavar="FILE", help="grid.png, or another format that Pillow writes")
    parser.add_argument(
        "--num-images", type=positive_int, default=None, metavar="N", help="default: 10 a class, 64 without"
    )
    parser.add_argument(
        "--classes", type=_labels, default=None, metavar="C,…",
        help="labels, repeated until there are N (default: all)",
    )  # fmt: skip
    parser.add_argument("--columns", type=positive_int, default=None, metavar="N", help="of the grid")
    parser.add_argument("--scale", type=positive_int, default=2, metavar="N", help="pixels a pixel becomes")
    _add_sampling(parser)
    add_machine_arguments(parser)


def add_eval_images(tests: Any) -> None:
    """Add `eval images`."""
    parser = add_command(
        tests,
        "images",
        _evaluate,
        help="drawn images against real ones: a classifier's accuracy, Fréchet distances, FID",
        description=(
            "Draw images, as many of each class, and compare them with real ones: how many a separate classifier "
            "recognises, and the Fréchet distance of its features ('classifier-feature Fréchet distance', no FID), "
            "beside what training images get; with --fid also FID and Inception Score by torch-fidelity."
        ),
    )
    parser.epilog = EVAL_EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a Hub id")
    add("--data", required=True, metavar="DIR_OR_ID", help="real images: idx files, a folder, or a dataset's id")
    add("--reference-split", default="test", help="what is compared with")
    add("--train-split", default="train", help="gets the same scores, to compare; none to leave it out")
    add("--resize", choices=("scale", "pad"), default="scale", help="as in training")
    add("--classifier", default=None, metavar="DIR", help="of examples/train_image_classifier.py")
    add("--fid", action="store_true", help="FID and Inception Score; needs torch-fidelity and its weights")
    add("--inception-weights", default=None, metavar="FILE", help="of torch-fidelity (default: downloaded)")
    add("--num-images", type=positive_int, default=10_000, metavar="N", help="drawn")
    add("--out", default="nearfar-images", metavar="DIR", help="where images.json and images.png go")
    _add_sampling(parser)
    add_machine_arguments(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--steps", type=positive_int, default=None, metavar="N", help="of Euler's method (default: the model's)")
    add("--guidance", type=temperature, default=None, metavar="S", help="1 for none (default: the model's)")
    add("--guidance-kind", choices=("classifier_free", "middle"), default=None, help="default: the model's")
    add("--batch-size", type=positive_int, default=500, metavar="N", help="images at once")
    add("--cuda-graph", action="store_true", help="record a step, for small batches on a GPU")
    add("--seed", type=random_seed, default=0, help="of the noise")


def _labels(text: str) -> list[int]:
    return [natural_int(part) for part in comma_separated(text)]


def _load(args: argparse.Namespace) -> FlowMatchingPipeline:
    device = find_device(args)
    dtype = find_dtype(args, device)
    source = args.model
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(f"{source} is a folder without config.json, not a saved model")
    from transformers.utils import logging as transformers_logging

    from nearfar.modeling.pipeline_flow_matching import FlowMatchingPipeline

    transformers_logging.disable_progress_bar()
    set_threads(args, device)
    with cli_loading.loading_errors(source):
        return FlowMatchingPipeline.from_pretrained(source, dtype=dtype).to(device)


def _draw(args: argparse.Namespace, pipe: FlowMatchingPipeline, labels: list[int] | None, count: int) -> torch.Tensor:
    """uint8 images."""
    import torch

    given: dict[str, Any] = {} if labels is None else {"class_labels": labels}
    images: torch.Tensor = pipe(
        count,
        steps=args.steps,
        guidance=args.guidance,
        guidance_kind=args.guidance_kind,
        generator=torch.Generator().manual_seed(args.seed),
        batch_size=min(args.batch_size, count),
        output_type="uint8",
        cuda_graph=args.cuda_graph,
        progress=True,
        **given,
    )
    return images


# --- sample-images ---------------------------------------------------------------------------------------------------


def _sample(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.is_dir() or not out.suffix:
        raise UserError(f"--out {out} must name a file such as grid.png")
    check_out(out.parent)
    from PIL import Image

    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:  # Pillow reads more than it writes
        raise UserError(f"--out {out}: Pillow writes no {out.suffix} files; give a name such as {out.stem}.png")
    from nearfar.evaluation.image_grid import write_grid

    pipe = _load(args)
    classes = pipe.model.config.num_classes
    if args.classes is not None and classes is None:
        raise UserError(f"--classes: {args.model} was made without classes")
    columns = args.columns
    labels = None
    if classes is None:
        count = args.num_images or 64
    else:
        wanted = args.classes or list(range(classes))
        count = args.num_images or 10 * len(wanted)
        labels = [wanted[index % len(wanted)] for index in range(count)]
        columns = columns or min(len(wanted), 20)
    images = _draw(args, pipe, labels, count)
    print(f"{count} images: {write_grid(out, images, columns, scale=args.scale)}")
    return 0


# --- eval images -----------------------------------------------------------------------------------------------------


def _evaluate(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_out(out)
    if args.classifier is None and not args.fid:
        raise UserError("nothing to measure: give --classifier, --fid or both")

    from nearfar.evaluation.image_classifier import ImageClassifier
    from nearfar.evaluation.image_data import load_images
    from nearfar.evaluation.image_grid import write_grid
    from nearfar.evaluation.machine import machine_report, synchronize
    from nearfar.modeling.atomic_file import write_beside

    classifier = None if args.classifier is None else ImageClassifier.load(args.classifier)
    pipe = _load(args)
    reader: Any = pipe.model.config if pipe.autoencoder is None else pipe.autoencoder.config
    options = {"size": reader.sizes, "channels": reader.in_channels, "resize": args.resize}
    reference = load_images(args.data, args.reference_split, **options)
    train = None
    if args.train_split.lower() != "none" and args.train_split != args.reference_split:
        train = load_images(args.data, args.train_split, **options).part(args.num_images, args.seed)
    classes = pipe.model.config.num_classes
    if classifier is not None:
        classifier.to(pipe.device)
        if classifier.channels != reader.in_channels:
            raise UserError(
                f"--classifier {args.classifier} reads {classifier.channels} channels, the model draws "
                f"{reader.in_channels}"
            )
        if classes is not None and classes != len(classifier.classes):
            raise UserError(
                f"--classifier {args.classifier} knows {len(classifier.classes)} classes, the model {classes}"
            )
        known = tuple(classifier.classes)
        if train is not None and train.labels is not None and train.classes != known[: len(train.classes)]:
            raise UserError(
                f"--classifier {args.classifier} knows the classes {', '.join(known)}, the "
                f"{args.train_split} images have {', '.join(train.classes)}"
            )
    labels = None if classes is None else [index % classes for index in range(args.num_images)]
    began = time.perf_counter()
    images = _draw(args, pipe, labels, args.num_images)
    synchronize(pipe.device)
    seconds = time.perf_counter() - began
    first = images[:100]
    grid = write_grid(out / "images.png", first, min(classes or 10, 20), scale=max(1, 64 // images.shape[-1]))
    rows = _scores(args, pipe, classifier, images, labels, reference, train)
    _print_table(args, rows)
    speed = args.num_images / seconds
    print(f"\n{args.num_images:,} images drawn in {seconds:.1f} s, {speed:,.1f} images/s")
    record = {
        "command": args.command_line,
        "model": args.model,
        "steps": args.steps or pipe.model.config.sampling_steps,
        "guidance": pipe.model.config.guidance_scale if args.guidance is None else args.guidance,
        "guidance_kind": args.guidance_kind or pipe.model.config.guidance,
        "seed": args.seed,
        "images": args.num_images,
        "images_per_second": speed,
        "classifier": None if classifier is None else classifier.record,
        "machine": machine_report(pipe.device),
        "scores": rows,
    }
    text = json.dumps(record, indent=2) + "\n"
    write_beside(out / "images.json", lambda file: file.write_text(text, encoding="utf-8"))
    print(f"figure: {grid}\ndata:   {out / 'images.json'}")
    return 0


def _scores(
    args: argparse.Namespace,
    pipe: FlowMatchingPipeline,
    classifier: Any,
    images: torch.Tensor,
    labels: list[int] | None,
    reference: ImageData,
    train: ImageData | None,
) -> dict[str, dict[str, Any]]:
    """What is measured of samples and of training images."""
    import torch

    from nearfar.evaluation.image_quality import classifier_scores, inception_scores

    wanted = None if labels is None else torch.tensor(labels)
    compared: list[tuple[str, torch.Tensor, torch.Tensor | None]] = [("samples", images, wanted)]
    if train is not None:
        compared.append((f"{args.train_split} images", train.images, train.labels))
    rows: dict[str, dict[str, Any]] = {}
    for name, given, given_labels in compared:
        rows[name] = {}
        if classifier is not None:
            rows[name] |= classifier_scores(classifier, given, given_labels, reference.images).to_dict()
        if args.fid:
            rows[name] |= inception_scores(given, reference.images, weights=args.inception_weights, device=pipe.device)
    return rows


def _print_table(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    from nearfar.evaluation.comparison import aligned_table

    columns = {
        "accuracy": ("recognised", lambda value: "–" if value is None else f"{100 * value:.2f} %"),
        "frechet_distance": ("classifier-feature Fréchet distance", lambda value: f"{value:.4f}"),
        "fid": ("FID", lambda value: f"{value:.3f}"),
        "inception_score": ("Inception Score", lambda value: f"{value:.3f}"),
    }
    shown = [name for name in columns if name in rows["samples"]]
    body = [[name, *(columns[key][1](row[key]) for key in shown)] for name, row in rows.items()]
    print(aligned_table([f"against {args.reference_split}", *(columns[name][0] for name in shown)], body))
