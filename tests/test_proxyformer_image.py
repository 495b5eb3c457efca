"""The image model in one, two and three dimensions: a slow reference, sizes, symmetries, conditions, errors."""

import math
from typing import Any

import pytest
import torch
from image_models import tiny_image_model
from torch import nn
from torch.nn import functional as F

from nearfar import ProxyFormerImageConfig, ProxyFormerImageModel
from nearfar.modeling.axial_positions import AxialRotary, grid_positions, sinusoidal_grid
from nearfar.modeling.block_compression import Compress, Decompress, join_blocks, split_blocks
from nearfar.modeling.nested_blocks import flat_factors, nest_blocks, unnest_blocks

# Dimensions, each with a size that patches do not divide.
SPACES: dict[str, dict[str, Any]] = {
    "1-D": {"image_size": [11], "patch_size": 4},
    "2-D": {"image_size": [6, 9], "patch_size": [2, 4]},
    "3-D": {"image_size": [3, 6, 5], "patch_size": [2, 2, 4]},
}


def inputs(model: ProxyFormerImageModel, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    config, dtype = model.config, model.dtype
    found: dict[str, Any] = {
        "pixel_values": torch.randn(batch, config.in_channels, *config.sizes, generator=generator, dtype=dtype),
        "time": torch.rand(batch, generator=generator, dtype=dtype),
    }
    if config.num_classes is not None:
        found["class_labels"] = torch.randint(0, config.num_classes, (batch,), generator=generator)
    if config.text_hidden_size is not None:
        found["text_states"] = torch.randn(batch, 4, config.text_hidden_size, generator=generator, dtype=dtype)
    return found


# --- blocks in nested order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "factors"),
    [((13,), [(2,), (3,)]), ((9, 7), [(2, 2), (2, 1)]), ((9, 7), [(1, 4)]), ((3, 6, 5), [(1, 2, 2), (2, 1, 2)])],
)
def test_nested_blocks_compress_alike(sizes: tuple[int, ...], factors: list[tuple[int, ...]]) -> None:
    x = torch.randn(2, *sizes, 3, dtype=torch.float64)
    widths = [3, *range(5, 4 + len(factors)), 7]
    slow, fast = Compress(factors, widths).double(), Compress(flat_factors(factors), widths).double()
    fast.load_state_dict(slow.state_dict())
    block = slow.block
    expected = slow(split_blocks(x, block)).flatten(1, -2)
    nested = nest_blocks(x, factors)
    assert (fast(nested) - expected).abs().max() < 1e-10
    assert torch.equal(unnest_blocks(nested, factors, sizes), x)

    slow_down, fast_down = Decompress(factors, widths).double(), Decompress(flat_factors(factors), widths).double()
    fast_down.load_state_dict(slow_down.state_dict())
    counts = split_blocks(x, block).shape[1 : 1 + len(sizes)]
    back = join_blocks(slow_down(expected.unflatten(1, counts)), sizes)
    assert (unnest_blocks(fast_down(expected), factors, sizes) - back).abs().max() < 1e-10
    with pytest.raises(ValueError, match="make"):
        unnest_blocks(nested, factors, [size + 9 for size in sizes])


# --- against a reference ---------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight  # type: ignore[operator]


def turned(x: torch.Tensor, places: torch.Tensor, base: float) -> torch.Tensor:
    """Pairs (i, i + half) of the last dimension turned one by one."""
    dims, half = places.shape[1], x.shape[-1] // 2
    found = x.clone()
    shared = half // dims
    for pair in range(shared * dims):
        angle = places[:, pair % dims].double() * base ** -((pair // dims) / shared)
        one, two = x[..., pair], x[..., pair + half]
        found[..., pair] = one * angle.cos() - two * angle.sin()
        found[..., pair + half] = two * angle.cos() + one * angle.sin()
    return found


def reference(model: ProxyFormerImageModel, pixel_values, time, class_labels) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The forward pass as it is written: one layer after the other on spatial blocks, attention by hand."""
    config = model.config
    sizes, patch = config.sizes, config.patches[0]
    dims = len(sizes)
    embedding = model.time_embedding
    steps = torch.arange(config.time_features // 2, dtype=torch.float64) / (config.time_features // 2)
    angles = time[:, None] * 1000 * 10_000**-steps
    waves = math.sqrt(2) * torch.cat([angles.cos(), angles.sin()], -1)
    tau = embedding.down_proj(F.silu(embedding.gate_proj(waves)) * embedding.up_proj(waves))
    states = model.class_embedding(class_labels).unflatten(-1, (config.class_tokens, -1))

    filled = [-(-size // side) * side for size, side in zip(sizes, patch, strict=True)]
    x = torch.zeros(len(time), *filled, config.in_channels, dtype=torch.float64)
    x[(slice(None), *(slice(size) for size in sizes))] = pixel_values.movedim(1, -1)
    local = split_blocks(model.input_embedding(x), patch)
    counts = local.shape[1 : 1 + dims]
    places = grid_positions(counts, torch.device("cpu"))
    heads, head_dim = config.num_attention_heads, config.head_dim

    def split(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(q @ k.mT / math.sqrt(head_dim), -1)
        return (weights @ v).transpose(1, 2).flatten(2)

    found, proxies = [], torch.zeros(())
    for index, layer in enumerate(model.stack.layers):
        widths = layer.compress.widths
        compress, decompress = (kind(layer.factors, widths).double() for kind in (Compress, Decompress))
        compress.load_state_dict(layer.compress.state_dict())
        decompress.load_state_dict(layer.decompress.state_dict())
        size, width = config.hidden_size, config.local_hidden_size
        scale_c, shift_c, scale_d, shift_d = layer.time_proj(tau)[:, None].split([size, size, width, width], -1)
        c = compress(local).flatten(1, dims) * (1 + scale_c) + shift_c
        if index == 0:
            c = c + sinusoidal_grid(counts, size, torch.device("cpu"), torch.float64)
        proxies = proxies + c
        if layer.condition_attention is not None:
            a = layer.condition_attention
            n, s = norm(proxies, a.input_norm), norm(states, a.condition_norm)
            q, k = norm(split(a.q_proj(n)), a.q_norm), norm(split(a.k_proj(s)), a.k_norm)
            proxies = proxies + a.o_proj(attend(q, k, split(a.v_proj(s))))
        b = layer.interaction.block
        n = norm(proxies, b.input_norm)
        q, k = norm(split(b.q_proj(n)), b.q_norm), norm(split(b.k_proj(n)), b.k_norm)
        q, k = (turned(y, places, config.rope_base) for y in (q, k))
        proxies = proxies + b.o_proj(attend(q, k, split(b.v_proj(n))))
        n = norm(proxies, b.mlp_norm)
        proxies = proxies + b.down_proj(F.silu(b.gate_proj(n)) * b.up_proj(n))
        delta = decompress(proxies.unflatten(1, counts))
        shape = (len(time), *[1] * (2 * dims), width)
        local = local + delta * (1 + scale_d.reshape(shape)) + shift_d.reshape(shape)
        for place, head in ((model.middle_layer, model.middle_head), (len(model.stack.layers) - 1, model.head)):
            if place == index:
                joined = join_blocks(local, sizes)
                found.append(head.output_head(norm(joined, head.norm)).movedim(-1, 1))
    return found


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_against_reference(space: dict[str, Any]) -> None:
    model = tiny_image_model(**space)
    given = inputs(model)
    with torch.no_grad():
        output = model(**given)
        middle, last = reference(model, **given)
    assert output.sample.shape == given["pixel_values"].shape
    # float32 angles: the reference's are exact.
    assert (output.sample - last).abs().max() < 2e-5
    assert (output.middle_sample - middle).abs().max() < 2e-5
    assert (last - middle).abs().max() > 1e-2


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_without_positions_the_reference_is_met_exactly(
    space: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_image_model(**space, rope_base=None, absolute_positions=False)
    given = inputs(model)
    monkeypatch.setitem(globals(), "turned", lambda x, places, base: x)
    monkeypatch.setitem(globals(), "sinusoidal_grid", lambda *args: torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        output, (middle, last) = model(**given), reference(model, **given)
    assert (output.sample - last).abs().max() < 1e-10
    assert (output.middle_sample - middle).abs().max() < 1e-10


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(7,), (3, 4), (2, 3, 4)])
def test_rotary_depends_on_differences_along_each_dimension(counts: tuple[int, ...]) -> None:
    rotary = AxialRotary(counts, 13, 100.0, torch.device("cpu"), torch.float64)
    places = grid_positions(counts, torch.device("cpu")).long()
    q, k = torch.randn(2, 13, dtype=torch.float64)
    cells = len(places)
    scores = rotary(q.expand(1, 1, cells, 13))[0, 0] @ rotary(k.expand(1, 1, cells, 13))[0, 0].mT
    by_difference: dict[tuple[int, ...], float] = {}
    for i in range(cells):
        for j in range(cells):
            difference = tuple((places[i] - places[j]).tolist())
            assert abs(by_difference.setdefault(difference, scores[i, j].item()) - scores[i, j].item()) < 1e-5
    values = list(by_difference.values())
    assert len({round(value, 6) for value in values}) == len(values)  # no two differences look alike


def test_sines_tell_cells_apart() -> None:
    found = sinusoidal_grid((5, 6), 26, torch.device("cpu"), torch.float64)
    assert found.shape == (30, 26)
    assert torch.equal(found[:, 24:], torch.zeros(30, 2, dtype=torch.float64))
    distances = torch.cdist(found, found) + torch.eye(30, dtype=torch.float64)
    assert distances.min() > 0.1


@pytest.mark.parametrize("space", [{"image_size": [12]}, {"image_size": [4, 6]}, {"image_size": [4, 2, 6]}])
def test_shift_by_whole_patches(space: dict[str, Any]) -> None:
    """Without positions a circular shift by patches shifts the estimate; with them, or by less, it does not."""
    dims = len(space["image_size"])
    axes = tuple(range(2, 2 + dims))

    def gap(shift: int, **options: Any) -> float:
        model = tiny_image_model(**space, **options)
        given = inputs(model)
        with torch.no_grad():
            one = model(**given).sample.roll([shift] * dims, axes)
            moved = {**given, "pixel_values": given["pixel_values"].roll([shift] * dims, axes)}
            return (one - model(**moved).sample).abs().max().item()

    assert gap(2, rope_base=None, absolute_positions=False) < 1e-10
    assert gap(1, rope_base=None, absolute_positions=False) > 1e-3
    assert gap(2, absolute_positions=False) > 1e-6
    assert gap(2, rope_base=None) > 1e-4


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
@pytest.mark.parametrize("convolution", [0, 3])
def test_filling_up_is_zeros_and_a_cut(space: dict[str, Any], convolution: int) -> None:
    model = tiny_image_model(**space, local_convolution=convolution)
    given = inputs(model)
    pixels = given["pixel_values"]
    patch = model.config.patches[0]
    padding = [pad for size, side in zip(model.config.sizes, patch, strict=True) for pad in (-size % side, 0)][::-1]
    with torch.no_grad():
        whole = model(**{**given, "pixel_values": F.pad(pixels, padding)}).sample
        found = model(**given).sample
    assert whole.shape != found.shape == pixels.shape
    assert torch.equal(found, whole[(..., *(slice(size) for size in model.config.sizes))])


def test_other_sizes_than_the_configuration_s() -> None:
    model = tiny_image_model()
    with torch.no_grad():
        assert model(torch.randn(1, 2, 3, 17, dtype=torch.float64), torch.tensor([0.5])).sample.shape == (1, 2, 3, 17)


def test_layers_with_different_patches() -> None:
    model = tiny_image_model(image_size=[7, 9], patch_size=[[4, 4], [2, 2], [2, 2]])
    assert [layer.starts_anew for layer in model.stack.layers] == [True, True, False]
    assert model.stack.side_multiples == (4, 4)
    given = inputs(model)
    output = model(**given)
    assert output.sample.shape == given["pixel_values"].shape
    output.sample.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("middle_head"), name
    # Every pixel reaches every other one.
    pixels = given["pixel_values"][:1].requires_grad_()
    sample = model(pixels, given["time"][:1]).sample
    (gradient,) = torch.autograd.grad(sample[0, 0, 0, 0], pixels)
    assert (gradient[0].abs().amax(0) > 0).all()


# --- gradients and options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text_hidden_size": 10},
        {"num_classes": None, "text_hidden_size": 10},
        {"num_classes": None},
        {"injection": "gated", "proxy_update": "gated"},
        {"injection": "affine", "proxy_update": "concatenate"},
        {"injection": "cross_attention", "proxy_update": "replace"},
        {"proxy_interaction": "mlp"},
        {"local_convolution": 3},
        {"image_size": [3, 4, 4], "local_convolution": 3},
        {"patch_size": 4, "compression_factors": [[2, 4], [2, 1]], "compression_widths": [8, 20, 24]},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_gradients_reach_all_parameters(options: dict[str, Any]) -> None:
    model = tiny_image_model(**options).train()
    given = inputs(model, batch=3)
    given["drop_condition"] = torch.tensor([False, True, False])
    output = model(**given)
    (output.sample.square().sum() + output.middle_sample.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_image_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs(model)).sample.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert all((one - two).abs().max() < 1e-10 for one, two in zip(*gradients, strict=True))


def test_bfloat16_and_autocast_are_near_float32() -> None:
    model = tiny_image_model(dtype=torch.float32)
    given = inputs(model)
    with torch.no_grad():
        exact = model(**given).sample
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(**given).sample
        half = model.to(torch.bfloat16)(**{**given, "pixel_values": given["pixel_values"].bfloat16()}).sample
    assert half.dtype == torch.bfloat16
    for found in (cast, half):
        assert (found.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


# --- conditions ------------------------------------------------------------------------------------------------------


def test_class_and_time_matter() -> None:
    model = tiny_image_model()
    given = inputs(model)
    with torch.no_grad():
        base = model(**given).sample
        other = model(**{**given, "class_labels": (given["class_labels"] + 1) % 5}).sample
        later = model(**{**given, "time": given["time"] / 2}).sample
    assert (base - other).abs().max() > 1e-3 and (base - later).abs().max() > 1e-3


def test_a_dropped_condition_is_none() -> None:
    model = tiny_image_model(text_hidden_size=10)
    given = inputs(model, batch=3)
    drop = torch.tensor([True, False, True])
    with torch.no_grad():
        found = model(**given, drop_condition=drop).sample
        both = model(**given).sample
        neither = model(given["pixel_values"], given["time"]).sample
        last = model(given["pixel_values"], given["time"], torch.full((3,), 5)).sample
    assert (found[drop] - neither[drop]).abs().max() < 1e-10
    assert (found[~drop] - both[~drop]).abs().max() < 1e-10
    assert torch.equal(neither, last)
    assert (both - neither).abs().amax((1, 2, 3)).min() > 1e-3


def test_padding_of_a_text_is_not_read() -> None:
    model = tiny_image_model(num_classes=None, text_hidden_size=10)
    given = inputs(model)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    changed = given["text_states"].clone()
    changed[0, 2:] = 7.0
    with torch.no_grad():
        one = model(**given, text_attention_mask=mask).sample
        two = model(**{**given, "text_states": changed}, text_attention_mask=mask).sample
        short = model(given["pixel_values"][:1], given["time"][:1], text_states=given["text_states"][:1, :2]).sample
        empty = model(**given, text_attention_mask=torch.zeros_like(mask)).sample
        none = model(given["pixel_values"], given["time"]).sample
    assert torch.equal(one, two)
    assert (one[:1] - short).abs().max() < 1e-10
    assert (empty - none).abs().max() < 1e-10


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pixel_values": torch.zeros(2, 3, 6, 8)}, ValueError, "images of 2 channels, got 3"),
        ({"pixel_values": torch.zeros(2, 2, 6)}, ValueError, r"\(batch, channels, 2 sizes\)"),
        ({"pixel_values": torch.zeros(2, 2, 6, 8, dtype=torch.uint8)}, TypeError, "floating-point"),
        ({"time": torch.tensor([0.5, 1.5])}, ValueError, "between 0"),
        ({"time": torch.tensor([0.5])}, ValueError, r"shape \(2,\)"),
        ({"class_labels": torch.tensor([0, 6])}, ValueError, "between 0 and 4, or be 5"),
        ({"class_labels": torch.tensor([-1, 0])}, ValueError, "between 0 and 4"),
        ({"class_labels": torch.tensor([0.0, 1.0])}, ValueError, "whole numbers"),
        ({"class_labels": torch.tensor([0])}, ValueError, "one an image"),
        ({"text_states": torch.zeros(2, 3, 4)}, ValueError, "without text"),
        ({"text_attention_mask": torch.ones(2, 3)}, ValueError, "goes with text_states"),
        ({"drop_condition": torch.tensor([True])}, ValueError, "drop_condition"),
        ({"labels": 3}, TypeError, "unexpected"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    model = tiny_image_model(dtype=torch.float32)
    with pytest.raises(error, match=message):
        model(**{**inputs(model), **changes})


def test_labels_for_a_model_without_classes() -> None:
    model = tiny_image_model(num_classes=None, dtype=torch.float32)
    with pytest.raises(ValueError, match="without classes"):
        model(**inputs(model), class_labels=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": [4, 4, 4, 4]}, "one to three sizes"),
        ({"image_size": 0}, "at least 1"),
        ({"patch_size": [2, 2, 2]}, "2 numbers"),
        ({"patch_size": [[2, 2], [4, 4]]}, "2 patches for 10 layers"),
        ({"patch_size": 0}, "at least 1"),
        ({"compression_factors": [[2, 2]]}, "whose product is the patch"),
        ({"compression_factors": [[2, 2], [2, 2]], "compression_widths": [64, 512]}, "one more"),
        ({"compression_widths": [64, 100]}, "must lead from"),
        ({"injection": "cross_attention", "hidden_size": 100}, "slots"),
        ({"local_convolution": 2}, "odd"),
        ({"rope_base": 1.0}, "above 1"),
        ({"head_dim": 3}, "head_dim of at least 4"),
        ({"time_features": 7}, "even"),
        ({"guidance": "middle", "auxiliary_loss_weight": 0}, "middle head"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_bad_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyFormerImageConfig(**options)
