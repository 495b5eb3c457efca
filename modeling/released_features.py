"""What becomes of a block's local features once it is compressed: dropped, kept, offloaded or quantised."""

from dataclasses import dataclass

import torch

KINDS = ("drop", "keep", "offload", "quantize")


@dataclass
class _Piece:
    """Local features of some blocks, `(rows, tokens, d_h)`, and how many tokens of each row are real."""

    features: torch.Tensor
    scales: torch.Tensor | None
    counts: list[int]
    device: torch.device
    dtype: torch.dtype

    def restored(self) -> torch.Tensor:
        features = self.features.to(self.device)
        if self.scales is None:
            return features
        return (features.to(torch.float32) * self.scales).to(self.dtype)


class ReleasedFeatures:
    """Local features of compressed blocks, in the order of the tokens.

    Args:
        kind: `"drop"`; `"keep"`, where they are; `"offload"`, in the CPU's memory; `"quantize"`, 8 bits a number and
            one scale a token.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"released_features must be one of {', '.join(KINDS)}, got {kind!r}.")
        self.kind = kind
        self._pieces: list[_Piece] = []

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self.kind != "drop"

    def append(self, features: torch.Tensor, counts: list[int]) -> None:
        """Add the first `counts[row]` tokens of `(rows, tokens, d_h)`."""
        if not self.wanted:
            return
        features, scales = features.detach(), None
        device, dtype = features.device, features.dtype
        if self.kind == "quantize":
            scales = features.to(torch.float32).abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            features = (features.to(torch.float32) / scales).round().to(torch.int8)
        elif self.kind == "offload":
            features = features.cpu()
        self._pieces.append(_Piece(features, scales, list(counts), device, dtype))

    def features(self, row: int) -> torch.Tensor:
        """Local features of one row's compressed blocks, `(tokens, d_h)`, on the device they came from.

        Raises:
            ValueError: they have been dropped, or there are none yet.
        """
        if not self._pieces:
            raise ValueError(
                "No local features are held: " + ("no block has been compressed yet." if self.wanted else
                "the cache drops them; make it with released_features='keep', 'offload' or 'quantize'.")
            )  # fmt: skip
        return torch.cat([piece.restored()[row, : piece.counts[row]] for piece in self._pieces])

    def select(self, rows: list[int]) -> None:
        """Let row i become what row `rows[i]` was."""
        for piece in self._pieces:
            piece.features = piece.features[rows]
            piece.scales = None if piece.scales is None else piece.scales[rows]
            piece.counts = [piece.counts[row] for row in rows]

    def repeat(self, times: int) -> None:
        """Repeat every row."""
        count = len(self._pieces[0].counts) if self._pieces else 0
        self.select([row for row in range(count) for _ in range(times)])

    def clear(self) -> None:
        """Forget everything."""
        self._pieces = []

    def nbytes(self) -> int:
        """Bytes that are held, wherever."""
        return sum(p.features.nbytes + (0 if p.scales is None else p.scales.nbytes) for p in self._pieces)
