"""The multi-needle test of the ProxyFormer paper (Section 5.3 and Figure 5), for any causal language model.

A document of L tokens holds 50 passkeys, one in each of 50 equal segments. It is read once; then each passkey is asked
for by itself. A question is a hit when the five digits appear in what greedy decoding writes, 10 tokens at most::

    background = load_background("test.txt.xz", tokenizer)
    results = evaluate_needles(model, tokenizer, background, [8192, 65536], num_documents=20, path="needles.json")
    print(results.table())
    write_heat_map("needles.png", results)

A model with `encode_history(ids)` (a ProxyFormer) reads the document with that; any other one reads it in chunks into
the cache that it makes itself. Questions continue copies of that cache, those of equal length at once, so no padding
is ever seen and nothing hangs on how a model treats masks.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.machine import machine_report
from nearfar.evaluation.needle_documents import DEFAULT_IDS, NeedleBatch, NeedleDocuments, NeedleTemplates
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.compat import cache_argument

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEPTH_INTERVALS = 10
GENERATED = "five digits appear in the greedily decoded text"
QUICK = "quick: the answer's tokens are all the most likely ones, teacher-forced in one pass"
_SAVE_SECONDS = 10.0


def wilson_interval(found: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % for the default z; (0, 1) when nothing was asked.

    Raises:
        ValueError: not 0 <= found <= asked.
    """
    if not 0 <= found <= asked:
        raise ValueError(f"found must be between 0 and asked, got {found} of {asked}")
    if asked == 0:
        return 0.0, 1.0
    share, spread = found / asked, z * z / asked
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass
class LengthResult:
    """What was answered about documents of `length` tokens.

    Attributes:
        hits: for each document's number, one bool a needle.
        positions: for each document's number, the token at which the needle asked for starts.
        seconds: reading and asking.
        block_tokens: tokens that the model compresses into one proxy, None where it does not say so.
    """

    length: int
    hits: dict[int, list[bool]] = field(default_factory=dict)
    positions: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    block_tokens: int | None = None

    @property
    def asked(self) -> int:
        """Questions."""
        return sum(map(len, self.hits.values()))

    @property
    def found(self) -> int:
        """Hits."""
        return sum(map(sum, self.hits.values()))

    @property
    def accuracy(self) -> float:
        """Hits as a share of the questions; NaN without any."""
        return self.found / self.asked if self.asked else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy, taking questions for independent; those of one document are not quite."""
        return wilson_interval(self.found, self.asked)

    def by_depth(self, intervals: int = DEPTH_INTERVALS) -> list[tuple[int, int]]:
        """(found, asked) in each of `intervals` equal parts of the document, by where the needle starts."""
        counts = [[0, 0] for _ in range(intervals)]
        for document, hits in self.hits.items():
            for position, hit in zip(self.positions[document], hits, strict=True):
                cell = counts[position * intervals // self.length]
                cell[0] += hit
                cell[1] += 1
        return [(found, asked) for found, asked in counts]

    @property
    def needles_per_block(self) -> tuple[float, int] | None:
        """Needles that start in a block of `block_tokens`: on average, and the most in one block of any document."""
        if self.block_tokens is None or not self.hits:
            return None
        blocks = -(-self.length // self.block_tokens)
        most = 0
        for positions in self.positions.values():
            inside = [position // self.block_tokens for position in positions]
            most = max(most, max(inside.count(block) for block in set(inside)))
        return self.asked / len(self.hits) / blocks, most


@dataclass
class NeedleResults:
    """Everything measured so far.

    Attributes:
        settings: what all documents have in common; results with other settings are never mixed with these.
        lengths: by document length, ascending.
        record: further entries of the file (command, machine).
    """

    settings: dict[str, Any]
    lengths: dict[int, LengthResult] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """One line a length, in plain text."""
        header = ["tokens", "documents", "found", "asked", "accuracy", "95 % interval", "worst depth", "needles/block"]
        rows = []
        for result in self.lengths.values():
            if not result.asked:
                continue
            low, high = result.interval
            depths = [found / asked if asked else 1.0 for found, asked in result.by_depth()]
            worst = depths.index(min(depths))
            blocks = result.needles_per_block
            rows.append(
                [
                    f"{result.length:,}",
                    str(len(result.hits)),
                    str(result.found),
                    str(result.asked),
                    f"{100 * result.accuracy:.1f} %",
                    f"{100 * low:.1f}–{100 * high:.1f} %",
                    f"{100 * depths[worst]:.1f} % at {depth_label(worst, len(depths))}",
                    "–" if blocks is None else f"{blocks[0]:.2f}, at most {blocks[1]}",
                ]
            )
        return aligned_table(header, rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it."""
        lengths = {}
        for length, result in self.lengths.items():
            blocks = result.needles_per_block
            lengths[str(length)] = {
                "accuracy": result.accuracy if result.asked else None,
                "interval": list(result.interval),
                "found": result.found,
                "asked": result.asked,
                "by_depth": [
                    {"found": found, "asked": asked, "accuracy": found / asked if asked else None}
                    for found, asked in result.by_depth()
                ],
                "needles_per_block": None if blocks is None else {"mean": blocks[0], "most": blocks[1]},
                "block_tokens": result.block_tokens,
                "seconds": round(result.seconds, 3),
                "documents": {
                    str(document): {
                        "hits": "".join("01"[hit] for hit in hits),
                        "positions": result.positions[document],
                    }
                    for document, hits in sorted(result.hits.items())
                },
            }
        return {**self.record, "settings": self.settings, "lengths": lengths}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NeedleResults:
        """The inverse of `to_dict`.

        Raises:
            ValueError: this is no record of needles.
        """
        results = cls(settings={}, record={})
        try:
            results.settings = dict(data["settings"])
            results.record = {key: value for key, value in data.items() if key not in ("settings", "lengths")}
            for length, entry in sorted(data["lengths"].items(), key=lambda item: int(item[0])):
                result = LengthResult(int(length), seconds=entry["seconds"], block_tokens=entry["block_tokens"])
                for document, answers in entry["documents"].items():
                    if len(answers["hits"]) != len(answers["positions"]):
                        raise ValueError(f"document {document} of length {length} is damaged")
                    result.hits[int(document)] = [hit == "1" for hit in answers["hits"]]
                    result.positions[int(document)] = list(answers["positions"])
                results.lengths[int(length)] = result
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of needles: {type(error).__name__} {error}") from None
        return results

    def write(self, path: str | Path) -> Path:
        """As JSON; written beside, then renamed."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        return write_beside(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))

    @classmethod
    def read(cls, path: str | Path) -> NeedleResults:
        """What `write` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no JSON file: {error}") from None
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def depth_label(index: int, intervals: int = DEPTH_INTERVALS) -> str:
    """`20–30 %` for the third of ten intervals."""
    return f"{100 * index / intervals:g}–{100 * (index + 1) / intervals:g} %"


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate_needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    background: torch.Tensor,
    lengths: Sequence[int],
    num_documents: int = 100,
    num_needles: int = DEFAULT_IDS,
    *,
    batch_size: int = 10,
    max_new_tokens: int = 10,
    seed: int = 0,
    quick: bool = False,
    control: bool = False,
    span: int | None = None,
    chunk_tokens: int = 4096,
    path: str | Path | None = None,
    restart: bool = False,
    model_name: str = "",
    record: dict[str, Any] | None = None,
    templates: NeedleTemplates | None = None,
    progress: bool = True,
) -> NeedleResults:
    """Ask for every needle of `num_documents` documents of each length.

    A document depends on `seed`, its length and its number only, so that a run with more documents or more lengths
    goes on from an earlier one. Where the tokenizer starts a text with a beginning-of-sequence token, that token is
    the first of the document's.

    Args:
        model: a causal language model in eval mode.
        background: `(n,)` token ids of `tokenizer` (`load_background`).
        lengths: tokens of a document.
        num_needles: of each document, all asked for.
        batch_size: questions at once; the cache is copied as often. It does not change what is measured.
        max_new_tokens: decoded for an answer. Decoding ends earlier once all answers of a batch were found or ended.
        quick: instead of decoding, check in one pass whether each of the answer's tokens is the most likely one after
            those before it. That is stricter than a hit. A model whose forward pass takes `history_ids` gets the
            document as that.
        control: ask each document's questions about another document, which does not hold the answers.
        span: all needles of a document stand within so many tokens at a random place (dense needles).
        chunk_tokens: tokens of a document that a model without `encode_history` reads at once.
        path: where results are kept, a JSON file: saved while measuring, gone on from when it is there.
        restart: start anew even so.
        model_name: goes into the settings.
        record: further entries of the file.
        templates: other wordings than the paper's.
        progress: show a progress bar.

    Returns:
        The results asked for and any that were in the file.

    Raises:
        ValueError: a number out of range, a length too short for the needles, a file with results of other settings.
        TypeError: the model's forward pass returns no cache.
    """
    if not lengths:
        raise ValueError("no length was given")
    if model.training:
        raise ValueError("the model is in training mode, call model.eval() first")
    for name, number in (
        ("num_documents", num_documents),
        ("num_needles", num_needles),
        ("batch_size", batch_size),
        ("max_new_tokens", max_new_tokens),
        ("chunk_tokens", chunk_tokens),
    ):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if templates is None:
        templates = NeedleTemplates(tokenizer, num_ids=max(DEFAULT_IDS, num_needles))
    prefix = _prefix(tokenizer)
    least = least_length(tokenizer, templates, num_needles)
    lengths = sorted(set(lengths))
    if lengths[0] < least:
        raise ValueError(
            f"{num_needles} needles of up to {templates.max_needle_tokens} tokens do not fit into documents of "
            f"{lengths[0]} tokens: the least length is {least}; give longer documents or fewer needles"
        )

    documents = NeedleDocuments(background.cpu(), templates)
    settings = {
        "model": model_name,
        "weights": _fingerprint(model),
        "dtype": str(model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "measure": QUICK if quick else GENERATED,
        "needles": num_needles,
        "ids": templates.num_ids,
        "needle": templates.needle,
        "query": templates.query,
        "span": span,
        "max_new_tokens": None if quick else max_new_tokens,
        "control": control,
        "seed": seed,
        "background_tokens": len(documents.background),
        "background": hashlib.sha256(documents.background.long().numpy().tobytes()).hexdigest()[:16],
    }
    results = _earlier(path, settings, restart)
    device = model.get_input_embeddings().weight.device
    results.record = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **(record or {}),
        "machine": machine_report(device),
    }
    todo = []
    for length in lengths:
        result = results.lengths.setdefault(length, LengthResult(length, block_tokens=_block_tokens(model)))
        todo += [(result, number) for number in range(num_documents) if number not in result.hits]
    results.lengths = dict(sorted(results.lengths.items()))

    asking = _Asking(model, tokenizer, batch_size, max_new_tokens, chunk_tokens, quick)
    saved = time.monotonic()
    try:
        with tqdm(total=len(todo), unit="document", disable=None if progress else True) as bar:
            for result, number in todo:
                start = time.perf_counter()

                def sample(name: str, length: int = result.length - len(prefix)) -> NeedleBatch:
                    generator = torch.Generator().manual_seed(_number(f"{seed}/{length + len(prefix)}/{name}"))
                    return documents.sample(1, length, num_needles, generator=generator, span=span)

                batch = sample(str(number))
                ids = torch.cat((torch.tensor(prefix, dtype=torch.long), batch.documents[0])).to(device)
                asked = sample(f"{number}/control") if control else batch
                hits = asking.hits(ids[None], asked)
                result.positions[number] = (asked.positions[0] + len(prefix)).tolist()
                result.hits[number] = hits
                result.seconds += time.perf_counter() - start
                bar.set_description(f"{result.length:,} tokens: {100 * result.accuracy:.1f} % found", refresh=False)
                bar.update()
                if path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                    results.write(path)
                    saved = time.monotonic()
    finally:  # also when interrupted: the same call goes on from here
        if path is not None:
            results.write(path)
    return results


def _earlier(path: str | Path | None, settings: dict[str, Any], restart: bool) -> NeedleResults:
    """What the file holds, if it was measured under the same settings."""
    if path is None or restart or not Path(path).exists():
        return NeedleResults(settings)
    results = NeedleResults.read(path)
    differing = [name for name in settings if results.settings.get(name) != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{path} holds results with another {', another '.join(differing)} ({name}: "
            f"{results.settings.get(name)!r} there, {settings[name]!r} now); write elsewhere, or restart to replace it"
        )
    return results


def least_length(tokenizer: PreTrainedTokenizerBase, templates: NeedleTemplates, num_needles: int) -> int:
    """Tokens of the shortest document that holds the needles."""
    return templates.min_length(num_needles) + len(_prefix(tokenizer))


def _number(name: str) -> int:
    """A seed out of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence token, where the tokenizer writes one."""
    first = list(tokenizer("").input_ids)[:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def _fingerprint(model: torch.nn.Module) -> str:
    """A few numbers of each weight, hashed: tells a checkpoint from one trained further under the same name."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.numel():
            with suppress(RuntimeError, NotImplementedError, TypeError):  # packed, quantised weights
                sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 16)][:16]
                digest.update(str(sample.double().cpu().tolist()).encode())
    return digest.hexdigest()[:16]


def _block_tokens(model: Any) -> int | None:
    """Tokens a proxy, as the model's configuration says; the most of all layers where they differ."""
    ratio = getattr(getattr(model, "config", None), "compression_ratio", None)
    ratios = ratio if isinstance(ratio, (list, tuple)) else [ratio]
    whole = [int(value) for value in ratios if isinstance(value, int) and value > 0]
    return max(whole) if whole else None


def _parameters(model: torch.nn.Module) -> set[str]:
    """Names of the arguments of the model's forward pass."""
    for cls in type(model).__mro__:
        if "forward" in cls.__dict__:
            return set(inspect.signature(cls.__dict__["forward"]).parameters)
    return set()


class _Asking:
    """How one model is asked about one document."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        max_new_tokens: int,
        chunk_tokens: int,
        quick: bool,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.max_new_tokens, self.chunk_tokens = batch_size, max_new_tokens, chunk_tokens
        self.parameters = _parameters(model)
        # A model without proxies may have both and be a plain decoder.
        proxies = getattr(getattr(model, "config", None), "compression_ratio", "unknown") is not None
        self.encode = getattr(model, "encode_history", None) if proxies else None
        self.two_inputs = quick and proxies and "history_ids" in self.parameters
        self.quick = quick
        generation = getattr(model, "generation_config", None)
        ends = [tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)]
        self.eos = {token for end in ends for token in (end if isinstance(end, (list, tuple)) else [end])} - {None}

    def hits(self, document: torch.Tensor, batch: NeedleBatch) -> list[bool]:
        """One bool for each question of `batch` (of one document), asked about `document` `(1, L)`."""
        cache = None if self.two_inputs else self.read(document)
        lengths = batch.query_lengths[0].tolist()
        answers = batch.answers[0]
        hits = [False] * len(answers)
        for rows in self._groups(lengths, cache):
            copied = None if cache is None else _repeated(cache, len(rows))
            if self.quick:
                inputs, labels = batch.input_ids[0, rows], batch.labels[0, rows]
                found = self.exact(document, copied, inputs.to(document.device), labels)
            else:
                queries = batch.queries[0, rows, : lengths[rows[0]]].to(document.device)
                found = self.decoded(copied, queries, [answers[row] for row in rows])
            for row, hit in zip(rows, found, strict=True):
                hits[row] = hit
        return hits

    def _groups(self, lengths: list[int], cache: Any) -> Iterator[list[int]]:
        """Questions of equal length, at most `batch_size` at once."""
        # A cache that cannot be repeated is copied for one question after the other.
        size = self.batch_size if cache is None or hasattr(cache, "batch_repeat_interleave") else 1
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def read(self, document: torch.Tensor) -> Any:
        """A cache that holds the document."""
        if self.encode is not None:
            return self.encode(document)
        cache = None
        for start in range(0, document.shape[1], self.chunk_tokens):
            cache = self._forward(document[:, start : start + self.chunk_tokens], cache)[1]
        return cache

    def _forward(self, ids: torch.Tensor, cache: Any, last_only: bool = True) -> tuple[torch.Tensor, Any]:
        """Logits and the cache; `cache` None lets the model make its own."""
        arguments: dict[str, Any] = {"logits_to_keep": 1} if last_only and "logits_to_keep" in self.parameters else {}
        if cache is not None:
            arguments[cache_argument(self.model)] = cache
        output = self.model(input_ids=ids, use_cache=True, **arguments)
        if cache is None:
            cache = next((output[key] for key in ("cache", "past_key_values") if output.get(key) is not None), None)
            if cache is None:
                raise TypeError(
                    f"{type(self.model).__name__} returns no cache: questions about a document that was read once "
                    "need one"
                )
        return output.logits, cache

    def decoded(self, cache: Any, queries: torch.Tensor, answers: list[str]) -> list[bool]:
        """Greedy decoding of questions `(n, T)` without padding."""
        written: list[list[int]] = [[] for _ in answers]
        ended, hits = [False] * len(answers), [False] * len(answers)
        ids = queries
        for _ in range(self.max_new_tokens):
            logits, cache = self._forward(ids, cache)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            for row, token in enumerate(ids[:, 0].tolist()):
                ended[row] = ended[row] or token in self.eos
                if not ended[row]:
                    written[row].append(token)
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
            hits = [hit or answer in text for hit, answer, text in zip(hits, answers, texts, strict=True)]
            # A wrong number may still be followed by the right one, so only hits and ends settle a row.
            if all(hit or end for hit, end in zip(hits, ended, strict=True)):
                break
        return hits

    def exact(self, document: torch.Tensor, cache: Any, inputs: torch.Tensor, labels: torch.Tensor) -> list[bool]:
        """Whether each labelled token of `inputs` `(n, T)` is the most likely one."""
        if self.two_inputs:
            logits = self.model(input_ids=inputs, history_ids=document).logits
        else:
            logits = self._forward(inputs, cache, last_only=False)[0]
        target = labels[:, 1:].to(logits.device)
        return ((logits[:, :-1].argmax(-1) == target) | (target == -100)).all(-1).tolist()


def _repeated(cache: Any, rows: int) -> Any:
    """A copy of a cache of batch 1 for `rows` rows; the original stays as it is."""
    layers = getattr(cache, "layers", None)
    # The update and the repeat of these two make new tensors, so that references are copy enough.
    if layers and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        copied = copy.copy(cache)
        copied.layers = [copy.copy(layer) for layer in layers]
    else:
        copied = copy.deepcopy(cache)
    if rows > 1:
        copied.batch_repeat_interleave(rows)
    return copied


# --- figure ----------------------------------------------------------------------------------------------------------


def write_heat_map(path: str | Path, results: NeedleResults, title: str = "") -> Path:
    """Accuracy by depth and length as a PNG, as in the paper's Figure 5; written beside, then renamed.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was measured.
    """
    figure = draw_heat_map(results, title)
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png"))


def draw_heat_map(results: NeedleResults, title: str = "") -> Figure:
    """The figure of `write_heat_map`; each cell holds its accuracy in percent."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing the heat map needs matplotlib: pip install 'nearfar[eval]'") from error

    measured = [result for result in results.lengths.values() if result.asked]
    if not measured:
        raise ValueError("nothing to draw: no question was asked")
    columns = [[found / asked if asked else math.nan for found, asked in result.by_depth()] for result in measured]
    figure = Figure(figsize=(2.6 + 0.75 * len(measured), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    image = axis.imshow(
        list(zip(*columns, strict=True)), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest"
    )
    for column, shares in enumerate(columns):
        for row, share in enumerate(shares):
            text = "–" if math.isnan(share) else f"{100 * share:.0f}"
            color = "white" if share < 0.6 else "black"
            axis.text(column, row, text, ha="center", va="center", fontsize=9, color=color)
    axis.set_xticks(
        range(len(measured)),
        [f"{short_length(result.length)}\n{100 * result.accuracy:.1f}" for result in measured],
    )
    axis.set_yticks(range(DEPTH_INTERVALS), [depth_label(row) for row in range(DEPTH_INTERVALS)])
    axis.set_xlabel("document length in tokens;\nbelow, accuracy over all depths in %")
    axis.set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axis, label="accuracy")
    if title:
        axis.set_title(title, fontsize=10)
    return figure


def short_length(tokens: int) -> str:
    """8192 as `8K`, 1048576 as `1M`; numbers that are no such multiples in full."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return f"{tokens:,}"
