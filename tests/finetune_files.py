"""Tiny models with their tokenizer, and texts, for `examples/finetune.py`."""

import json
from pathlib import Path

import torch
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, tiny_llama, tiny_tokenizer

IDS = {"vocab_size": 264, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
BLOCK, BATCH, STEPS = 48, 8, 4


def make_files(folder: Path) -> Path:
    """Models in `dar`, `proxyformer` (both with tied embeddings) and `llama`, and two texts."""
    models = {
        "dar": tiny_dar(dtype=torch.float32, tie_word_embeddings=True, **IDS),
        "proxyformer": tiny_proxyformer(dtype=torch.float32, **IDS),
        "llama": tiny_llama(torch.float32),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "train.txt").write_text(english(600), encoding="utf-8")
    (folder / "held.txt").write_text(english(100, 1), encoding="utf-8")
    return folder


def command(files: Path, model: str, *more: object) -> list[str]:
    """Arguments of a short run, without --output; what `more` says again wins."""
    common = (
        "--model", files / model, "--text", files / "train.txt", "--eval-text", f"held={files / 'held.txt'}",
        "--block-tokens", BLOCK, "--batch-size", BATCH, "--steps", STEPS, "--eval-every", 2, "--eval-blocks", 8,
        "--learning-rate", 1e-2, "--cache-dir", files / "cache", "--cpu", *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


def curve(output: Path) -> list[float]:
    """The loss of every step of a finished run."""
    log = json.loads((output / "log_history.json").read_text(encoding="utf-8"))
    return [line["loss"] for line in log if "loss" in line]
