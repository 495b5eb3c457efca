"""The history stream without its local features in memory for the backward pass.

With residual injection X^(l) = X^(l-1) + D_l(H̄^(l)), so the backward pass goes back from layer to layer by subtracting
what the forward pass added. Of a layer only the proxies are kept. The one local stream that exists is changed in
place, a chunk of blocks at a time; it is held in single precision where the model computes in half, so that
subtracting brings back what was there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .proxy_history import ProxyHistoryLayer

Embed = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class _LocalStream:
    """The local features `(batch, tokens, d_h)`, their gradient, and the layer they are at."""

    def __init__(self, ids: torch.Tensor, real: torch.Tensor | None, halo: int, stem_tokens: int, chunk: int) -> None:
        self.ids, self.real, self.halo, self.stem_tokens, self.chunk = ids, real, halo, stem_tokens, chunk
        self.features: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.dtype: torch.dtype | None = None  # that the model computes in
        self.level = 0
        device = ids.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    @contextmanager
    def as_forward(self) -> Iterator[None]:
        """Gradients on, and autocast as it was in the forward pass."""
        device, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            yield

    def slices(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def embedded(self, embed: Embed, part: slice) -> torch.Tensor:
        """Local features of some tokens at layer 0, with as many before them as the stem looks back at."""
        begin = max(part.start - self.stem_tokens, -self.halo)
        columns = slice(begin + self.halo, part.stop + self.halo)
        real = None if self.real is None else self.real[:, columns]
        return embed(self.ids[:, columns], real)[:, part.start - begin :]

    def mask(self, part: slice) -> torch.Tensor | None:
        if self.real is None:
            return None
        return self.real[:, self.halo :][:, part]


def reversible_history(
    layers: nn.ModuleList,
    ids: torch.Tensor,
    real: torch.Tensor | None,
    halo: int,
    stem_tokens: int,
    embed: Embed,
    embed_parameters: list[nn.Parameter],
    chunk_blocks: int,
    interact: Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Proxies H̄ of every layer, `(batch, proxies, d_proxy)`, and the local stream at the end, for looking at only.

    Args:
        layers: `ProxyHistoryLayer`s of one ratio, with residual injection.
        ids: `(batch, halo + tokens)`.
        real: `(batch, halo + tokens)`, bool, or `None` if all are.
        halo: tokens before the first block, which only the embedding's stem reads.
        stem_tokens: how many tokens the stem looks back.
        embed: ids and mask to local features, `(batch, n, d_h)`.
        embed_parameters: what it learns.
        chunk_blocks: blocks that are compressed and decompressed at a time.
        interact: `(layer, proxies of the layer before, compressed)` to proxies.
    """
    first = layers[0]
    assert isinstance(first, ProxyHistoryLayer)
    stream = _LocalStream(ids, real, halo, stem_tokens, chunk_blocks * first.ratio)
    proxies: torch.Tensor | None = None
    found: list[torch.Tensor] = []
    layer: Any
    for index, layer in enumerate(layers):
        before: Any = layers[index - 1] if index else None
        learnt = list(embed_parameters) if before is None else list(before.decompress.parameters())
        learnt += list(layer.compress.parameters())
        learnt = [parameter for parameter in learnt if parameter.requires_grad]
        compressed = _Step.apply(proxies, stream, index, before, layer, embed, learnt, *learnt)
        # The interaction is computed again in the backward pass: of it, only its inputs are kept.
        proxies = checkpoint(interact, index, proxies, compressed, use_reentrant=False)
        found.append(proxies)
    assert stream.features is not None
    return found, stream.features


class _Step(torch.autograd.Function):
    """Add what the proxies of the layer before inject, and compress for this layer."""

    @staticmethod
    def forward(ctx: Any, proxies, stream, index, before, layer, embed, learnt, *parameters):  # type: ignore[no-untyped-def]
        ctx.constants = (stream, index, before, layer, embed, learnt)
        tokens = stream.ids.shape[1] - stream.halo
        parts = []
        for part in stream.slices(tokens):
            if before is None:
                fresh = stream.embedded(embed, part)
                if stream.features is None:
                    dtype = torch.float32 if fresh.dtype in (torch.float16, torch.bfloat16) else fresh.dtype
                    stream.features = fresh.new_empty(fresh.shape[0], tokens, fresh.shape[2], dtype=dtype)
                    stream.dtype = fresh.dtype
                stream.features[:, part] = fresh
            else:
                stream.features[:, part] += _injected(before, proxies, part, stream)
            parts.append(layer.summarise(stream.features[:, part].to(stream.dtype)))
        stream.level = index
        if proxies is not None:
            ctx.save_for_backward(proxies)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        stream, index, before, layer, embed, learnt = ctx.constants
        if stream.level != index:
            raise RuntimeError(
                "A reversible history goes back through its layers once and in order: call backward() once, on a loss "
                "that reads every layer, or set reversible_history=False."
            )
        proxies: Any = ctx.saved_tensors[0] if before is not None else None
        if stream.gradient is None:
            stream.gradient = torch.zeros_like(stream.features)
        to_proxies: Any = None if proxies is None else torch.empty_like(proxies)
        totals: dict[int, torch.Tensor] = {}
        compress = [p for p in layer.compress.parameters() if p.requires_grad]
        other = learnt[: len(learnt) - len(compress)]

        for part in stream.slices(stream.features.shape[1]):
            blocks = slice(part.start // layer.ratio, part.stop // layer.ratio)
            with stream.as_forward():
                local = stream.features[:, part].to(stream.dtype).requires_grad_()
                compressed = layer.summarise(local)
            found = torch.autograd.grad(compressed, [local, *compress], gradients[0][:, blocks])
            stream.gradient[:, part] += found[0]
            _add(totals, compress, found[1:])
            with stream.as_forward():
                if before is None:
                    output = stream.embedded(embed, part)
                else:
                    source = proxies[:, blocks].detach().requires_grad_()
                    output = _injected(before, source, part, stream, chunked=True)
            towards = stream.gradient[:, part].to(output.dtype)
            if before is None:
                if other:
                    _add(totals, other, torch.autograd.grad(output, other, towards, allow_unused=True))
            else:
                found = torch.autograd.grad(output, [source, *other], towards)
                to_proxies[:, blocks] = found[0]
                _add(totals, other, found[1:])
                stream.features[:, part] -= output.detach()
        stream.level = index - 1
        if before is None:
            stream.features = stream.gradient = None
        return to_proxies, None, None, None, None, None, None, *(totals.get(id(p)) for p in learnt)


def _injected(
    layer: Any, proxies: torch.Tensor, part: slice, stream: _LocalStream, chunked: bool = False
) -> torch.Tensor:
    """What a layer's proxies add to the local features of some tokens."""
    if not chunked:
        proxies = proxies[:, part.start // layer.ratio : part.stop // layer.ratio]
    delta = layer.decompress(proxies).flatten(1, 2)
    mask = stream.mask(part)
    return delta if mask is None else delta * mask[..., None].to(delta.dtype)


def _add(totals: dict[int, torch.Tensor], parameters: list[nn.Parameter], found: tuple) -> None:
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is None:
            continue
        known = totals.get(id(parameter))
        totals[id(parameter)] = gradient if known is None else known + gradient
