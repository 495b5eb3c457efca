"""HybridAxialMapper: against the paper's equations written out, windows, layer pairs, models it refuses, files."""

import json
import math
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from test_remote_code import HIDE, finish, start
from tiny_models import tiny_config, tiny_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, LlamaConfig, PreTrainedConfig, T5Config

import nearfar
from nearfar import HybridAxialMapper, HybridAxialMapperConfig
from nearfar.configuration.configuration_axial_mapper import state_size
from nearfar.modeling.modeling_axial_mapper import LOG_FLOOR, sinusoidal_positions, window_starts

SIZES = {
    "proxy_num_layers": 2, "proxy_num_heads": 4, "target_num_layers": 5, "target_num_heads": 3, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "window_tokens": 12, "window_stride": 6,
}  # fmt: skip


def tiny_mapper(dtype: torch.dtype = torch.float64, **changes: object) -> HybridAxialMapper:
    """A random mapper in eval mode, with statistics and biases that are not those of a new one."""
    torch.manual_seed(0)
    mapper = HybridAxialMapper(HybridAxialMapperConfig(**{**SIZES, **changes})).to(dtype).eval()
    with torch.no_grad():
        for name, tensor in [*mapper.named_parameters(), *mapper.named_buffers()]:
            if "running_var" in name:
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point() and tensor.ndim == 1:
                tensor.normal_(0.3, 0.3)
    return mapper


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def reference(mapper: HybridAxialMapper, row: torch.Tensor, bank: int = 0) -> torch.Tensor:
    """Section 4.1 for one row `(H_s, tokens)`, one step after the other."""
    p, config = mapper.state_dict(), mapper.config
    hidden = row
    if config.proxy_states != "none":
        layers = row.view(config.proxy_num_layers, -1, row.shape[1])
        hidden, states = layers[:, : config.proxy_num_heads].flatten(0, 1), layers[:, config.proxy_num_heads :]
    if config.feature_transform == "log":
        hidden = (hidden + LOG_FLOOR).log()
    if config.proxy_states != "none":
        mean, variance = (p[f"state_norm.running_{name}"][:, None] for name in ("mean", "var"))
        hidden = torch.cat([hidden, (states.flatten(0, 1) - mean) / (variance + 1e-5).sqrt()])
    for i in range(2):
        padded = F.pad(hidden, (1, 1))
        weight, bias = p[f"stem.convolutions.{i}.weight"], p[f"stem.convolutions.{i}.bias"]
        hidden = torch.stack(
            [(weight * padded[None, :, t : t + 3]).sum((1, 2)) + bias for t in range(row.shape[1])], dim=1
        )
        mean, variance = (p[f"stem.norms.{i}.running_{name}"][:, None] for name in ("mean", "var"))
        hidden = (hidden - mean) / (variance + 1e-5).sqrt()
        hidden = F.gelu(hidden * p[f"stem.norms.{i}.weight"][:, None] + p[f"stem.norms.{i}.bias"][:, None])
    hidden = hidden.T
    tokens, width = hidden.shape
    for t in range(tokens):
        for k in range(width // 2):
            angle = t / 10000 ** (2 * k / width)
            hidden[t, 2 * k] += math.sin(angle)
            hidden[t, 2 * k + 1] += math.cos(angle)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    heads = config.num_attention_heads
    for i in range(config.num_hidden_layers):
        query, key, value = linear(f"layers.{i}.query_key_value", norm(f"layers.{i}.attention_norm", hidden)).chunk(
            3, 1
        )
        size = width // heads
        outs = []
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            outs.append((query[:, own] @ key[:, own].T / math.sqrt(size)).softmax(-1) @ value[:, own])
        hidden = hidden + linear(f"layers.{i}.attention_out", torch.cat(outs, 1))
        hidden = hidden + linear(
            f"layers.{i}.mlp_down", F.gelu(linear(f"layers.{i}.mlp_up", norm(f"layers.{i}.mlp_norm", hidden)))
        )
    hidden = norm("norm", hidden)
    queries = p["heads.queries"][bank]
    out = torch.empty(config.target_num_heads, tokens, dtype=row.dtype)
    for t in range(tokens):  # Eq. 3
        keys = linear("heads.key", hidden[t]).view(config.num_synthetic_heads, config.head_dim)
        values = linear("heads.value", hidden[t]).view(config.num_synthetic_heads, config.head_dim)
        gathered = (queries @ keys.T / math.sqrt(config.head_dim)).softmax(-1) @ values
        out[:, t] = linear("heads.out", gathered)[:, 0]
    return out


@pytest.mark.parametrize("changes", [
    {}, {"feature_transform": "log", "num_synthetic_heads": 6}, {"layer_queries": True, "proxy_num_heads": 1},
])  # fmt: skip
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forward_is_section_4_1(changes: dict[str, object], attention: str) -> None:
    mapper = tiny_mapper(**changes)
    mapper.set_attn_implementation(attention)
    x = features(3, mapper.config.proxy_num_heads, 10)
    layers = torch.tensor([4, 0, 2])
    with torch.no_grad():
        found = mapper(x, layers=layers)
    banks = layers.tolist() if mapper.config.layer_queries else [0, 0, 0]
    wanted = torch.stack([reference(mapper, row, bank) for row, bank in zip(x, banks, strict=True)])
    assert found.shape == (3, 3, 10)
    assert (found - wanted).abs().max() < 1e-10
    assert wanted.std() > 0.01


@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layers_read_memory_in_order(masked: bool) -> None:
    """Token by token, whatever order the convolutions leave behind: every layer would inherit it."""
    mapper, found = tiny_mapper(), []
    for layer in mapper.layers:
        layer.register_forward_hook(lambda module, inputs, output: found.extend([inputs[0], output]))
    mapper(features(3, 4, 10), torch.ones(3, 10, dtype=torch.bool) if masked else None)
    assert len(found) == 4 and all(hidden.is_contiguous() for hidden in found)


@pytest.mark.parametrize("states", ["none", "values"])
def test_padding_is_as_if_it_were_not_there(states: str) -> None:
    options: dict[str, object] = {"dropout": 0.0}
    if states != "none":
        options |= {"proxy_layers": "all", "layer_queries": True, "proxy_states": states, "proxy_state_size": 3}
    for training in (False, True):
        mapper = tiny_mapper(**options).train(training)
        x = features(2, mapper.config.input_channels, 9)
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, 6:] = False
        x[1, :, 6:] = 1e6
        with torch.no_grad():
            found = mapper(x, mask)
            if not training:
                assert (found[0] - mapper(x[:1])[0]).abs().max() < 1e-10
                assert (found[1, ..., :6] - mapper(x[1:, :, :6])[0]).abs().max() < 1e-10
            other = x.clone()
            other[1, :, 6:] = -5.0
            again = tiny_mapper(**options).train(training)(other, mask)
            seen = mask.view(2, *[1] * (found.ndim - 2), 9).expand_as(found)
            assert (found - again)[seen].abs().max() < 1e-10


def test_statistics_of_training_leave_padding_out() -> None:
    mapper = tiny_mapper()
    mapper.train()
    x = features(2, 4, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3:] = False
    norm = mapper.stem.norms[0]
    before = norm.running_mean.clone()
    mapper(x, mask)
    convolved = mapper.stem.convolutions[0](x * mask[:, None])
    kept = convolved.mT[mask]
    assert (norm.running_mean - (0.9 * before + 0.1 * kept.mean(0))).abs().max() < 1e-10

    mapper = tiny_mapper(proxy_layers="all", layer_queries=True, proxy_states="values", proxy_state_size=3).train()
    assert mapper.state_norm is not None and mapper.state_norm.weight is None
    x = features(2, 14, 8)
    before = mapper.state_norm.running_mean.clone()
    mapper(x, mask)
    kept = x.view(2, 2, 7, 8)[:, :, 4:].flatten(1, 2).mT[mask]
    assert (mapper.state_norm.running_mean - (0.9 * before + 0.1 * kept.mean(0))).abs().max() < 1e-10


@pytest.mark.parametrize(("tokens", "starts", "length"), [
    (1, [0], 1), (12, [0], 12), (13, [0, 1], 12), (18, [0, 6], 12), (19, [0, 6, 7], 12), (30, [0, 6, 12, 18], 12),
])  # fmt: skip
def test_windows_cover_the_context(tokens: int, starts: list[int], length: int) -> None:
    assert window_starts(tokens, 12, 6) == (starts, length)
    covered = {t for start in starts for t in range(start, start + length)}
    assert covered == set(range(tokens))


@pytest.mark.parametrize("layer_queries", [False, True])
@pytest.mark.parametrize("tokens", [5, 12, 13, 31])
def test_predict_averages_overlapping_windows(layer_queries: bool, tokens: int) -> None:
    mapper = tiny_mapper(layer_queries=layer_queries)
    x = features(2, 4, tokens)
    starts, length = window_starts(tokens, 12, 6)
    wanted = torch.zeros(5, 3, tokens, dtype=torch.float64)
    for place, layer in enumerate(mapper.config.layer_pairs):
        for t in range(tokens):
            seen = [
                reference(mapper, x[layer, :, s : s + length], place if layer_queries else 0)[:, t - s]
                for s in starts
                if s <= t < s + length
            ]
            wanted[place, :, t] = torch.stack(seen).mean(0)
    for batch in (None, 1, 3):
        found = mapper.predict(x, batch_windows=batch, return_logits=True)
        assert (found - wanted).abs().max() < 1e-10
    assert (mapper.predict(x) - wanted.sigmoid()).abs().max() < 1e-10
    if tokens <= 12:
        with torch.no_grad():
            one = mapper(x[mapper.config.layer_pairs], layers=torch.arange(5))
        assert (one - found).abs().max() < 1e-10
    assert torch.equal(found[0], found[1]) != layer_queries  # both are of proxy layer 0


@pytest.mark.parametrize("tokens", [5, 31])
@pytest.mark.parametrize(("states", "transform", "channels"), [
    ("none", "none", 4), ("values", "none", 7), ("values", "log", 7),
])  # fmt: skip
def test_all_proxy_layers_at_once(states: str, transform: str, channels: int, tokens: int) -> None:
    """All channels of a token go in together, and each bank of queries reads the same hidden states."""
    mapper = tiny_mapper(
        proxy_layers="all", layer_queries=True, proxy_states=states, proxy_state_size=3, feature_transform=transform
    )
    x = features(2, channels, tokens)
    x[:, 4:] -= 1.5  # states have both signs
    assert mapper.stem.convolutions[0].in_channels == mapper.config.input_channels == 2 * channels
    starts, length = window_starts(tokens, 12, 6)
    crops = torch.stack([x.flatten(0, 1)[:, s : s + length] for s in starts])
    with torch.no_grad():
        found = mapper(crops)
    assert found.shape == (len(starts), 5, 3, length)
    wanted = torch.stack([torch.stack([reference(mapper, crop, bank) for bank in range(5)]) for crop in crops])
    assert (found - wanted).abs().max() < 1e-10
    total, counts = torch.zeros(5, 3, tokens, dtype=torch.float64), torch.zeros(tokens, dtype=torch.float64)
    for s, row in zip(starts, wanted, strict=True):
        total[:, :, s : s + length] += row
        counts[s : s + length] += 1
    for batch in (None, 2):
        predicted = mapper.predict(x, batch_windows=batch, return_logits=True)
        assert (predicted - total / counts).abs().max() < 1e-10
    with pytest.raises(ValueError, match=f"{2 * channels} channels"):
        mapper(features(1, 4, 5))


def test_layer_pairs_are_the_papers() -> None:
    config = HybridAxialMapperConfig(**{**SIZES, "proxy_num_layers": 16, "target_num_layers": 32})
    assert config.layer_pairs == [math.ceil(layer * 16 / 32) - 1 for layer in range(1, 33)]
    config = HybridAxialMapperConfig(**{**SIZES, "proxy_num_layers": 28, "target_num_layers": 5})
    assert config.layer_pairs == [5, 11, 16, 22, 27]
    hybrid = HybridAxialMapperConfig.for_models(tiny_config("llama"), tiny_config("gemma3"))
    assert hybrid.target_layers == [2, 3] and hybrid.layer_pairs == [2, 2] and hybrid.target_num_layers == 4


def test_default_size_is_the_papers_checkpoints() -> None:
    with torch.device("meta"):
        mapper = HybridAxialMapper(HybridAxialMapperConfig())
    assert 4 * mapper.num_parameters() == pytest.approx(100e6, rel=0.15)
    assert mapper.config.intermediate_size == 2048


def test_sizes_come_from_the_models() -> None:
    config = HybridAxialMapperConfig.for_models(tiny_config("qwen3"), tiny_config("gpt_neox"), hidden_size=64)
    assert (config.proxy_num_layers, config.proxy_num_heads) == (3, 4)
    assert (config.target_num_layers, config.target_num_heads) == (3, 4)
    assert config.hidden_size == 64 and config.num_synthetic_heads == 4
    with pytest.raises(TypeError, match="target_config must be a transformers configuration"):
        HybridAxialMapperConfig.for_models(tiny_config("llama"), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        HybridAxialMapperConfig.for_models(PreTrainedConfig(), tiny_config("llama"))
    with pytest.raises(ValueError, match="encoder-decoder"):
        HybridAxialMapperConfig.for_models(T5Config(), tiny_config("llama"))


def test_other_models_are_refused() -> None:
    proxy, target, other = tiny_model("qwen2"), tiny_model("llama"), tiny_model("llama", seed=1)
    mapper = HybridAxialMapper.for_models(proxy, target, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    mapper.check_compatible(proxy, target)
    mapper.check_compatible(proxy.config, target.config)
    mapper.check_compatible(target=target.float())
    with pytest.raises(ValueError, match=r"same shape but other weights.*train-mapper"):
        mapper.check_compatible(proxy, other)
    mapper.check_compatible(proxy, other, allow_other_models=True)
    with pytest.raises(ValueError, match=r"made for a proxy.*'qwen2', 3 layers.*has model type 'llama'"):
        mapper.check_compatible(target, target)
    wide = LlamaConfig(**{**tiny_config("llama").to_dict(), "num_key_value_heads": 4})
    with pytest.raises(ValueError, match=r"2 key-value heads; the target given has .* 4 key-value heads"):
        mapper.check_compatible(None, wide)


def test_the_size_of_values_matters_where_they_are_read() -> None:
    """Not to a mapper that reads attention alone, such as those of older releases, which do not name it."""
    proxy, target = tiny_config("llama"), tiny_config("qwen2")
    wide = LlamaConfig(**{**proxy.to_dict(), "num_key_value_heads": 4})
    plain = HybridAxialMapperConfig.for_models(proxy, target)
    assert plain.proxy_state_size == 16 and plain.proxy_states == "none"
    older = {name: value for name, value in plain.to_dict().items() if not name.startswith("proxy_state")}
    for config in (plain, HybridAxialMapperConfig(**older)):
        config.check_compatible(wide, target)
        with pytest.raises(ValueError) as told:
            config.check_compatible(target, target)
        assert "values" not in str(told.value)
    reading = {"proxy_layers": "all", "layer_queries": True, "proxy_states": "values"}
    config = HybridAxialMapperConfig.for_models(proxy, target, **reading)
    config.check_compatible(proxy, target)
    assert config.layer_channels == 20 and config.input_channels == 60
    with pytest.raises(ValueError, match=r"values of 16 numbers a token; .* values of 32 numbers a token"):
        config.check_compatible(wide, target)
    with pytest.raises(StrictDataclassFieldValidationError, match=r"one of \('none', 'values'\), got keys"):
        HybridAxialMapperConfig.for_models(proxy, target, **{**reading, "proxy_states": "keys"})


def test_sizes_of_values() -> None:
    assert [state_size(tiny_config(family)) for family in ("llama", "gemma3", "gpt_neox")] == [16, 16, 32]
    config = LlamaConfig(**{**tiny_config("llama").to_dict(), "head_dim": None, "num_key_value_heads": None})
    assert state_size(config) == 32
    config.v_head_dim = 5
    assert state_size(config) == 20
    # As configurations are whose layers have sizes of their own; others than transformers' own have no such property.
    layers = [tiny_config("llama"), tiny_config("gpt_neox")]

    class Mixed(PreTrainedConfig):
        num_hidden_layers, num_attention_heads, is_heterogeneous, per_layer_config = 2, 4, True, layers

        @property
        def head_dim(self) -> int:
            raise RuntimeError("a per-layer attribute")

    assert state_size(Mixed()) is None
    mapper = HybridAxialMapperConfig.for_models(Mixed(), tiny_config("llama"))
    assert mapper.proxy_state_size is None
    with pytest.raises(ValueError, match="the same in all layers of the proxy; got None"):
        HybridAxialMapperConfig.for_models(
            Mixed(), tiny_config("llama"), proxy_layers="all", layer_queries=True, proxy_states="values"
        )
    layers[1] = layers[0]
    assert state_size(Mixed()) == 16


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 18, "num_attention_heads": 4}, "multiple of num_attention_heads"),
    ({"hidden_size": 15, "num_attention_heads": 3}, "even hidden_size"),
    ({"window_stride": 13}, "window_stride must not exceed"),
    ({"dropout": 1.0}, "dropout must be in"),
    ({"proxy_layers": "all"}, "needs layer_queries=True"),
    ({"proxy_states": "values", "proxy_state_size": 3}, "values' needs proxy_layers=\"all\""),
    ({"proxy_states": "values", "proxy_layers": "all", "layer_queries": True}, "needs proxy_state_size.*got None"),
    ({"target_layers": [3, 2]}, "ascending indices"),
    ({"target_layers": [5]}, "below target_num_layers = 5"),
    ({"target_layers": []}, "ascending indices"),
    ({"proxy_num_heads": 0}, "proxy_num_heads must be at least 1, got 0"),
])  # fmt: skip
def test_bad_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridAxialMapperConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("stage", ["convolutions", "encoder", "heads"])
def test_a_disabled_stage_keeps_the_shapes(stage: str, tmp_path: Path) -> None:
    """By both ways of reading proxy layers; and it does what it is said to do."""
    whole = {name for name, _ in tiny_mapper(layer_queries=True).named_parameters()}
    for proxy_layers in ("paired", "all"):
        mapper = tiny_mapper(disabled_stage=stage, layer_queries=True, proxy_layers=proxy_layers)
        config = mapper.config
        lost = whole - {name for name, _ in mapper.named_parameters()}
        start = {"convolutions": "stem.", "encoder": "layers.", "heads": "heads."}[stage]
        assert lost and all(name.startswith(start) for name in lost)
        x = features(config.proxy_num_layers, config.proxy_num_heads, 20)
        scores = mapper.predict(x, return_logits=True)
        assert scores.shape == (config.target_num_layers, config.target_num_heads, 20)
        # Padding is not read.
        rows = x.flatten(0, 1)[None] if proxy_layers == "all" else x[:1]
        layers = torch.tensor([1])
        padded, mask = F.pad(rows, (0, 3), value=7.0), torch.arange(23)[None] < 20
        torch.testing.assert_close(mapper(padded, mask, layers)[..., :20], mapper(rows, None, layers))
    mapper.save_pretrained(tmp_path)
    again = HybridAxialMapper.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.config.disabled_stage == stage
    torch.testing.assert_close(again.predict(x, return_logits=True), scores)


def test_bad_inputs_are_refused() -> None:
    mapper = tiny_mapper()
    with pytest.raises(ValueError, match=r"4 channels .* 4 proxy heads; got torch.float64 of shape \(1, 3, 5\)"):
        mapper(features(1, 3, 5))
    with pytest.raises(ValueError, match=r"mask must be of shape \(1, 5\)"):
        mapper(features(1, 4, 5), torch.ones(1, 4))
    with pytest.raises(ValueError, match="floating point"):
        mapper(torch.ones(1, 4, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="empty"):
        mapper(features(1, 4, 0))
    with pytest.raises(ValueError, match="all 2 proxy layers, got 3"):
        mapper.predict(features(3, 4, 5))
    with pytest.raises(ValueError, match="batch_windows must be at least 1"):
        mapper.predict(features(2, 4, 5), batch_windows=0)
    with pytest.raises(ValueError, match=r"call mapper.eval\(\)"):
        mapper.train().predict(features(2, 4, 5))
    with pytest.raises(ValueError, match=r"needs layers of shape \(1,\)"):
        tiny_mapper(layer_queries=True)(features(1, 4, 5))


def test_half_precision_and_autocast_stay_close() -> None:
    mapper = tiny_mapper(torch.float32, feature_transform="log")
    x = features(2, 4, 40).float()
    x[:, :, 0] = 1e5  # a sink beyond float16's range
    wanted = mapper.predict(x, return_logits=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert (mapper.predict(x, return_logits=True) - wanted).abs().max() < 0.1
    half = mapper.to(torch.bfloat16).predict(x, return_logits=True)
    assert half.dtype == torch.float32 and (half - wanted).abs().max() < 0.2

    options = {"proxy_layers": "all", "layer_queries": True, "proxy_states": "values", "proxy_state_size": 3}
    mapper = tiny_mapper(torch.float32, feature_transform="log", **options)
    x = features(2, 7, 40).float()
    wanted = mapper.predict(x, return_logits=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert (mapper.predict(x, return_logits=True) - wanted).abs().max() < 0.1
    half = mapper.to(torch.float16)
    assert (half.predict(x, return_logits=True) - wanted).abs().max() < 0.02
    x[:, 4:, 7] = torch.tensor([1e6, -1e6, 6e4])  # beyond float16's range, and beyond that of a sum of such
    assert half.predict(x, return_logits=True).isfinite().all()


def test_statistics_of_values_are_those_of_float32_under_autocast() -> None:
    options = {"proxy_layers": "all", "layer_queries": True, "proxy_states": "values", "proxy_state_size": 3}
    found = []
    for bf16 in (False, True):
        mapper = tiny_mapper(torch.float32, dropout=0.0, **options).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            mapper(features(2, 14, 9).float())
        assert mapper.state_norm is not None and mapper.state_norm.running_var.dtype == torch.float32
        found.append(mapper.state_norm.running_var.clone())
    assert torch.equal(*found)


def test_wide_features_are_read_fewer_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many numbers as the encoder holds; of a batch, a row is read as it would be alone."""
    options = {"proxy_layers": "all", "layer_queries": True, "proxy_states": "values"}
    rows = []
    for size in (3, 124):  # 14 and 256 channels, and an inner width of 64
        mapper = tiny_mapper(proxy_state_size=size, **options)
        forward = mapper.forward
        monkeypatch.setattr(mapper, "forward", lambda x, f=forward: rows.append(x.shape[0]) or f(x))
        monkeypatch.setattr("nearfar.modeling.modeling_axial_mapper.BATCH_TOKENS", 48)
        x = features(2, 2, 4 + size, 31)
        whole = mapper.predict(x[:, 1])
        assert torch.equal(whole, mapper.predict(x[:, 1].contiguous()))
    assert rows == [4, 1] * 2 + [1] * 5 * 2


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    found = []
    for checkpointing in (False, True):
        mapper = tiny_mapper(dropout=0.0).train()
        if checkpointing:
            mapper.gradient_checkpointing_enable()
        mapper(features(2, 4, 9)).square().sum().backward()
        found.append([parameter.grad for parameter in mapper.parameters()])
    for first, second in zip(*found, strict=True):
        assert first is not None and (first - second).abs().max() < 1e-10


def test_positions_and_auto_classes(tmp_path: Path) -> None:
    positions = sinusoidal_positions(7, 6, torch.zeros(1, dtype=torch.float64))
    assert positions[5, 3] == pytest.approx(math.cos(5 / 10000 ** (2 / 6)))
    mapper = tiny_mapper(torch.float32)
    mapper.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is nearfar.HybridAxialMapper
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(again.config)
    x = features(2, 4, 20).float()
    assert (again.predict(x) - mapper.predict(x)).abs().max() < 1e-6
    assert not again.training


READ = """
import torch
from transformers import AutoConfig, AutoModel

torch.set_num_threads(1)
saved, again, result = sys.argv[1:]
x = torch.load("features.pt")
found = []
for source in (saved, again):
    mapper = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float64)
    assert type(mapper).__module__.startswith("transformers_modules."), type(mapper)
    with torch.no_grad():
        found.append({"scores": mapper.predict(x), "logits": mapper(x)})
    if source == saved:
        mapper.save_pretrained(again)
torch.save(found, result)
"""


def test_a_checkpoint_carries_its_code(tmp_path: Path) -> None:
    mapper = tiny_mapper(target_fingerprint=[[0.1, 0.2]], proxy_name="small")
    mapper.save_pretrained(tmp_path / "model")
    x = features(2, 4, 25)
    torch.save(x, tmp_path / "features.pt")
    finish(start(HIDE + READ, tmp_path / "model", tmp_path / "again", tmp_path / "result.pt", cwd=tmp_path))
    with torch.no_grad():
        expected = {"scores": mapper.predict(x), "logits": mapper(x)}
    for found in torch.load(tmp_path / "result.pt"):
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-10, name
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("model", "again")
    )
    assert first.keys() == second.keys() and "modeling_axial_mapper.py" in first
    for name, content in first.items():
        assert content == second[name] or name == "config.json", name
    saved, again = (json.loads(files["config.json"]) for files in (first, second))
    assert saved == again
