"""First bottleneck weights for a GPT-NeoX that becomes a DAR: in closed form, from a few hundred thousand tokens.

A far token j is seen through h_j P with P = W_down W_up of rank r, where h_j is the attention's input, a row. To
first order in the error e_j = h_j (I - P), the attention output of head h at query i changes by

    sum over far j of  p_ij [ (q_i R e_j K_h)(v_j - o_i) O_h  +  e_j V_h O_h ]

with attention weights p, scaled queries q, rotation R, the head's key, value and output maps K, V, O, values v and
outputs o. The "weighted" method minimises an estimate of its square that has a closed solution:

    tr (I - P)' S (I - P) M M',        M = [K_h A_h^(1/2), b_h^(1/2) V_h O_h  for each head h]

- S = E[a' a] of a = sum over far j of p_ij h_j: what queries read of the far tokens together, because in the second
  term errors add up before they are squared. A multiple of the identity is added, for text unlike the calibration's.
- A_h = E[(sum over far j of p_ij^2 |(v_j - o_i) O_h|^2) q_i' q_i], averaged over rotations, and b_h = E[sum over far j
  of p_ij^2]: how much a head's output turns on its far keys, and on its far values. They also say what keys are worth
  against values.

With U the first r left singular vectors of S^(1/2) M, P = S^(-1/2) U U' S^(1/2). The other methods, to compare: "svd"
keeps the first left singular vectors of the key and value weights, with no text at all, and "pca" the first principal
components of h.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from nearfar.modeling.rotary_halves import rotate_halves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nearfar.modeling.modeling_dar import DARForCausalLM
    from nearfar.training.token_blocks import TokenBlocks

__all__ = [
    "METHODS",
    "AttentionMoments",
    "average_over_rotations",
    "bottleneck_weights",
    "collect_moments",
    "initialise_bottlenecks",
    "needs_moments",
    "weighted_low_rank",
]

METHODS = ("weighted", "svd", "pca")
# Eigenvalues of S below this share of the largest are raised to it: S^(-1/2) would blow up what calibration never saw.
EIGENVALUE_FLOOR = 1e-10
# This share of S's mean eigenvalue is added to each: other text than the calibration's reads other directions too.
SHRINKAGE = 0.1


@dataclass
class AttentionMoments:
    """What is remembered of one layer's calibration text; all float64. d is the hidden size.

    Attributes:
        tokens: `(d, d)`, E[h' h] over all tokens, not centred.
        far_averages: `(d, d)`, E[a' a] over queries that see far tokens and over heads; see the module's docstring.
        queries: `(heads, head dim, head dim)`, A_h before the average over rotations.
        values: `(heads,)`, b_h.
    """

    tokens: torch.Tensor
    far_averages: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor


# ---------------------------------------------------------------------------------------------------------------------
# From moments to weights
# ---------------------------------------------------------------------------------------------------------------------


def needs_moments(method: str, bottleneck_size: int, hidden_size: int) -> bool:
    """Whether `bottleneck_weights` needs calibration text at all.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    return method != "svd" and bottleneck_size < hidden_size


def average_over_rotations(moment: torch.Tensor, rotary_dims: int) -> torch.Tensor:
    """E over angles of R' moment R, where R turns each rotary pair by an angle of its own, uniform on the circle.

    A score is q R k' with a rotation R that depends on the distance, so that is what a far key meets of the queries'
    second moment. Within a pair the average is the mean energy of the two dimensions on the diagonal; between pairs,
    and between a pair and dimensions that do not turn, nothing survives; what does not turn stays as it is.

    Args:
        moment: `(…, head dim, head dim)`, symmetric.
        rotary_dims: how many of the first dimensions turn, the first half of them against the second; even.

    Returns:
        A tensor of the same shape.
    """
    half = rotary_dims // 2
    energy = moment.diagonal(dim1=-2, dim2=-1)
    pairs = (energy[..., :half] + energy[..., half:rotary_dims]) / 2
    averaged = torch.zeros_like(moment)
    averaged.diagonal(dim1=-2, dim2=-1)[..., :rotary_dims] = torch.cat([pairs, pairs], dim=-1)
    averaged[..., rotary_dims:, rotary_dims:] = moment[..., rotary_dims:, rotary_dims:]
    return averaged


def weighted_low_rank(
    second_moment: torch.Tensor, readout: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The W_down, W_up of this rank with the least E|(h - h W_down W_up) readout|^2.

    Args:
        second_moment: `(d, d)`, E[h' h].
        readout: `(d, any)`.
        rank: from 1 to d.

    Returns:
        W_down `(d, rank)` and W_up `(rank, d)`, for row vectors h, float64. Their product is unique (unless singular
        values tie); of its factors those are taken whose columns and rows are equally long. Adam's steps then mean
        the same in every model, and rounding to bfloat16 costs least.
    """
    values, vectors = torch.linalg.eigh(second_moment.double())
    roots = values.clamp_min(EIGENVALUE_FLOOR * float(values[-1].clamp_min(torch.finfo(values.dtype).tiny))).sqrt()
    root, inverse = (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT
    read = root @ readout.double()
    # The first left singular vectors, at a tenth of their cost for a large model.
    kept = torch.linalg.eigh(read @ read.mT).eigenvectors[:, -rank:]
    return _even_factors(inverse @ kept, kept.mT @ root)


def _even_factors(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors (A s^(1/2), s^(1/2) B') of the same product, from its singular value decomposition A s B'."""
    left, right = torch.linalg.qr(down), torch.linalg.qr(up.mT)
    inner = torch.linalg.svd(left.R @ right.R.mT)
    scale = inner.S.sqrt()
    return left.Q @ inner.U * scale, scale[:, None] * (inner.Vh @ right.Q.mT)


def bottleneck_weights(
    query_key_value: torch.Tensor,
    dense: torch.Tensor,
    moments: AttentionMoments | None,
    bottleneck_size: int,
    *,
    heads: int,
    rotary_dims: int,
    method: str = "weighted",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's first weights.

    Args:
        query_key_value: `(3 d, d)`, GPT-NeoX's fused projection, rows `[heads, 3, head dim]`.
        dense: `(d, d)`, the output projection, columns `[heads, head dim]`.
        moments: of this layer; `None` where the method needs none (see `needs_moments`).
        bottleneck_size: r, from 1 to d. With d nothing is lost, and both weights are the identity.
        heads: attention heads.
        rotary_dims: dimensions of a head that the rotary embedding turns.
        method: one of `METHODS`; see the module's docstring.

    Returns:
        The weights of `bottleneck_down` `(r, d)` and `bottleneck_up` `(d, r)`, float64, on the weights' device.

    Raises:
        ValueError: an unknown method, a size out of range, or moments missing.
    """
    hidden = dense.shape[0]
    if not 1 <= bottleneck_size <= hidden:
        raise ValueError(f"bottleneck_size must lie between 1 and the hidden size {hidden}, got {bottleneck_size}")
    if needs_moments(method, bottleneck_size, hidden) and moments is None:
        raise ValueError(f"method {method!r} needs the moments of some calibration text")
    device = dense.device
    if bottleneck_size == hidden:
        identity = torch.eye(hidden, dtype=torch.float64, device=device)
        return identity, identity.clone()

    key, value = _key_and_value_maps(query_key_value.double(), heads)
    if moments is None or method == "svd":
        plain = torch.cat([key, value], dim=-1).transpose(0, 1).flatten(1)
        down, up = weighted_low_rank(torch.eye(hidden, dtype=torch.float64, device=device), plain, bottleneck_size)
    elif method == "pca":
        directions = torch.linalg.eigh(moments.tokens.to(device)).eigenvectors[:, -bottleneck_size:]
        down, up = directions, directions.mT
    else:
        output = dense.double().view(hidden, heads, -1).permute(1, 2, 0)  # (heads, head dim, d)
        queries = average_over_rotations(moments.queries.to(device), rotary_dims)
        read_keys = key @ _square_root(queries)
        read_values = moments.values.to(device).sqrt()[:, None, None] * (value @ _square_root(output @ output.mT))
        readout = torch.cat([read_keys, read_values], dim=-1).transpose(0, 1).flatten(1)
        down, up = weighted_low_rank(_shrunk(moments.far_averages.to(device)), readout, bottleneck_size)
    return down.mT.contiguous(), up.mT.contiguous()


def _key_and_value_maps(query_key_value: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For row vectors, `(heads, d, head dim)` each."""
    _, key, value = query_key_value.view(heads, 3, -1, query_key_value.shape[1]).mT.unbind(1)
    return key, value


def _square_root(matrix: torch.Tensor) -> torch.Tensor:
    """A symmetric square root of symmetric matrices without negative eigenvalues, but for rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def _shrunk(moment: torch.Tensor) -> torch.Tensor:
    """A second moment, drawn a little towards a multiple of the identity."""
    identity = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return moment + SHRINKAGE * moment.trace() / len(moment) * identity


@torch.no_grad()
def initialise_bottlenecks(
    model: DARForCausalLM, moments: Sequence[AttentionMoments] | None, *, method: str = "weighted"
) -> None:
    """Set every layer's `bottleneck_down` and `bottleneck_up`, in the model's own dtype and in place.

    Args:
        model: with a linear bottleneck.
        moments: one a layer, from `collect_moments`; `None` where the method needs none.
        method: one of `METHODS`.

    Raises:
        ValueError: an unknown method, a model without bottleneck or with a sigmoid one, moments missing or not one a
            layer.
    """
    config: Any = model.config
    layers: Any = model.gpt_neox.layers
    if not config.has_bottleneck:
        raise ValueError("the model has window_size=None: there is no bottleneck to initialise")
    if config.bottleneck_activation is not None:
        raise ValueError(
            f"bottleneck_activation={config.bottleneck_activation!r}: a squashed bottleneck cannot pass hidden states "
            "on unchanged, and has no such solution. Use bottleneck_activation=None, or train the model from its start"
        )
    if moments is not None and len(moments) != len(layers):
        raise ValueError(f"the model has {len(layers)} layers, and there are moments of {len(moments)}")
    needs_moments(method, config.bottleneck_size, config.hidden_size)
    for index, layer in enumerate(layers):
        attention = layer.attention
        down, up = bottleneck_weights(
            attention.query_key_value.weight,
            attention.dense.weight,
            None if moments is None else moments[index],
            config.bottleneck_size,
            heads=config.num_attention_heads,
            rotary_dims=config.rotary_dims,
            method=method,
        )
        attention.bottleneck_down.weight.copy_(down)
        attention.bottleneck_up.weight.copy_(up)


# ---------------------------------------------------------------------------------------------------------------------
# Moments from text
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def collect_moments(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    window: int,
    batch_size: int = 4,
    queries_per_block: int = 128,
    quiet: bool = False,
) -> list[AttentionMoments]:
    """Read calibration text with a model in which every token is near, and remember what initialisation needs.

    Besides the model's own forward pass it costs, per block and layer, the attention of `queries_per_block` queries
    and heads times as much for their averages of hidden states; and 2 d² numbers a layer.

    Args:
        model: a GPT-NeoX, or a DAR whose tokens are all near (see `every_token_near`), on any device and in any dtype;
            moments are float64 on that device.
        blocks: the text; `block_tokens` > `window`.
        window: distance, in tokens, from which on a token counts as far.
        batch_size: blocks a forward pass.
        queries_per_block: queries that are looked at, evenly spaced over those that see far tokens: neighbours hardly
            differ.
        quiet: no progress bar.

    Raises:
        ValueError: blocks no longer than the window, or numbers out of range.
    """
    if blocks.block_tokens <= window:
        raise ValueError(
            f"calibration blocks of {blocks.block_tokens} tokens hold none beyond a window of {window}: give longer "
            "blocks or a smaller window"
        )
    for name, value in (("window", window + 1), ("batch_size", batch_size), ("queries_per_block", queries_per_block)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value - (name == 'window')}")
    layers = model.gpt_neox.layers
    collectors = [_Collector(layer.attention, model.config, window) for layer in layers]
    device = model.get_input_embeddings().weight.device
    tokens = blocks.block_tokens
    count = min(queries_per_block, tokens - window)
    columns = torch.linspace(window, tokens - 1, count, dtype=torch.float64).round().long().to(device)
    starts = range(0, len(blocks), batch_size)
    for start in tqdm(starts, desc="calibrating", unit="batch", disable=quiet or None, file=sys.stderr):
        ids = torch.stack([blocks[i]["input_ids"] for i in range(start, min(start + batch_size, len(blocks)))]).to(
            device
        )
        angles = model.gpt_neox.rotary_emb(
            torch.zeros((), device=device), position_ids=torch.arange(tokens, device=device)[None]
        )
        with _watched(layers, collectors, columns, angles):
            model.gpt_neox(input_ids=ids, use_cache=False)
    return [collector.moments() for collector in collectors]


@contextmanager
def _watched(
    layers: Sequence[Any],
    collectors: Sequence[_Collector],
    columns: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[None]:
    """Show each layer's hidden states and projections to its collector."""

    def hook(collector: _Collector) -> Any:
        def see(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            collector.see(inputs[0], output, columns, *angles)

        return see

    handles = [
        layer.attention.query_key_value.register_forward_hook(hook(collector))
        for layer, collector in zip(layers, collectors, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Collector:
    """Sums over one layer's tokens, queries and heads."""

    def __init__(self, attention: Any, config: Any, window: int) -> None:
        self.heads, self.window, self.scaling = config.num_attention_heads, window, attention.scaling
        weight = attention.dense.weight
        hidden, head_dim = weight.shape[0], weight.shape[0] // self.heads
        output = weight.double().view(hidden, self.heads, head_dim).permute(1, 2, 0)
        # |x O_h|^2 = x G_h x' spares a product with the full hidden size for every pair of tokens.
        self.output_gram = output @ output.mT
        wide = {"dtype": torch.float64, "device": weight.device}
        self.tokens = torch.zeros(hidden, hidden, **wide)
        self.far_averages = torch.zeros(hidden, hidden, **wide)
        self.queries = torch.zeros(self.heads, head_dim, head_dim, **wide)
        self.values = torch.zeros(self.heads, **wide)
        self.token_count = self.query_count = 0

    def see(
        self, hidden: torch.Tensor, states: torch.Tensor, columns: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Add a batch.

        Args:
            hidden: `(batch, tokens, d)`, the attention's input.
            states: `(batch, tokens, 3 d)`, of it the projected queries, keys and values.
            columns: `(queries,)`, the queries that are looked at.
            cos, sin: `(1, tokens, rotary dims)`.
        """
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tokens = hidden.shape[1]
        column = torch.arange(tokens, device=hidden.device)
        distance = columns[:, None] - column
        for row, projected in zip(hidden, states, strict=True):  # one at a time: heads × queries × d numbers each
            row = row.to(dtype)
            wide = row.double()
            self.tokens += wide.mT @ wide
            self.token_count += tokens
            query, key, value = (
                projected.to(dtype).view(tokens, self.heads, 3, -1).permute(2, 1, 0, 3)
            )  # each (heads, tokens, head dim)
            query = query * self.scaling
            turned = rotate_halves(query, cos.to(dtype), sin.to(dtype))[:, columns]
            scores = turned @ rotate_halves(key, cos.to(dtype), sin.to(dtype)).mT
            weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
            out = weights @ value  # (heads, queries, head dim)
            far = weights * (distance >= self.window)

            averages = (far @ row).flatten(0, 1).double()
            self.far_averages += averages.mT @ averages
            # |(v_j - o_i) O_h|^2, expanded; rounding may leave it a little below zero.
            gram = self.output_gram.to(dtype)
            value_energy = ((value @ gram) * value).sum(-1)
            out_energy = ((out @ gram) * out).sum(-1)
            turn = value_energy[:, None, :] - 2 * (out @ gram) @ value.mT + out_energy[..., None]
            squares = far.square()
            sensitivity = (squares * turn.clamp_min(0)).sum(-1)  # (heads, queries)
            chosen = query[:, columns].double()
            self.queries += (chosen * sensitivity.double()[..., None]).mT @ chosen
            self.values += squares.sum((-2, -1)).double()
            self.query_count += len(columns)

    def moments(self) -> AttentionMoments:
        """The means."""
        return AttentionMoments(
            tokens=self.tokens / self.token_count,
            far_averages=self.far_averages / (self.query_count * self.heads),
            queries=self.queries / self.query_count,
            values=self.values / self.query_count,
        )
