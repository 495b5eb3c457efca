"""Importance scores that another thread, stream or device may still be computing."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# No score may reach this: above it `ProxyKVCache` ranks tokens that nobody scored by their age.
LARGEST_SCORE = float(1 << 20)


class PendingScores:
    """Scores of the pairs of one batch of prompts, for the layers of a target that are pruned.

    Args:
        layers: the target's layers that are scored, ascending.
        rows: prompts.
        heads: key-value heads of a layer.
        tokens: length of the prompts, padding included.
    """

    def __init__(self, layers: list[int], rows: int, heads: int, tokens: int) -> None:
        self.layers, self.rows, self.heads, self.tokens = layers, rows, heads, tokens
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._scores: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._spans: dict[str, list[Any]] = {}

    def compute(
        self,
        function: Callable[[], torch.Tensor],
        device: torch.device,
        *,
        in_parallel: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Compute the scores, here and now or in a thread of their own.

        Args:
            function: returns `(layers, rows, heads, tokens)`, on any device.
            device: where it works.
            in_parallel: return at once; what goes wrong is then raised by `wait`.
            stream: of `device`, for the thread to work in. One for all prompts, because what one stream has freed is
                not given to another.

        Raises:
            RuntimeError: the scores could not be computed (not in parallel).
        """
        if not in_parallel:
            self._work(function, device, nullcontext())
            self.wait()
            return
        surroundings: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            # The prompt, and perhaps the weights, are still being written by what was launched before.
            stream.wait_stream(torch.cuda.current_stream(device))
            surroundings = torch.cuda.stream(stream)
        threading.Thread(
            target=self._work, args=(function, device, surroundings), name="proxy scores", daemon=True
        ).start()

    def _work(
        self, function: Callable[[], torch.Tensor], device: torch.device, surroundings: AbstractContextManager[Any]
    ) -> None:
        try:
            with torch.no_grad(), _current(device), surroundings:
                scores = function()
                # Reading the check waits for the device: whoever sees the scores may use them on any stream.
                self._check(scores)
                self._scores = scores
        except BaseException as error:  # whatever it is, nobody may wait for ever
            # The frames hold the proxy's cache and activations.
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            self._done.set()

    def _check(self, scores: torch.Tensor) -> None:
        expected = (len(self.layers), self.rows, self.heads, self.tokens)
        if scores.shape != expected:
            raise ValueError(
                f"Expected scores of shape {expected} (layers, rows, key-value heads, tokens), got "
                f"{tuple(scores.shape)}."
            )
        if not bool(torch.isfinite(scores).all()):
            bad = [self.layers[i] for i in (~torch.isfinite(scores)).flatten(1).any(1).nonzero()[:, 0].tolist()]
            raise ValueError(f"Scores are NaN or infinite for the target's layers {bad}.")
        if not bool((scores.abs() < LARGEST_SCORE).all()):
            raise ValueError(f"Scores must stay below {LARGEST_SCORE:.0f}, got {float(scores.abs().max()):.3g}.")

    def ready(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the scores are there.

        Raises:
            RuntimeError: they could not be computed; its cause is what went wrong.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(
                "The prompt could not be scored, so there is nothing to evict by: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def of_layer(self, layer_idx: int, device: torch.device) -> torch.Tensor:
        """Scores of one of the target's layers, `(rows, heads, tokens)`, on `device`; waits for them.

        Raises:
            RuntimeError: see `wait`.
        """
        self.wait()
        assert self._scores is not None
        if self._scores.is_cuda:  # they belong to the stream that made them, and are read in another
            self._scores.record_stream(torch.cuda.current_stream(self._scores.device))
        return self._scores[self._places[layer_idx]].to(device)

    @contextmanager
    def timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Time what is done inside, under `name`; on a GPU without waiting for it."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._spans[name] = [time.perf_counter() - begin]
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        yield
        stop.record(torch.cuda.current_stream(device))
        self._spans[name] = [start, stop]

    def seconds(self) -> dict[str, float]:
        """Time spent on each part, once the scores are there; parts that ran beside the target include its share."""
        self.wait()
        found = {}
        for name, span in self._spans.items():
            found[name] = span[0] if len(span) == 1 else span[0].elapsed_time(span[1]) / 1000
        return found


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
