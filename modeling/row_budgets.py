"""`RowBudgets`: how many pairs each row of a pruned cache may keep."""

import math


class RowBudgets:
    """Pairs that each row may keep, a layer and key-value head on average.

    Args:
        budget, retention_ratio, sink_tokens: as in `PrunedCache`.

    Attributes:
        rows: one number a row; None before they are known. A list is replaced, never changed.
        settled: whether a prefill has settled them: a ratio is of the tokens seen by then.
    """

    def __init__(self, budget: int | None, retention_ratio: float | None, sink_tokens: int) -> None:
        self._budget, self._retention_ratio, self._sink_tokens = budget, retention_ratio, sink_tokens
        self.rows: list[int] | None = None
        self.settled = False

    def set(self, real_tokens: list[int]) -> list[int]:
        """Derive them from the tokens that each row has seen, padding left out."""
        if self._budget is not None:
            self.rows = [self._budget] * len(real_tokens)
        else:
            assert self._retention_ratio is not None
            # A ratio of a short row must still leave room for the sinks and one token.
            floor = self._sink_tokens + 1
            self.rows = [max(math.ceil(self._retention_ratio * tokens), floor) for tokens in real_tokens]
        return self.rows

    def settle(self, real_tokens: list[int]) -> None:
        """`set` them at the end of a prefill."""
        self.set(real_tokens)
        self.settled = True

    def forget(self) -> None:
        """As in an empty cache."""
        self.rows, self.settled = None, False

    def known(self) -> list[int]:
        """The numbers, which have to be known."""
        assert self.rows is not None
        return self.rows

    def exceeded_by(self, real_tokens: list[int]) -> bool:
        """Whether any row has seen more tokens than it may keep; sets budgets that are not known yet."""
        rows = self.set(real_tokens) if self.rows is None else self.rows
        return any(tokens > budget for tokens, budget in zip(real_tokens, rows, strict=True))
