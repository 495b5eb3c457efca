"""The reconstruction pass against an independent slow one: eager attention probabilities of an ordinary model."""

import pytest
import torch
from tiny_models import random_ids, tiny_model
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nearfar.modeling import kvzip_scores
from nearfar.modeling import received_attention as received_attention_module
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt, reconstruction_scores
from nearfar.modeling.received_attention import BLOCK_ELEMENTS, received_attention

PROMPT = RepeatPrompt(prefix=(1, 2), first=(3, 4, 5), later=(6, 7), suffix=(8, 9))
PREFIX, LENGTH = 3, 23


@pytest.fixture
def context() -> torch.Tensor:
    return random_ids(1, LENGTH, seed=1)


def eager_logits(model: torch.nn.Module, cache: DynamicCache, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Each layer's query-key products `(query heads, q, seen)` for new tokens, by hooks on the projections' results.

    Independent of the attention dispatch: the model's own eager attention, recorded with a function in its place.
    """
    found: dict[int, torch.Tensor] = {}

    def record(module, query, key, value, mask, **kwargs):
        group = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(group, 1).mT * kwargs["scaling"]
        assert mask is not None
        additive = mask if mask.dtype != torch.bool else torch.zeros_like(logits).masked_fill(~mask, -torch.inf)
        logits = logits + additive
        found[module.layer_idx] = logits[0]
        return (logits.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("test_record", record)
    ALL_MASK_ATTENTION_FUNCTIONS.register("test_record", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.config._attn_implementation = "test_record"
    try:
        with torch.no_grad():
            model(torch.tensor([tokens]), **{cache_argument(model): cache}, use_cache=True)
    finally:
        model.config._attn_implementation = before
    return found


def slow_scores(model, ids: list[int], chunks: list[tuple[int, int]], sinks: int, heads: int, layers: list[int]):
    """The definition, one query and one head at a time."""
    scores = {layer: torch.zeros(heads, len(ids), dtype=torch.float64) for layer in layers}
    for number, (start, stop) in enumerate(chunks):
        cache = DynamicCache(config=model.config)
        eager_logits(model, cache, ids)
        request = [3, 4, 5] if number == 0 else [6, 7, *ids[max(0, start - 8) : start]]
        tokens = [*request, 8, 9, *ids[start:stop]]
        logits = eager_logits(model, cache, tokens)
        columns = [*range(min(sinks, start)), *range(start, stop), *range(len(ids), len(ids) + len(tokens))]
        for layer in layers:
            group = logits[layer].shape[0] // heads
            for head in range(logits[layer].shape[0]):
                for query in range(len(tokens)):
                    probabilities = logits[layer][head, query, columns].softmax(0)
                    for column, probability in zip(columns, probabilities, strict=True):
                        if start <= column < stop:
                            row = scores[layer][head // group]
                            row[column] = max(row[column], probability)
    for layer in layers:
        scores[layer][:, :PREFIX] = 1.0
    return scores


@pytest.mark.parametrize(
    "kind, heads, layers", [("llama", 2, [0, 1, 2]), ("gpt_neox", 4, [0, 1, 2]), ("gemma3", 2, [2, 3])]
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk_tokens, chunks", [(100, [(3, 23)]), (9, [(3, 10), (10, 16), (16, 23)])])
def test_agrees_with_the_definition(kind, heads, layers, implementation, chunk_tokens, chunks, context, monkeypatch):
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 300)  # several blocks of queries
    model = tiny_model(kind, attention=implementation)
    found = reconstruction_scores(
        model, context, PROMPT, prefix_length=PREFIX, chunk_tokens=chunk_tokens, sink_tokens=2
    )
    expected = slow_scores(model, context[0].tolist(), chunks, 2, heads, layers)
    assert sorted(found.scores) == layers
    for layer in layers:
        assert found.scores[layer].shape == (1, heads, LENGTH)
        # transformers' eager attention takes its softmax in float32 whatever the model's dtype.
        tolerance = 1e-10 if implementation == "sdpa" else 1e-4
        torch.testing.assert_close(found.scores[layer][0], expected[layer], atol=tolerance, rtol=0)
    assert model.config._attn_implementation == implementation


def test_sliding_window_in_all_layers(context):
    """Mistral: scored over what the window shows. The slow side reads the model's own mask."""
    model = tiny_model("mistral")
    found = reconstruction_scores(model, context, PROMPT, prefix_length=PREFIX, chunk_tokens=100, sink_tokens=2)
    expected = slow_scores_from_full_states(model, context[0].tolist())
    for layer in (0, 1, 2):
        torch.testing.assert_close(found.scores[layer][0], expected[layer], atol=1e-10, rtol=0)


def slow_scores_from_full_states(model, ids: list[int]) -> dict[int, torch.Tensor]:
    tokens = [3, 4, 5, 8, 9, *ids[PREFIX:]]
    logits = eager_logits(model, DynamicCache(), [*ids, *tokens])  # a cache without a configuration keeps everything
    columns = torch.tensor([*range(2), *range(PREFIX, len(ids)), *range(len(ids), len(ids) + len(tokens))])
    scores = {}
    for layer, all_logits in logits.items():
        probabilities = all_logits[:, len(ids) :][..., columns].softmax(-1)
        highest = probabilities[..., 2 : 2 + len(ids) - PREFIX].amax(1).view(2, 2, -1).amax(1)
        scores[layer] = torch.cat([torch.ones(2, PREFIX, dtype=torch.float64), highest], dim=1)
    return scores


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prefill_statistics_and_full_cache(kind, context, monkeypatch):
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 200)
    model = tiny_model(kind)
    found = reconstruction_scores(
        model, context, PROMPT, prefix_length=PREFIX, chunk_tokens=9, prefill_statistics=True
    )
    plain = DynamicCache(config=model.config)
    logits = eager_logits(model, plain, context[0].tolist())
    for layer, scores in found.scores.items():
        heads = scores.shape[1]
        grouped = logits[layer].softmax(-1).view(heads, -1, LENGTH, LENGTH)
        torch.testing.assert_close(found.attention_max[layer][0], grouped.amax((1, 2)), atol=1e-10, rtol=0)
        torch.testing.assert_close(found.attention_mass[layer][0], grouped.sum((1, 2)), atol=1e-10, rtol=0)
    # The repeating tokens left no trace, in any layer, and the cache still works as a stock one.
    assert found.cache.get_seq_length() == LENGTH
    for mine, stock in zip(found.cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(mine.keys, stock.keys)
        torch.testing.assert_close(mine.values, stock.values)
    ids = random_ids(1, 4)
    with torch.no_grad():
        mine, stock = (model(ids, **{cache_argument(model): cache}).logits for cache in (found.cache, plain))
    torch.testing.assert_close(mine, stock)


def test_statistics_do_not_change_the_scores(context):
    model = tiny_model("llama")
    plain = reconstruction_scores(model, context, PROMPT, prefix_length=PREFIX)
    measured = reconstruction_scores(model, context[0].tolist(), PROMPT, prefix_length=PREFIX, prefill_statistics=True)
    assert not plain.attention_max and not plain.attention_mass
    for layer in plain.scores:
        torch.testing.assert_close(plain.scores[layer], measured.scores[layer])
        assert float(plain.scores[layer].min()) >= 0.0 and float(plain.scores[layer].max()) <= 1.0


def test_half_precision_is_scored_in_float32(context):
    model = tiny_model("llama").to(torch.bfloat16)
    scores = reconstruction_scores(model, context, PROMPT, prefix_length=PREFIX).scores
    assert all(s.dtype == torch.float32 and bool(torch.isfinite(s).all()) for s in scores.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_cuda_agrees_with_the_cpu(context, dtype, tolerance):
    model = tiny_model("llama")  # its sines and cosines are float32 even so, and differ between the devices
    expected = reconstruction_scores(model, context, PROMPT, prefix_length=PREFIX, prefill_statistics=True)
    found = reconstruction_scores(
        model.to("cuda", dtype), context.cuda(), PROMPT, prefix_length=PREFIX, prefill_statistics=True
    )
    for layer, scores in expected.scores.items():
        assert found.scores[layer].is_cuda
        torch.testing.assert_close(found.scores[layer].cpu().double(), scores, atol=tolerance, rtol=0)
        highest, mass = found.attention_max[layer], found.attention_mass[layer]
        torch.testing.assert_close(highest.cpu().double(), expected.attention_max[layer], atol=tolerance, rtol=0)
        torch.testing.assert_close(mass.cpu().double(), expected.attention_mass[layer], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox"])
def test_no_mask_as_wide_as_the_context_is_made(kind, context, monkeypatch):
    widths = []
    attend = kvzip_scores._ScoredLayer.attend

    def watched(layer, call):
        widths.append(None if call.mask is None else call.mask.shape[-1])
        return attend(layer, call)

    monkeypatch.setattr(kvzip_scores._ScoredLayer, "attend", watched)
    scores = reconstruction_scores(tiny_model(kind), context, PROMPT, chunk_tokens=9).scores
    assert len(widths) == 3 * len(scores) and set(widths) == {None}
    # Where no kernel serves, a mask is made after all, with the same result.
    monkeypatch.setattr(kvzip_scores, "chunk_attention_available", lambda query, value: False)
    for layer, expected in reconstruction_scores(tiny_model(kind), context, PROMPT, chunk_tokens=9).scores.items():
        torch.testing.assert_close(scores[layer], expected, atol=1e-10, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox"])
def test_cuda_without_a_mask_agrees_with_a_mask(kind, monkeypatch):
    model = tiny_model(kind).to("cuda", torch.bfloat16)
    found = {}
    for split in (True, False):
        if not split:
            monkeypatch.setattr(kvzip_scores, "chunk_attention_available", lambda query, value: False)
            monkeypatch.setattr(received_attention_module, "summed_attention_kernel_available", lambda *states: False)
        scores = reconstruction_scores(model, random_ids(1, 300), PROMPT, chunk_tokens=120).scores
        found[split] = torch.stack(list(scores.values()))
    assert (found[True] - found[False]).norm() < 0.05 * found[False].norm()  # 0.01 on a CPU


def test_block_size_does_not_matter(monkeypatch):
    query, keys = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 12, 8)
    columns = torch.tensor([0, 1, 5, 6, 7, 20, 21, 22, 23, 24, 25, 26])
    whole = received_attention(query, keys, 0.3, columns, window=18)
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 1)
    for mine, expected in zip(received_attention(query, keys, 0.3, columns, window=18), whole, strict=True):
        torch.testing.assert_close(mine, expected)
    assert torch.isclose(whole[1].sum(), torch.tensor(28.0))  # every query of every head gives away 1


class Tokenizer:
    """Characters as ids; a chat template when asked for."""

    bos_token_id = 0

    def __init__(self, chat: bool, bos: bool = True) -> None:
        self.chat_template = "template" if chat else None
        self.bos = bos

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(c) for c in text]
        return type("Encoding", (), {"input_ids": [0, *ids] if add_special_tokens and self.bos else ids})

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "<user>" + messages[0]["content"] + "</user><model>"


def test_prompt_from_tokenizer():
    ids = lambda text: tuple(ord(c) for c in text)  # noqa: E731
    chat = RepeatPrompt.from_tokenizer(Tokenizer(chat=True))
    assert chat.prefix == ids("<user>") and chat.suffix == ids("</user><model>")
    plain = RepeatPrompt.from_tokenizer(Tokenizer(chat=False))
    assert plain.prefix == (0,) and plain.suffix == ids("\n")
    assert RepeatPrompt.from_tokenizer(Tokenizer(chat=False, bos=False)).prefix == ()
    context = list(range(1000, 1040))
    assert chat.ids(context, 5, 9, first=True) == [*ids("\n\nRepeat the previous context exactly."), *chat.suffix,
                                                   1005, 1006, 1007, 1008]  # fmt: skip
    later = chat.ids(context, 20, 22, first=False)
    assert later[-2:] == [1020, 1021] and later[len(chat.later) :][:8] == list(range(1012, 1020))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context_ids": []}, "empty"),
        ({"context_ids": torch.ones(2, 5, dtype=torch.long)}, "batch of 2"),
        ({"prefix_length": LENGTH}, "prefix_length"),
        ({"prefix_length": -1}, "prefix_length"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"sink_tokens": -1}, "sink_tokens"),
    ],
)
def test_bad_input(change, message, context):
    arguments = {"context_ids": context, "prompt": PROMPT, **change}
    with pytest.raises(ValueError, match=message):
        reconstruction_scores(tiny_model("llama"), **arguments)


def test_training_mode_is_refused(context):
    with pytest.raises(ValueError, match="eval"):
        reconstruction_scores(tiny_model("llama").train(), context, PROMPT)
