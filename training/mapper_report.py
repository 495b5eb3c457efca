"""What came of a mapper's training: its log, figure and card, and the mass reconstruction on whole contexts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nearfar.configuration.configuration_axial_mapper import HybridAxialMapperConfig
from nearfar.evaluation.card_data import Metric, card_data
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
from nearfar.training.mapper_losses import mass_reconstruction
from nearfar.training.mapper_pairs import MapperPairs

__all__ = [
    "LOG_NAME",
    "PLOT_NAME",
    "context_mass_reconstruction",
    "model_card",
    "plot_mapper_training",
    "read_log",
]

LOG_NAME, PLOT_NAME = "training.jsonl", "training.png"


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log: `kind` "step" within an epoch, "epoch" after one (step 0: the untrained mapper)."""
    path = Path(folder) / LOG_NAME
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model_card(config: HybridAxialMapperConfig, seed: int, line: dict[str, Any]) -> str:
    """README.md of a trained mapper; `line` is the log's where its weights were measured."""
    mass = ", ".join(f"{value:.4f} at {ratio}" for ratio, value in line["mass_reconstruction"].items())
    metrics = [
        Metric("mass_reconstruction", value, "held-out contexts", f"mass reconstruction at {ratio}")
        for ratio, value in line["mass_reconstruction"].items()
    ]
    attention = "attention" if config.proxy_states == "none" else "attention and values"
    channels = "heads" if config.proxy_states == "none" else f"{config.layer_channels} channels"
    data = card_data("HybridAxialMapper", ["proxykv", "custom_code"], metrics, pipeline_tag="feature-extraction")
    return f"""---
{data.to_yaml()}
---

# HybridAxialMapper

Maps the {attention} of the proxy {config.proxy_name or config.proxy_model_type} ({config.proxy_num_layers} layers,
{config.proxy_num_heads} query heads) to the importance of key-value pairs of the target
{config.target_name or config.target_model_type} ({config.target_num_layers} layers, {config.target_num_heads}
key-value heads), as KVzip would score them.

- trained {line["step"]:,} steps, seed {seed}; validation loss {line["validation_loss"]:.4f}
- mass reconstruction on held-out contexts: {mass}

```python
from transformers import AutoModel

mapper = AutoModel.from_pretrained("this folder", trust_remote_code=True)
scores = mapper.predict(features)  # (proxy layers, {channels}, tokens) -> (target layers, key-value heads, tokens)
```
"""


@torch.no_grad()
def context_mass_reconstruction(
    mapper: HybridAxialMapper,
    pairs: MapperPairs,
    contexts: Sequence[int],
    ratios: Sequence[float] = (0.1, 0.3),
    *,
    scope: Literal["context", "head"] = "context",
) -> dict[str, dict[str, float]]:
    """Mass reconstruction as it is in use: whole contexts, one top-K over all layers and heads, the prefix left out.

    Args:
        mapper: in evaluation mode.
        contexts: indices into `pairs.contexts`.
        scope: "head" takes a top-K of each layer and head by itself, and the mean over them.

    Returns:
        For each ratio the "share" of the oracle's mass, and relative to the oracle's own top-K, means over contexts.
    """
    found: dict[str, dict[str, list[float]]] = {f"{ratio:g}": {"share": [], "relative": []} for ratio in ratios}
    device = mapper.device
    for context in contexts:
        prefix = pairs.contexts[context].prefix_tokens
        x = pairs.features(context)[:, : mapper.config.layer_channels]
        features = torch.from_numpy(np.array(x, np.float32)).to(device)
        target = torch.from_numpy(np.array(pairs.scores(context), np.float32)).to(device)
        scores = mapper.predict(features, return_logits=True)
        rows = 1 if scope == "context" else scores.shape[0] * scores.shape[1]
        scores, target = (tensor[:, :, prefix:].reshape(rows, -1) for tensor in (scores, target))
        for ratio in ratios:
            for name, relative in (("share", False), ("relative", True)):
                mass = mass_reconstruction(scores, target, ratio, relative=relative)
                found[f"{ratio:g}"][name].append(float(mass.mean()))
    return {ratio: {name: sum(v) / max(1, len(v)) for name, v in both.items()} for ratio, both in found.items()}


def plot_mapper_training(path: str | Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Loss and mass reconstruction along training as a PNG, like the paper's Figure 24; written beside, then renamed.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no epoch in the log.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing the training takes matplotlib: pip install 'nearfar[train]'") from error

    epochs = [line for line in lines if line["kind"] == "epoch"]
    if not epochs:
        raise ValueError("nothing to draw: the log has no epoch")
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    trained = [line for line in lines if line["kind"] == "step"]
    steps = [line["step"] for line in epochs]
    if trained:
        left.plot([line["step"] for line in trained], [line["loss"] for line in trained], "C3-", alpha=0.35,
                  label="training loss")  # fmt: skip
    left.plot(steps, [line["validation_loss"] for line in epochs], "C3o-", markersize=3, label="validation loss")
    for number, ratio in enumerate(epochs[0]["mass_reconstruction"]):
        values = [line["mass_reconstruction"][ratio] for line in epochs]
        right.plot(steps, values, f"C{(0, 2, 4, 5)[number % 4]}s-", markersize=3, label=f"mass, {ratio} kept")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    right.set_ylabel("mass reconstruction")
    right.set_ylim(0, 1)
    left.grid(alpha=0.3)
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return write_beside(path, lambda file: figure.savefig(file, dpi=150, format="png"))
