"""Keys and values between uses, in 8 or 4 bits a number (quantisation by torchao).

A layer's pairs are quantised once, after each eviction; tokens that have come since stay exact. While the layer is
used its pairs are dequantised into ordinary buffers, which are dropped again afterwards: at most one layer is held in
full. Each pair has its own scale and zero point over the head dimension (asymmetric, min-max).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from .ragged_store import RaggedStore

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


@dataclass
class QuantizedRows:
    """A matrix `(rows, dim)` with one scale and zero point a row; with 4 bits two numbers share a byte."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bits: int
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: torch.Tensor, bits: int) -> "QuantizedRows":
        ao, mapping = _torchao()
        rows = matrix.float()  # a bfloat16 scale would cost more precision than a code does
        block, top = (1, matrix.shape[1]), 2**bits - 1
        scale, zero = ao.choose_qparams_affine(rows, mapping, block, torch.uint8, 0, top, eps=1e-12)
        codes = ao.quantize_affine(rows, block, scale, zero, torch.uint8, 0, top)
        if bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        return cls(codes, scale, zero.to(torch.int16), bits, matrix.dtype)

    def dequantize(self) -> torch.Tensor:
        ao, _ = _torchao()
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        block, top = (1, codes.shape[1]), 2**self.bits - 1
        zero = self.zero_point.int()
        return ao.dequantize_affine(codes, block, self.scale, zero, torch.uint8, 0, top).to(self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.codes, self.scale, self.zero_point]

    def to(self, device: torch.device) -> "QuantizedRows":
        codes, scale, zero_point = (tensor.to(device) for tensor in self.tensors())
        return QuantizedRows(codes, scale, zero_point, self.bits, self.dtype)


@dataclass
class RestingPairs:
    """What stands for a store's `pairs.keys` and `pairs.values` while the layer rests.

    Attributes:
        keys, values: all slots as of the last eviction.
        layout: the store's layout they belong to.
        recent_keys, recent_values: `(batch, heads, m, dim)`, exact states of the tokens since.
    """

    keys: QuantizedRows
    values: QuantizedRows
    layout: int
    recent_keys: torch.Tensor
    recent_values: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [*self.keys.tensors(), *self.values.tensors(), self.recent_keys, self.recent_values]

    def to(self, device: torch.device) -> "RestingPairs":
        return RestingPairs(
            self.keys.to(device),
            self.values.to(device),
            self.layout,
            self.recent_keys.to(device),
            self.recent_values.to(device),
        )


def put_to_rest(store: RaggedStore, bits: int, last: RestingPairs | None) -> RestingPairs:
    """Quantise the store's pairs and drop its buffers; `last` is used again while the layout is the same."""
    if last is not None and last.layout == store.layout:
        keys, values = last.keys, last.values
    else:
        keys, values = QuantizedRows.of(store.pairs.keys, bits), QuantizedRows.of(store.pairs.values, bits)
    slots, _, _ = store.pending_slots()
    resting = RestingPairs(keys, values, store.layout, store.pairs.keys[slots], store.pairs.values[slots])
    empty_keys, empty_values = store.pairs.keys[:0].clone(), store.pairs.values[:0].clone()
    store.pairs = dataclasses.replace(store.pairs, keys=empty_keys, values=empty_values)
    return resting


def wake_up(store: RaggedStore, resting: RestingPairs) -> None:
    """Give the store its buffers back."""
    keys, values = resting.keys.dequantize(), resting.values.dequantize()
    slots, _, real = store.pending_slots()
    chosen = real[:, None].expand(slots.shape)
    keys[slots[chosen]] = resting.recent_keys[chosen]
    values[slots[chosen]] = resting.recent_values[chosen]
    store.pairs = dataclasses.replace(store.pairs, keys=keys, values=values)


def _torchao() -> tuple[Any, Any]:
    try:
        from torchao.quantization import quant_primitives
    except ImportError as error:
        raise ImportError(
            "Quantised storage of pairs needs torchao: pip install 'nearfar[quant]' (or pip install torchao)."
        ) from error
    return quant_primitives, quant_primitives.MappingType.ASYMMETRIC
