"""The ProxyFormer language model: what sees what, both forms of input, options, losses, gradients."""

import contextlib
import copy
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from proxyformer_models import tiny_proxyformer, tiny_proxyformer_config
from torch.nn import functional as F

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Every option of the paper that changes what is computed.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retained": {"retained_blocks": 1},
    "two retained": {"retained_blocks": 2},
    "long generation blocks": {"generation_block_size": 8},
    "ratios by layer": {"compression_ratio": [2, 4, 8]},
    "overlap": {"partition_overlap": 2},
    "rope": {"rope_parameters": ROPE},
    "rope on proxies": {"rope_parameters": ROPE, "proxy_rope": True, "retained_blocks": 1},
    "distances": {"distance_ratios": [[8, 8], [16, 16]]},
    "recurrent": {"proxy_interaction": "recurrent"},
    "identity": {"proxy_interaction": "identity"},
    "mlp": {"proxy_interaction": "mlp"},
    "shared projections": {"separate_proxy_kv": False},
    "shared weights": {"share_proxy_generation_weights": True},
    "shared embedding": {"shared_embedding": True},
    "no stem": {"history_stem_layers": 0},
    "gated update": {"proxy_update": "gated"},
    "concatenating update": {"proxy_update": "concatenate"},
    "replacing update": {"proxy_update": "replace"},
    "gated injection": {"injection": "gated"},
    "affine injection": {"injection": "affine"},
    "attention injection": {"injection": "cross_attention"},
    "wide proxies": {"proxy_hidden_size": 64},
    "two levels": {"compression_factors": [2, 2], "compression_widths": [8, 16, 32]},
    "query scale": {"proxy_query_scale": 1.5},
    "sharpened": {"proxy_sharpen_from": 2},
}


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: ProxyFormerForCausalLM, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bound: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        scale = max(gradient.abs().max().item(), 1e-12)
        assert (gradient - other[name]).abs().max().item() / scale < bound, name


# --- what sees what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_no_later_token_reaches_an_earlier_logit(options: dict[str, Any]) -> None:
    model = tiny_proxyformer(**options)
    tokens = ids(1, 22)
    embedded = model.model.embed_tokens.weight[tokens].detach().requires_grad_()
    shared = options.get("shared_embedding", False)
    history = None if shared else model.model.history_embed_tokens.weight[tokens].detach().requires_grad_()
    place = torch.arange(22)
    # Look up positions instead of ids, so that gradients tell tokens apart.
    model.config.vocab_size = 61
    _look_up(model, embedded, history)
    for query in (0, 3, 4, 11, 12, 20, 21):
        logits = model(place[None], use_cache=False).logits[0, query]
        leaves = [embedded] if history is None else [embedded, history]
        found = torch.autograd.grad(logits.square().sum(), leaves, allow_unused=True)
        reach = sum(g[0].abs().sum(-1) for g in found if g is not None)
        assert (reach[query + 1 :] == 0).all()
        assert reach[query] > 0
        assert (reach[: query + 1] > 0).all()  # and every earlier token does reach it


def _look_up(model: ProxyFormerForCausalLM, embedded: torch.Tensor, history: torch.Tensor | None) -> None:
    class Table(torch.nn.Module):
        def __init__(self, rows: torch.Tensor) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows[0][ids]

    del model.model.embed_tokens
    model.model.embed_tokens = Table(embedded)
    model.model.embed_tokens.weight = embedded[0]
    if history is not None:
        del model.model.history_embed_tokens
        model.model.history_embed_tokens = Table(history)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_an_option_changes_the_logits_and_only_where_it_should(name: str) -> None:
    """With the same weights wherever there are the same."""
    tokens = ids(1, 30)
    base, model = tiny_proxyformer(), tiny_proxyformer(**OPTIONS[name])
    known = base.state_dict()
    same = {n: known[n] for n, p in model.state_dict().items() if n in known and known[n].shape == p.shape}
    model.load_state_dict(same, strict=False)
    change = (base(tokens, use_cache=False).logits - model(tokens, use_cache=False).logits).abs().amax(-1)[0]
    assert change[16:].max() > 1e-6
    if name == "rope" or name == "rope on proxies":
        assert change[0] < 1e-12  # one token alone
    else:
        assert change[:4].max() < 1e-12  # in the first block there is neither a proxy nor a block before


def test_no_proxies_read_exactly_nothing() -> None:
    model = tiny_proxyformer()
    tokens = ids(2, 4)
    before = model(tokens, use_cache=False).logits
    with torch.no_grad():
        for layer in model.model.layers:
            layer.proxy_gate.bias.fill_(1e6)
    assert torch.equal(before, model(tokens, use_cache=False).logits)


def test_a_dense_softmax_gives_the_same() -> None:
    """One layer's attention, spelled out over all tokens and proxies with masks."""
    model = tiny_proxyformer(num_hidden_layers=1, retained_blocks=1, rope_parameters=None)
    config, tokens = model.config, ids(1, 21)
    layer, history = model.model.layers[0], model.model.history_layers[0]
    hidden = model.model._embed(tokens)
    local = model.model._embed_history(tokens[:, :20], None)
    proxies = torch.stack([history.compress(local[:, 4 * b : 4 * b + 4]) for b in range(5)], dim=1)
    proxies, _ = history.interaction(proxies)
    normed, query, key, value = layer.block.project(hidden)
    proxy_key, proxy_value = layer.project_proxies(proxies)
    out = torch.zeros_like(query)
    gate = layer.proxy_gate(F.silu(normed))
    for t in range(21):
        block = t // 4
        begin = max(0, (block - 1) * 4)
        scores = (query[0, :, t, None] * key[0, :, begin : t + 1]).sum(-1) / math.sqrt(config.head_dim)
        out[0, :, t] = (scores.softmax(-1)[..., None] * value[0, :, begin : t + 1]).sum(1)
        if block:
            scores = (query[0, :, t, None] * proxy_key[0, :, :block]).sum(-1) / math.sqrt(config.head_dim)
            told = (scores.softmax(-1)[..., None] * proxy_value[0, :, :block]).sum(1)
            out[0, :, t] += gate[0, t, :, None] * told
    hidden = layer.block.finish(hidden, out.transpose(1, 2).flatten(2))
    expected = model.lm_head(model.model.norm(hidden))
    assert (model(tokens, use_cache=False).logits - expected).abs().max() < 1e-10


def test_queries_of_long_histories_are_sharpened() -> None:
    model, sharp = tiny_proxyformer(), tiny_proxyformer(proxy_sharpen_from=3)
    tokens = ids(2, 30)
    plain, other = (m(tokens, use_cache=False).logits for m in (model, sharp))
    assert torch.equal(plain[:, :16], other[:, :16])  # at most three proxies are seen
    assert (plain[:, 16:] - other[:, 16:]).abs().amax(-1).min() > 0
    # Six proxies, of a history given whole, of rows of unequal length, and stepping: the factor is log 6 / log 3.
    history, query = ids(2, 24, 1), ids(2, 3, 2)
    scaled = tiny_proxyformer(proxy_query_scale=math.log(6) / math.log(3))
    expected = scaled(query, history_ids=history, use_cache=False).logits
    assert (sharp(query, history_ids=history, use_cache=False).logits - expected).abs().max() < 1e-10
    mask = torch.ones_like(history)
    mask[1, 9:] = 0
    ragged = sharp(query, history_ids=history, history_attention_mask=mask, use_cache=False).logits
    assert (ragged[:1] - expected[:1]).abs().max() < 1e-10
    unscaled = model(query[1:], history_ids=history[1:, :9], use_cache=False).logits
    assert (ragged[1:] - unscaled).abs().max() < 1e-10
    # Both can be set on a model that is there, as the configuration says.
    model.config.proxy_sharpen_from = 3
    assert torch.equal(model(tokens, use_cache=False).logits, other)
    model.config.proxy_sharpen_from, model.config.proxy_query_scale = None, math.log(6) / math.log(3)
    assert torch.equal(model(query, history_ids=history, use_cache=False).logits, expected)


# --- two-input form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_history_of_whole_blocks_is_the_beginning_of_the_input(options: dict[str, Any]) -> None:
    model = tiny_proxyformer(**options)
    if options.get("retained_blocks"):
        pytest.skip("a history's tokens are never raw")
    history, query = ids(2, 16, 1), ids(2, 4, 2)
    joined = model(torch.cat([history, query], dim=1), use_cache=False).logits[:, 16:]
    assert (model(query, history_ids=history, use_cache=False).logits - joined).abs().max() < 1e-10


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_a_history_of_any_length_with_many_questions(length: int) -> None:
    model = tiny_proxyformer()
    history, queries = ids(2, length, 1), ids(6, 9, 2)
    one_pass = model(queries, history_ids=history, use_cache=False).logits
    cache = model.encode_history(history)
    cache.batch_repeat_interleave(3)
    assert (model(queries, cache=cache).logits - one_pass).abs().max() < 1e-10
    for row in range(6):
        alone = model(queries[row : row + 1], history_ids=history[row // 3 : row // 3 + 1], use_cache=False).logits
        assert (alone - one_pass[row : row + 1]).abs().max() < 1e-10


def test_histories_of_unequal_length_are_masked() -> None:
    model = tiny_proxyformer()
    history, queries = ids(2, 13, 1), ids(4, 3, 2)
    mask = torch.ones_like(history)
    mask[1, 6:] = 0
    together = model(queries, history_ids=history, history_attention_mask=mask, use_cache=False).logits
    alone = model(queries[2:], history_ids=history[1:, :6], use_cache=False).logits
    assert (together[2:] - alone).abs().max() < 1e-10


def test_bidirectional_and_cross_attention_serve_whole_histories() -> None:
    history, query = ids(2, 16, 1), ids(2, 4, 2)
    model = tiny_proxyformer(proxy_interaction="bidirectional_attention")
    causal = tiny_proxyformer()
    causal.load_state_dict(model.state_dict())
    one, other = (m(query, history_ids=history, use_cache=False).logits for m in (model, causal))
    assert (one - other).abs().max() > 1e-6
    model = tiny_proxyformer(proxy_interaction="cross_attention", condition_size=5)
    states = torch.randn(2, 3, 5, dtype=torch.float64)
    told = [
        model(query, history_ids=history, condition_states=states * scale, use_cache=False).logits
        for scale in (1.0, -1.0)
    ]
    assert (told[0] - told[1]).abs().max() > 1e-6
    with pytest.raises(ValueError, match="condition"):
        model(query, history_ids=history, use_cache=False)


@pytest.mark.parametrize("ratios", [[2, 4, 4], [4, 2, 4], [2, 4, 2]])
@pytest.mark.parametrize("block", [4, 8])
@torch.no_grad()
def test_histories_of_odd_length_with_ratios_by_layer(ratios: list[int], block: int) -> None:
    """A layer of small ratio has proxies of nothing in a block that is filled up."""
    model = tiny_proxyformer(compression_ratio=ratios, generation_block_size=block)
    for length in range(1, 10):
        history, query = ids(2, length, 1), ids(2, 3 + block, 2)
        one_pass = model(query, history_ids=history, use_cache=False).logits
        cached = model(query, cache=model.encode_history(history)).logits
        assert (one_pass - cached).abs().max() < 1e-10, length


def test_proxies_that_see_later_ones_are_refused_in_the_plain_form() -> None:
    model = tiny_proxyformer(proxy_interaction="bidirectional_attention")
    with pytest.raises(ValueError, match="histories given whole"):
        model(ids(1, 9), use_cache=False)
    with pytest.raises(ValueError, match="histories given whole"):
        model(ids(1, 9), history_ids=ids(1, 4), use_cache=False)


@torch.no_grad()
def test_hidden_states_are_of_the_input_s_columns() -> None:
    model = tiny_proxyformer()
    tokens = ids(1, 10)
    alone = model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    assert [tuple(x.shape) for x in alone] == [(1, 10, 32)] * 4
    assert torch.equal(model.lm_head(alone[-1]), model(tokens, use_cache=False).logits)
    left = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    mask = (torch.arange(13) >= 3).long()[None]
    padded = model(left, attention_mask=mask, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    assert padded.logits.shape == (1, 1, 61)
    for one, other in zip(alone, padded.hidden_states, strict=True):
        assert (one - other[:, 3:]).abs().max() < 1e-10


def test_both_embeddings_are_resized(tmp_path: Path) -> None:
    model = tiny_proxyformer(dtype=torch.float32)
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.model.history_embed_tokens.weight.shape == (70, 8)
    tokens = torch.full((1, 9), 69)
    expected = model(tokens, use_cache=False).logits
    assert expected.shape == (1, 9, 70)
    model.save_pretrained(tmp_path)
    again = ProxyFormerForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(again(tokens, use_cache=False).logits, expected, atol=1e-5)


@torch.no_grad()
def test_compiled_rows_keep_their_padding() -> None:
    model = tiny_proxyformer(num_hidden_layers=2)
    tokens, mask = ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, backend="eager")(tokens, attention_mask=mask, use_cache=False).logits
    assert (expected - compiled)[mask.bool()].abs().max() < 1e-10


# --- losses and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_loss_is_cross_entropy_of_both_heads(weight: float) -> None:
    model = tiny_proxyformer(auxiliary_loss_weight=weight, loss_chunk_tokens=5).train()
    tokens = ids(2, 19)
    labels = tokens.clone()
    labels[0, :7] = -100
    labels[1, 12:15] = -100
    loss = model(tokens, labels=labels).loss
    model.eval()
    out = model.model(tokens, use_cache=False)
    expected = torch.zeros((), dtype=torch.float64)
    heads = [(1.0, out.last_hidden_state)] + ([(weight, out.middle_hidden_state)] if weight else [])
    for share, hidden in heads:
        logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
        expected = expected + share * F.cross_entropy(logits, labels[:, 1:].flatten())
    assert abs(loss.item() - expected.item()) < 1e-10


def test_blocks_without_labels_cost_nothing_and_change_nothing() -> None:
    model = tiny_proxyformer().train()
    tokens = ids(2, 40)
    labels = torch.full_like(tokens, -100)
    labels[0, 14:16] = tokens[0, 14:16]
    labels[1, 33:] = tokens[1, 33:]
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    loss, found = gradients(model, input_ids=tokens, labels=labels)
    handle.remove()
    assert seen == [8]  # two of ten blocks a row
    total, everything = torch.zeros((), dtype=torch.float64), {}
    model.zero_grad()
    out = model.model(tokens)
    for share, hidden in ((1.0, out.last_hidden_state), (0.3, out.middle_hidden_state)):
        logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
        total = total + share * F.cross_entropy(logits, labels[:, 1:].flatten())
    total.backward()
    everything = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert abs(total.item() - loss) < 1e-10
    assert_same_gradients(found, everything)


def test_num_items_in_batch_divides_the_loss() -> None:
    model = tiny_proxyformer().train()
    tokens = ids(2, 9)
    mean = model(tokens, labels=tokens).loss
    assert torch.allclose(model(tokens, labels=tokens, num_items_in_batch=32).loss * 2, mean)


def test_no_labels_at_all_give_zero_and_no_nan() -> None:
    model = tiny_proxyformer().train()
    tokens = ids(1, 9)
    loss, found = gradients(model, input_ids=tokens, labels=torch.full_like(tokens, -100))
    assert loss == 0.0
    assert all(torch.isfinite(g).all() for g in found.values())


def test_gradients_reach_everything_in_eval_mode_too() -> None:
    model = tiny_proxyformer()
    tokens = ids(2, 22)
    model(tokens, labels=tokens).loss.backward()
    # Of the auxiliary head there is no loss in eval mode.
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["model.middle_norm.weight"]


def test_a_head_that_is_no_plain_matrix_is_called() -> None:
    """Adapters and hooks have a say in the loss, not in the logits alone."""
    model = tiny_proxyformer(loss_chunk_tokens=5).train()
    tokens = ids(2, 19)
    expected, plain = gradients(model, input_ids=tokens, labels=tokens)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.0)
    loss, found = gradients(model, input_ids=tokens, labels=tokens)
    assert abs(loss - expected) < 1e-10
    assert_same_gradients(plain, found)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2.0)
    assert abs(model(tokens, labels=tokens).loss.item() - expected) > 1e-3


def test_logits_in_training_where_a_trainer_wants_them() -> None:
    tokens = ids(2, 19)
    some, every = tiny_proxyformer().train(), tiny_proxyformer(logits_in_training=True).train()
    without, with_logits = (model(tokens, labels=tokens) for model in (some, every))
    assert without.logits is None and with_logits.logits.shape == (2, 19, 61)
    assert abs(without.loss.item() - with_logits.loss.item()) < 1e-10


def test_dropout_in_a_reversible_history_is_refused() -> None:
    model = tiny_proxyformer(reversible_history=True).train()
    model.model.history_layers[0].compress.add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match="dropout"):
        model(ids(1, 9), labels=ids(1, 9))


@pytest.mark.parametrize("hooked", [False, True])
@torch.no_grad()
def test_hooks_of_history_layers_run_without_gradients_too(hooked: bool) -> None:
    model = tiny_proxyformer()
    tokens, seen = ids(1, 12), []
    expected = model(tokens, use_cache=False).logits
    if hooked:
        for layer in model.model.history_layers:
            layer.register_forward_pre_hook(lambda *_: seen.append(1))
    assert (model(tokens, use_cache=False).logits - expected).abs().max() < 1e-10
    assert len(seen) == (3 if hooked else 0)


@pytest.mark.parametrize("options", [{}, {"history_stem_layers": 0}, {"history_chunk_blocks": 2}, {"vocab_size": 80}])
@pytest.mark.parametrize("form", ["two inputs", "two inputs, several blocks", "plain", "ragged"])
def test_reversible_gradients_are_the_plain_ones(options: dict[str, Any], form: str) -> None:
    inputs: dict[str, Any] = {"input_ids": ids(2, 30, 3), "labels": ids(2, 30, 3)}
    if form.startswith("two"):
        length = 11 if "several" in form else 4
        inputs = {"input_ids": ids(4, length, 2), "labels": ids(4, length, 2), "history_ids": ids(2, 43, 1)}
    if form == "ragged":
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[0, :11] = 0
        inputs["attention_mask"] = mask
    results = [gradients(tiny_proxyformer(reversible_history=r, **options).train(), **inputs) for r in (False, True)]
    assert abs(results[0][0] - results[1][0]) < 1e-12
    assert_same_gradients(results[0][1], results[1][1])


def test_reversible_history_says_when_it_cannot_go_back_twice() -> None:
    model = tiny_proxyformer(reversible_history=True).train()
    loss = model(ids(1, 12), labels=ids(1, 12)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="reversible_history=False"):
        loss.backward()


def test_gradient_checkpointing_changes_nothing() -> None:
    tokens = ids(2, 21)
    plain = tiny_proxyformer(retained_blocks=1).train()
    other = copy.deepcopy(plain)
    other.activation_checkpointing_enable() if hasattr(
        other, "activation_checkpointing_enable"
    ) else other.gradient_checkpointing_enable()
    one, two = (gradients(model, input_ids=tokens, labels=tokens) for model in (plain, other))
    assert abs(one[0] - two[0]) < 1e-12
    assert_same_gradients(one[1], two[1])


def kept_bytes(model: ProxyFormerForCausalLM, tokens: int) -> int:
    """Bytes of tensors that the backward pass of a loss on one block behind `tokens` of history needs."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    query = torch.randint(0, 64, (1, 16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(query, labels=query, history_ids=torch.randint(0, 64, (1, tokens))).loss
    assert loss.requires_grad
    return sum(size for size, _ in seen.values())


def test_a_reversible_history_keeps_at_most_400_bytes_a_token() -> None:
    """The shape of the paper's language model, bfloat16."""
    shape: dict[str, Any] = {"vocab_size": 64, "reversible_history": True, "intermediate_size": 64}
    model = ProxyFormerForCausalLM(ProxyFormerConfig(**shape)).bfloat16().train()
    short, long = (kept_bytes(model, tokens) for tokens in (64 * 8, 64 * 24))
    assert 160 <= (long - short) / (64 * 16) <= 400


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression_ratio": 0}, "compression_ratio"),
        ({"compression_ratio": [4, 4]}, "one for each of the 3 layers"),
        ({"compression_ratio": [4, 4, 3]}, "multiple of every compression ratio"),
        ({"compression_factors": [2, 3]}, "product 4"),
        ({"compression_widths": [8, 16]}, "compression_widths"),
        ({"compression_factors": [2, 2], "compression_widths": [8, 32]}, "one more than compression_factors"),
        ({"generation_block_size": 6}, "generation_block_size"),
        ({"partition_overlap": 5}, "partition_overlap"),
        ({"retained_blocks": -1}, "retained_blocks"),
        ({"reversible_history": True, "injection": "gated"}, "injection='residual'"),
        ({"reversible_history": True, "partition_overlap": 1}, "partition_overlap=0"),
        ({"separate_proxy_kv": False, "proxy_hidden_size": 64}, "separate_proxy_kv"),
        ({"share_proxy_generation_weights": True, "proxy_interaction": "mlp"}, "share_proxy_generation_weights"),
        ({"proxy_interaction": "cross_attention"}, "condition_size"),
        ({"condition_size": 4}, "condition_size"),
        ({"proxy_rope": True}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"distance_ratios": [[6, 8]]}, "multiple of the generation block"),
        ({"distance_ratios": [[8, 6]]}, "ratios of distance_ratios"),
        ({"distance_ratios": [[16, 8], [8, 16]]}, "distances of distance_ratios"),
        ({"proxy_query_scale": 0.0}, "proxy_query_scale"),
        ({"proxy_sharpen_from": 1}, "proxy_sharpen_from"),
        ({"injection": "cross_attention", "history_hidden_size": 32}, "key-value slots"),
        ({"proxy_update": "sum"}, "proxy_update"),
        ({"proxy_interaction": "convolution"}, "proxy_interaction"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        tiny_proxyformer_config(**changes)
    assert isinstance(caught.value, ValueError | TypeError) or "Validation" in type(caught.value).__name__


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.tensor([[3, 61]])}, "vocab_size - 1 = 60, got 61"),
        ({"input_ids": torch.tensor([[-1, 3]])}, "got -1"),
        ({"input_ids": torch.tensor([[3]]), "history_ids": torch.tensor([[99]])}, "history_ids"),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "input_ids"),
        ({"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"input_ids": ids(3, 4), "history_ids": ids(2, 4)}, "multiple"),
        ({"input_ids": ids(1, 4), "labels": ids(1, 3)}, "labels"),
        ({"input_ids": ids(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, "pack"),
        ({"input_ids": ids(1, 0)}, "at least one token"),
        ({"input_ids": ids(0, 4)}, "at least one token"),
        ({"input_ids": ids(1, 4), "labels": torch.full((1, 4), 99)}, "labels must lie"),
        ({"input_ids": ids(1, 4), "history_attention_mask": ids(1, 4)}, "history_ids, which are missing"),
        ({"input_ids": ids(1, 4), "condition_states": torch.zeros(1, 2, 3)}, "condition_states"),
        ({"input_ids": ids(1, 4), "cu_seq_lens_q": torch.tensor([0, 2, 4])}, "packs"),
        (
            {
                "input_ids": ids(1, 4),
                "attention_mask": torch.ones(1, 4),
                "position_ids": torch.tensor([[0, 1, 0, 1]]),
            },
            "pack",
        ),
    ],
)
def test_bad_input_is_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_proxyformer()(**inputs)


def test_a_plain_decoder_refuses_a_history() -> None:
    model = tiny_proxyformer(compression_ratio=None)
    with pytest.raises(ValueError, match="in front of input_ids"):
        model(ids(1, 4), history_ids=ids(1, 4))
    with pytest.raises(ValueError, match="plain decoder"):
        model.encode_history(ids(1, 4))


def test_the_plain_decoder_has_the_same_size_of_stream() -> None:
    plain, ours = tiny_proxyformer(compression_ratio=None), tiny_proxyformer()
    names = {name for name, _ in plain.named_parameters()}
    assert names < {name for name, _ in ours.named_parameters()}
    assert not any("history" in name or "proxy" in name for name in names)


@pytest.mark.parametrize("reversible", [False, True])
def test_what_only_a_cache_needs_does_not_outlive_the_forward_pass(reversible: bool) -> None:
    """Keys and values among proxies would double what is kept of a history."""
    model = tiny_proxyformer(reversible_history=reversible).train()
    seen: list[weakref.ref] = []
    layer = model.model.history_layers[0].interaction
    plain = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        seen.extend(weakref.ref(tensor) for tensor in out[1])
        return out

    layer.forward = watched
    with torch.no_grad() if not reversible else contextlib.nullcontext():
        out = model(ids(1, 4), labels=ids(1, 4), history_ids=ids(1, 16))
    gc.collect()
    assert out.loss is not None and len(seen) == 2
    assert all(reference() is None for reference in seen)
