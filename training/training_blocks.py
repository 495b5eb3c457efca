"""The blocks that a run trains and evaluates on, and how processes share them: every step reads as many tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["blocks_at_once", "check_numbers", "even_shares", "load_training_blocks"]

# Blocks that a device holds at once, unless it is told.
_MOST_AT_ONCE = 8


def load_training_blocks(
    sources: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    block_tokens: int,
    *,
    batch_size: int,
    split: str = "train",
    text_field: str = "text",
    max_tokens: int | None = None,
    evaluation_texts: Mapping[str, str | Path] | None = None,
    evaluation_split: str | None = None,
    cache_dir: str | Path | None = None,
    single_block: str = "the text is a single block, which leaves none to evaluate on: give more, or --eval-text",
) -> tuple[TokenBlocks, dict[str, TokenBlocks]]:
    """Blocks to train on, and blocks to evaluate on by the name of their text.

    With neither texts nor a split to evaluate on, the last 1 % of the blocks are set apart as "held_out".

    Args:
        sources, tokenizer, block_tokens, split, text_field, max_tokens, cache_dir: as in `load_token_blocks`; a split
            and a number of tokens are those of the training text.
        batch_size: blocks of a step, over all processes.
        evaluation_texts: name -> file or folder.
        evaluation_split: of the dataset that `sources` is; its blocks go by this name.
        single_block: what the error says when there is one block and nothing else to evaluate on.

    Returns:
        The training blocks, a whole number of batches, and name -> blocks.

    Raises:
        ValueError: a single block, with nothing else to evaluate on; fewer blocks than a batch; what
            `load_token_blocks` refuses.
    """

    def load(what: str | Path | Sequence[str | Path], split: str = "train", most: int | None = None) -> TokenBlocks:
        return load_token_blocks(
            what, tokenizer, block_tokens, split=split, text_field=text_field, max_tokens=most, cache_dir=cache_dir
        )

    train = load(sources, split, max_tokens)
    evaluation = {name: load([Path(path)]) for name, path in (evaluation_texts or {}).items()}
    if evaluation_split:
        evaluation[evaluation_split] = load(sources, evaluation_split)
    if not evaluation:
        held_out = max(1, len(train) // 100)
        if held_out == len(train):
            raise ValueError(single_block)
        evaluation["held_out"] = train.part(len(train) - held_out, len(train))
        train = train.part(0, len(train) - held_out)
    if len(train) < batch_size:
        raise ValueError(f"{train} to train on are fewer than one batch of {batch_size}")
    # With whole batches every step of every epoch reads the same number of tokens.
    return train.part(0, len(train) // batch_size * batch_size), evaluation


def even_shares(
    evaluation: Mapping[str, TokenBlocks], most: int, per_device_batch_size: int, processes: int
) -> dict[str, TokenBlocks]:
    """The first blocks of each evaluation set, as many as processes can share evenly.

    The Trainer would count some blocks twice otherwise. A set with less than a block for each place of all processes'
    batches stays as it is.

    Args:
        evaluation: name -> blocks.
        most: blocks of each set.
        per_device_batch_size: blocks that each process evaluates at once.
        processes: how many there are; one shares with nobody.
    """
    share = per_device_batch_size * processes
    shared = {}
    for name, blocks in evaluation.items():
        count = min(len(blocks), most)
        shared[name] = blocks.part(0, count // share * share if processes > 1 and count > share else count)
    return shared


def check_numbers(options: Any, above_zero: Sequence[str], not_negative: Sequence[str]) -> None:
    """Refuse what would fail, or train to NaN, after minutes; `seed` is looked at too.

    Args:
        options: has the attributes named, each that of an argument `--name`.

    Raises:
        ValueError: a number out of range, infinite or NaN.
    """
    for name in above_zero:
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
    for name in not_negative:
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(options, name)}")
    if not 0 <= options.seed < 1 << 32:
        raise ValueError(f"--seed must be 0 or more and below 2^32, got {options.seed}")


def blocks_at_once(batch_size: int, processes: int, wanted: int | None = None, *, kind: str = "blocks") -> int:
    """How many blocks of a batch each process holds at once; the rest is accumulated.

    Args:
        batch_size: blocks of a step, over all processes.
        wanted: --per-device-batch-size; None for the largest number up to 8 that divides a process's share.
        kind: what an error calls the blocks.

    Raises:
        ValueError: a batch that processes cannot share, or a number that does not divide a process's share.
    """
    if batch_size % processes:
        raise ValueError(f"--batch-size {batch_size} cannot be shared by {processes} processes")
    share = batch_size // processes
    if wanted is None:
        return max(size for size in range(1, _MOST_AT_ONCE + 1) if share % size == 0)
    if wanted < 1 or share % wanted:
        raise ValueError(
            f"--per-device-batch-size {wanted} does not divide the {share} {kind} that each of {processes} processes "
            f"has of a batch of {batch_size}"
        )
    return wanted
