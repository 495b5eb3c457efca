"""Needles stand where they should, questions are what a user would ask, and a hit is what greedy decoding gives."""

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import random_ids, tiny_model
from tiny_texts import english, tiny_llama, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer

from nearfar.evaluation.comparison import prefill
from nearfar.evaluation.needles import (
    FACTS,
    SECRET_CODE,
    Fact,
    Needle,
    NeedleContext,
    ask_needle,
    ask_needles,
    greedy_answer,
    multi_needle_context,
    needle_trials,
)
from nearfar.evaluation.restoring import eviction_held, restored
from nearfar.modeling.cache_registry import make_cache
from nearfar.modeling.compat import cache_argument

TEXT = english(600)


def _statement(fact: Fact, needle: Needle) -> str:
    return f"{fact.statement.format(key=needle.key)} {needle.value}. "


def _secret(needle: Needle) -> str:
    return _statement(SECRET_CODE, needle)


# --- contexts --------------------------------------------------------------------------------------------------------


def test_one_needle_at_a_sentence_start_near_its_depth() -> None:
    tokenizer = tiny_tokenizer()
    trials = needle_trials(tokenizer, [TEXT, english(600, seed=1)], 8, 900, seed=3)
    for index, trial in enumerate(trials):
        (needle,) = trial.needles
        body = tokenizer.decode(trial.body_ids)
        assert body.count(_secret(needle)) == 1
        before, after = body.split(_secret(needle))
        assert before.endswith(". ") and after[0].isupper()
        # Without the needle the body is a piece of the document it was taken from: nothing lost, nothing changed.
        assert before + after in (TEXT, english(600, seed=1))[index % 2]
        # A sentence has at most 12 words of 8 letters, so the nearest start is within half of that.
        assert abs(len(before) / len(before + after) - (index + 0.5) / 8) < 55 / len(before + after)
        assert needle.depth == pytest.approx(len(before) / len(before + after))
        assert len(needle.value) == 5 and needle.value.isdigit()


def test_trials_repeat_with_their_seed_and_differ_without() -> None:
    tokenizer = tiny_tokenizer()
    assert needle_trials(tokenizer, [TEXT], 4, 500, seed=1) == needle_trials(tokenizer, [TEXT], 4, 500, seed=1)
    assert needle_trials(tokenizer, [TEXT], 4, 500, seed=1) != needle_trials(tokenizer, [TEXT], 4, 500, seed=2)
    windows = {trial.body_ids[:50] for trial in needle_trials(tokenizer, [TEXT], 6, 500, seed=1)}
    assert len(windows) == 6


@pytest.mark.parametrize("count", [1, 12, len(FACTS) + 5])
def test_many_needles_are_distinct_ordered_and_all_there(count: int) -> None:
    tokenizer = tiny_tokenizer()
    context = multi_needle_context(tokenizer, TEXT, count, 3000, seed=5, continuation_tokens=40)
    assert len(context.needles) == count
    assert len({needle.key for needle in context.needles}) == count
    assert len({needle.value for needle in context.needles}) == count
    body = tokenizer.decode(context.body_ids)
    places = [body.index(f" {needle.value}. ") for needle in context.needles]
    assert places == sorted(places)
    depths = [needle.depth for needle in context.needles]
    assert depths == sorted(depths) and len(set(depths)) == count
    assert all(abs(depth - (i + 0.5) / count) < 0.05 for i, depth in enumerate(depths))
    for needle in context.needles:
        assert sum(body.count(_statement(fact, needle)) for fact in FACTS) == 1
    # Taken out again, what is left is the document, and the continuation is what follows in it.
    for needle in context.needles:
        for fact in FACTS:
            body = body.replace(_statement(fact, needle), "")
    assert TEXT.startswith(body)
    assert TEXT[len(body) :].lstrip().startswith(tokenizer.decode(context.continuation_ids).lstrip())


def test_a_code_that_stands_in_the_text_is_not_used() -> None:
    tokenizer = tiny_tokenizer()
    first = multi_needle_context(tokenizer, TEXT, 1, 3000).needles[0].value
    second = multi_needle_context(tokenizer, f"Call {first}. {TEXT}", 1, 3000).needles[0].value
    assert second != first


def test_wordings_are_all_used_before_one_is_repeated() -> None:
    context = multi_needle_context(tiny_tokenizer(), TEXT, len(FACTS), 3000)
    body = tiny_tokenizer().decode(context.body_ids)
    for fact in FACTS:
        start, end = fact.statement.split("{key}")
        assert any(start + needle.key + end in body for needle in context.needles), fact.statement


def test_the_question_continues_the_chat() -> None:
    tokenizer = tiny_tokenizer()
    trial = needle_trials(tokenizer, [TEXT], 1, 500)[0]
    (needle,) = trial.needles
    body = tokenizer.decode(trial.body_ids)
    question = f"\n\nWhat is the secret code for {needle.key}?"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": body + question}], tokenize=False, add_generation_prompt=True
    )
    asked = tokenizer.decode(trial.context_ids + needle.question_ids + needle.answer_ids)
    assert asked == f"{chat}The secret code for {needle.key} is {needle.value}"


def test_without_a_chat_template_the_question_is_plain_text() -> None:
    tokenizer = tiny_tokenizer(chat=False)
    trial = needle_trials(tokenizer, [TEXT], 1, 500)[0]
    (needle,) = trial.needles
    assert trial.prefix_ids == ()
    asked = tokenizer.decode(needle.question_ids + needle.answer_ids)
    assert asked == (
        f"\n\nWhat is the secret code for {needle.key}?\nThe secret code for {needle.key} is {needle.value}"
    )


def test_a_beginning_of_sequence_token_is_kept() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    trial = needle_trials(tokenizer, [TEXT], 1, 500)[0]
    assert trial.prefix_ids == (bos,)
    assert bos not in trial.body_ids + trial.needles[0].question_ids + trial.needles[0].answer_ids


def test_the_answer_is_cut_where_the_tokenizer_cuts() -> None:
    # A tokenizer that marks the start of a text (as SentencePiece ones do) encodes " 12345" alone with a second mark.
    symbols = ["[UNK]", "▁", *"abcdefghijklmnopqrstuvwxyz'.?\nTWKPIN0123456789", "▁▁"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "▁")], unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    (needle,) = needle_trials(tokenizer, [TEXT.lower()], 1, 500)[0].needles
    alone = tokenizer(" " + needle.value, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(alone) == ["▁▁", *needle.value]
    assert tokenizer.convert_ids_to_tokens(list(needle.answer_ids)) == ["▁", *needle.value]


def test_texts_without_sentences_or_spaces_still_take_needles() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("word " * 700, "x" * 3000, "名" * 1200):
        context = multi_needle_context(tokenizer, text, 6, 2500)
        body = tokenizer.decode(context.body_ids)
        assert all(body.count(needle.value) == 1 for needle in context.needles)
        assert all(abs(n.depth - (i + 0.5) / 6) < 0.02 for i, n in enumerate(context.needles))


@pytest.mark.parametrize("context_tokens", [900, 901, 902])
def test_a_cut_inside_a_character_moves_before_it(context_tokens: int) -> None:
    tokenizer = tiny_tokenizer()
    text = "名前はまだ無い。" * 100  # three bytes, so three tokens, a character
    context = multi_needle_context(tokenizer, text, 0, context_tokens, continuation_tokens=30)
    body, following = tokenizer.decode(context.body_ids), tokenizer.decode(context.continuation_ids)
    assert "\ufffd" not in body + following
    assert text.startswith(body + following) and len(body) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_needles=3, context_tokens=10**6), "too short"),
        (dict(num_needles=3, context_tokens=5000, continuation_tokens=10**6), "continuation"),
        (dict(num_needles=-1), "num_needles"),
        (dict(num_needles=10**4, context_tokens=100), "distinct keys"),
        (dict(num_needles=3, context_tokens=0), "context_tokens"),
    ],
)
def test_bad_requests_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        multi_needle_context(tiny_tokenizer(), TEXT, **arguments)


def test_bad_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="num_trials"):
        needle_trials(tiny_tokenizer(), [TEXT], 0, 100)
    with pytest.raises(ValueError, match="documents"):
        needle_trials(tiny_tokenizer(), [], 1, 100)
    with pytest.raises(ValueError, match="documents"):
        needle_trials(tiny_tokenizer(), TEXT, 1, 100)
    with pytest.raises(ValueError, match="document 1 is too short"):
        needle_trials(tiny_tokenizer(), [TEXT, "short"], 1, 100)
    with pytest.raises(ValueError, match="white space"):
        needle_trials(tiny_tokenizer(), [" " * 200], 1, 100)


# --- asking ----------------------------------------------------------------------------------------------------------


def _prefilled(name: str = "full", **options: int) -> tuple:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    context = multi_needle_context(tokenizer, TEXT, 6, 700)
    cache = make_cache(name, model, budget=96, **options)
    prefill(model, cache, context.context_ids)
    return model, cache, context


@pytest.mark.parametrize("name", ["full", "streaming_llm"])
def test_a_hit_is_exactly_what_greedy_decoding_gives(name: str) -> None:
    """Answers are derived from the model's own greedy decoding and damaged at each place in turn."""
    model, cache, context = _prefilled(name)
    outcomes = []
    for needle in context.needles:
        said = greedy_answer(model, cache, needle)
        assert len(said) == len(needle.answer_ids)
        candidates = [tuple(said)]
        for place in range(len(said)):
            other = (said[place] + 1) % model.config.vocab_size
            candidates.append((*said[:place], other, *said[place + 1 :]))
        for answer in [*candidates, needle.answer_ids]:
            asked = dataclasses.replace(needle, answer_ids=answer)
            # The reference decodes afresh: what it says does not depend on the answer, only on its length.
            expected = tuple(greedy_answer(model, cache, asked)) == answer
            assert ask_needle(model, cache, asked).hit is expected
            outcomes.append(expected)
    assert outcomes.count(True) == len(context.needles) and outcomes.count(False) > 10


def test_log_probability_is_that_of_the_whole_text_without_a_cache() -> None:
    model, cache, context = _prefilled()
    for needle in context.needles[:2]:
        ids = torch.tensor([context.context_ids + needle.question_ids + needle.answer_ids])
        with torch.no_grad():
            logits = model(ids).logits[0].log_softmax(-1)
        count = len(needle.answer_ids)
        expected = logits[-count - 1 : -1].gather(1, ids[0, -count:, None]).mean().item()
        # The answer's logits are read in float32.
        assert ask_needle(model, cache, needle).log_probability == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["full", "streaming_llm", "random"])
def test_questions_do_not_see_each_other(name: str) -> None:
    model, cache, context = _prefilled(name)
    seen = cache.get_seq_length()
    forward = ask_needles(model, cache, context.needles)
    backward = ask_needles(model, cache, context.needles[::-1])
    assert forward == backward[::-1]
    assert len({answer.log_probability for answer in forward}) == len(forward)
    assert cache.get_seq_length() == seen


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("fail", [False, True])
def test_restored_undoes_everything(family: str, fail: bool) -> None:
    """Sliding layers too, which cannot be cropped once they are full, and also when the block fails."""
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    ids, more = random_ids(1, 30), random_ids(1, 5, seed=1)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
        before = [(layer.keys.clone(), layer.values.clone(), layer.get_seq_length()) for layer in cache.layers]
        try:
            with restored(cache):
                model(more, **{cache_argument(model): cache})
                assert cache.get_seq_length() == 35
                if fail:
                    raise KeyError
        except KeyError:
            assert fail
        for layer, (keys, values, length) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            assert layer.get_seq_length() == length
        expected = model(torch.cat([ids, more], 1)).logits[:, 30:]
        assert torch.allclose(model(more, **{cache_argument(model): cache}).logits, expected)


def test_restored_copies_layers_it_does_not_know() -> None:
    class InPlace(DynamicLayer):
        """Writes into its own tensors, so that keeping references would not do."""

        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_initialized:
                self.keys.add_(1.0)
            return super().update(keys, values, *args, **kwargs)

    cache = DynamicCache()
    cache.layers = [InPlace()]
    states = torch.zeros(1, 2, 3, 4)
    cache.update(states, states, 0)
    with restored(cache):
        cache.update(states, states, 0)
        assert cache.get_seq_length() == 6
    assert cache.get_seq_length() == 3
    assert float(cache.layers[0].keys.abs().sum()) == 0.0


def test_eviction_held_is_nothing_for_a_full_cache() -> None:
    with eviction_held(DynamicCache()):
        pass


def test_contexts_are_plain_data() -> None:
    context = NeedleContext((1,), (2, 3), ())
    assert context.context_ids == (1, 2, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.body_ids = ()  # type: ignore[misc]
