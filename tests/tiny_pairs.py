"""A folder of pairs whose scores can be learned from their features, and sizes of a mapper for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from nearfar.training.mapper_pairs import MapperPairs

FIELDS = {
    "proxy_num_layers": 2, "proxy_num_heads": 4, "target_num_layers": 4, "target_num_heads": 2,
    "target_layers": [0, 1, 2, 3], "proxy_model_type": "llama", "target_model_type": "llama",
    "proxy_fingerprint": [], "target_fingerprint": [], "proxy_name": None, "target_name": "large",
}  # fmt: skip
# Of a mapper.
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "dropout": 0.1,
    "window_tokens": 32, "window_stride": 16,
}  # fmt: skip


def write_pairs(folder: Path, lengths: list[int], seed: int = 0) -> MapperPairs:
    """Pairs whose scores follow from the features of the paired proxy layer and its neighbours in time.

    Target head h of a layer is a peaky function of proxy heads h and h + 2 at the token and the one before.
    """
    rng = np.random.default_rng(seed)
    records, xs, ys, start = [], [], [], 0
    for number, tokens in enumerate(lengths):
        x = rng.exponential(1.0, (2, 4, tokens)).astype(np.float32)
        y = np.empty((4, 2, tokens), np.float32)
        for layer in range(4):
            source = x[layer // 2]
            for head in range(2):
                signal = source[head] - 0.7 * source[head + 2] + 0.8 * np.pad(source[head], (1, 0))[:-1]
                y[layer, head] = 1 / (1 + np.exp(-4 * (signal - 2.5)))
        y[:, :, :3] = 1.0  # the prefix
        records.append(
            {
                "name": f"c{number}",
                "digest": f"{seed}-{number:03d}",
                "tokens": tokens,
                "prefix_tokens": 3,
                "start": start,
            }
        )
        xs.append(x)
        ys.append(y)
        start += tokens
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "shard-0-00000.features.npy", np.concatenate(xs, -1))
    np.save(folder / "shard-0-00000.scores.npy", np.concatenate(ys, -1))
    shard = {"name": "shard-0-00000", "tokens": start, "contexts": records}
    settings = {"chunk_tokens": 2000, "storage": "float32"}
    index = {"format": 1, "mapper": FIELDS, "settings": settings, "shards": [shard]}
    (folder / "index-0.json").write_text(json.dumps(index))
    return MapperPairs(folder)


def add_states(folder: Path) -> MapperPairs:
    """The pairs of `write_pairs` with states of 3 numbers, which mean nothing."""
    (path,) = folder.glob("index-*.json")
    index = json.loads(path.read_text())
    index["settings"]["proxy_states"], index["mapper"]["proxy_state_size"] = "values", 3
    path.write_text(json.dumps(index))
    (file,) = folder.glob("*.features.npy")
    x = np.load(file)
    noise = np.random.default_rng(1).normal(size=(2, 3, x.shape[-1])).astype(x.dtype)
    np.save(file, np.concatenate([x, noise], 1))
    return MapperPairs(folder)
