"""kvpress's scores in nearfar's pruned caches, so that its policies are measured on the same footing as ours."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import Cache

from nearfar.evaluation.pruning_trials import Variant
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates

# kvpress's policies that need no second pass over the context.
PEERS = ("StreamingLLM", "SnapKV", "ExpectedAttention", "Knorm")


class PeerCache(PrunedCache):
    """kvpress's score for each layer, in our cache: the same budget in every head, as kvpress has it.

    Args:
        press: a press of kvpress that scores by `score`.
        inputs: of the model's attention layers.
        size: `budget` or `retention_ratio`.
    """

    def __init__(self, model: Any, press: Any, inputs: AttentionInputs, **size: Any) -> None:
        super().__init__(model, allocation="uniform", sink_tokens=0, recent_tokens=1, **size)
        self.press, self.inputs = press, inputs

    def score(self, states: TokenStates) -> torch.Tensor:
        module, hidden, kwargs = self.inputs.seen[states.layer_idx]
        if states.keys.shape[2] != hidden.shape[1]:  # tokens after the prefill, about to be forgotten by a restore
            return states.positions[:, None].expand(states.keys.shape[:3]).float()
        # A press may score by how much it is to remove (StreamingLLM's does).
        kept = self.retention_ratio if self.budget is None else self.budget / hidden.shape[1]
        self.press.compression_ratio = 1 - (kept or 0.0)
        scores: torch.Tensor = self.press.score(module, hidden, states.keys, states.values, None, kwargs)
        return scores


class AttentionInputs:
    """What each attention layer was given in the last prefill: presses look at hidden states."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[int, tuple[Any, torch.Tensor, dict[str, Any]]] = {}
        for layer in model.model.layers:
            # Presses look for the rotary embedding on the attention module.
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.register_forward_hook(self._remember, with_kwargs=True)

    def _remember(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"]
        if hidden.shape[1] > 512:  # a prefill, not a question or a piece of a continuation
            self.seen[module.layer_idx] = (module, hidden, {"position_embeddings": kwargs["position_embeddings"]})


def list_peers(model: Any) -> list[Variant]:
    """Some of kvpress's policies.

    Raises:
        ImportError: kvpress is not installed, does not work with this transformers, or lacks one of them.
    """
    try:
        kvpress = import_module("kvpress")
        presses = [getattr(kvpress, f"{name}Press") for name in PEERS]
    except AttributeError as error:
        raise ImportError(str(error)) from error
    inputs = AttentionInputs(model)

    def variant(press: Any) -> Variant:
        def make(**size: Any) -> Cache:
            return PeerCache(model, press(), inputs, **size)

        return Variant(f"kvpress {press.__name__.removesuffix('Press')}", "peer", make)

    return [variant(press) for press in presses]
