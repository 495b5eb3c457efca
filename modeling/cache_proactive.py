"""Proactive Cache: what to keep is decided while the prompt is read, by what the pairs look like.

Stores `budget` pairs a head on average: sinks, the newest quarter, and those that `KeyPrototypes`, fitted offline once
a model, predicts to be needed. Scoring a pair costs a small matrix product at prefill. A decode step scores nothing:
new pairs are scored once, `eviction_interval` at a time, when the cache goes back to its budget. No query is looked
at, so one compressed context serves any question.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .budgets import Allocation
from .key_prototypes import KeyPrototypes, find_prototypes
from .prototype_scoring import HEADS
from .pruned_cache import PrunedCache, TokenStates
from .rotary import KeyRotation

# Stands in saved settings for prototypes that were never saved themselves.
UNSAVED = "(not saved)"


class ProactiveCache(PrunedCache):
    """Pairs that fitted prototypes predict to be important.

    Args:
        model_or_config: see `PrunedCache`. Give the model itself, so that prototypes of another model can be told.
        prototypes: fitted prototypes, or what `KeyPrototypes.from_pretrained` takes (a folder, a packaged name, a Hub
            id). By default those that come with the package for this model.
        head: which fitted head scores: "linear", "prototypes", "mlp", or "cosine", the paper's own.
        allow_other_model: accept prototypes of another model of the same shape.
        options: see `PrunedCache`. The default allocation is "global", and "uniform" with `head="cosine"`, as in the
            paper.

    Raises:
        ValueError: no prototypes for this model, prototypes of another model, or a head that was not fitted.
    """

    def __init__(
        self,
        model_or_config: nn.Module | PreTrainedConfig,
        *,
        prototypes: KeyPrototypes | str | Path | None = None,
        head: str = "linear",
        allocation: Allocation | None = None,
        allow_other_model: bool = False,
        **options: Any,
    ) -> None:
        if head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}.")
        if allocation is None:
            allocation = "uniform" if head == "cosine" else "global"
        super().__init__(model_or_config, allocation=allocation, **options)
        if prototypes is None:
            prototypes = find_prototypes(model_or_config)
        elif isinstance(prototypes, (str, Path)):
            if str(prototypes) == UNSAVED:
                raise ValueError("This context was compressed with prototypes that were not saved: pass prototypes=….")
            prototypes = KeyPrototypes.from_pretrained(prototypes)
        elif not isinstance(prototypes, KeyPrototypes):
            raise TypeError(f"prototypes must be KeyPrototypes, a folder or a name, got {type(prototypes).__name__}.")
        prototypes.check_compatible(model_or_config, allow_other_model=allow_other_model)
        if head not in prototypes.config.heads:
            raise ValueError(
                f"The head {head!r} was not fitted; these prototypes have {', '.join(prototypes.config.heads)}."
            )
        self.prototypes, self.head, self.allow_other_model = prototypes, head, allow_other_model
        # The model's own rotary embedding, which may have been scaled for longer contexts since the fit.
        self._rotation = KeyRotation(self.config) if head != "cosine" else None

    def score(self, states: TokenStates) -> torch.Tensor:
        """Predicted log importance; see `KeyPrototypes.score`."""
        return self.prototypes.score(
            states.layer_idx, states.keys, states.values, states.positions, self.head, self._rotation
        )

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "prototypes": self.prototypes.source or UNSAVED,
            "head": self.head,
            "allow_other_model": self.allow_other_model,
        }
