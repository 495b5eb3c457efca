"""Caches and gradient checkpointing: a layer that is computed twice would store its tokens twice."""

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)


def cache_for_pass(model: nn.Module, cache: Any) -> Any:
    """The cache a pass may use: `None` in place of an empty one where layers are checkpointed.

    Raises:
        ValueError: the cache holds tokens there, which the pass would have to read.
    """
    checkpointed = bool(model.gradient_checkpointing) and model.training and torch.is_grad_enabled()
    if cache is None or not checkpointed:
        return cache
    if cache.get_seq_length() > 0:
        raise ValueError(
            "With gradient checkpointing a layer is computed twice, and a cache that holds tokens would change in "
            "between: call the model in torch.no_grad() or eval(), or call gradient_checkpointing_disable()."
        )
    logger.warning_once("A cache does not go with gradient checkpointing in training: none is filled.")
    return None
