"""What a HybridAxialMapper learns from: a proxy's attention features X and the target's KVzip scores Y, kept on disk.

Both are computed once for each context (one prefill of the proxy, one oracle pass of the target) and read many times::

    contexts = mixture_contexts(tokenizer, ["books/", "needles"], count=50)  # of mapper_contexts
    compute_pairs("pairs", proxy, target, tokenizer, contexts)
    pairs = MapperPairs("pairs")

A folder of pairs holds shards of several contexts end to end, two `.npy` files each (features `(L_s, H_s, tokens)`,
with more channels where the proxy's values are stored too; scores `(L_l, H_l, tokens)`), which are mapped into memory
rather than read, and for each process that wrote there an `index-<process>.json` that names models, settings and
finished shards. A shard is listed only once it is whole, so an interrupted run goes on after the last one; contexts
that are there already are not computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm

from nearfar.configuration.configuration_axial_mapper import (
    PROXY_STATES,
    HybridAxialMapperConfig,
    ProxyStates,
    token_channels,
)
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.kvzip_scores import QUOTED_TOKENS, RepeatPrompt, reconstruction_scores
from nearfar.modeling.model_identity import embedding_fingerprint, model_name, same_model
from nearfar.modeling.prunable_models import text_config
from nearfar.training.mapper_contexts import PairContext, ids_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MapperPairs", "PairSettings", "StoredContext", "compute_pairs", "stored_settings"]

logger = logging.getLogger(__name__)

_FORMAT = 1
# A shard is closed when it holds so many tokens, or after so many seconds: what an interruption costs at most.
SHARD_TOKENS, SHARD_SECONDS = 1 << 16, 300.0
# Takes a model and ids (1, n), gives features (layers, 1, channels, n).
Features = Callable[["PreTrainedModel", torch.Tensor], torch.Tensor]


# --- computing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairSettings:
    """What decides the numbers of a pair besides models and text; pairs of different settings are not mixed.

    Attributes:
        chunk_tokens: of the oracle, see `reconstruction_scores`.
        storage: dtype on disk. float16 takes half the room; sums beyond 65,504 (a sink's, in a very long context) are
            stored as that.
        proxy_states: "values" also stores the proxy's values, for mappers that read them (see
            `HybridAxialMapperConfig`). They take most of the room: a proxy like Llama-3.2-1B has 32 column sums and
            512 numbers in its values for each token and layer.

    Raises:
        ValueError: a value out of range.
    """

    chunk_tokens: int = 2000
    storage: Literal["float16", "float32"] = "float16"
    proxy_states: ProxyStates = "none"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if self.storage not in ("float16", "float32"):
            raise ValueError(f"storage must be 'float16' or 'float32', got {self.storage!r}")
        if self.proxy_states not in PROXY_STATES:
            raise ValueError(f"proxy_states must be one of {', '.join(PROXY_STATES)}, got {self.proxy_states!r}")

    def to_dict(self) -> dict[str, Any]:
        return {"chunk_tokens": self.chunk_tokens, "storage": self.storage, "proxy_states": self.proxy_states}


def compute_pairs(
    folder: str | Path,
    proxy: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contexts: Iterable[PairContext],
    settings: PairSettings | None = None,
    *,
    features: Features | None = None,
    seconds: float | None = None,
    progress: bool = True,
) -> int:
    """Compute what is missing of `contexts` in a folder of pairs; of several processes each does its share.

    Args:
        folder: made if it is missing.
        proxy, target: causal language models in evaluation mode, on any device, that share `tokenizer`.
        contexts: see `mixture_contexts`.
        features: computes X of one context; by default `attention_features.proxy_features` with the settings' states.
        seconds: begin no further context after so long; what is missing then is left to a later call.
        progress: show a progress bar.

    Returns:
        How many contexts this process computed.

    Raises:
        ValueError: the folder holds pairs of other models or settings; token ids that a model does not know; a context
            longer than a model was made for; scores that are not finite.
        TypeError, ValueError: a model whose attention is not supported.
    """
    folder, settings = Path(folder), settings or PairSettings()
    state = PartialState()
    header = _header(proxy, target, settings)
    done = {context["digest"] for index in _indexes(folder, header) for context in _listed(index)}
    state.wait_for_everyone()  # all have seen what is there before the first one adds to it
    prompt = RepeatPrompt.from_tokenizer(tokenizer)
    missing: dict[str, PairContext] = {}
    for context in contexts:
        digest = ids_digest(context.ids, prompt.prefix)
        if digest not in done:
            missing.setdefault(digest, context)
    _check_contexts(list(missing.values()), prompt, proxy, target, settings)
    if features is None:
        from nearfar.modeling.attention_features import proxy_features

        features = partial(proxy_features, states=settings.proxy_states)
    mine = list(missing.items())[state.process_index :: state.num_processes]
    writer = _ShardWriter(folder, state.process_index, header, settings)
    layers = HybridAxialMapperConfig(**header["mapper"]).scored_layers
    bar = tqdm(
        total=sum(len(context.ids) for _, context in mine),
        unit="token",
        unit_scale=True,
        desc="oracle pairs",
        disable=None if progress and state.is_main_process else True,
    )
    begin, computed = time.monotonic(), 0
    with bar, closing(writer):  # what is whole is kept, whatever ends the loop
        for digest, context in mine:
            if seconds is not None and time.monotonic() - begin >= seconds:
                break
            ids = [*prompt.prefix, *context.ids]
            inputs = torch.tensor([ids], device=proxy.get_input_embeddings().weight.device)
            with torch.no_grad():
                x = features(proxy, inputs)[:, 0]
            scores = reconstruction_scores(
                target, ids, prompt, prefix_length=len(prompt.prefix), chunk_tokens=settings.chunk_tokens
            ).scores
            y = torch.stack([scores[layer][0].cpu() for layer in layers])
            record = {
                "name": context.name,
                "digest": digest,
                "tokens": len(ids),
                "prefix_tokens": len(prompt.prefix),
                "sources": list(context.sources),
            }
            writer.add(record, x.cpu(), y)
            computed += 1
            bar.update(len(context.ids))
    state.wait_for_everyone()
    return computed


def _header(proxy: PreTrainedModel, target: PreTrainedModel, settings: PairSettings) -> dict[str, Any]:
    config = HybridAxialMapperConfig.for_models(text_config(proxy), text_config(target))
    mapper: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    for role, model in (("proxy", proxy), ("target", target)):
        mapper[f"{role}_fingerprint"] = embedding_fingerprint(model)
        mapper[f"{role}_name"] = model_name(model)
    return {"format": _FORMAT, "mapper": mapper, "settings": settings.to_dict()}


_SIZES = (
    "proxy_num_layers", "proxy_num_heads", "proxy_state_size", "target_num_layers", "target_num_heads",
    "target_layers", "proxy_model_type", "target_model_type",
)  # fmt: skip
# Of settings that folders of older releases do not name.
_UNNAMED = {"proxy_states": "none"}


def _check_contexts(
    contexts: Sequence[PairContext],
    prompt: RepeatPrompt,
    proxy: PreTrainedModel,
    target: PreTrainedModel,
    settings: PairSettings,
) -> None:
    if not contexts:
        return
    longest = max(contexts, key=lambda context: len(context.ids))
    highest = max(max(context.ids, default=0) for context in contexts)
    if min(len(context.ids) for context in contexts) < 1:
        raise ValueError("a context is empty")
    length = len(prompt.prefix) + len(longest.ids)
    request = max(len(prompt.first), len(prompt.later) + QUOTED_TOKENS) + len(prompt.suffix)
    for role, model, needed in (
        ("proxy", proxy, length),
        ("target", target, length + request + min(len(longest.ids), settings.chunk_tokens)),
    ):
        config = text_config(model)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if highest >= vocabulary:
            raise ValueError(
                f"the tokenizer gives id {highest} and the {role} knows {vocabulary} ids: proxy and target must share "
                "a tokenizer, as models of one family do"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and needed > limit:
            raise ValueError(
                f"{longest.name}, a context of {length} tokens, takes {needed} positions (with what the target is "
                f"asked to repeat) and the {role} was made for {limit}: use shorter contexts"
            )


class _ShardWriter:
    """Collects contexts and writes them as shards, each followed by the index that lists it."""

    def __init__(self, folder: Path, process: int, header: dict[str, Any], settings: PairSettings) -> None:
        self.folder, self.process, self.settings = folder, process, settings
        self.path = folder / f"index-{process}.json"
        self.index: dict[str, Any] = {**header, "shards": []}
        if self.path.is_file():
            self.index["shards"] = json.loads(self.path.read_text(encoding="utf-8"))["shards"]
        self._records: list[dict[str, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._tokens, self._since = 0, time.monotonic()

    def add(self, record: dict[str, Any], features: torch.Tensor, scores: torch.Tensor) -> None:
        mapper, tokens = self.index["mapper"], record["tokens"]
        channels = _channels(mapper, self.settings.proxy_states)
        expected = (
            ("features", features, (mapper["proxy_num_layers"], channels, tokens)),
            ("scores", scores, (len(mapper["target_layers"]), mapper["target_num_heads"], tokens)),
        )
        arrays = []
        for name, tensor, shape in expected:
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{record['name']}: {name} have shape {tuple(tensor.shape)}, expected {shape}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(
                    f"{record['name']}: the {name} hold NaN or infinity; use a wider dtype for the models"
                )
            dtype = np.dtype(self.settings.storage)
            limit = np.finfo(dtype).max
            arrays.append(tensor.numpy().clip(-limit, limit).astype(dtype))
        self._records.append({**record, "start": self._tokens})
        self._arrays.append((arrays[0], arrays[1]))
        self._tokens += tokens
        if self._tokens >= SHARD_TOKENS or time.monotonic() - self._since >= SHARD_SECONDS:
            self.close()

    def close(self) -> None:
        """Write what has been collected."""
        if self._records:
            name = f"shard-{self.process}-{len(self.index['shards']):05d}"
            for kind, arrays in zip(("features", "scores"), zip(*self._arrays, strict=True), strict=True):
                joined = np.concatenate(arrays, axis=-1)
                write_beside(self.folder / f"{name}.{kind}.npy", partial(_save_array, joined))
            self.index["shards"].append({"name": name, "tokens": self._tokens, "contexts": self._records})
            text = json.dumps(self.index, indent=1) + "\n"
            write_beside(self.path, lambda file: file.write_text(text, encoding="utf-8"))
        self._records, self._arrays, self._tokens, self._since = [], [], 0, time.monotonic()


def _channels(mapper: dict[str, Any], states: str) -> int:
    return token_channels(mapper["proxy_num_heads"], states, mapper.get("proxy_state_size"))


def _save_array(array: np.ndarray, path: Path) -> None:
    np.save(path, array)


# --- reading ---------------------------------------------------------------------------------------------------------


def _indexes(folder: Path, header: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """All indexes of a folder, which must agree with each other and with `header`.

    Raises:
        ValueError: damaged, of another format, or of other models or settings.
    """
    found = []
    for path in sorted(folder.glob("index-*.json")):
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            format_found = index["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of mapper pairs: {error}") from None
        if format_found != _FORMAT:
            raise ValueError(f"{path} is of format {format_found}, not {_FORMAT}: compute the pairs anew")
        header = header or index
        _check_same(path, index, header)
        found.append(index)
    return found


def stored_settings(folder: str | Path) -> PairSettings | None:
    """What the pairs of a folder were computed with, and more of them have to be; None where there are no pairs.

    Raises:
        ValueError: damaged or mixed indexes.
    """
    indexes = _indexes(Path(folder))
    if not indexes:
        return None
    found = {**_UNNAMED, **indexes[0]["settings"]}
    try:
        return PairSettings(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} lists pairs of unknown settings {found}: {error}") from None


def _states_of(settings: dict[str, Any]) -> ProxyStates:
    states: ProxyStates = settings.get("proxy_states", _UNNAMED["proxy_states"])
    return states


def _check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    remedy = "choose another folder, or delete that one"
    for name, value in {**_UNNAMED, **wanted["settings"]}.items():
        theirs = found["settings"].get(name, _UNNAMED.get(name))
        if theirs != value:
            raise ValueError(f"{path} lists pairs with {name}={theirs!r}, now it is {value!r}: {remedy}")
    mine, theirs = wanted["mapper"], {**dict.fromkeys(_SIZES), **found["mapper"]}
    mine = {**dict.fromkeys(_SIZES), **mine}
    for role in ("proxy", "target"):
        same_sizes = all(
            mine[name] == theirs[name] or (name == "proxy_state_size" and None in (mine[name], theirs[name]))
            for name in _SIZES
            if name.startswith(role)
        )
        same = same_model(mine[f"{role}_fingerprint"], theirs[f"{role}_fingerprint"])
        if not same_sizes or same is False:
            raise ValueError(
                f"{path} lists pairs of the {role} {theirs[f'{role}_name'] or theirs[f'{role}_model_type']}, which is "
                f"another model than {mine[f'{role}_name'] or mine[f'{role}_model_type']}: {remedy}"
            )


def _listed(index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for shard in index["shards"]:
        for context in shard["contexts"]:
            yield {**context, "shard": shard["name"]}


@dataclass(frozen=True)
class StoredContext:
    """Where one context lies: its tokens are `start … start + tokens` of a shard; the first `prefix_tokens` of them
    are no text and have no scores of their own. `sources`: see `PairContext`."""

    name: str
    digest: str
    tokens: int
    prefix_tokens: int
    shard: str
    start: int
    sources: tuple[str, ...] = ()


class MapperPairs:
    """A folder of pairs, mapped into memory.

    Contexts are in an order of their own, whatever order and however many processes computed them.

    Args:
        folder: written by `compute_pairs`.

    Attributes:
        contexts: what there is.
        mapper_fields: sizes and fingerprints of both models, as fields of `HybridAxialMapperConfig`.
        settings: see `PairSettings`.

    Raises:
        FileNotFoundError: no pairs there, or a shard's file is missing.
        ValueError: damaged or mixed files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        indexes = _indexes(self.folder)
        unique = {
            context["digest"]: StoredContext(**{**context, "sources": tuple(context.get("sources", ()))})
            for index in indexes
            for context in _listed(index)
        }
        if not unique:
            raise FileNotFoundError(f"{self.folder} holds no mapper pairs: compute them first (compute_pairs)")
        self.contexts = sorted(unique.values(), key=lambda context: (context.name, context.digest))
        unnamed = sum(not context.sources for context in self.contexts)
        if unnamed:
            logger.warning(
                "%s: %d of %d contexts do not say which texts they are made of (older releases left it out): of those "
                "that share text some may be trained on and others held out. Compute the pairs anew to prevent that.",
                self.folder, unnamed, len(self.contexts),
            )  # fmt: skip
        self.settings: dict[str, Any] = indexes[0]["settings"]
        self.mapper_fields: dict[str, Any] = {
            **indexes[0]["mapper"],
            "proxy_states": _states_of(self.settings),
        }
        self._arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._thresholds: dict[tuple[int, tuple[float, ...]], np.ndarray] = {}
        for shard in (shard for index in indexes for shard in index["shards"]):
            self._arrays[shard["name"]] = self._open(shard["name"], shard["tokens"])

    def _open(self, name: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        fields = self.mapper_fields
        shapes = {
            "features": (fields["proxy_num_layers"], self.channels, tokens),
            "scores": (len(fields["target_layers"]), fields["target_num_heads"], tokens),
        }
        arrays = []
        for kind, shape in shapes.items():
            path = self.folder / f"{name}.{kind}.npy"
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, though the index lists it")
            try:
                array = np.load(path, mmap_mode="r")
            except ValueError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
            if array.shape != shape:
                raise ValueError(f"{path} holds an array of shape {array.shape}, the index says {shape}")
            arrays.append(array)
        return arrays[0], arrays[1]

    def __len__(self) -> int:
        return len(self.contexts)

    def __repr__(self) -> str:
        tokens = sum(context.tokens for context in self.contexts)
        return f"MapperPairs({len(self):,} contexts, {tokens:,} tokens)"

    @property
    def digest(self) -> str:
        """Names the whole content: contexts, models and settings."""
        left_out = ("proxy_states", "proxy_name", "target_name")  # the settings name the first
        fields = {name: value for name, value in self.mapper_fields.items() if name not in left_out}
        contexts = [
            [context.digest, *context.sources] if context.sources else context.digest for context in self.contexts
        ]
        content = [contexts, fields, self.settings]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def channels(self) -> int:
        """Numbers of a token in a proxy layer: H_s column sums, then its values if they are stored."""
        return _channels(self.mapper_fields, self.mapper_fields["proxy_states"])

    def features(self, context: int) -> np.ndarray:
        """X of a context, `(L_s, H_s, tokens)`, or with values `(L_s, channels, tokens)`, as stored."""
        entry = self.contexts[context]
        return self._arrays[entry.shard][0][:, :, entry.start : entry.start + entry.tokens]

    def scores(self, context: int) -> np.ndarray:
        """Y of a context, `(scored target layers, H_l, tokens)`, as stored; 1 in the prefix."""
        entry = self.contexts[context]
        return self._arrays[entry.shard][1][:, :, entry.start : entry.start + entry.tokens]

    def thresholds(self, context: int, ratios: Sequence[float]) -> np.ndarray:
        """The score from which on the oracle keeps a pair, all layers and heads together, for each ratio; float32.

        The prefix is left out. Read once from disk, then remembered.
        """
        key = (context, tuple(ratios))
        if key not in self._thresholds:
            entry = self.contexts[context]
            scores = np.sort(self.scores(context)[:, :, entry.prefix_tokens :], axis=None)[::-1]
            places = [min(max(int(ratio * scores.size + 0.5), 1), scores.size) - 1 for ratio in ratios]
            self._thresholds[key] = scores[places].astype(np.float32)
        return self._thresholds[key]

    def split(self, share: float, seed: int = 0) -> tuple[list[int], list[int]]:
        """Contexts to train on and to validate on; which are which depends on their content and the seed.

        Contexts that share text, such as needles hidden in a passage that is also a context of its own, are on the
        same side.

        Raises:
            ValueError: a share out of (0, 1), a single context, or contexts that all share text.
        """
        if not 0 < share < 1:
            raise ValueError(f"the validation share must be between 0 and 1, got {share}")
        if len(self) < 2:
            raise ValueError(f"{self.folder} holds a single context: training and validation need one each")
        count = min(max(1, round(share * len(self))), len(self) - 1)

        def place(index: int) -> str:
            return hashlib.sha256(f"{seed}/{self.contexts[index].digest}".encode()).hexdigest()

        held_out: set[int] = set()
        groups = self._groups(sorted(range(len(self)), key=place))
        for group in groups:
            if len(held_out) + len(group) <= count:
                held_out.update(group)
        smallest = min(groups, key=len)
        held_out.update([] if held_out else smallest)
        if len(held_out) == len(self):
            raise ValueError(
                f"the {len(self)} contexts of {self.folder} are all made of the same text, which leaves none to "
                "validate on: compute more of other texts"
            )
        return [i for i in range(len(self)) if i not in held_out], sorted(held_out)

    def _groups(self, order: Sequence[int]) -> list[list[int]]:
        """The contexts in this order, those together that share text, directly or through others."""
        parent = {index: index for index in order}
        first: dict[str, int] = {}

        def root(index: int) -> int:
            while parent[index] != index:
                parent[index] = index = parent[parent[index]]
            return index

        for index in order:
            for source in self.contexts[index].sources:
                parent[root(index)] = root(first.setdefault(source, index))
        groups: dict[int, list[int]] = {}
        for index in order:
            groups.setdefault(root(index), []).append(index)
        return list(groups.values())
