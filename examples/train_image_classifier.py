"""Train the small classifier that `nearfar eval images` judges drawn images with.

    python examples/train_image_classifier.py --data mnist/ --image-size 32 --output runs/mnist-classifier

--data is a folder with idx files (MNIST's format), a folder of images by class, or the id of a dataset; see
`nearfar.evaluation.image_data.load_images`. Size, channels and resizing must be those of the images to be judged.
Prints, and keeps in classifier.json, the share of test images that are recognised.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nearfar import cli
from nearfar.evaluation.image_data import RESIZE, load_images
from nearfar.training.classifier_training import train_classifier


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR_OR_ID")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--split", default="train")
    parser.add_argument("--test-split", default="test")
    parser.add_argument("--image-size", type=int, help="of both sides (default: as they are)")
    parser.add_argument("--channels", type=int, choices=(1, 3), help="default: as they are")
    parser.add_argument("--resize", choices=RESIZE, default="scale")
    parser.add_argument("--max-images", type=int)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, help="a limit")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--shift", type=int, default=2, help="pixels that images are moved by, at random")
    parser.add_argument("--seed", type=int, default=0)
    cli.add_machine_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    cli.check_out(args.output, "--output")
    device = cli.find_device(args)
    dtype = cli.find_dtype(args, device)
    options = {
        "size": args.image_size, "channels": args.channels, "resize": args.resize, "max_images": args.max_images
    }  # fmt: skip
    data = load_images(args.data, args.split, **options)
    test = load_images(args.data, args.test_split, **options)
    cli.set_threads(args, device)
    classifier = train_classifier(
        data,
        test,
        steps=args.steps,
        seconds=args.seconds,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        width=args.width,
        shift=args.shift,
        seed=args.seed,
        device=device,
        bf16=str(dtype) == "torch.bfloat16",
    )
    classifier.save(args.output)
    record = classifier.record
    print(
        f"{record['test_accuracy']:.4f} of {record['test_images']:,} test images recognised after {record['steps']:,} "
        f"steps in {record['seconds']:.1f} s; saved: {args.output}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_script(run, build_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
