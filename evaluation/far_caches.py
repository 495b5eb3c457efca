"""A DAR model's far caches on one text: perplexity through the cache, against the uncached pass; bytes; speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from nearfar.evaluation.comparison import aligned_table, format_bytes
from nearfar.evaluation.machine import synchronize
from nearfar.modeling.cache_dar import DARCache
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FarCacheResult", "FarCaches", "compare_far_caches", "format_far_caches", "training_words"]

MODES = ("fast", "small")


@dataclass(frozen=True)
class FarCacheResult:
    """One mode of `DARCache`.

    Attributes:
        mode: "fast" or "small".
        perplexity: of the text, read in chunks through the cache.
        difference: the largest difference of a logit from the uncached pass.
        same_choice: share of positions at which the likeliest token is the uncached pass's.
        cache_bytes: held after the text: window, bottlenecks, room for coming tokens and fused projections.
        far_token_bytes: what one more token beyond the window costs, all layers together.
        tokens_per_second: greedy decoding at batch 1, behind the text.
        continuation: the token ids that greedy decoding wrote.
    """

    mode: str
    perplexity: float
    difference: float
    same_choice: float
    cache_bytes: int
    far_token_bytes: int
    tokens_per_second: float
    continuation: list[int]


@dataclass(frozen=True)
class FarCaches:
    """What `compare_far_caches` found.

    Attributes:
        tokens: of the text.
        uncached_perplexity: of the text in one pass without a cache.
        plain_token_bytes: computed: keys and values of one token at this shape and dtype, as a `DynamicCache` holds.
        window, bottleneck: of the model.
        results: one a mode.
    """

    tokens: int
    uncached_perplexity: float
    plain_token_bytes: int
    window: int
    bottleneck: int
    results: list[FarCacheResult]


@torch.no_grad()
def compare_far_caches(
    model: PreTrainedModel,
    ids: torch.Tensor | Sequence[int],
    *,
    chunk_tokens: int = 64,
    decode_tokens: int = 48,
    progress: bool = True,
) -> FarCaches:
    """Read a text without a cache and through both modes of `DARCache`.

    Args:
        model: a DAR model in eval mode that has a bottleneck.
        ids: `(n,)`, n > 1; more than the model's window, or nothing is far.
        chunk_tokens: tokens of the text that are fed at once.
        decode_tokens: of the timed greedy decoding, after one untimed step.
        progress: show a progress bar on standard error.

    Raises:
        TypeError: another kind of model.
        ValueError: a model without bottleneck, a text no longer than the window, a count below 1.
    """
    for name, value in (("chunk_tokens", chunk_tokens), ("decode_tokens", decode_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    DARCache(model)  # says what is wrong with another model
    config: Any = model.config
    device = model.get_input_embeddings().weight.device
    inputs = torch.as_tensor(ids, dtype=torch.long, device=device).flatten()[None]
    count = inputs.shape[1]
    if count < max(2, config.near_window + 1):
        raise ValueError(f"the text has {count} tokens, of which none is beyond the window of {config.near_window}")
    steps = 1 + len(MODES) * (-(-count // chunk_tokens) + 1)
    results = []
    with tqdm(total=steps, disable=not progress, unit="step", leave=False, dynamic_ncols=True) as bar:
        bar.set_description("DAR: without a cache")
        whole = model(inputs, use_cache=False).logits[0].float()
        bar.update()
        for mode in MODES:
            bar.set_description(f"DAR: {mode}")
            cache = DARCache(model, far_cache=mode)
            logits = []
            for start in range(0, count, chunk_tokens):
                chunk = inputs[:, start : start + chunk_tokens]
                logits.append(model(chunk, **{cache_argument(model): cache}, use_cache=True).logits[0].float())
                bar.update()
            read = torch.cat(logits)
            size, far = cache.nbytes(), cache.bytes_per_far_token()
            written, speed = _decode(model, cache, read[-1:], decode_tokens)
            bar.update()
            results.append(
                FarCacheResult(
                    mode=mode,
                    perplexity=_perplexity(read, inputs[0]),
                    difference=float((read - whole).abs().max()),
                    same_choice=float((read.argmax(-1) == whole.argmax(-1)).float().mean()),
                    cache_bytes=size,
                    far_token_bytes=far,
                    tokens_per_second=speed,
                    continuation=written,
                )
            )
    element = model.get_input_embeddings().weight.element_size()
    return FarCaches(
        tokens=count,
        uncached_perplexity=_perplexity(whole, inputs[0]),
        plain_token_bytes=2 * config.hidden_size * config.num_hidden_layers * element,
        window=config.near_window,
        bottleneck=config.bottleneck_size,
        results=results,
    )


def _perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    nats = F.cross_entropy(logits[:-1], ids[1:].to(logits.device)).item()
    return math.exp(nats) if nats < 700 else math.inf


def _decode(model: PreTrainedModel, cache: DARCache, logits: torch.Tensor, tokens: int) -> tuple[list[int], float]:
    """Greedy tokens behind what the cache holds, and how many of them a second; the first step is not timed."""
    written: list[int] = []
    start = 0.0
    for step in range(1 + tokens):
        if step == 1:
            synchronize(logits.device)
            start = time.perf_counter()
        token = logits.argmax(-1, keepdim=True)
        written.append(int(token))
        logits = model(token, **{cache_argument(model): cache}, use_cache=True).logits[:, -1]
    synchronize(logits.device)
    return written, tokens / (time.perf_counter() - start)


def format_far_caches(found: FarCaches) -> str:
    """A plain-text table: the uncached pass, both modes, and what keys and values would take."""
    header = ["far tokens", "perplexity", "as uncached", "bytes", "bytes a far token", "decode tok/s"]
    plain = found.plain_token_bytes
    rows = [["no cache, one pass", f"{found.uncached_perplexity:.3f}", "-", "-", "-", "-"]]
    for result in found.results:
        rows.append(
            [
                f"DARCache, {result.mode}",
                f"{result.perplexity:.3f}",
                f"{100 * result.same_choice:.1f} %",
                format_bytes(result.cache_bytes),
                f"{result.far_token_bytes:,}, 1/{plain / result.far_token_bytes:.3g}",
                f"{result.tokens_per_second:.1f}",
            ]
        )
    rows.append(["keys and values (computed)", "-", "-", format_bytes(plain * found.tokens), f"{plain:,}", "-"])
    return aligned_table(header, rows)


def training_words(folder: Path) -> str | None:
    """What a checkpoint's `training.json` says of its own perplexity and its vanilla twin's; None without that file.

    Raises:
        ValueError: the file is something else.
    """
    file = folder / "training.json"
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        twin = record["vanilla"]
        parts = []
        for name, value in record["perplexity"].items():
            words = f"{value:.2f}" if value is not None else "not finite"
            other = twin["perplexity"].get(name) if twin else None
            words += f" (its vanilla twin: {other:.2f})" if other is not None else ""
            parts.append(f"{words} on {name}")
        return (
            f"Its own record, not measured here: trained on {record['trained_on_tokens']:,} tokens, perplexity "
            f"{', '.join(parts)}."
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no record of examples/train_dar.py: {type(error).__name__} {error}") from None
