"""A ProxyFormer reads long documents once and is asked for what is hidden in them: found, bytes, seconds.

`multi_needle` is the measurement with many documents; this is one document a length, with what its cache costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from nearfar.evaluation.comparison import aligned_table, format_bytes
from nearfar.evaluation.machine import synchronize
from nearfar.evaluation.multi_needle import evaluate_needles
from nearfar.evaluation.needle_documents import DEFAULT_IDS, NeedleDocuments, NeedleTemplates
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LongReading", "format_readings", "plain_decoder_bytes", "read_long_documents"]


@dataclass(frozen=True)
class LongReading:
    """One document.

    Attributes:
        tokens: of the document.
        found, asked: passkeys.
        cache_bytes: that the cache holds after the document.
        plain_bytes: computed: keys and values that a plain decoder of this shape would hold.
        prefill_seconds: compressing the document.
        token_seconds: a token of greedy decoding at batch 1, after the question.
    """

    tokens: int
    found: int
    asked: int
    cache_bytes: int
    plain_bytes: int
    prefill_seconds: float
    token_seconds: float


def plain_decoder_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of `tokens` tokens' keys and values at the model's layers, heads and dtype, if it were a plain decoder."""
    config: Any = model.config
    numbers = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return numbers * tokens * model.get_input_embeddings().weight.element_size()


def read_long_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    background: torch.Tensor,
    lengths: Sequence[int],
    num_needles: int = 20,
    *,
    decode_tokens: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> list[LongReading]:
    """Hide passkeys in one document a length, read it, and ask for each.

    Args:
        model: a ProxyFormer in eval mode.
        background: `(n,)` token ids of the text that documents are cut from.
        lengths: tokens of the documents.
        num_needles: passkeys in each, all asked for.
        decode_tokens: of the timed decoding.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: a model without history, a text too short, lengths too short for the needles.
    """
    if not hasattr(model, "encode_history"):
        raise ValueError(f"{type(model).__name__} has no encode_history: it compresses no history")
    if decode_tokens < 1:
        raise ValueError(f"decode_tokens must be at least 1, got {decode_tokens}")
    templates = NeedleTemplates(tokenizer, num_ids=max(DEFAULT_IDS, num_needles))
    device = model.get_input_embeddings().weight.device
    documents = NeedleDocuments(background.cpu(), templates)
    readings = []
    with tqdm(total=2 * len(lengths), disable=not progress, unit="step", leave=False, dynamic_ncols=True) as bar:
        for length in lengths:
            bar.set_description(f"ProxyFormer: {length:,} tokens")
            generator = torch.Generator().manual_seed(seed)
            batch = documents.sample(1, length, num_needles, 1, generator)
            question = batch.queries[0, :1, : int(batch.query_lengths[0, 0])].to(device)
            timed = _timed(model, batch.documents.to(device), question, decode_tokens)
            bar.update()
            result = evaluate_needles(
                model, tokenizer, background, [length], 1, num_needles, seed=seed, templates=templates, progress=False
            ).lengths[length]
            bar.update()
            plain = plain_decoder_bytes(model, length)
            readings.append(LongReading(length, result.found, result.asked, timed[0], plain, *timed[1:]))
    return readings


@torch.no_grad()
def _timed(
    model: PreTrainedModel, document: torch.Tensor, question: torch.Tensor, decode_tokens: int
) -> tuple[int, float, float]:
    """Bytes of the cache, seconds of reading, seconds a decoded token."""
    synchronize(document.device)
    start = time.perf_counter()
    cache: Any = model.encode_history(document)
    synchronize(document.device)
    prefill = time.perf_counter() - start
    size = int(cache.nbytes())
    name = cache_argument(model)
    ids = model(question, **{name: cache}, use_cache=True).logits[:, -1:].argmax(-1)
    synchronize(document.device)
    start = time.perf_counter()
    for _ in range(decode_tokens):
        ids = model(ids, **{name: cache}, use_cache=True).logits[:, -1:].argmax(-1)
    synchronize(document.device)
    return size, prefill, (time.perf_counter() - start) / decode_tokens


def format_readings(readings: Sequence[LongReading]) -> str:
    """A plain-text table, a document a line."""
    header = ["document", "passkeys found", "cache", "plain decoder (computed)", "prefill s", "ms a token"]
    rows = [
        [
            f"{reading.tokens:,} tokens",
            f"{reading.found} of {reading.asked}",
            format_bytes(reading.cache_bytes),
            f"{format_bytes(reading.plain_bytes)}, {reading.plain_bytes / reading.cache_bytes:.1f} times",
            f"{reading.prefill_seconds:.2f}",
            f"{1000 * reading.token_seconds:.1f}",
        ]
        for reading in readings
    ]
    return aligned_table(header, rows)
