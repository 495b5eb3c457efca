"""How proxies enter their blocks' local features (ProxyFormer, Section 3.4, Eq. 11-14)."""

import torch
from torch import nn

from .rms_norm import RMSNorm

INJECTIONS = ("residual", "gated", "affine", "cross_attention")

# Small, so that a new model's local stream starts near the identity; not zero, so that gradients pass from the start.
_START = 0.1


class Injection(nn.Module):
    """New local features of a block from its old ones X, the decompressed proxy Δ and the proxy itself.

    Args:
        kind: `"residual"`, X + Δ (Eq. 11); `"gated"`, X + sigmoid(W [X, Δ]) · Δ (Eq. 12); `"affine"`,
            (1 + s(Δ)) · RMSNorm(X) + t(Δ) with linear s and t (Eq. 13); `"cross_attention"`, X plus attention from X
            to the proxy (Eq. 14).
        d_h: width of the local features.
        d_p: width of the proxies. For cross-attention a proxy is read as `d_p / d_h` keys and values of width `d_h`,
            since attention to a single one is constant.
        eps: of the norms.

    Attributes:
        uses_delta: whether Δ is read, so that a `Decompress` is needed; not for cross-attention.

    Raises:
        ValueError: an unknown kind; for cross-attention, a `d_p` that is not a multiple of `d_h` above it.
    """

    def __init__(self, kind: str, d_h: int, d_p: int, eps: float = 1e-6) -> None:
        super().__init__()
        if kind not in INJECTIONS:
            raise ValueError(f"Unknown injection {kind!r}: choose one of {', '.join(INJECTIONS)}.")
        self.kind = kind
        self.d_h = d_h
        self.d_p = d_p
        self.uses_delta = kind != "cross_attention"
        if kind == "gated":
            self.gate = nn.Linear(2 * d_h, d_h, bias=False)
        elif kind == "affine":
            self.norm = RMSNorm(d_h, eps=eps)
            self.scale_shift = nn.Linear(d_h, 2 * d_h, bias=False)
            self.scale_shift.init_scale = _START  # type: ignore[assignment]
        elif kind == "cross_attention":
            if d_p % d_h or d_p == d_h:
                raise ValueError(
                    f"Injection by cross-attention reads a proxy as several keys as wide as the local features: "
                    f"proxies of {d_p} must be twice, three times, … as wide as local features of {d_h}."
                )
            self.norm = RMSNorm(d_h, eps=eps)
            self.proxy_norm = RMSNorm(d_p, eps=eps)
            self.q_proj = nn.Linear(d_h, d_h, bias=False)
            self.k_proj = nn.Linear(d_h, d_h, bias=False)
            self.v_proj = nn.Linear(d_h, d_h, bias=False)
            self.o_proj = nn.Linear(d_h, d_h, bias=False)
            self.o_proj.init_scale = _START  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None = None, proxy: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Inject proxies.

        Args:
            x: `(…, P, d_h)`; a block of several dimensions is flattened to P places.
            delta: `(…, P, d_h)`, read if `uses_delta`.
            proxy: `(…, d_p)`, one a block, read if not.

        Returns:
            `(…, P, d_h)`.

        Raises:
            ValueError: what is read is missing or has another shape.
        """
        if not self.uses_delta:
            if proxy is None or tuple(proxy.shape) != (*x.shape[:-2], self.d_p):
                got = "none" if proxy is None else f"shape {tuple(proxy.shape)}"
                raise ValueError(f"Injection by cross-attention reads proxies {(*x.shape[:-2], self.d_p)}, got {got}.")
            return x + self.o_proj(self._attend(x, proxy))
        if delta is None or delta.shape != x.shape:
            got = "none" if delta is None else f"shape {tuple(delta.shape)}"
            raise ValueError(f"Injection by {self.kind} reads a delta shaped like x {tuple(x.shape)}, got {got}.")
        if self.kind == "residual":
            return x + delta
        if self.kind == "gated":
            return x + torch.sigmoid(self.gate(torch.cat([x, delta], dim=-1))) * delta
        scale, shift = self.scale_shift(delta).chunk(2, dim=-1)
        return (1 + scale) * self.norm(x) + shift

    def _attend(self, x: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
        """`(…, P, d_h)`: what each place reads from its block's proxy.

        A handful of keys: the scores are smaller than x, and blocks may be more than a fused kernel's batch can hold.
        """
        slots = self.proxy_norm(proxy).unflatten(-1, (-1, self.d_h))
        scores = self.q_proj(self.norm(x)) @ self.k_proj(slots).transpose(-1, -2) * self.d_h**-0.5
        return torch.softmax(scores, dim=-1).to(x.dtype) @ self.v_proj(slots).to(x.dtype)

    def extra_repr(self) -> str:
        return self.kind
