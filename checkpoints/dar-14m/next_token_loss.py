"""Losses of a language model's head on chunks of labelled positions, with the loss of an auxiliary head added."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .chunked_loss import IGNORED, chunked_cross_entropy


class NextTokenLoss:
    """For a model class with an `lm_head`, and `loss_chunk_tokens` in its configuration."""

    config: Any
    lm_head: nn.Linear
    training: bool

    def _loss(
        self,
        hidden: torch.Tensor,
        middle: torch.Tensor | None,
        targets: torch.Tensor,
        wanted: torch.Tensor | None,
        num_items: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """Cross-entropy of `(batch, tokens)` targets from the last head and the auxiliary one, mean over targets."""
        if wanted is not None:
            targets = targets[wanted]
        else:
            hidden, targets = hidden.flatten(0, 1), targets.flatten()
            middle = None if middle is None else middle.flatten(0, 1)
        divisor = self._divisor(targets, num_items)
        # FSDP2's hooks count the calls of a group's modules, and torch < 2.13 takes a second call of one in a pass for
        # another pass: the head is called once, for nothing, and its weight, which is gathered by now, used directly.
        seen = self.lm_head(hidden[:1] * 0.0).sum() * 0.0 if _is_sharded(self.lm_head) else 0.0
        loss = self._sum_of_losses(hidden, targets) / divisor + seen
        weight = self._auxiliary_weight()
        if middle is not None and weight:
            loss = loss + weight * self._sum_of_losses(middle, targets) / divisor
        return loss

    def _loss_of_logits(
        self,
        logits: torch.Tensor,
        middle: torch.Tensor | None,
        targets: torch.Tensor,
        num_items: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """The same from logits that are there already; the auxiliary head counts in training only."""
        targets = targets.flatten()
        divisor = self._divisor(targets, num_items)
        scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum") / divisor
        weight = self._auxiliary_weight()
        if middle is not None and weight and self.training:
            loss = loss + weight * self._sum_of_losses(middle.flatten(0, 1), targets) / divisor
        return loss

    def _auxiliary_weight(self) -> float:
        return float(getattr(self.config, "auxiliary_loss_weight", 0.0))

    @staticmethod
    def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None) -> torch.Tensor:
        """What each column is to predict, `(batch, tokens)`: the label behind it, or what `shift_labels` says."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels

    @staticmethod
    def _divisor(targets: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor | int:
        if num_items is None:
            return (targets != IGNORED).sum().clamp(min=1)
        return num_items.to(targets.device) if isinstance(num_items, torch.Tensor) else num_items

    def _sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropy of `(n, hidden size)` against `(n,)`, a chunk of labelled positions at a time."""
        chunk = self.config.loss_chunk_tokens
        if _is_plain(self.lm_head):
            return chunked_cross_entropy(hidden, self.lm_head.weight, targets, chunk)
        # Adapters, quantised and dispatched heads are called, not taken apart.
        labelled = targets != IGNORED
        hidden, targets = hidden[labelled], targets[labelled]
        total = hidden.sum() * 0.0
        for call in range(_head_calls(hidden, self.lm_head, chunk)):
            part = slice(call * chunk, (call + 1) * chunk)
            found = checkpoint(self._chunk_loss, hidden[part], targets[part], use_reentrant=False)
            assert isinstance(found, torch.Tensor)
            total = total + found
        return total

    def _chunk_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, reduction="sum")


def _head_calls(hidden: torch.Tensor, head: Any, chunk: int) -> int:
    """How often a head is called on a chunk of `(n, hidden size)` states, the last times maybe on none.

    At least once, for its weights' gradients. Where each call gathers weights from other processes, as often as on the
    process with the most labels: the others would wait for it forever.
    """
    calls = max(1, -(-hidden.shape[0] // chunk))
    weight = getattr(head, "weight", None)
    sharded = hasattr(weight, "ds_id") or hasattr(weight, "full_tensor")  # by ZeRO-3, or a DTensor
    if sharded and torch.distributed.is_available() and torch.distributed.is_initialized():
        most = torch.tensor(calls, device=hidden.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        calls = int(most)
    return calls


def _is_plain(head: Any) -> bool:
    """Whether a head is a matrix on this device that nothing but FSDP2, which has gathered it, is hooked to."""
    bias = getattr(head, "bias", None)
    hooked = head._forward_pre_hooks or head._forward_hooks or hasattr(head, "_hf_hook")
    return (
        (_is_sharded(head) if hooked else type(head) is nn.Linear)
        and bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.is_floating_point()
        and not head.weight.is_meta
    )


def _is_sharded(head: Any) -> bool:
    """Whether it is a matrix that FSDP2's `fully_shard` has been applied to, which changes the class."""
    return isinstance(head, nn.Linear) and any(kind.__name__ == "FSDPModule" for kind in type(head).__mro__)
