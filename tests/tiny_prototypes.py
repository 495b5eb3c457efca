"""Prototypes for tiny models: a tokenizer of characters, random text, and a fit that takes a second."""

import random
from types import SimpleNamespace
from typing import Any

from tiny_models import VOCABULARY
from transformers import PreTrainedModel

from nearfar.modeling.key_prototypes import KeyPrototypes

SMALL = {
    "contexts": 3,
    "context_tokens": 60,
    "num_prototypes": 12,
    "cosine_prototypes": 4,
    "mlp_hidden": 8,
    "progress": False,
}


class CharacterTokenizer:
    """One token a character; a chat template when asked for."""

    bos_token_id = 1

    def __init__(self, chat: bool = True, bos: bool = True) -> None:
        self.chat_template = "template" if chat else None
        self.bos = bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> SimpleNamespace:
        ids = [3 + ord(character) % (VOCABULARY - 3) for character in text]
        return SimpleNamespace(input_ids=[1, *ids] if add_special_tokens and self.bos else ids)

    def apply_chat_template(self, messages: list[dict], tokenize: bool, add_generation_prompt: bool) -> str:
        return "<user>" + messages[0]["content"] + "</user><model>"


def random_texts(count: int = 3, length: int = 80, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length)) for _ in range(count)]


def fit_tiny(model: PreTrainedModel, **changes: Any) -> KeyPrototypes:
    """All heads, small."""
    return KeyPrototypes.fit(model, CharacterTokenizer(), random_texts(), **{**SMALL, **changes})  # type: ignore[arg-type]
