"""Proxies that attend to a condition, a class or a text, beside another interaction (ProxyFormer, Section 3.9)."""

from torch import nn

from .proxy_interaction import CrossAttentionInteraction


class ConditionAttention(CrossAttentionInteraction):
    """Cross-attention with its residual, without the SwiGLU: the interaction among proxies that follows has one.

    Args:
        d: width of the proxies.
        heads, head_dim: of the attention.
        condition_size: width of the condition's states.
        eps: of the norms.
        out_scale: `init_scale` of the projection into the residual stream.
    """

    def __init__(
        self, d: int, heads: int, head_dim: int, condition_size: int, eps: float = 1e-6, out_scale: float = 1.0
    ) -> None:
        super().__init__(d, heads, head_dim, 1, condition_size, eps, out_scale)
        self.block = nn.Identity()  # type: ignore[assignment]
