"""The scoring heads of `KeyPrototypes`: what they look at, and their formulas.

Features of a token in one layer (x, standardised over the fitting tokens):
    pre-RoPE keys and values of all key-value heads, the logarithm of each one's norm, log(1 + position)
Target, for each key-value head:
    z = log(max(KVzip score, 1e-6))

- "linear": s = W x + b, by ridge regression.
- "prototypes": s = softmax(-|p - c|² / 2τ) w + b, with 256 centres c in the space p = P x of the directions in which
  z varies, and so do the largest and the total attention that a pair receives while it is read.
- "mlp": s = W₂ gelu(W₁ x + b₁) + b₂, with 128 hidden units.
- "cosine": s = max over c of cos(key, c), with 16 centres c of a head's cached (post-RoPE) keys. The score of the
  Proactive Cache paper; it knows where keys lie, not which of them matter.

Each head's s is then scaled and shifted to the mean and spread of z on the fitting tokens, so that one threshold over
all layers and heads makes sense.

Scoring a layer's n tokens costs n multiplications by a matrix of (features × key-value heads) for "linear", features ×
3 key-value heads plus 256 × 4 key-value heads for "prototypes", features × 128 for "mlp", 16 products a key for
"cosine".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from .prototype_kernel import fused_features, fused_features_available
from .rotary import KeyRotation

HEADS = ("linear", "prototypes", "mlp", "cosine")
FORMAT = "nearfar-prototypes-1"


@dataclass
class PrototypesConfig:
    """What a set of fitted prototypes is; the content of `prototypes_config.json`.

    Attributes:
        model_type, model_name: of the model it was fitted on.
        layers: the layers that are scored, ascending.
        num_key_value_heads, head_dim, value_dim: shape of a layer's states.
        heads: the fitted heads.
        max_position: largest position seen when fitting; later ones count as this one.
        num_prototypes, bandwidth: of the "prototypes" head; τ = bandwidth × 3 × num_key_value_heads.
        mlp_hidden: hidden units of the "mlp" head.
        cosine_prototypes: centres a key-value head of the "cosine" head.
        rotary: the fields of the model's configuration that say how keys are rotated.
        fingerprint: a sample of the model's input embedding; empty when it had none to look at.
        fit: how it was fitted, for the record.
    """

    model_type: str
    model_name: str
    layers: list[int]
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    heads: list[str]
    max_position: int
    num_prototypes: int = 256
    bandwidth: float = 0.1
    mlp_hidden: int = 128
    cosine_prototypes: int = 16
    rotary: dict[str, Any] = field(default_factory=dict)
    fingerprint: list[list[float]] = field(default_factory=list)
    fit: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def num_features(self) -> int:
        return self.num_key_value_heads * (self.head_dim + self.value_dim + 2) + 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the fitted heads; the first dimension counts the scored layers."""
        layers, heads, features = len(self.layers), self.num_key_value_heads, self.num_features
        shapes: dict[str, tuple[int, ...]] = {}
        if set(self.heads) - {"cosine"}:
            shapes |= {"features.mean": (layers, features), "features.scale": (layers, features)}
        if "linear" in self.heads:
            shapes |= {"linear.weight": (layers, features, heads), "linear.bias": (layers, heads)}
        if "prototypes" in self.heads:
            width = 3 * heads
            shapes |= {
                "prototypes.projection": (layers, features, width),
                "prototypes.centres": (layers, self.num_prototypes, width),
                "prototypes.importance": (layers, self.num_prototypes, heads),
                "prototypes.bias": (layers, heads),
            }
        if "mlp" in self.heads:
            shapes |= {
                "mlp.weight_1": (layers, features, self.mlp_hidden),
                "mlp.bias_1": (layers, self.mlp_hidden),
                "mlp.weight_2": (layers, self.mlp_hidden, heads),
                "mlp.bias_2": (layers, heads),
            }
        if "cosine" in self.heads:
            shapes["cosine.centres"] = (layers, heads, self.cosine_prototypes, self.head_dim)
        for head in self.heads:
            shapes |= {f"{head}.calibration_scale": (layers, heads), f"{head}.calibration_shift": (layers, heads)}
        return shapes


def feature_matrix(
    keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, max_position: int
) -> torch.Tensor:
    """Features before standardisation, written out; scoring never builds this matrix (see `FeatureMap`).

    Args:
        keys: `(heads, n, head dim)`, before rotary embedding.
        values: `(heads, n, value dim)`.
        positions: `(n,)`.
        max_position: later positions count as this one.

    Returns:
        `(n, features)`: keys head by head, values head by head, log norms of keys, of values, log(1 + position).
    """
    place = positions.clamp(0, max_position).to(keys.dtype).log1p()
    return torch.cat(
        [
            keys.transpose(0, 1).flatten(1),
            values.transpose(0, 1).flatten(1),
            _log_norm(keys).T,
            _log_norm(values).T,
            place[:, None],
        ],
        dim=1,
    )


def _log_norm(states: torch.Tensor) -> torch.Tensor:
    # The floor is for the states of a model that puts out exact zeros.
    return torch.linalg.vector_norm(states, dim=-1).clamp_min(1e-18).log()


@dataclass(frozen=True)
class States:
    """A layer's keys and values, and what it takes to un-rotate the keys.

    Attributes:
        keys: `(batch, heads, n, head dim)`.
        values: `(batch, heads, n, value dim)`.
        positions: `(batch or 1, n)`.
        rotation: how the keys were rotated, None when they are not rotated.
        layer_idx: the layer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    rotation: KeyRotation | None
    layer_idx: int

    def part(self, tokens: slice) -> "States":
        """Some of the tokens."""
        positions = self.positions[:, tokens]
        return States(self.keys[:, :, tokens], self.values[:, :, tokens], positions, self.rotation, self.layer_idx)


class FeatureMap:
    """A linear map of the standardised features, with the standardisation folded into it.

    Equal to `(feature_matrix(…) - mean) / scale @ weight + bias`, without building the matrix.

    Args:
        mean, scale: `(features,)`.
        weight: `(features, outputs)`, of standardised features.
        bias: `(outputs,)`.
        config: the states' shape.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        config: PrototypesConfig,
    ) -> None:
        heads, dims = config.num_key_value_heads, (config.head_dim, config.value_dim)
        folded = weight.double() / scale.double()[:, None]
        self.bias = bias.double() - mean.double() @ folded
        # Transposed: products of few rows with many tokens are several times faster than of few columns.
        parts = folded.T.split([heads * dims[0], heads * dims[1], heads, heads, 1], dim=1)
        self.keys, self.values, self.key_norms, self.value_norms, position = (part.contiguous() for part in parts)
        self.position = position[:, 0]
        self.max_position = config.max_position

    def to(self, device: torch.device, dtype: torch.dtype) -> "FeatureMap":
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device, dtype))
        return self

    def __call__(self, states: States) -> torch.Tensor:
        """`(batch, n, outputs)`, in the map's dtype."""
        keys, values, positions, rotation = states.keys, states.values, states.positions, states.rotation
        if rotation is not None and fused_features_available(keys, values, len(self.bias)):
            frequencies, scaling = rotation.frequencies(states.layer_idx, keys.device)
            return fused_features(self, keys, values, positions, frequencies, scaling)
        if rotation is not None:
            keys = rotation.unrotate(keys, positions, states.layer_idx)
        keys, values = keys.to(self.bias.dtype), values.to(self.bias.dtype)
        place = positions.clamp(0, self.max_position).to(keys.dtype).log1p()
        out = F.linear(keys.transpose(1, 2).flatten(2), self.keys, self.bias)
        out += F.linear(values.transpose(1, 2).flatten(2), self.values)
        out += F.linear(_log_norm(keys).transpose(1, 2), self.key_norms)
        out += F.linear(_log_norm(values).transpose(1, 2), self.value_norms)
        return out.addcmul_(place[..., None], self.position)


# A head's score of one layer, `(batch, n, heads)`.
Scorer = Callable[[States], torch.Tensor]


def calibrated_scorer(
    head: str,
    layer: dict[str, torch.Tensor],
    config: PrototypesConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Scorer:
    """`raw_scorer` followed by the calibration."""
    raw = raw_scorer(head, layer, config, device, dtype)
    scale = layer[f"{head}.calibration_scale"].to(device, dtype)
    shift = layer[f"{head}.calibration_shift"].to(device, dtype)
    return lambda states: torch.addcmul(shift, raw(states), scale)


def raw_scorer(
    head: str,
    layer: dict[str, torch.Tensor],
    config: PrototypesConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Scorer:
    """A head's score s of one layer before calibration.

    Args:
        head: one of `HEADS`.
        layer: the head's tensors of this layer, and the features' mean and scale.
        config: shapes and constants.
        device, dtype: where and in what to compute.
    """

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype)

    if head == "cosine":
        centres = put(F.normalize(layer["cosine.centres"].double(), dim=-1)).mT

        def cosine(states: States) -> torch.Tensor:
            keys = states.keys.to(dtype)
            norms = torch.linalg.vector_norm(keys, dim=-1).clamp_min(1e-18)
            return ((keys @ centres).amax(-1) / norms).transpose(1, 2)

        return cosine

    def features(weight: torch.Tensor, bias: torch.Tensor) -> FeatureMap:
        return FeatureMap(layer["features.mean"], layer["features.scale"], weight, bias, config).to(device, dtype)

    if head == "linear":
        return features(layer["linear.weight"], layer["linear.bias"])

    if head == "prototypes":
        projection = layer["prototypes.projection"]
        project = features(projection, projection.new_zeros(projection.shape[1], dtype=torch.float64))
        # -|p - c|² / 2τ up to a term that all centres share, which a softmax does not see.
        exact, tau = layer["prototypes.centres"].double(), config.bandwidth * projection.shape[1]
        directions, offsets = put(exact / tau), put(-exact.square().sum(-1) / (2 * tau))
        importance, bias = put(layer["prototypes.importance"].T.contiguous()), put(layer["prototypes.bias"])

        def prototypes(states: States) -> torch.Tensor:
            nearness = F.linear(project(states), directions, offsets).softmax(-1)
            return F.linear(nearness, importance, bias)

        return prototypes

    hidden = features(layer["mlp.weight_1"], layer["mlp.bias_1"])
    weight, bias_2 = put(layer["mlp.weight_2"].T.contiguous()), put(layer["mlp.bias_2"])
    return lambda states: F.linear(F.gelu(hidden(states)), weight, bias_2)
