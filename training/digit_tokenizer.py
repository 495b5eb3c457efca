"""A small byte-level BPE whose digits are single tokens, for models that are trained on passkeys.

With one token a digit, a passkey is copied digit by digit, and none of the 100,000 is a word of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nearfar.evaluation.needle_documents import DEFAULT_IDS, NEEDLE, QUERY, VALUE_DIGITS

__all__ = ["train_digit_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
# The bytes, and the token that ends a text.
LEAST_VOCABULARY = 257
# The needles' words become tokens: each sentence is among the texts so many times.
_REPEATS = 20


def train_digit_tokenizer(
    texts: Iterable[str], vocabulary: int = 4096, *, sentences: Sequence[str] | None = None
) -> PreTrainedTokenizerFast:
    """Train the tokenizer.

    Args:
        texts: pieces of text, gone through once.
        vocabulary: tokens at most; fewer where the texts give no more.
        sentences: whose words become tokens as well; by default those of the multi-needle test.

    Returns:
        A tokenizer that writes every text again as it was. `<|endoftext|>` begins, ends and pads.

    Raises:
        ValueError: a vocabulary below 257, or no text.
    """
    if vocabulary < LEAST_VOCABULARY:
        raise ValueError(
            f"vocabulary must be at least {LEAST_VOCABULARY}, the bytes and the end of a text, got {vocabulary}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sentences = _needle_sentences() if sentences is None else sentences
    seen = 0

    def corpus() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += len(text.strip())
            yield text
        for _ in range(_REPEATS):
            yield from sentences

    backend.train_from_iterator(corpus(), trainer)
    if not seen:
        raise ValueError("there is no text to train a tokenizer on")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _needle_sentences() -> list[str]:
    rng = random.Random(0)
    sentences = []
    for name in range(1, DEFAULT_IDS + 1):
        value = f"{rng.randrange(10**VALUE_DIGITS):0{VALUE_DIGITS}d}"
        sentences += [NEEDLE.format(id=name, value=value), QUERY.format(id=name)]
    return sentences
