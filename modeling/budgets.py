"""Which pairs survive: top-K inside a head, across a layer's heads, or across all layers and heads."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Allocation = Literal["uniform", "head", "global"]
ALLOCATIONS: tuple[str, ...] = get_args(Allocation)


def keep_top_k(scores: torch.Tensor, k: list[int], columns: torch.Tensor | None = None) -> torch.Tensor:
    """The k largest scores of each row; among equal scores the earlier token wins.

    Args:
        scores: `(rows, n)`, float; -inf marks entries that cannot be kept, +inf entries that must be.
        k: one count a row; fastest when they are all equal. A row with fewer finite or +inf entries keeps them all.
        columns: `(rows, n)`, int, each entry's token; by default entries stand in their tokens' order.

    Returns:
        `(rows, n)`, bool.
    """
    rows, n = scores.shape
    if rows > 1 and (columns is not None or len(set(k)) > 1):
        given = [None] * rows if columns is None else columns.split(1)
        return torch.cat([keep_top_k(scores[row : row + 1], [k[row]], given[row]) for row in range(rows)])
    candidates = scores > -math.inf
    count = min(k[0], n)
    if count <= 0:
        return torch.zeros_like(candidates)
    if count == n:
        return candidates
    threshold = torch.topk(scores, count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, level = scores > threshold, scores == threshold
    room = count - above.sum(1, keepdim=True)
    if columns is not None and int(level.sum()) > int(room):
        tied = level[0].nonzero()[:, 0]
        first = tied[columns[0, tied].argsort(stable=True)[: int(room)]]
        return (above | torch.zeros_like(level).index_fill_(1, first, True)) & candidates
    return (above | (level & (level.cumsum(1) <= room))) & candidates


def keep_top_k_reference(scores: torch.Tensor, k: list[int]) -> torch.Tensor:
    """`keep_top_k`, one Python sort a row: highest score first, then lowest column."""
    keep = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        order = sorted((-value, column) for column, value in enumerate(values) if value > -math.inf)
        for _, column in order[: k[row]]:
            keep[row, column] = True
    return keep


@dataclass
class Candidates:
    """Pairs of one layer that compete for the budget.

    Attributes:
        scores: `(slots,)`, float; +inf for pairs that must stay, -inf for slots that hold none.
        columns: `(slots,)`, int, each pair's token.
        rows: first and end slot of each row; inside a row, heads lie side by side.
        heads: for each row, the slots of each head.
    """

    scores: torch.Tensor
    columns: torch.Tensor
    rows: list[tuple[int, int]]
    heads: list[list[int]]


def select(
    candidates: list[Candidates], budgets: list[int], heads: int, layers: int, allocation: Allocation
) -> list[torch.Tensor]:
    """Which pairs stay.

    Args:
        candidates: one or more layers; with "global" they compete with each other, and all `layers` of the model
            share the budget, so a later call with more of them can only take pairs away.
        budgets: for each row, the pairs to keep per layer and head on average.
        heads: key-value heads of a layer.
        layers: pruned layers of the model.
        allocation: see `PrunedCache`.

    Returns:
        For each layer, `(slots,)`, bool.
    """
    if allocation == "global":
        return _select_globally(candidates, [budget * heads * layers for budget in budgets])
    return [_select_in_layer(layer, budgets, heads, allocation) for layer in candidates]


def passing(layer: Candidates, weakest: list[torch.Tensor] | None) -> torch.Tensor:
    """`(slots,)`, bool: the candidates that score at least their row's `weakest`; all of them if it is None."""
    if weakest is None:
        return layer.scores > -math.inf
    bars = [bar.to(layer.scores.device) for bar in weakest]
    parts = [layer.scores[slice(*span)] >= bar for span, bar in zip(layer.rows, bars, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)) & (layer.scores > -math.inf)


def weakest_kept(candidates: list[Candidates], keeps: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each row, the lowest score kept in any layer; -inf where a row kept all it had.

    In a later competition with more layers no lower score can be kept.
    """
    bars = []
    for row in range(len(candidates[0].rows)):
        spans = [slice(*layer.rows[row]) for layer in candidates]
        device = candidates[0].scores.device
        scores = torch.cat([layer.scores[span].to(device) for layer, span in zip(candidates, spans, strict=True)])
        kept = torch.cat([keep[span].to(device) for keep, span in zip(keeps, spans, strict=True)])
        lowest = scores.masked_fill(~kept, math.inf).amin()
        all_kept = (kept | (scores == -math.inf)).all()
        bars.append(torch.where(all_kept, -math.inf, lowest))
    return bars


def _select_in_layer(layer: Candidates, budgets: list[int], heads: int, allocation: Allocation) -> torch.Tensor:
    if allocation == "uniform" and len(set(budgets)) == 1 and len({n for sizes in layer.heads for n in sizes}) == 1:
        segments = heads * len(budgets)
        return keep_top_k(layer.scores.view(segments, -1), [budgets[0]] * segments).view(-1)
    parts = []
    for span, sizes, budget in zip(layer.rows, layer.heads, budgets, strict=True):
        scores, columns = layer.scores[slice(*span)], layer.columns[slice(*span)]
        if allocation == "head":
            parts.append(keep_top_k(scores[None], [budget * heads], columns[None])[0])
        elif len(set(sizes)) == 1:
            parts.append(keep_top_k(scores.view(heads, -1), [budget] * heads).view(-1))
        else:
            parts += [keep_top_k(part[None], [budget])[0] for part in scores.split(sizes)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _select_globally(candidates: list[Candidates], totals: list[int]) -> list[torch.Tensor]:
    device, by_row = candidates[0].scores.device, []
    for row, total in enumerate(totals):
        parts = [layer.scores[slice(*layer.rows[row])].to(device) for layer in candidates]
        columns = [layer.columns[slice(*layer.rows[row])].to(device) for layer in candidates]
        kept = keep_top_k(torch.cat(parts)[None], [total], torch.cat(columns)[None])[0]
        by_row.append(kept.split([len(part) for part in parts]))
    keeps = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*by_row, strict=True)]
    return [keep.to(layer.scores.device) for keep, layer in zip(keeps, candidates, strict=True)]


def check_budget(
    budget: int | None, retention_ratio: float | None, sink_tokens: int, recent_tokens: int | None
) -> None:
    """Refuse a budget that cannot be honoured.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: neither or both of `budget` and `retention_ratio`; a budget below 1; a ratio outside (0, 1];
            negative sinks or recent tokens; sinks and recent tokens that leave no room in the budget.
    """
    if (budget is None) == (retention_ratio is None):
        raise ValueError(
            f"Give exactly one of budget (tokens a layer) and retention_ratio, got budget={budget!r}, "
            f"retention_ratio={retention_ratio!r}."
        )
    for name, value in (("budget", budget), ("sink_tokens", sink_tokens), ("recent_tokens", recent_tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be a whole number of tokens, got {value!r}.")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget must be at least 1 token, got {budget}.")
    if retention_ratio is not None:
        if isinstance(retention_ratio, bool) or not isinstance(retention_ratio, (int, float)):
            raise TypeError(f"retention_ratio must be a number in (0, 1], got {retention_ratio!r}.")
        if not 0.0 < retention_ratio <= 1.0:
            raise ValueError(f"retention_ratio must lie in (0, 1], got {retention_ratio}.")
    if sink_tokens < 0:
        raise ValueError(f"sink_tokens must not be negative, got {sink_tokens}.")
    if recent_tokens is not None and recent_tokens < 1:
        raise ValueError(f"recent_tokens must be at least 1 (the newest token is always kept), got {recent_tokens}.")
    if budget is not None and sink_tokens + (recent_tokens or 1) > budget:
        raise ValueError(
            f"sink_tokens={sink_tokens} and recent_tokens={recent_tokens or 1} do not fit in budget={budget}: "
            f"raise the budget to at least {sink_tokens + (recent_tokens or 1)}, or lower them."
        )
