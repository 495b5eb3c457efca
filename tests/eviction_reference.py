"""What a policy that watches queries must have kept, worked out one pair at a time from the dense oracle.

`Drive` notes what every head held before each piece of a sequence; the oracle gives all query-key products of the
whole sequence at once. From these two a policy's score of any pair at any moment follows by its definition, and what
it must have kept by sorting. Nothing here shares code with the caches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dense_oracle import LOGITS, SEEN, Drive

from nearfar.modeling.ragged_layer import RaggedLayer


@dataclass
class Moment:
    """One row of one layer and head, after `stop` columns have been read.

    Attributes:
        logits: `(group, tokens, tokens)`, all query-key products of the head.
        seen: `(tokens, tokens)`, bool, the pairs that each query saw when it came.
        real: the row's real columns before `stop`.
        held: columns of the pairs that are held.
        window: the layer's sliding window.
    """

    logits: torch.Tensor
    seen: torch.Tensor
    real: list[int]
    held: list[int]
    window: int | None

    def probabilities(self, query: int, pairs: list[int]) -> dict[int, float]:
        """What `query` gives to those of `pairs` that it may see, over the group: a softmax over them."""
        visible = [c for c in pairs if c <= query and (self.window is None or c > query - self.window)]
        if not visible:
            return {}
        total = self.logits[:, query][:, visible].softmax(-1).sum(0)
        return dict(zip(visible, total.tolist(), strict=True))


Scores = Callable[[Moment], dict[int, float]]


def accumulated(moment: Moment) -> dict[int, float]:
    """H2O: all probabilities that a pair has ever been given, over what its queries saw then."""
    sums = dict.fromkeys(moment.held, 0.0)
    for query in moment.real:
        saw = moment.seen[query].nonzero()[:, 0].tolist()
        for column, given in moment.probabilities(query, saw).items():
            if column in sums:
                sums[column] += given
    return sums


def observed(window_tokens: int, kernel: int, average: bool) -> Scores:
    """SnapKV: what the last queries give to the pairs that are held, pooled over neighbours in the text."""

    def scores(moment: Moment) -> dict[int, float]:
        queries = moment.real[-window_tokens:]
        mass = dict.fromkeys(moment.held, 0.0)
        for query in queries:
            for column, given in moment.probabilities(query, moment.held).items():
                mass[column] += given / moment.logits.shape[0]
        pooled = {}
        for column in moment.held:
            place = moment.real.index(column)
            near = moment.real[max(0, place - kernel // 2) : place + kernel // 2 + 1]
            lent = [mass[c] for c in near if c in mass and (c in queries) == (column in queries)]
            pooled[column] = sum(lent) / kernel if average else max(lent)
        return pooled

    return scores


def check_every_eviction(drive: Drive, scores: Scores, recent: Callable[[int], int]) -> int:
    """Assert that at each eviction exactly the pairs with the highest scores were kept.

    Args:
        drive: with at least one piece read, by a cache with a `budget`.
        scores: of the pairs held, by column.
        recent: newest tokens that are protected, of the budget.

    Returns:
        How many evictions there were, over pieces and rows.
    """
    drive.oracle()
    cache, evictions = drive.cache, 0
    layers = [layer.layer_idx for layer in cache.layers if isinstance(layer, RaggedLayer)]
    after = [
        *(held for _, _, held in drive.pieces[1:]),
        [drive._held(layer, len(drive.ids)) for layer in cache.layers],
    ]
    for (start, stop, before), left in zip(drive.pieces, after, strict=True):
        for row in range(len(drive.ids)):
            real = drive.mask[row, :stop].nonzero()[:, 0].tolist()
            protected = {*real[: cache.sink_tokens], *real[len(real) - recent(cache.budget) :]}
            ranked: dict[tuple[int, int], list[tuple[float, int, int, int]]] = {}
            kept = set()
            for layer in layers:
                heads = range(SEEN[layer].shape[1])
                for head in heads:
                    new = [column for column in real if column >= start]
                    held = [*(before[layer][row][head] if start else []), *new]
                    kept |= {(layer, head, column) for column in left[layer][row][head]}
                    moment = _moment(drive, layer, row, head, stop, real, held)
                    ranked[layer, head] = [
                        (-math.inf if column in protected else -score, column, layer, head)
                        for column, score in scores(moment).items()
                        if moment.window is None or column > stop - moment.window
                    ]
            everything = {(layer, head, column) for group in ranked.values() for _, column, layer, head in group}
            if kept >= everything:
                continue
            evictions += 1
            assert kept == _best(ranked, cache.allocation, cache.budget), (start, stop, row)
    return evictions


def _moment(drive: Drive, layer: int, row: int, head: int, stop: int, real: list[int], held: list[int]) -> Moment:
    heads = SEEN[layer].shape[1]
    group = LOGITS[layer].shape[1] // heads
    logits = LOGITS[layer][row, head * group : (head + 1) * group]
    return Moment(logits, SEEN[layer][row, head], real, held, drive.cache.layers[layer].window)


def _best(
    ranked: dict[tuple[int, int], list[tuple[float, int, int, int]]], allocation: str, budget: int
) -> set[tuple[int, int, int]]:
    rivals: dict[object, list[tuple[float, int, int, int]]] = {}
    for (layer, head), group in ranked.items():
        key = {"uniform": (layer, head), "head": layer, "global": None}[allocation]
        rivals.setdefault(key, []).extend(group)
    share = budget * len(ranked) // len(rivals)
    best = [pair for group in rivals.values() for pair in sorted(group)[:share]]
    return {(layer, head, column) for _, column, layer, head in best}
