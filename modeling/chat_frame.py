"""What stands around a user's message: a chat template's header and end of turn, or next to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT = "#####NEARFAR-CONTENT#####"


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], str]:
    """What stands before and after a user's message.

    Returns:
        The ids before it (chat header; a beginning-of-sequence token where there is no chat template) and the text
        after it, up to where the model's answer starts (a line break where there is no chat template).

    Raises:
        ValueError: the chat template does not repeat the user's message exactly once.
    """
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": _CONTENT}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        if not isinstance(text, str) or text.count(_CONTENT) != 1:
            raise ValueError("the tokenizer's chat template does not repeat the user's message exactly once")
        before, after = text.split(_CONTENT)
        return tuple(tokenizer(before, add_special_tokens=False).input_ids), after
    probe = tokenizer("a").input_ids  # with the special tokens that this tokenizer puts first
    starts_with_bos = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
    return (tokenizer.bos_token_id,) if starts_with_bos else (), "\n"
