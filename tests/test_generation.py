"""Every way to generate, for both models and the pruned caches, by transformers' own interfaces.

Beams, greedy search, left padding and roll-back of each cache are tested beside it: `test_cache_dar.py`,
`test_cache_proxy.py`, `test_pruned_cache.py`, `test_pruned_cache_state.py`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from tiny_models import random_ids, tiny_model
from tiny_texts import tiny_llama, tiny_tokenizer
from transformers import Cache, GenerationConfig, PreTrainedModel, TextIteratorStreamer, pipeline

from nearfar import DARCache, ProxyCache, SnapKVCache, StreamingLLMCache
from nearfar.modeling.compat import cache_argument

TOKENS = 261  # of the tiny tokenizer


@dataclass(frozen=True)
class Kind:
    """A model, and how a call of `generate` gets its cache."""

    make: Callable[[], PreTrainedModel]
    options: Callable[[PreTrainedModel], dict[str, Any]] = lambda model: {}


KINDS = {
    "dar": Kind(lambda: tiny_dar(vocab_size=TOKENS)),
    "dar static": Kind(lambda: tiny_dar(vocab_size=TOKENS), lambda model: {"cache_implementation": "static"}),
    "proxyformer": Kind(lambda: tiny_proxyformer(vocab_size=TOKENS)),
    # Within their budget, so that they give what a full cache gives.
    "streaming_llm": Kind(tiny_llama, lambda model: {"past_key_values": StreamingLLMCache(model, budget=400)}),
    "snapkv": Kind(tiny_llama, lambda model: {"past_key_values": SnapKVCache(model, budget=400)}),
}
OWN = ("dar", "proxyformer")
OWN_CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {"dar": DARCache, "proxyformer": ProxyCache}
GREEDY = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TOKENIZER = tiny_tokenizer()
TOKENIZER.padding_side = "left"


def unequal(lengths: tuple[int, ...] = (17, 6), seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded rows."""
    ids = random_ids(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True, "top_p": 0.8, "temperature": 1.3},
        {"num_beams": 3, "do_sample": True, "top_k": 7},
        {"num_return_sequences": 3, "do_sample": True},
        {"penalty_alpha": None, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "sampling", "beam sampling", "three of each", "processors"],
)
def test_a_cache_changes_nothing(kind: Kind, how: dict[str, Any]) -> None:
    model, inputs = kind.make(), unequal()
    found = []
    for options in (kind.options(model), {"use_cache": False}):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, **{**GREEDY, **how}, **options))
    assert torch.equal(*found)


def test_guidance_by_a_negative_prompt_of_another_length(kind: Kind) -> None:
    """Two texts of unequal length in turn through one model: each has a cache of its own."""
    model, inputs = kind.make(), unequal((9,))
    negative = unequal((23,), seed=1)
    guided = {
        "guidance_scale": 1.7,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    without = model.generate(**inputs, **GREEDY, **guided, use_cache=False)
    assert torch.equal(model.generate(**inputs, **GREEDY, **guided, **kind.options(model)), without)
    assert not torch.equal(model.generate(**inputs, **GREEDY, use_cache=False), without)


def test_streaming(kind: Kind) -> None:
    model = kind.make()
    inputs = TOKENIZER("What is streamed comes in parts.", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    options = {**GREEDY, "max_new_tokens": 20, **kind.options(model)}
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    parts = list(streamer)
    thread.join()
    ids = model.generate(**inputs, **{**options, **kind.options(model)})
    assert "".join(parts) == TOKENIZER.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert len(parts) >= 2


def test_the_text_generation_pipeline(kind: Kind) -> None:
    model = kind.make()
    model.generation_config = GenerationConfig(pad_token_id=TOKENIZER.pad_token_id)
    generator = pipeline("text-generation", model=model, tokenizer=TOKENIZER)
    settings = {"max_new_tokens": 9, "do_sample": False, "return_full_text": False}

    def alone(text: str) -> str:
        inputs = TOKENIZER(text, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=9, do_sample=False, **kind.options(model))
        return TOKENIZER.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    texts = ["A text.", "Another one, which is longer than the first."]
    (one,) = generator(texts[0], **settings, **kind.options(model))
    assert one["generated_text"] == alone(texts[0])
    two = generator(texts, batch_size=2, **settings, **kind.options(model))
    assert [rows[0]["generated_text"] for rows in two] == [alone(text) for text in texts]

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    (said,) = generator(chat, **{**settings, "return_full_text": True}, **kind.options(model))
    assert said["generated_text"][:-1] == chat and said["generated_text"][-1]["role"] == "assistant"
    prompt = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|assistant|>\n") and said["generated_text"][-1]["content"] == alone(prompt)


@pytest.mark.parametrize("chunk", [1, 6, 7, 8, 29])
def test_a_prompt_in_chunks(kind: Kind, chunk: int) -> None:
    """Shorter and longer than a window of 7 and blocks of 4, and all at once."""
    model, ids = kind.make(), random_ids(1, 29)
    whole = model.generate(ids, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, **GREEDY, **kind.options(model), prefill_chunk_size=chunk), whole)


def test_a_conversation_goes_on_in_the_cache_that_generate_returns(kind: Kind) -> None:
    if kind is KINDS["dar static"]:
        pytest.skip("its room is made for one call: give a DARCache(model, max_cache_len=…) for several")
    model, ids = kind.make(), random_ids(1, 40)
    first = model.generate(ids[:, :20], **GREEDY, **kind.options(model), return_dict_in_generate=True)
    cache = first["past_key_values"] if "past_key_values" in first else first["cache"]
    longer = torch.cat([first.sequences, ids[:, 20:]], dim=1)
    second = model.generate(longer, **GREEDY, past_key_values=cache)
    assert torch.equal(second, model.generate(longer, **GREEDY, use_cache=False))


@pytest.mark.parametrize("name", ["dar", "proxyformer", "streaming_llm", "snapkv"])
def test_texts_that_do_not_go_on_where_the_cache_ends_are_refused(name: str) -> None:
    """transformers lets new tokens overlap with those that a cache has seen, and does not say so."""
    model, ids = KINDS[name].make(), random_ids(1, 30)

    def read(tokens: int) -> Any:
        cache = KINDS[name].options(model).get("past_key_values") or OWN_CACHES[name](model)
        with torch.no_grad():
            model(ids[:, :tokens], **{cache_argument(model): cache})
        return cache

    for tokens in (21, 25, 30):  # a prompt with nothing new; a question alone
        # Where generate passes a mask of the prompt, DAR says that it is too short.
        why = rf"begin at position \d+, and the cache has seen {tokens} tokens|attention_mask must have shape"
        with pytest.raises(ValueError, match=why):
            model.generate(ids[:, :21], **GREEDY, past_key_values=read(tokens))
    with pytest.raises(ValueError, match="no use_cache=False beside a cache"):
        model.generate(ids, **GREEDY, past_key_values=read(29), use_cache=False)
    if name != "proxyformer":
        with pytest.raises(ValueError, match="assisted decoding an empty cache"):
            model.generate(ids, **GREEDY, past_key_values=read(21), prompt_lookup_num_tokens=3)
    # What is right: the whole text, or what comes last with a mask of all.
    wanted = model.generate(ids, **GREEDY, use_cache=False)[:, 30:]
    assert torch.equal(model.generate(ids, **GREEDY, past_key_values=read(21))[:, 30:], wanted)
    rest = model.generate(ids[:, 21:], attention_mask=torch.ones_like(ids), **GREEDY, past_key_values=read(21))
    assert torch.equal(rest[:, 9:], wanted)


@pytest.mark.parametrize("name", ["dar", "proxyformer", "streaming_llm", "snapkv"])
def test_the_filling_behind_an_answer_that_ended_early_stays_text(name: str) -> None:
    """A row that is over gets padding, which its cache holds as tokens: no later mask takes them back."""
    model, inputs = KINDS[name].make(), unequal()
    ended = {**GREEDY, "eos_token_id": int(model.generate(**inputs, **GREEDY, use_cache=False)[1, 20])}
    cache = KINDS[name].options(model).get("past_key_values") or OWN_CACHES[name](model)
    answers = model.generate(**inputs, **ended, past_key_values=cache)
    longer = torch.cat([answers, random_ids(2, 5, 3)], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, longer.shape[1] - 17), value=1)
    hidden = mask.clone()
    hidden[1, 21 : answers.shape[1]] = 0
    assert answers.shape[1] > 23
    with pytest.raises(ValueError, match=r"row 1 begin .* leave the mask at 1 behind"):
        model.generate(longer, attention_mask=hidden, **GREEDY, past_key_values=copy.deepcopy(cache))
    found = model.generate(longer, attention_mask=mask, **GREEDY, past_key_values=cache)
    assert torch.equal(found, model.generate(longer, attention_mask=mask, **GREEDY, use_cache=False))


@pytest.mark.parametrize("name", ["dar", "proxyformer", "streaming_llm", "gemma3"])
def test_several_sequences_from_one_row_that_has_been_read(name: str) -> None:
    model = tiny_model("gemma3") if name == "gemma3" else KINDS[name].make()
    cache, ids = OWN_CACHES.get(name, partial(StreamingLLMCache, budget=400))(model), random_ids(1, 20)
    with torch.no_grad():
        model(ids[:, :12], **{cache_argument(model): cache})
    with pytest.raises(ValueError, match=r"holds 1 row.*batch_repeat_interleave"):
        model.generate(ids, **{**GREEDY, "do_sample": True}, num_return_sequences=3, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    found = model.generate(ids.repeat(3, 1), **GREEDY, past_key_values=cache)
    assert torch.equal(found, model.generate(ids, **GREEDY, use_cache=False).repeat(3, 1))


@pytest.mark.parametrize("name", ["dar", "streaming_llm", "gemma3"])
def test_a_context_read_in_another_dtype(name: str) -> None:
    """A ProxyFormer reads one, see `test_cache_proxy.py`."""
    model = tiny_model("gemma3") if name == "gemma3" else KINDS[name].make()
    cache, ids = OWN_CACHES.get(name, partial(StreamingLLMCache, budget=400))(model), random_ids(1, 20)
    with torch.no_grad():
        model(ids[:, :12], **{cache_argument(model): cache})
    with pytest.raises(ValueError, match=r"holds torch\.float64 and the model computes in torch\.bfloat16"):
        model.bfloat16().generate(ids, **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("name", ["dar", "streaming_llm", "snapkv"])
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_of_a_prompt_lookup(name: str, sampled: bool) -> None:
    """Assisted decoding without a second model; that of a ProxyFormer is refused, see `test_cache_proxy.py`."""
    kind = KINDS[name]
    model, ids = kind.make(), random_ids(1, 6).repeat(1, 5)
    found = []
    for options in (kind.options(model), {"use_cache": False}):
        torch.manual_seed(2)
        settings = {**GREEDY, "do_sample": sampled, "max_new_tokens": 16}
        lookup = {} if "use_cache" in options and not sampled else {"prompt_lookup_num_tokens": 4}
        if "use_cache" in options and sampled:
            options = {}  # drafts need a cache: the model's own, for comparison
        found.append(model.generate(ids, **settings, **options, **lookup))
    assert torch.equal(*found)


def test_generation_from_embeddings() -> None:
    model, inputs = tiny_dar(), unequal()
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    found = model.generate(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], **GREEDY)
    assert torch.equal(found, model.generate(**inputs, **GREEDY)[:, 17:])
    with pytest.raises(ValueError, match="doesn't have its forwarding implemented"):
        tiny_proxyformer().generate(inputs_embeds=embedded, **GREEDY)


def test_static_caches_are_where_they_are_true() -> None:
    assert DARCache(tiny_dar(), max_cache_len=20).is_compileable
    assert not DARCache(tiny_dar()).is_compileable
    assert not StreamingLLMCache(tiny_llama(), budget=20).is_compileable
    with pytest.raises(ValueError, match="cache_implementation='static' holds keys and values of all tokens"):
        tiny_proxyformer().generate(random_ids(1, 5), cache_implementation="static", **GREEDY)


# ---------------------------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_compiled_step_with_a_static_cache() -> None:
    """One graph for all steps, whose shapes do not grow."""
    model, ids = tiny_dar(num_hidden_layers=2), random_ids(1, 26)
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, backend=count, fullgraph=True)
    cache = DARCache(model, max_cache_len=30)
    found = [model(ids[:, :14], past_key_values=cache).logits]
    for place in range(14, 26):
        position = torch.tensor([[place]])
        found.append(step(ids[:, place : place + 1], position_ids=position, past_key_values=cache).logits)
    assert (torch.cat(found, dim=1) - model(ids, use_cache=False).logits).abs().max() < 1e-10
    assert len(graphs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_proxyformer_decodes() -> None:
    """With graph breaks, as it says of itself."""
    model, ids = tiny_proxyformer(num_hidden_layers=2), random_ids(1, 15)
    assert not model._can_compile_fullgraph
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    expected = model.generate(ids, **GREEDY)
    tokens, cache = ids, None
    new = ids
    for _ in range(GREEDY["max_new_tokens"]):
        out = compiled(new, past_key_values=cache, use_cache=True)
        cache = out["past_key_values"] if "past_key_values" in out else out["cache"]
        new = out.logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], dim=1)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", OWN)
def test_export(name: str) -> None:
    """A graph for texts of any length; a ProxyFormer's is for one number of rows, with padding on the right."""
    model = {"dar": tiny_dar, "proxyformer": tiny_proxyformer}[name](num_hidden_layers=2)
    rows = torch.export.Dim.DYNAMIC if name == "dar" else None
    shape = {1: torch.export.Dim.DYNAMIC} | ({} if rows is None else {0: rows})

    def inputs(lengths: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
        given = unequal(lengths, seed)
        return given if name == "dar" else {key: value.flip(1) for key, value in given.items()}

    example = inputs((23, 14), 0)
    graph = torch.export.export(
        model,
        (),
        {**example, "use_cache": False},
        dynamic_shapes={"input_ids": shape, "attention_mask": shape, "use_cache": None},
        strict=False,
    ).module()
    for given in (example, inputs((9, 41) if rows is None else (9, 41, 30), 1)):
        real = given["attention_mask"].bool()
        difference = graph(**given, use_cache=False).logits - model(**given, use_cache=False).logits
        assert difference[real].abs().max() < 1e-10
    if name == "proxyformer":
        with pytest.raises(RuntimeError, match="padding on the right"):
            graph(**unequal((9, 12)), use_cache=False)
