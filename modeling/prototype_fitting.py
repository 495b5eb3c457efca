"""Fitting of `KeyPrototypes`: statistics of a few contexts, then ridge regressions, k-means and a small network.

The recipe, whose constants were chosen by needle retrieval on SmolLM2-135M:

- ridge penalty 0.02 × tokens;
- "prototypes": the metric is the space of the ridge predictions of three targets a key-value head (z, log of the
  largest and of the total attention received while reading, the latter per query that could see the pair), each
  standardised; 256 centres by k-means; the centres' importances are solved for, not averaged over members;
- "mlp": ten epochs of AdamW.

Solved in float64; weights are rounded to half precision before the calibration, which therefore holds for what is
stored.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .kvzip_scores import QUOTED_TOKENS, RepeatPrompt, reconstruction_scores
from .model_identity import embedding_fingerprint, scored_layers
from .prototype_scoring import HEADS, PrototypesConfig, States, feature_matrix, raw_scorer
from .prunable_models import text_config
from .rotary import KeyRotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# What a configuration must tell for keys to be un-rotated.
ROTARY_FIELDS = (
    "rope_parameters",
    "layer_types",
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
)
RIDGE_PENALTY = 0.02
IMPORTANCE_FLOOR = 1e-6
BANDWIDTH = 0.1
PROTOTYPE_PENALTY = 1.0
KMEANS_ITERATIONS = 10
KMEANS_TOKENS = 20_000
MLP_EPOCHS, MLP_BATCH, MLP_LEARNING_RATE, MLP_WEIGHT_DECAY = 10, 256, 2e-3, 1e-2
# Spread that a feature is given at least, relative to its mean: a nearly constant one (the norm of a normalised key)
# carries rounding noise, which another dtype would multiply.
LEAST_RELATIVE_SPREAD = 1e-3
# First tokens that no head learns from: every cache keeps sinks anyway, and they look like nothing else.
SINK_TOKENS = 4
CHARACTERS_A_TOKEN = 16


@dataclass(frozen=True)
class FitSettings:
    """Arguments of `KeyPrototypes.fit`, which see."""

    heads: tuple[str, ...]
    contexts: int
    context_tokens: int
    chunk_tokens: int
    num_prototypes: int
    cosine_prototypes: int
    mlp_hidden: int
    seed: int

    def __post_init__(self) -> None:
        unknown = [head for head in self.heads if head not in HEADS]
        if unknown or not self.heads or len(set(self.heads)) != len(self.heads):
            raise ValueError(f"heads must be some of {', '.join(HEADS)}, each once, got {list(self.heads)}.")
        for name, value in asdict(self).items():
            if name not in ("heads", "seed") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")

    @property
    def tokens_needed(self) -> int:
        """Fewest tokens that a fit makes sense with."""
        return max(self.num_prototypes if "prototypes" in self.heads else 0, self.cosine_prototypes, 16)


@dataclass
class LayerStatistics:
    """What was seen of one layer's pairs, all contexts one after the other.

    Attributes:
        cached_keys, plain_keys: `(heads, tokens, head dim)`, with and without rotary embedding; plain keys are None
            when no head needs them.
        values: `(heads, tokens, value dim)`.
        positions: `(tokens,)`, int64.
        importance: `(tokens, heads)`, z.
        attention: `(tokens, 2 * heads)`, logarithms of the largest and of the total attention received, the latter per
            query that saw the pair and times the context's length; None when no head needs it.
    """

    cached_keys: torch.Tensor
    plain_keys: torch.Tensor | None
    values: torch.Tensor
    positions: torch.Tensor
    importance: torch.Tensor
    attention: torch.Tensor | None


def fit_prototypes(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    settings: FitSettings,
    *,
    model_name: str | None,
    progress: bool,
) -> tuple[PrototypesConfig, dict[str, torch.Tensor]]:
    """See `KeyPrototypes.fit`."""
    config = text_config(model)
    rotation = KeyRotation(config) if set(settings.heads) - {"cosine"} else None
    prompt = RepeatPrompt.from_tokenizer(tokenizer)
    contexts = cut_contexts(tokenizer, texts, settings)
    _check_lengths(config, prompt, contexts, settings)
    layers = scored_layers(config)
    with tqdm(total=len(contexts) + len(layers), disable=not progress, unit="step", desc="reading") as bar:
        pieces = [_read(model, [*prompt.prefix, *context], prompt, layers, settings, bar) for context in contexts]
        bar.set_description("fitting")
        shape = pieces[0][layers[0]]
        description = PrototypesConfig(
            model_type=config.model_type,
            model_name=model_name or _name_of(model),
            layers=layers,
            num_key_value_heads=shape.cached_keys.shape[0],
            head_dim=shape.cached_keys.shape[-1],
            value_dim=shape.values.shape[-1],
            heads=[head for head in HEADS if head in settings.heads],
            max_position=max(int(piece[layers[0]].positions.max()) for piece in pieces),
            num_prototypes=settings.num_prototypes,
            bandwidth=BANDWIDTH,
            mlp_hidden=settings.mlp_hidden,
            cosine_prototypes=settings.cosine_prototypes,
            rotary={name: getattr(config, name) for name in ROTARY_FIELDS if getattr(config, name, None) is not None},
            fingerprint=embedding_fingerprint(model),
        )
        device = model.get_input_embeddings().weight.device
        if device.type == "mps":  # has no float64
            device = torch.device("cpu")
        fitted, correlations = [], []
        for layer in layers:
            # Each layer's pieces are given up as it is fitted.
            statistics = _joined([piece.pop(layer) for piece in pieces], layer, rotation, device)
            tensors, correlation = fit_layer(statistics, description, settings)
            fitted.append(tensors)
            correlations.append(correlation)
            bar.update()
    tensors = {name: torch.stack([layer[name] for layer in fitted]) for name in fitted[0]}
    mean = {head: sum(c[head] for c in correlations) / len(layers) for head in description.heads}
    description.fit = {
        **asdict(settings),
        "heads": list(settings.heads),
        "contexts": len(contexts),
        "tokens": sum(len(context) for context in contexts),
        "dtype": str(model.dtype).removeprefix("torch."),
        "correlation_with_importance": {head: round(value, 4) for head, value in mean.items()},
        "versions": _versions("nearfar", "torch", "transformers"),
    }
    return description, tensors


# --- what is read ----------------------------------------------------------------------------------------------------


def cut_contexts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], settings: FitSettings) -> list[list[int]]:
    """At most `settings.contexts` pieces of `settings.context_tokens` tokens.

    The first piece of every long enough text comes first, then the second pieces, and so on; what is too short for a
    piece of its own is joined with blank lines between, in order.

    Raises:
        TypeError, ValueError: not a list of strings; too few tokens.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError("texts must be a list of strings, one a document.")
    size, count = settings.context_tokens, settings.contexts
    blank = list(tokenizer("\n\n", add_special_tokens=False).input_ids)
    rounds: list[list[list[int]]] = [[] for _ in range(count)]
    rest: list[int] = []
    for text in texts:
        text = text.strip()[: count * size * CHARACTERS_A_TOKEN]
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        whole = len(ids) // size
        for number in range(min(whole, count)):
            rounds[number].append(ids[number * size : (number + 1) * size])
        if whole == 0 and len(rest) < count * size:
            rest += [*(blank if rest else []), *ids]
    cut = [piece for pieces in rounds for piece in pieces]
    cut += [rest[start : start + size] for start in range(0, len(rest) - size + 1, size)]
    if not cut and len(rest) > 0:
        cut = [rest]
    cut = cut[:count]
    tokens = sum(len(piece) for piece in cut)
    least = settings.tokens_needed + len(cut) * SINK_TOKENS
    if tokens < least:
        raise ValueError(
            f"The texts give {tokens} tokens to fit on; at least {least} are needed, and several thousand are good: "
            "give more text."
        )
    if len(cut) < count:
        logger.warning("The texts give %d contexts of %d tokens, not %d: fitting on those.", len(cut), size, count)
    return cut


def _check_lengths(config: Any, prompt: RepeatPrompt, contexts: list[list[int]], settings: FitSettings) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    longest = max(len(context) for context in contexts)
    around = len(prompt.prefix) + max(len(prompt.first), len(prompt.later) + QUOTED_TOKENS) + len(prompt.suffix)
    if limit is not None and longest + min(longest, settings.chunk_tokens) + around > limit:
        raise ValueError(
            f"Reading and repeating {longest} tokens exceeds the model's {limit} positions: use context_tokens of at "
            f"most {max(1, (limit - around) // 2)}."
        )


def _read(
    model: "PreTrainedModel",
    ids: list[int],
    prompt: RepeatPrompt,
    layers: list[int],
    settings: FitSettings,
    bar: tqdm,
) -> dict[int, LayerStatistics]:
    """One context's statistics by layer, on the CPU; keys are not un-rotated yet."""
    found = reconstruction_scores(
        model,
        ids,
        prompt,
        prefix_length=len(prompt.prefix),
        chunk_tokens=settings.chunk_tokens,
        sink_tokens=SINK_TOKENS,
        prefill_statistics="prototypes" in settings.heads,
    )
    # The chat header's pairs are kept whatever their looks, and its scores are set rather than measured.
    chosen = slice(max(len(prompt.prefix), SINK_TOKENS), None)
    positions = torch.arange(len(ids))
    pieces = {}
    for layer in layers:
        states = found.cache.layers[layer]
        keys, values = states.keys[0, :, chosen].cpu(), states.values[0, :, chosen].cpu()
        scores = found.scores[layer][0, :, chosen].cpu()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (keys, values, scores)):
            raise ValueError(f"The model's keys, values or attention in layer {layer} are not finite: nothing to fit.")
        attention = None
        if found.attention_max:
            queries = (len(ids) - positions).double() / len(ids)
            mass = found.attention_mass[layer][0].double().cpu() / queries
            attention = torch.cat([found.attention_max[layer][0].double().cpu(), mass])[:, chosen]
            attention = attention.clamp_min(IMPORTANCE_FLOOR).log().T
        importance = scores.double().clamp_min(IMPORTANCE_FLOOR).log().T
        pieces[layer] = LayerStatistics(keys, None, values, positions[chosen], importance, attention)
    bar.update()
    return pieces


def _joined(
    pieces: list[LayerStatistics], layer: int, rotation: KeyRotation | None, device: torch.device
) -> LayerStatistics:
    """One layer's pieces one after the other, in float64 on `device`, keys un-rotated."""

    def join(name: str, dim: int) -> torch.Tensor:
        joined = torch.cat([getattr(piece, name) for piece in pieces], dim).to(device)
        return joined.double() if joined.is_floating_point() else joined

    keys, positions = join("cached_keys", 1), join("positions", 0)
    plain = None if rotation is None else rotation.unrotate(keys[None], positions[None], layer)[0]
    attention = None if pieces[0].attention is None else join("attention", 0)
    return LayerStatistics(keys, plain, join("values", 1), positions, join("importance", 0), attention)


# --- fitting one layer -----------------------------------------------------------------------------------------------


def fit_layer(
    statistics: LayerStatistics, config: PrototypesConfig, settings: FitSettings
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Parameters of one layer, named as in `PrototypesConfig.tensor_shapes` without the first dimension, on the CPU.

    Returns:
        The parameters; and for each head the correlation of its score with z on the fitting tokens, averaged over
        key-value heads.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    z = statistics.importance
    tensors: dict[str, torch.Tensor] = {}
    if statistics.plain_keys is not None:
        features = feature_matrix(statistics.plain_keys, statistics.values, statistics.positions, config.max_position)
        mean, spread = features.mean(0), features.std(0)
        scale = torch.maximum(spread, LEAST_RELATIVE_SPREAD * mean.abs()) + 1e-6
        tensors |= {"features.mean": mean.float(), "features.scale": scale.float()}
        # As stored, so that what follows sees what scoring will see.
        features = (features - tensors["features.mean"].double()) / tensors["features.scale"].double()
    if "linear" in config.heads:
        tensors |= {"linear.weight": _stored(ridge(features, z)), "linear.bias": z.mean(0).float()}
    if "prototypes" in config.heads:
        assert statistics.attention is not None
        targets = torch.cat([z, statistics.attention], dim=1)
        tensors |= _fit_prototype_head(features, z, targets, config, generator)
    if "mlp" in config.heads:
        tensors |= _fit_mlp(features.float(), z.float(), config.mlp_hidden, generator)
    if "cosine" in config.heads:
        unit = F.normalize(statistics.cached_keys, dim=-1)
        centres = kmeans(unit, config.cosine_prototypes, generator, spherical=True)
        tensors["cosine.centres"] = _stored(centres)
    correlations = {}
    for head in config.heads:
        calibration, correlations[head] = _calibrate(head, tensors, statistics, config)
        tensors |= calibration
    return {name: tensor.cpu() for name, tensor in tensors.items()}, correlations


def _stored(weight: torch.Tensor) -> torch.Tensor:
    """Half precision, in which matrices are kept."""
    return weight.half()


def ridge(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Ridge regression on standardised features `(tokens, features)`; the intercept is the targets' mean.

    Returns:
        `(features, targets)`.
    """
    gram = features.T @ features
    gram.diagonal().add_(RIDGE_PENALTY * len(features))
    return torch.linalg.solve(gram, features.T @ (targets - targets.mean(0)))


def _fit_prototype_head(
    features: torch.Tensor,
    z: torch.Tensor,
    targets: torch.Tensor,
    config: PrototypesConfig,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    projection = ridge(features, targets)
    projection = _stored(projection / ((features @ projection).std(0) + 1e-6))
    points = features @ projection.double()
    centres = _stored(kmeans(points[None], config.num_prototypes, generator)[0])
    tau = config.bandwidth * points.shape[1]
    nearness = prototype_nearness(points, centres.double(), tau)
    gram = nearness.T @ nearness
    gram.diagonal().add_(PROTOTYPE_PENALTY)
    importance = torch.linalg.solve(gram, nearness.T @ (z - z.mean(0)))
    return {
        "prototypes.projection": projection,
        "prototypes.centres": centres,
        "prototypes.importance": importance.float(),
        "prototypes.bias": z.mean(0).float(),
    }


def prototype_nearness(points: torch.Tensor, centres: torch.Tensor, tau: float) -> torch.Tensor:
    """`(tokens, centres)`: softmax of -|p - c|² / 2τ."""
    return (-torch.cdist(points, centres).square() / (2 * tau)).softmax(-1)


def kmeans(points: torch.Tensor, k: int, generator: torch.Generator, spherical: bool = False) -> torch.Tensor:
    """Lloyd's algorithm from k random points, for several groups of points at once.

    Args:
        points: `(groups, tokens, dims)`; at most `KMEANS_TOKENS` of them are used.
        k: centres a group.
        generator: on the CPU, so that the choice of points is the same on every device.
        spherical: points are unit vectors: assign by cosine, keep centres on the sphere.

    Returns:
        `(groups, k, dims)`. A centre that loses all its points stays where it is.
    """
    tokens = points.shape[1]
    if tokens > KMEANS_TOKENS:
        chosen = torch.randperm(tokens, generator=generator)[:KMEANS_TOKENS]
        points, tokens = points[:, chosen.to(points.device)], KMEANS_TOKENS
    centres = points[:, torch.randperm(tokens, generator=generator)[:k].to(points.device)]
    for _ in range(KMEANS_ITERATIONS):
        likeness = points @ centres.mT
        if not spherical:
            likeness -= 0.5 * centres.square().sum(-1)[:, None]
        # Sums as a product with the memberships: unlike scattered additions, the same on every run on a GPU.
        member = F.one_hot(likeness.argmax(-1), k).to(points.dtype)
        counts = member.sum(1)[..., None]
        means = (member.mT @ points) / counts.clamp_min(1)
        centres = torch.where(counts > 0, F.normalize(means, dim=-1) if spherical else means, centres)
    return centres


def _fit_mlp(
    features: torch.Tensor, z: torch.Tensor, hidden: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A two-layer network on standardised targets, in float32."""
    mean, spread = z.mean(0), z.std(0) + 1e-6
    targets = (z - mean) / spread
    tokens, width, heads, device = len(features), features.shape[1], z.shape[1], features.device

    def uniform(*shape: int, fan_in: int) -> torch.Tensor:
        values = (torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)
        return values.to(device).requires_grad_()

    parameters = [
        uniform(width, hidden, fan_in=width),
        uniform(hidden, fan_in=width),
        uniform(hidden, heads, fan_in=hidden),
        uniform(heads, fan_in=hidden),
    ]
    batch = min(MLP_BATCH, tokens)
    steps = tokens // batch
    optimizer = torch.optim.AdamW(parameters, lr=MLP_LEARNING_RATE, weight_decay=MLP_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, MLP_LEARNING_RATE, total_steps=MLP_EPOCHS * steps)
    with torch.enable_grad():
        for _ in range(MLP_EPOCHS):
            order = torch.randperm(tokens, generator=generator).to(device)
            for part in order[: steps * batch].view(steps, batch):
                weight_1, bias_1, weight_2, bias_2 = parameters
                predicted = F.gelu(features[part] @ weight_1 + bias_1) @ weight_2 + bias_2
                loss = F.mse_loss(predicted, targets[part])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    weight_1, bias_1, weight_2, bias_2 = (parameter.detach() for parameter in parameters)
    return {
        "mlp.weight_1": _stored(weight_1),
        "mlp.bias_1": bias_1,
        "mlp.weight_2": weight_2 * spread,
        "mlp.bias_2": bias_2 * spread + mean,
    }


def _calibrate(
    head: str, tensors: dict[str, torch.Tensor], statistics: LayerStatistics, config: PrototypesConfig
) -> tuple[dict[str, torch.Tensor], float]:
    """The scale and shift that give a head's score the mean and spread of z, and its correlation with z."""
    z, keys = statistics.importance, statistics.plain_keys
    if head == "cosine" or keys is None:
        keys = statistics.cached_keys
    # Layer and rotation do not matter: the keys are as the head wants them.
    states = States(keys[None], statistics.values[None], statistics.positions[None], rotation=None, layer_idx=0)
    scores = raw_scorer(head, tensors, config, z.device, torch.float64)(states)[0]
    spread = scores.std(0)
    # A score that does not vary tells nothing: every pair gets the head's mean.
    scale = torch.where(spread > 1e-9, z.std(0) / spread.clamp_min(1e-9), 0.0)
    calibration = {
        f"{head}.calibration_scale": scale.float(),
        f"{head}.calibration_shift": (z.mean(0) - scores.mean(0) * scale).float(),
    }
    aligned = ((scores - scores.mean(0)) * (z - z.mean(0))).mean(0)
    correlation = aligned / (scores.std(0) * z.std(0)).clamp_min(1e-12)
    return calibration, float(correlation.mean())


def _name_of(model: "PreTrainedModel") -> str:
    """What the model was loaded by; of a folder only its own name."""
    name = getattr(model.config, "_name_or_path", "") or model.config.model_type
    return Path(name).resolve().name if Path(name).is_dir() else str(name)


def _versions(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed (a checkout of this one may be used without)."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
