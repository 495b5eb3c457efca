"""The multi-granularity hybrid loss of ProxyKV (Section 4.2, Eq. 4 to 6), and the metric that goes with it.

All functions work on rows of scores, `(rows, elements)`: a row is what one top-K is taken from (one layer pair's heads
and tokens, or one head's tokens), and `valid` of the same shape is False at what is left out. Logits are the mapper's
output Ŷ, targets the oracle's scores Y >= 0. Nothing here waits for a GPU.

The rank losses average over pairs of elements. With `samples=None` all pairs are taken, which costs elements² and is
for tests and short rows; otherwise so many are drawn in each row, with replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "RATIOS",
    "MapperLoss",
    "boundary_rank_loss",
    "cosine_loss",
    "mass_reconstruction",
    "multi_ratio_loss",
    "top_masks",
    "value_weighted_mse",
    "within_top_rank_loss",
]

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
# Pairs whose scores differ by less than this share of the row's largest score are dropped.
LEAST_DIFFERENCE = 0.01


# --- top-K -----------------------------------------------------------------------------------------------------------


def top_masks(scores: Tensor, ratios: Sequence[float], valid: Tensor | None = None) -> Tensor:
    """Which elements of each row are among its K largest, K = ratio × valid elements, rounded, at least 1.

    Args:
        scores: `(rows, elements)`.
        ratios: retention ratios in (0, 1].
        valid: `(rows, elements)`, bool; None for all.

    Returns:
        `(ratios, rows, elements)`, bool; ties go to the earlier element.

    Raises:
        ValueError: a ratio out of range.
    """
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise ValueError(f"a retention ratio must be in (0, 1], got {ratio}")
    valid = _all_valid(scores, valid)
    order = scores.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    count = valid.sum(1)
    keep = [(count * ratio + 0.5).floor().clamp(min=1)[:, None] for ratio in ratios]
    return torch.stack([(rank < most) & valid for most in keep])


def _all_valid(scores: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    """Mean over what is kept; 0 where nothing is."""
    return torch.where(kept, values, 0).sum() / kept.sum().clamp(min=1)


# --- the terms -------------------------------------------------------------------------------------------------------


def multi_ratio_loss(
    logits: Tensor, masks: Tensor, ratios: Sequence[float] = RATIOS, valid: Tensor | None = None, gamma: float = 1.0
) -> Tensor:
    """L_bin of Eq. 4: Σ_r (r_min / r)^γ · BCE(σ(Ŷ), M*_r), each a mean over all valid elements.

    Args:
        logits: `(rows, elements)`.
        masks: `(ratios, rows, elements)`, what the oracle keeps at each ratio; see `top_masks`.
    """
    if len(masks) != len(ratios):
        raise ValueError(f"there are {len(ratios)} ratios and masks of {len(masks)}")
    valid = _all_valid(logits, valid)
    weights = [(min(ratios) / ratio) ** gamma for ratio in ratios]
    # BCE is softplus(Ŷ) − M·Ŷ: with one softplus for all ratios.
    labels = sum(weight * mask.to(logits.dtype) for weight, mask in zip(weights, masks, strict=True))
    return _mean(sum(weights) * F.softplus(logits) - labels * logits, valid)


def value_weighted_mse(
    logits: Tensor,
    target: Tensor,
    valid: Tensor | None = None,
    *,
    largest: Tensor | None = None,
    epsilon: float = 0.1,
    alpha: float = 1.5,
) -> Tensor:
    """L_mse of Eq. 4: mean of (Y + ε)^α · (σ(Ŷ) · s_max − Y)² over the valid elements.

    Args:
        largest: s_max, a scalar; by default the largest valid target of the batch.
    """
    valid = _all_valid(logits, valid)
    if largest is None:
        largest = target.masked_fill(~valid, 0).max()
    errors = (target + epsilon) ** alpha * (logits.sigmoid() * largest - target) ** 2
    return _mean(errors, valid)


def within_top_rank_loss(
    logits: Tensor,
    target: Tensor,
    top: Tensor,
    *,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """L_fine of Eq. 5: ln(1 + exp(−sgn(Y_i − Y_j)(Ŷ_i − Ŷ_j))) over pairs inside the oracle's top-K.

    Pairs weigh |Y_i − Y_j|, relative to its mean over the row's pairs. The mean over rows that have a pair.

    Args:
        top: `(rows, elements)`, bool, the top-K.
    """
    first, second, kept = _pairs(top, top, samples, generator)
    differences = target.gather(1, first) - target.gather(1, second)
    kept = kept & (differences.abs() >= _least_difference(target, top)) & (differences != 0)
    margins = differences.sign() * (logits.gather(1, first) - logits.gather(1, second))
    weights = torch.where(kept, differences.abs(), 0)
    total = weights.sum(1)
    losses = (weights * F.softplus(-margins)).sum(1) / torch.where(total > 0, total, 1)
    return _mean(losses, total > 0)


def boundary_rank_loss(
    logits: Tensor,
    target: Tensor,
    top: Tensor,
    valid: Tensor | None = None,
    *,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    margin: float = 1.0,
) -> Tensor:
    """L_global of Eq. 6: w_ij · [1 − (Ŷ_i − Ŷ_j)]_+ over pairs of one inside the top-K and one outside.

    w_ij = clip(1 + |y_i − y_j|, 1, 5) with the row's scores scaled to 0 … 1. The mean over rows that have a pair.

    Args:
        top: `(rows, elements)`, bool, the top-K, all of it valid.
    """
    valid = _all_valid(logits, valid)
    first, second, kept = _pairs(top, valid & ~top, samples, generator)
    differences = target.gather(1, first) - target.gather(1, second)
    kept = kept & (differences.abs() >= _least_difference(target, valid))
    lowest = target.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    highest = target.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    spread = highest - lowest
    weights = (1 + differences.abs() / torch.where(spread > 0, spread, 1)).clamp(1, 5)
    short = (margin - (logits.gather(1, first) - logits.gather(1, second))).clamp(min=0)
    count = kept.sum(1)
    losses = torch.where(kept, weights * short, 0).sum(1) / count.clamp(min=1)
    return _mean(losses, count > 0)


def cosine_loss(logits: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """L_cos of Eq. 5: 1 − Ŷ·Y / (‖Ŷ‖ ‖Y‖) of each row, with Ŷ the logits as the equation has it; the mean over rows.

    Rows whose target is 0 everywhere are left out.
    """
    valid = _all_valid(logits, valid)
    predicted, wanted = torch.where(valid, logits, 0), torch.where(valid, target, 0)
    size = wanted.norm(dim=1)
    norms = (predicted.square().sum(1) + 1e-24).sqrt() * torch.where(size > 0, size, 1)
    return _mean(1 - (predicted * wanted).sum(1) / norms, size > 0)


def _least_difference(target: Tensor, among: Tensor) -> Tensor:
    return LEAST_DIFFERENCE * target.masked_fill(~among, 0).amax(1, keepdim=True)


def _pairs(
    first: Tensor, second: Tensor, samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of one element of `first` and one of `second`, masks `(rows, elements)`.

    Returns:
        Two indices into the elements and whether the pair counts, each `(rows, pairs)`.
    """
    rows, elements = first.shape
    if samples is None:
        i, j = (index.flatten() for index in torch.meshgrid(*2 * [_places(first)], indexing="ij"))
        i, j = i.expand(rows, -1), j.expand(rows, -1)
        return i, j, first.gather(1, i) & second.gather(1, j)
    chosen = []
    kept = torch.ones(rows, 1, dtype=torch.bool, device=first.device)
    for mask in (first, second):
        order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)  # the mask's elements first
        count = mask.sum(1, keepdim=True)
        draw = torch.rand(rows, samples, device=mask.device, generator=generator)
        chosen.append(order.gather(1, (draw * count).long().clamp(max=elements - 1)))
        kept = kept & (count > 0)
    return chosen[0], chosen[1], kept.expand(-1, samples)


def _places(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[1], device=rows.device)


# --- the sum ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapperLoss:
    """The weighted sum of the five terms. Defaults are the paper's (Section 4.2, Appendix F) where it gives them.

    Attributes:
        binary, mse, fine, boundary, cosine: λ of each term; 0 leaves it out.
        ratios, gamma: of the binary term.
        rank_ratio: the K of both rank losses; the paper names none.
        samples: pairs drawn for each row in both rank losses, None for all.
        scope: what a top-K is taken over: one layer's heads and tokens together ("layer"), each head's tokens
            ("head"), or all layers, heads and tokens of the context ("context"), which needs thresholds.

    Raises:
        ValueError: a value out of range.
    """

    binary: float = 10.0
    mse: float = 20.0
    fine: float = 3.0
    boundary: float = 2.0
    cosine: float = 0.5
    ratios: tuple[float, ...] = RATIOS
    gamma: float = 1.0
    rank_ratio: float = 0.2
    samples: int | None = 4096
    scope: Literal["layer", "head", "context"] = "layer"

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("binary", "mse", "fine", "boundary", "cosine")}
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"the weight {name} must be 0 or more, got {weight}")
        if not any(weights.values()):
            raise ValueError("all weights of the loss are 0")
        for ratio in (*self.ratios, self.rank_ratio):
            if not 0 < ratio <= 1:
                raise ValueError(f"a retention ratio must be in (0, 1], got {ratio}")
        if not self.ratios:
            raise ValueError("ratios is empty")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.scope not in ("layer", "head", "context"):
            raise ValueError(f"scope must be 'layer', 'head' or 'context', got {self.scope!r}")

    @property
    def threshold_ratios(self) -> tuple[float, ...]:
        """The ratios of which `thresholds` holds a column each: those of the binary term, then that of the ranks."""
        return (*self.ratios, self.rank_ratio)

    def to_dict(self) -> dict[str, object]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        *,
        thresholds: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch of layer pairs.

        Args:
            logits: `(rows, H_l, tokens)`, the mapper's output.
            target: the same shape, the oracle's scores.
            valid: `(rows, tokens)`, False at tokens that are not learned from; None for all.
            thresholds: `(rows, len(threshold_ratios))`, for the scope "context": the score from which on the oracle
                keeps a pair of the row's context, for each of `threshold_ratios`.
            generator: of the pairs that are drawn.

        Returns:
            The sum, and each term without its weight, detached.

        Raises:
            ValueError: shapes that do not match, or thresholds missing.
        """
        if logits.shape != target.shape or logits.ndim != 3:
            raise ValueError(
                f"logits and target must be (rows, heads, tokens), got {tuple(logits.shape)} and {tuple(target.shape)}"
            )
        rows, heads, tokens = logits.shape
        kept = torch.ones(rows, tokens, dtype=torch.bool, device=logits.device) if valid is None else valid.bool()
        per_row = rows * heads if self.scope == "head" else rows
        kept = kept[:, None].expand(rows, heads, tokens).reshape(per_row, -1)
        # Ranks and small differences need more than half precision.
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits, target = (tensor.to(wide).reshape(per_row, -1) for tensor in (logits, target))
        if self.scope == "context":
            if thresholds is None or thresholds.shape != (rows, len(self.threshold_ratios)):
                raise ValueError(
                    f"the scope 'context' needs thresholds of shape {(rows, len(self.threshold_ratios))}, got "
                    f"{None if thresholds is None else tuple(thresholds.shape)}"
                )
            masks = (target >= thresholds.to(wide).mT[..., None]) & kept
        else:
            masks = top_masks(target, self.threshold_ratios, kept)
        top = masks[-1]
        terms: dict[str, Tensor] = {}
        if self.binary:
            terms["binary"] = multi_ratio_loss(logits, masks[:-1], self.ratios, kept, self.gamma)
        if self.mse:
            terms["mse"] = value_weighted_mse(logits, target, kept)
        if self.fine:
            terms["fine"] = within_top_rank_loss(logits, target, top, samples=self.samples, generator=generator)
        if self.boundary:
            terms["boundary"] = boundary_rank_loss(
                logits, target, top, kept, samples=self.samples, generator=generator
            )
        if self.cosine:
            terms["cosine"] = cosine_loss(logits, target, kept)
        total = torch.stack([getattr(self, name) * term for name, term in terms.items()]).sum()
        return total, {name: term.detach() for name, term in terms.items()}


# --- the metric ------------------------------------------------------------------------------------------------------


def mass_reconstruction(
    scores: Tensor, target: Tensor, ratio: float, valid: Tensor | None = None, *, relative: bool = False
) -> Tensor:
    """Share of the oracle's mass that the predicted top-K captures.

    Args:
        scores: `(rows, elements)`, predictions; only their order matters.
        target: the same shape, the oracle's scores.
        ratio: retention ratio, K as in `top_masks`.
        valid: as there.
        relative: divide by what the oracle's own top-K captures, so that 1 is the best there is.

    Returns:
        `(rows,)`, in [0, 1]; 1 where the target is 0 everywhere.
    """
    valid = _all_valid(scores, valid)
    target = torch.where(valid, target, 0)
    (chosen,) = top_masks(scores, (ratio,), valid)
    found = torch.where(chosen, target, 0).sum(1)
    best = torch.where(top_masks(target, (ratio,), valid)[0], target, 0).sum(1) if relative else target.sum(1)
    return torch.where(best > 0, found / torch.where(best > 0, best, 1), 1)
