"""Tokenise texts once, into files that the training examples take on any machine in place of the texts.

    python examples/write_tokens.py --tokenizer gpt2 --out tokens train=corpus/ held=held.txt.xz --max-tokens 30000000
    python examples/train_dar.py --tokenizer gpt2 --text tokens/train.npz --eval-text held=tokens/held.npz …

Each NAME=PATH becomes OUT/NAME.npz, packed, a little over a byte a token; of several PATHs of one NAME one after the
other. Some 130,000 tokens a second and core.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from nearfar.modeling.atomic_file import check_writable
from nearfar.training.token_blocks import load_token_blocks, write_token_file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "texts", nargs="+", metavar="NAME=PATH", help=".txt, .md, .jsonl, .json, also .xz and .gz, or a folder of them"
    )
    add("--tokenizer", required=True, metavar="ID_OR_DIR")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--max-tokens", type=int, help="of each NAME (default: all)")
    add("--text-field", default="text", help="of JSON files")
    options = parser.parse_args(argv)
    try:
        check_writable(options.out)
        texts: dict[str, list[Path]] = {}
        for text in options.texts:
            if not re.fullmatch(r"[\w-]+=.+", text):
                raise ValueError(f"a text must look like NAME=PATH, got {text!r}")
            name, path = text.split("=", 1)
            texts.setdefault(name, []).append(Path(path))
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        for name, paths in texts.items():
            blocks = load_token_blocks(
                paths, tokenizer, 2, text_field=options.text_field, max_tokens=options.max_tokens
            )
            file = write_token_file(options.out / f"{name}.npz", blocks, tokenizer)
            count = len(blocks) * 2 + blocks.dropped_tokens
            print(f"{file}: {count:,} tokens, {file.stat().st_size / 1e6:.1f} MB")
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
