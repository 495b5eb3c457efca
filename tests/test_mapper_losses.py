"""Each term of the mapper's loss against its equation written as plain loops, and its gradient against differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nearfar.training.mapper_losses import (
    RATIOS,
    MapperLoss,
    boundary_rank_loss,
    cosine_loss,
    mass_reconstruction,
    multi_ratio_loss,
    top_masks,
    value_weighted_mse,
    within_top_rank_loss,
)

ROWS, ELEMENTS = 3, 14


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, long-tailed targets with near ties, and a mask."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, ELEMENTS, generator=generator, dtype=torch.float64)
    target = torch.rand(ROWS, ELEMENTS, generator=generator, dtype=torch.float64) ** 3
    target[0, 3] = target[0, 8]  # a tie
    target[1, 2] = target[1, 5] + 0.004 * target[1].max()  # closer than 1 % of the maximum
    valid = torch.ones(ROWS, ELEMENTS, dtype=torch.bool)
    valid[1, 10:] = False
    valid[2, ::3] = False
    return logits, target, valid


# --- plain references ------------------------------------------------------------------------------------------------


def plain_top(row: list[float], valid: list[bool], ratio: float) -> set[int]:
    known = [i for i in range(len(row)) if valid[i]]
    count = max(1, math.floor(ratio * len(known) + 0.5))
    return set(sorted(known, key=lambda i: (-row[i], i))[:count])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain_binary(logits: Tensor, target: Tensor, valid: Tensor) -> float:
    total = 0.0
    for ratio in RATIOS:
        errors = []
        for y, t, v in zip(logits.tolist(), target.tolist(), valid.tolist(), strict=True):
            kept = plain_top(t, v, ratio)
            for i in range(len(y)):
                if v[i]:
                    p = sigmoid(y[i])
                    errors.append(-math.log(p) if i in kept else -math.log(1 - p))
        total += 0.05 / ratio * sum(errors) / len(errors)
    return total


def plain_mse(logits: Tensor, target: Tensor, valid: Tensor) -> float:
    triples = list(zip(logits.flatten().tolist(), target.flatten().tolist(), valid.flatten().tolist(), strict=True))
    largest = max(t for _, t, v in triples if v)
    errors = [(t + 0.1) ** 1.5 * (sigmoid(y) * largest - t) ** 2 for y, t, v in triples if v]
    return sum(errors) / len(errors)


def plain_fine(logits: Tensor, target: Tensor, valid: Tensor, ratio: float) -> float:
    losses = []
    for y, t, v in zip(logits.tolist(), target.tolist(), valid.tolist(), strict=True):
        top = plain_top(t, v, ratio)
        largest = max(t[i] for i in top)
        pairs = [(i, j) for i in top for j in top if abs(t[i] - t[j]) >= 0.01 * largest and t[i] != t[j]]
        if not pairs:
            continue
        mean = sum(abs(t[i] - t[j]) for i, j in pairs) / len(pairs)
        terms = [
            abs(t[i] - t[j]) / mean * math.log(1 + math.exp(-math.copysign(1, t[i] - t[j]) * (y[i] - y[j])))
            for i, j in pairs
        ]
        losses.append(sum(terms) / len(pairs))
    return sum(losses) / len(losses)


def plain_boundary(logits: Tensor, target: Tensor, valid: Tensor, ratio: float) -> float:
    losses = []
    for y, t, v in zip(logits.tolist(), target.tolist(), valid.tolist(), strict=True):
        top = plain_top(t, v, ratio)
        known = [i for i in range(len(t)) if v[i]]
        low, high = min(t[i] for i in known), max(t[i] for i in known)
        terms = []
        for i in top:
            for j in set(known) - top:
                if abs(t[i] - t[j]) >= 0.01 * high:
                    weight = min(5.0, max(1.0, 1 + abs(t[i] - t[j]) / (high - low)))
                    terms.append(weight * max(0.0, 1 - (y[i] - y[j])))
        if terms:
            losses.append(sum(terms) / len(terms))
    return sum(losses) / len(losses)


def plain_cosine(logits: Tensor, target: Tensor, valid: Tensor) -> float:
    losses = []
    for y, t, v in zip(logits.tolist(), target.tolist(), valid.tolist(), strict=True):
        known = [i for i in range(len(t)) if v[i]]
        dot = sum(y[i] * t[i] for i in known)
        losses.append(1 - dot / math.sqrt(sum(y[i] ** 2 for i in known) * sum(t[i] ** 2 for i in known)))
    return sum(losses) / len(losses)


# --- the terms -------------------------------------------------------------------------------------------------------

RATIO = 0.4
TERMS: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {
    "binary": (lambda y, t, v: multi_ratio_loss(y, top_masks(t, RATIOS, v), RATIOS, v), plain_binary),
    "mse": (value_weighted_mse, plain_mse),
    "fine": (
        lambda y, t, v: within_top_rank_loss(y, t, top_masks(t, (RATIO,), v)[0]),
        lambda y, t, v: plain_fine(y, t, v, RATIO),
    ),
    "boundary": (
        lambda y, t, v: boundary_rank_loss(y, t, top_masks(t, (RATIO,), v)[0], v),
        lambda y, t, v: plain_boundary(y, t, v, RATIO),
    ),
    "cosine": (cosine_loss, plain_cosine),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_are_their_equations(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    fast, plain = TERMS[name]
    found = float(fast(*batch))
    assert found == pytest.approx(plain(*batch), abs=1e-10)
    assert found > 0.01
    logits, target, valid = batch
    everything = torch.ones_like(valid)
    assert float(fast(logits, target, everything)) == pytest.approx(plain(logits, target, everything), abs=1e-10)
    # What is left out has no influence.
    other = torch.where(valid, logits, 50.0), torch.where(valid, target, 0.99), valid
    assert float(fast(*other)) == pytest.approx(found, abs=1e-10)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_are_finite_differences(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    fast, _ = TERMS[name]
    logits, target, valid = batch
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fast(logits, target, valid), logits)
    step = 1e-6
    for row in range(ROWS):
        for element in range(ELEMENTS):
            moved = [logits.detach().clone() for _ in range(2)]
            moved[0][row, element] += step
            moved[1][row, element] -= step
            high, low = (float(fast(y, target, valid)) for y in moved)
            assert float(gradient[row, element]) == pytest.approx((high - low) / (2 * step), abs=1e-7)
    assert gradient[~valid].abs().max() == 0
    assert gradient.abs().max() > 1e-3


def test_every_term_is_lower_for_better_predictions(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    _, target, valid = batch
    for name, (fast, _) in TERMS.items():
        good = (target / target.max()).clamp(1e-3, 1 - 1e-3).logit() if name != "cosine" else target
        good = 4 * (good + 1) if name in ("fine", "boundary") else good
        assert fast(good, target, valid) < 0.7 * fast(-good, target, valid), name


def test_near_ties_are_dropped(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, _ = batch
    target = torch.full((1, ELEMENTS), 0.5, dtype=torch.float64)
    target[0, 0] = 0.5 * 1.009
    everything = torch.ones(1, ELEMENTS, dtype=torch.bool)
    top = top_masks(target, (0.5,))[0]
    y = logits[:1].clone().requires_grad_()
    for loss in (within_top_rank_loss(y, target, top), boundary_rank_loss(y, target, top, everything)):
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, y, retain_graph=True)[0].abs().max() == 0
    target[0, 0] = 0.5 * 1.02
    assert within_top_rank_loss(y, target, top) > 0 and boundary_rank_loss(y, target, top) > 0


def test_drawn_pairs_tend_to_all_pairs(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, valid = batch
    top = top_masks(target, (RATIO,), valid)[0]
    functions: list[Callable[..., Tensor]] = [
        lambda **options: within_top_rank_loss(logits, target, top, **options),
        lambda **options: boundary_rank_loss(logits, target, top, valid, **options),
    ]
    for function in functions:
        exact = float(function())
        drawn = [float(function(samples=20_000, generator=torch.Generator().manual_seed(s))) for s in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[0] == pytest.approx(exact, rel=0.02)


def test_top_masks() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    valid = torch.tensor([[True] * 5, [False, True, True, True, False]])
    masks = top_masks(scores, (0.01, 0.4, 1.0), valid)
    assert masks[0].int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]  # the earlier of two that tie
    assert masks[1].int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert torch.equal(masks[2], valid)
    with pytest.raises(ValueError, match=r"in \(0, 1\], got 0"):
        top_masks(scores, (0,))


# --- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["layer", "head"])
def test_the_sum_has_the_papers_weights(scope: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 10, generator=generator, dtype=torch.float64)
    target = torch.rand(2, 3, 10, generator=generator, dtype=torch.float64) ** 2
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1, 7:] = False
    loss, terms = MapperLoss(samples=None, scope=scope, rank_ratio=RATIO)(logits, target, valid)
    shape = (2, 30) if scope == "layer" else (6, 10)
    flat = (logits.reshape(shape), target.reshape(shape), valid[:, None].expand(2, 3, 10).reshape(shape))
    wanted = {name: plain(*flat) for name, (_, plain) in TERMS.items()}
    assert {name: float(term) for name, term in terms.items()} == pytest.approx(wanted, abs=1e-10)
    weights = {"binary": 10, "mse": 20, "fine": 3, "boundary": 2, "cosine": 0.5}
    assert float(loss) == pytest.approx(sum(weights[name] * wanted[name] for name in weights), abs=1e-9)


def test_thresholds_of_the_whole_context_decide() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 2, 6, generator=generator, dtype=torch.float64)
    target = torch.rand(2, 2, 6, generator=generator, dtype=torch.float64)
    target[1] *= 0.1  # a layer that keeps little
    settings = MapperLoss(samples=None, scope="context", ratios=(0.25, 0.5), rank_ratio=0.5)
    ordered = target.flatten().sort(descending=True).values
    thresholds = torch.stack([ordered[5], ordered[11], ordered[11]]).expand(2, 3)
    _, terms = settings(logits, target, thresholds=thresholds)
    masks = torch.stack([target >= ordered[5], target >= ordered[11]]).flatten(2)
    assert masks.sum((1, 2)).tolist() == [6, 12] and masks[0, 1].sum() == 0
    assert terms["binary"] == multi_ratio_loss(logits.flatten(1), masks, (0.25, 0.5))
    assert torch.isfinite(terms["fine"]) and torch.isfinite(terms["boundary"])
    with pytest.raises(ValueError, match=r"needs thresholds of shape \(2, 3\), got None"):
        settings(logits, target)


def test_rows_without_scores_do_no_harm() -> None:
    logits = torch.randn(2, 1, 8, dtype=torch.float64, requires_grad=True)
    target = torch.zeros(2, 1, 8, dtype=torch.float64)
    target[0, 0, 2] = 0.7
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1] = False
    for samples in (None, 16):
        loss, _ = MapperLoss(samples=samples)(logits, target, valid)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        assert gradient[0].abs().max() > 0 and gradient[1].abs().max() == 0


@pytest.mark.parametrize(("options", "message"), [
    ({"mse": -1}, "the weight mse must be 0 or more, got -1"),
    (dict.fromkeys(("binary", "mse", "fine", "boundary", "cosine"), 0), "all weights"),
    ({"ratios": (0.1, 1.5)}, r"in \(0, 1\], got 1.5"),
    ({"ratios": ()}, "ratios is empty"),
    ({"rank_ratio": 0.0}, r"in \(0, 1\], got 0.0"),
    ({"samples": 0}, "samples must be at least 1"),
    ({"scope": "model"}, "scope must be 'layer', 'head' or 'context', got 'model'"),
])  # fmt: skip
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MapperLoss(**options)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(rows, heads, tokens\), got \(2, 3\)"):
        MapperLoss()(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="7 ratios and masks of 1"):
        multi_ratio_loss(torch.zeros(2, 3), torch.zeros(1, 2, 3, dtype=torch.bool))


# --- the metric ------------------------------------------------------------------------------------------------------


def test_mass_reconstruction(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, target, valid = batch
    for ratio in (0.1, 0.3, 0.9):
        found = mass_reconstruction(scores, target, ratio, valid)
        relative = mass_reconstruction(scores, target, ratio, valid, relative=True)
        for row in range(ROWS):
            s, t, v = scores[row].tolist(), target[row].tolist(), valid[row].tolist()
            mass = sum(t[i] for i in plain_top(s, v, ratio))
            assert float(found[row]) == pytest.approx(mass / sum(x for x, k in zip(t, v, strict=True) if k))
            assert float(relative[row]) == pytest.approx(mass / sum(t[i] for i in plain_top(t, v, ratio)))
    assert mass_reconstruction(target, target, 0.2, valid, relative=True).tolist() == [1.0] * ROWS
    assert torch.equal(mass_reconstruction(scores, target, 1.0, valid), torch.ones(ROWS, dtype=torch.float64))
    assert mass_reconstruction(scores, torch.zeros_like(target), 0.2).tolist() == [1.0] * ROWS
    assert torch.equal(mass_reconstruction(scores.sigmoid(), target, 0.3), mass_reconstruction(scores, target, 0.3))
