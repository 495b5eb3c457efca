"""How a layer's compressed blocks enter the proxies of the layer before (ProxyFormer, Eq. 3 and 8)."""

import torch
from torch import nn

PROXY_UPDATES = ("residual", "gated", "concatenate", "replace")


class ProxyUpdate(nn.Module):
    """New proxies H from the layer before's, H′, and this layer's compressed blocks c.

    Args:
        kind: `"residual"`, H′ + c (Eq. 8); `"gated"`, H′ + sigmoid(W [H′, c]) · c; `"concatenate"`, W [H′, c];
            `"replace"`, c.
        d: width of the proxies.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(self, kind: str, d: int) -> None:
        super().__init__()
        if kind not in PROXY_UPDATES:
            raise ValueError(f"Unknown proxy update {kind!r}: choose one of {', '.join(PROXY_UPDATES)}.")
        self.kind = kind
        self.proj = nn.Linear(2 * d, d, bias=False) if kind in ("gated", "concatenate") else None

    def forward(self, previous: torch.Tensor | None, compressed: torch.Tensor) -> torch.Tensor:
        """Update proxies.

        Args:
            previous: `(…, d)`, or `None` for zeros: in the first layer, or where the block size changes.
            compressed: `(…, d)`.

        Returns:
            `(…, d)`.

        Raises:
            ValueError: two shapes that differ.
        """
        if previous is not None and previous.shape != compressed.shape:
            raise ValueError(
                f"The layer before has proxies of shape {tuple(previous.shape)}, this one {tuple(compressed.shape)}: "
                f"give None where the block size changes."
            )
        if self.proj is None:
            return compressed if previous is None or self.kind == "replace" else previous + compressed
        if previous is None:
            # The weight is used whole, so that no parameter goes without a gradient (DDP waits for all of them).
            previous = torch.zeros_like(compressed)
        mixed = self.proj(torch.cat([previous, compressed], dim=-1))
        return mixed if self.kind == "concatenate" else previous + torch.sigmoid(mixed) * compressed

    def extra_repr(self) -> str:
        return self.kind
