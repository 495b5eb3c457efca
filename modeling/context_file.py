"""A compressed context as one safetensors file.

Only kept pairs are written, heads one after the other without spare places; a JSON entry in the file's metadata says
what they are. See `PrunedCache.save_context` and `load_context`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .atomic_file import write_beside
from .ragged_layer import RaggedLayer
from .ragged_store import Pending, RaggedStore

if TYPE_CHECKING:
    from .pruned_cache import PrunedCache

FORMAT = "nearfar-context-1"


def write_context(path: Path, cache: "PrunedCache") -> None:
    """Write `cache` to `path`, beside and then renamed."""
    tensors: dict[str, torch.Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        prefix = f"layers.{index}."
        if not isinstance(layer, RaggedLayer):
            tensors[prefix + "keys"], tensors[prefix + "values"] = layer.keys, layer.values
            layers.append({"kind": "sliding", "seen": layer.get_seq_length()})
            continue
        with layer.awake():
            compact = layer.store.clone()
        compact.keep(compact.filled(), spare=0)
        pairs = compact.pairs
        for name in ("keys", "values", "columns"):
            tensors[prefix + name] = getattr(pairs, name)
        tensors[prefix + "lengths"], tensors[prefix + "scores"] = pairs.host_lengths, compact.scores
        tensors[prefix + "places"] = compact.places
        for number, piece in enumerate(compact.pending):
            tensors[f"{prefix}pending.{number}.positions"] = piece.positions
            if piece.valid is not None:
                tensors[f"{prefix}pending.{number}.valid"] = piece.valid
        for name, tensor in layer.extra.items():
            tensors[f"{prefix}extra.{name}"] = tensor.clone()  # layers may share it, which the file cannot
        layers.append(
            {
                "kind": "ragged",
                "batch": compact.batch,
                "heads": compact.heads,
                "seen": layer.seen,
                "evicted": layer.evicted,
                "real_tokens": compact.real_tokens,
                "pending": len(compact.pending),
                "extra": sorted(layer.extra),
            }
        )
    description = {
        "format": FORMAT,
        "policy": type(cache).__name__,
        "settings": cache.settings(),
        "row_budgets": cache.row_budgets,
        "model": _shape_of(cache.config),
        "layers": layers,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_beside(path, lambda file: save_file(tensors, file, metadata={"nearfar": json.dumps(description)}))


def read_context(
    path: Path, policy: type["PrunedCache"], model_or_config: Any, options: dict[str, Any]
) -> "PrunedCache":
    """A `policy` cache holding the contents of `path`; see `PrunedCache.load_context`."""
    if not path.is_file():
        raise FileNotFoundError(f"No saved context at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {}).get("nearfar", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    if description.get("format") != FORMAT:
        raise ValueError(f"{path} is not a context saved by nearfar (format {description.get('format')!r}).")
    if description["policy"] != policy.__name__:
        raise ValueError(
            f"{path} was saved by {description['policy']}; load it with that class, not {policy.__name__}."
        )
    settings = {**description["settings"], **options}
    for given, other in (("budget", "retention_ratio"), ("retention_ratio", "budget")):
        if options.get(given) is not None and other not in options:
            settings[other] = None
    cache = policy(model_or_config, **settings)
    expected, found = _shape_of(cache.config), description["model"]
    if expected != found:
        raise ValueError(f"{path} belongs to a model of shape {found}, this one has {expected}.")
    device = getattr(model_or_config, "device", torch.device("cpu"))
    for index, (layer, saved) in enumerate(zip(cache.layers, description["layers"], strict=True)):
        prefix = f"layers.{index}."
        mine = {name[len(prefix) :]: t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
        if saved["kind"] == "sliding":
            layer.lazy_initialization(mine["keys"], mine["values"])
            layer.keys, layer.values, layer.cumulative_length = mine["keys"], mine["values"], saved["seen"]
            continue
        layer.store = _store_from(mine, saved)
        layer.seen, layer.evicted, layer.device = saved["seen"], saved["evicted"], layer.store.scores.device
        layer.extra = {name: mine[f"extra.{name}"] for name in saved["extra"]}
        layer.is_initialized = True
        layer.rest()
    cache.restore_budgets(None if {"budget", "retention_ratio"} & set(options) else description["row_budgets"])
    return cache


def _store_from(tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> RaggedStore:
    keys, values = tensors["keys"], tensors["values"]
    store = RaggedStore.empty(saved["batch"], saved["heads"], keys, values)
    host_lengths = tensors["lengths"].cpu().clone()
    starts = (host_lengths.cumsum(0) - host_lengths).to(keys.device)
    store.pairs.keys, store.pairs.values, store.pairs.columns = keys, values, tensors["columns"]
    store.pairs.starts, store.pairs.lengths = starts, tensors["lengths"]
    store.pairs.host_lengths, store.capacities = host_lengths, host_lengths.clone()
    store.scores, store.places, store.real_tokens = tensors["scores"], tensors["places"], list(saved["real_tokens"])
    store.pending = [
        Pending(tensors[f"pending.{i}.positions"], tensors.get(f"pending.{i}.valid")) for i in range(saved["pending"])
    ]
    return store


def _shape_of(config: Any) -> dict[str, Any]:
    names = (
        "model_type",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "head_dim",
    )
    return {name: getattr(config, name, None) for name in names}
