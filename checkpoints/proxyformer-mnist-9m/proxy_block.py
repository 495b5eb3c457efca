"""Pre-norm transformer block in parts: who attends to what is up to the caller (ProxyFormer, Eq. 9, 19 and 20)."""

import torch
import torch.nn.functional as F
from torch import nn

from .rms_norm import RMSNorm


class FeedForwardBlock(nn.Module):
    """RMSNorm and SwiGLU with a residual.

    Args:
        d: width of the states.
        intermediate: width between.
        eps: of the norm.
        out_scale: `init_scale` of the projection into the residual stream, for the model's initialisation.
    """

    def __init__(self, d: int, intermediate: int, eps: float = 1e-6, out_scale: float = 1.0) -> None:
        super().__init__()
        self.mlp_norm = RMSNorm(d, eps=eps)
        self.gate_proj = nn.Linear(d, intermediate, bias=False)
        self.up_proj = nn.Linear(d, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, d, bias=False)
        self.down_proj.init_scale = out_scale  # type: ignore[assignment]

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` plus its SwiGLU, `(…, d)`."""
        n = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `feed_forward`."""
        return self.feed_forward(x)


class AttentionBlock(FeedForwardBlock):
    """Projections of an attention block with RMSNorm of queries and keys, and its SwiGLU.

    Args:
        d: width of the states.
        heads, head_dim: of the attention.
        intermediate: width of the SwiGLU.
        eps: of all norms.
        out_scale: `init_scale` of the two projections into the residual stream, for the model's initialisation.
    """

    def __init__(
        self, d: int, heads: int, head_dim: int, intermediate: int, eps: float = 1e-6, out_scale: float = 1.0
    ) -> None:
        super().__init__(d, intermediate, eps, out_scale)
        self.heads = heads
        self.head_dim = head_dim
        self.input_norm = RMSNorm(d, eps=eps)
        self.q_proj = nn.Linear(d, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d, heads * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps)
        self.k_norm = RMSNorm(head_dim, eps=eps)
        self.o_proj = nn.Linear(heads * head_dim, d, bias=False)
        self.o_proj.init_scale = out_scale  # type: ignore[assignment]

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, heads · head dim)` to `(batch, tokens, heads, head dim)`."""
        return x.unflatten(-1, (self.heads, self.head_dim))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of states.

        Args:
            x: `(batch, tokens, d)`.

        Returns:
            The normalised states `(batch, tokens, d)`, and queries, keys and values, each `(batch, heads, tokens,
            head dim)`. Queries and keys are normalised; none is turned.
        """
        n = self.input_norm(x)
        query = self.q_norm(self.split_heads(self.q_proj(n)))
        key = self.k_norm(self.split_heads(self.k_proj(n)))
        value = self.split_heads(self.v_proj(n))
        return n, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add what was attended to, then the SwiGLU.

        Args:
            x: `(batch, tokens, d)`, as given to `project`.
            attended: `(batch, tokens, heads · head dim)`.

        Returns:
            `(batch, tokens, d)`.
        """
        return self.feed_forward(x + self.o_proj(attended))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Refused: attention lies between `project` and `finish`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("Call project(), attend, then finish(): the block does not know who sees whom.")
