"""How proxies see each other, or a condition (ProxyFormer, Section 3.3, Eq. 4 and 9)."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from .proxy_block import AttentionBlock, FeedForwardBlock
from .rms_norm import RMSNorm

State = tuple[torch.Tensor, ...]
Past = tuple[torch.Tensor | None, ...]
# Turns queries or keys (batch, heads, m, head dim); takes the positions as a second argument where they are given.
Rotary = Callable[..., torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Interface
# ---------------------------------------------------------------------------------------------------------------------


class ProxyInteraction(nn.Module):
    """Proxies of one layer, after they have seen each other.

    Attributes:
        causal: whether a proxy depends on those before it only, so that proxies may come in several calls.
    """

    causal = True

    def forward(
        self,
        proxies: torch.Tensor,
        past: Past | None = None,
        valid: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        condition_valid: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Let proxies interact.

        Args:
            proxies: `(batch, m, d)`.
            past: what earlier calls left, for one row of `proxies` each. For causal attention `(key, value,
                past_valid)`, keys (turned, if `rotary` turns them) and values `(batch, heads, M, head dim)` of all
                earlier proxies and which of them hold tokens, `(batch, M)` bool, `None` for all; for the recurrence
                its state; `None` or `()` else.
            valid: `(batch, m)` bool, proxies of blocks that hold a real token; others are not seen. `None` for all.
                For causal attention `None` is right, and faster, where invalid proxies only follow valid ones
                (padding on the right) and are not read.
            condition: `(batch, n, c)`, what cross-attention reads.
            positions: `(batch or 1, m)`, or `(batch or 1, m, D)` in D dimensions; handed to `rotary`.
            rotary: for attention among proxies, turns queries and keys `(batch, heads, m, head dim)`: `rotary(x)`, or
                `rotary(x, positions)` with positions. Without it, attention knows no positions.
            condition_valid: `(batch, n)` bool, which states of the condition are real; `None` for all.

        Returns:
            Proxies `(batch, m, d)`, finite in invalid places too, and the state: `(key, value)` of the new proxies
            for attention among proxies, `(hidden,)` `(batch, d)` in float32 (float64 for float64 proxies) after the
            last valid proxy for the recurrence, `()` for the others.

        Raises:
            ValueError: shapes that do not fit; a `past` for bidirectional attention; cross-attention without a
                condition; positions without rotary.
        """
        _check(proxies, valid, positions, rotary)
        return self.interact(proxies, past or None, valid, condition, positions, rotary, condition_valid)

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        """What a subclass does; arguments as in `forward`, an empty past as `None`."""
        raise NotImplementedError


def _check(
    proxies: torch.Tensor, valid: torch.Tensor | None, positions: torch.Tensor | None, rotary: Rotary | None
) -> None:
    if proxies.ndim != 3:
        raise ValueError(f"proxies must have shape (batch, m, d), got {tuple(proxies.shape)}.")
    if valid is not None and (valid.shape != proxies.shape[:2] or valid.dtype != torch.bool):
        raise ValueError(
            f"valid must be bool of shape (batch, m) = {tuple(proxies.shape[:2])}, got {valid.dtype} of shape "
            f"{tuple(valid.shape)}."
        )
    if positions is not None and rotary is None:
        raise ValueError("positions are read by rotary: give it too, or neither.")


def make_interaction(
    kind: str,
    size: int,
    heads: int,
    head_dim: int,
    intermediate: int,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    condition_size: int | None = None,
) -> ProxyInteraction:
    """An interaction by name.

    Args:
        kind: `"causal_attention"`, `"bidirectional_attention"`, `"identity"`, `"mlp"`, `"recurrent"` or
            `"cross_attention"`.
        size: width of the proxies.
        heads, head_dim: of the attention.
        intermediate: width of the SwiGLU.
        eps: of all norms.
        out_scale: `init_scale` of projections into the residual stream.
        condition_size: width of the condition, for cross-attention.

    Raises:
        ValueError: an unknown kind, or cross-attention without `condition_size`.
    """
    if kind not in PROXY_INTERACTIONS:
        raise ValueError(f"Unknown proxy interaction {kind!r}: choose one of {', '.join(PROXY_INTERACTIONS)}.")
    if kind == "identity":
        return IdentityInteraction()
    if kind == "mlp":
        return MLPInteraction(size, intermediate, eps, out_scale)
    if kind == "recurrent":
        return RecurrentInteraction(size, intermediate, eps, out_scale)
    if kind == "cross_attention":
        if condition_size is None:
            raise ValueError("Cross-attention of proxies needs condition_size, the width of the condition.")
        return CrossAttentionInteraction(size, heads, head_dim, intermediate, condition_size, eps, out_scale)
    attention = CausalAttentionInteraction if kind == "causal_attention" else BidirectionalAttentionInteraction
    return attention(size, heads, head_dim, intermediate, eps, out_scale)


# ---------------------------------------------------------------------------------------------------------------------
# Without a look at other proxies
# ---------------------------------------------------------------------------------------------------------------------


class IdentityInteraction(ProxyInteraction):
    """Proxies as they are; blocks evolve independently."""

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        return proxies, ()


class MLPInteraction(ProxyInteraction):
    """One SwiGLU for each proxy; arguments as in `FeedForwardBlock`."""

    def __init__(self, d: int, intermediate: int, eps: float = 1e-6, out_scale: float = 1.0) -> None:
        super().__init__()
        self.block = FeedForwardBlock(d, intermediate, eps, out_scale)

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        return self.block(proxies), ()


# ---------------------------------------------------------------------------------------------------------------------
# Attention among proxies
# ---------------------------------------------------------------------------------------------------------------------


class CausalAttentionInteraction(ProxyInteraction):
    """Proxies attend to themselves and to valid proxies before them (Eq. 9); arguments as in `AttentionBlock`."""

    def __init__(
        self, d: int, heads: int, head_dim: int, intermediate: int, eps: float = 1e-6, out_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.block = AttentionBlock(d, heads, head_dim, intermediate, eps, out_scale)

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        _, query, key, value = self.block.project(proxies)
        if rotary is not None:
            given = () if positions is None else (positions,)
            query, key = rotary(query, *given), rotary(key, *given)
        attended = self.attend(query, key, value, past, valid)
        return self.block.finish(proxies, attended.transpose(1, 2).flatten(2)), (key, value)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """`(batch, heads, m, head dim)`: values of the proxies seen, without a mask wherever none is needed."""
        past_valid = None
        if past is not None:
            past_key, past_value, past_valid = past
            if past_key is None or past_value is None:
                raise ValueError("past must hold the keys and values of earlier proxies: (key, value, past_valid).")
            if past_valid is not None and past_valid.shape != (key.shape[0], past_key.shape[2]):
                raise ValueError(
                    f"past_valid must have shape (batch, earlier proxies) = {(key.shape[0], past_key.shape[2])}, got "
                    f"{tuple(past_valid.shape)}."
                )
            key = torch.cat([past_key.to(key.dtype), key], dim=2)
            value = torch.cat([past_value.to(value.dtype), value], dim=2)
        new, total = query.shape[2], key.shape[2]
        if new == 1 and past_valid is None:
            return F.scaled_dot_product_attention(query, key, value)
        if valid is None and past_valid is None:
            if new == total:
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)
            if not torch.compiler.is_compiling():
                return F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(new, total))
        seen = _causal_mask(new, total, valid, past_valid, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def _causal_mask(
    new: int, total: int, valid: torch.Tensor | None, past_valid: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """`(batch or 1, 1, new, total)` bool: valid proxies up to the query's, and the query's own even if invalid.

    Its own makes rows without any valid proxy finite.
    """
    seen = torch.ones(new, new, dtype=torch.bool, device=device).tril()[None]
    if valid is not None:
        seen = (seen & valid[:, None, :]) | torch.eye(new, dtype=torch.bool, device=device)
    if total > new:
        if past_valid is None:
            earlier = seen.new_ones(1, 1, total - new)
        else:
            earlier = past_valid[:, None, :].bool()
        batch = max(seen.shape[0], earlier.shape[0])
        seen = torch.cat([earlier.expand(batch, new, -1), seen.expand(batch, -1, -1)], dim=-1)
    return seen[:, None]


class BidirectionalAttentionInteraction(CausalAttentionInteraction):
    """Proxies attend to all valid proxies (Eq. 9 with M = 0), for images; arguments as in `AttentionBlock`."""

    causal = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        if past is not None:
            raise ValueError("Bidirectional attention cannot continue a past: give all proxies in one call.")
        return F.scaled_dot_product_attention(query, key, value, attn_mask=_key_mask(valid))


def _key_mask(valid: torch.Tensor | None) -> torch.Tensor | None:
    """`(batch, 1, 1, keys)` bool, all of them where a row has no valid one: what is read there is dropped later."""
    return None if valid is None else (valid | ~valid.any(dim=1, keepdim=True))[:, None, None]


# ---------------------------------------------------------------------------------------------------------------------
# Attention to a condition
# ---------------------------------------------------------------------------------------------------------------------


class CrossAttentionInteraction(ProxyInteraction):
    """Proxies attend to the states of a condition, such as a text's, not to each other.

    Args:
        d, heads, head_dim, intermediate, eps, out_scale: as in `AttentionBlock`.
        condition_size: width of the condition.
    """

    def __init__(
        self,
        d: int,
        heads: int,
        head_dim: int,
        intermediate: int,
        condition_size: int,
        eps: float = 1e-6,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.condition_size = condition_size
        self.heads_shape = (heads, head_dim)
        self.input_norm = RMSNorm(d, eps=eps)
        self.condition_norm = RMSNorm(condition_size, eps=eps)
        self.q_proj = nn.Linear(d, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(condition_size, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(condition_size, heads * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps)
        self.k_norm = RMSNorm(head_dim, eps=eps)
        self.o_proj = nn.Linear(heads * head_dim, d, bias=False)
        self.o_proj.init_scale = out_scale  # type: ignore[assignment]
        self.block = FeedForwardBlock(d, intermediate, eps, out_scale)

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        if condition is None:
            raise ValueError("Cross-attention of proxies needs a condition (batch, n, c).")
        if condition.ndim != 3 or (condition.shape[0], condition.shape[2]) != (proxies.shape[0], self.condition_size):
            raise ValueError(
                f"The condition must have shape (batch, n, c) = ({proxies.shape[0]}, n, {self.condition_size}), got "
                f"{tuple(condition.shape)}."
            )
        if condition_valid is not None and condition_valid.shape != condition.shape[:2]:
            raise ValueError(
                f"condition_valid must have shape {tuple(condition.shape[:2])}, got {tuple(condition_valid.shape)}."
            )
        query = self.q_norm(self.q_proj(self.input_norm(proxies)).unflatten(-1, self.heads_shape))
        states = self.condition_norm(condition)
        key = self.k_norm(self.k_proj(states).unflatten(-1, self.heads_shape))
        value = self.v_proj(states).unflatten(-1, self.heads_shape)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=_key_mask(condition_valid))
        if condition_valid is not None:
            attended = attended * condition_valid.any(dim=1)[:, None, None, None]
        return self.block(proxies + self.o_proj(attended.transpose(1, 2).flatten(2))), ()


# ---------------------------------------------------------------------------------------------------------------------
# Recurrence
# ---------------------------------------------------------------------------------------------------------------------

# Spans, in proxies, over which channels of a new recurrence forget at its slowest and fastest gate.
_SHORTEST, _LONGEST = 10.0, 10_000.0


class RecurrentInteraction(ProxyInteraction):
    """A gated linear recurrence over proxies, then a SwiGLU.

    With n = RMSNorm(proxy), r = sigmoid(W_r n), i = sigmoid(W_i n) and a = exp(-softplus(λ) r), channel by channel:
    h ← a h + sqrt(1 - a²) i W_x n, and the proxy becomes proxy + W_o (silu(W_g n) h). An invalid proxy leaves h as it
    is. The cost is linear in proxies, and what is kept of the past is one vector.

    Args:
        d, intermediate, eps, out_scale: as in `FeedForwardBlock`.

    Attributes:
        decay: λ `(d,)`; `initial_decay` is what it starts with.
    """

    def __init__(self, d: int, intermediate: int, eps: float = 1e-6, out_scale: float = 1.0) -> None:
        super().__init__()
        self.input_norm = RMSNorm(d, eps=eps)
        self.x_proj = nn.Linear(d, d, bias=False)
        self.input_gate_proj = nn.Linear(d, d, bias=False)
        self.recurrence_gate_proj = nn.Linear(d, d, bias=False)
        self.output_gate_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.o_proj.init_scale = out_scale  # type: ignore[assignment]
        self.decay = nn.Parameter(self.initial_decay(d))
        self.block = FeedForwardBlock(d, intermediate, eps, out_scale)

    @staticmethod
    def initial_decay(d: int) -> torch.Tensor:
        """λ `(d,)` of a new model, with which channels forget over 10 to 10,000 proxies, evenly in the logarithm."""
        spans = torch.logspace(math.log10(_SHORTEST), math.log10(_LONGEST), d, dtype=torch.float64)
        # softplus(λ) = 1 / span.
        return torch.log(torch.expm1(1 / spans)).to(torch.get_default_dtype())

    def interact(
        self,
        proxies: torch.Tensor,
        past: Past | None,
        valid: torch.Tensor | None,
        condition: torch.Tensor | None,
        positions: torch.Tensor | None,
        rotary: Rotary | None,
        condition_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        n = self.input_norm(proxies)
        exact = torch.promote_types(proxies.dtype, torch.float32)
        log_a = -F.softplus(self.decay.to(exact)) * torch.sigmoid(self.recurrence_gate_proj(n).to(exact))
        # The bound keeps the root's gradient finite where a gate closes.
        new = (-torch.expm1(2 * log_a)).clamp_min(1e-8).sqrt() * torch.sigmoid(self.input_gate_proj(n).to(exact))
        a, b = log_a.exp(), new * self.x_proj(n).to(exact)
        if valid is not None:
            a = torch.where(valid[..., None], a, 1.0)
            b = torch.where(valid[..., None], b, 0.0)
        if past is not None:
            (hidden,) = past
            if hidden is None or hidden.shape != (proxies.shape[0], proxies.shape[2]):
                got = "none" if hidden is None else f"shape {tuple(hidden.shape)}"
                raise ValueError(f"past must hold the hidden state {(proxies.shape[0], proxies.shape[2])}, got {got}.")
            b = torch.cat([b[:, :1] + a[:, :1] * hidden[:, None].to(exact), b[:, 1:]], dim=1)
        states = linear_scan(a, b)
        gated = F.silu(self.output_gate_proj(n)) * states.to(n.dtype)
        return self.block(proxies + self.o_proj(gated)), (states[:, -1],)


def linear_scan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """All states h_t = a_t h_{t-1} + b_t with h_{-1} = 0, in about 2 log2(m) steps and 2 m products.

    Args:
        a, b: `(batch, m, …)` with m ≥ 1; magnitudes of `a` at most 1.

    Returns:
        `(batch, m, …)`.
    """
    length = a.shape[1]
    if length == 1:
        return b
    # Neighbours joined are a recurrence of half the length, whose states are those of odd places.
    even = length - length % 2
    first, second = a[:, 0:even:2], a[:, 1:even:2]
    odd_states = linear_scan(first * second, second * b[:, 0:even:2] + b[:, 1:even:2])
    # An even place follows the odd one before it; the first follows none.
    later = a[:, 2::2] * odd_states[:, : (length - 1) // 2] + b[:, 2::2]
    even_states = torch.cat([b[:, :1], later], dim=1)
    pairs = torch.stack([even_states[:, : even // 2], odd_states], dim=2).flatten(1, 2)
    return pairs if even == length else torch.cat([pairs, even_states[:, -1:]], dim=1)


PROXY_INTERACTIONS = (
    "causal_attention",
    "bidirectional_attention",
    "identity",
    "mlp",
    "recurrent",
    "cross_attention",
)
