"""Choosing the pairs that stay."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.modeling.budgets import Candidates, keep_top_k, keep_top_k_reference, passing, select, weakest_kept


def in_order(scores: torch.Tensor, heads: int, rows: int = 1) -> Candidates:
    """A layer whose heads hold tokens 0, 1, 2, …"""
    size = len(scores) // rows
    n = size // heads
    spans = [(row * size, (row + 1) * size) for row in range(rows)]
    return Candidates(scores, torch.arange(n).repeat(rows * heads), spans, [[n] * heads] * rows)


SCORES = st.sampled_from([-math.inf, -1.5, 0.0, 0.0, 0.25, 3.0, math.inf])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rows=st.integers(1, 3), n=st.integers(1, 12))
def test_keep_top_k_agrees_with_sorting(data, rows: int, n: int) -> None:
    scores = torch.tensor(data.draw(st.lists(SCORES, min_size=rows * n, max_size=rows * n))).view(rows, n)
    k = data.draw(st.lists(st.integers(0, n + 2), min_size=rows, max_size=rows))
    assert torch.equal(keep_top_k(scores, k), keep_top_k_reference(scores, k))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.integers(1, 6))
def test_global_selection_may_be_done_layer_by_layer(seed: int, budget: int) -> None:
    """The best of some layers contain the best of all: selecting early never loses a pair that should stay."""
    generator = torch.Generator().manual_seed(seed)
    heads, layers, n = 2, 4, 9
    scores = [torch.randint(0, 8, (heads * n,), generator=generator).float() for _ in range(layers)]

    def choose(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return select([in_order(part, heads) for part in parts], [budget], heads, layers, "global")

    at_once = choose(scores)
    stepwise: list[torch.Tensor] = []
    for layer in scores:
        keeps = choose([*stepwise, layer])
        stepwise = [part.masked_fill(~keep, -math.inf) for part, keep in zip([*stepwise, layer], keeps, strict=True)]
    assert [(part > -math.inf).tolist() for part in stepwise] == [keep.tolist() for keep in at_once]
    assert sum(int(keep.sum()) for keep in at_once) == budget * heads * layers


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.integers(1, 6), rows=st.integers(1, 3))
def test_no_later_winner_scores_below_the_weakest_kept(seed: int, budget: int, rows: int) -> None:
    """What lets a layer be filtered before it competes: two layers compete, a third one only has to pass the bar."""
    generator = torch.Generator().manual_seed(seed)
    heads, n = 2, 7
    layers = [
        in_order(torch.randint(0, 9, (rows * heads * n,), generator=generator).float(), heads, rows) for _ in range(3)
    ]
    layers[1].scores[::5] = -math.inf
    budgets = [budget] * rows
    bars = weakest_kept(layers[:2], select(layers[:2], budgets, heads, 3, "global"))
    final = select(layers, budgets, heads, 3, "global")
    for layer, keep in zip(layers, final, strict=True):
        assert bool((passing(layer, bars) | ~keep).all())
    assert bool((passing(layers[1], None) == (layers[1].scores > -math.inf)).all())


def test_allocations_keep_the_same_number_in_different_places() -> None:
    scores = torch.tensor([9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 3.0, 4.0])  # two heads of four
    other = scores - 20.0
    layers = [in_order(scores, 2), in_order(other, 2)]
    counts = {
        allocation: [
            keep.view(2, 4).sum(1).tolist()
            for keep in select(layers, [2], 2, 2, allocation)  # type: ignore[arg-type]
        ]
        for allocation in ("uniform", "head", "global")
    }
    assert counts == {"uniform": [[2, 2], [2, 2]], "head": [[4, 0], [4, 0]], "global": [[4, 4], [0, 0]]}


def test_ties_between_heads_and_layers_go_to_the_earlier_token() -> None:
    flat = torch.zeros(12)  # two heads of six, all alike
    (keep,) = select([in_order(flat, 2)], [2], 2, 1, "head")
    assert keep.view(2, 6).int().tolist() == [[1, 1, 0, 0, 0, 0]] * 2
    keeps = select([in_order(flat, 2), in_order(flat, 2)], [2], 2, 2, "global")
    assert [keep.view(2, 6).int().tolist() for keep in keeps] == [[[1, 1, 0, 0, 0, 0]] * 2] * 2


def test_uniform_selection_of_heads_with_unequal_room() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 9.0, 8.0])
    layer = Candidates(scores, torch.arange(5), [(0, 5)], [[3, 2]])
    (keep,) = select([layer], [1], 2, 1, "uniform")
    assert keep.tolist() == [False, False, True, True, False]
