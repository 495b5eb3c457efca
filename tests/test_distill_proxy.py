"""A small sibling of a model: which weights it starts from, distillation, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import random_ids, tiny_config, tiny_model
from tiny_texts import english, save_tiny_checkpoint, tiny_llama, tiny_tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, SmolLM3Config, TrainerCallback

from nearfar import cli
from nearfar.conversion import distill_proxy as conversion
from nearfar.conversion.distill_proxy import Sibling, distill_proxy
from nearfar.conversion.smaller_model import choose_layers, fewer_layers, narrower, residual_components
from nearfar.training.dar_distillation import logits_loss
from nearfar.training.proxy_distillation import ProxyDistillation, distill_logits
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

BLOCK = 32
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in bfloat16 with three layers, and two texts."""
    folder = tmp_path_factory.mktemp("files")
    model = tiny_llama(torch.float32)
    config = model.config
    config.num_hidden_layers, config.tie_word_embeddings = 3, True
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.15)
    target.to(torch.bfloat16).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "train.txt").write_text(english(500, seed=0), encoding="utf-8")
    (folder / "held.txt").write_text(english(60, seed=1), encoding="utf-8")
    return folder


def _distill(files: Path, output: Path, **more: Any) -> Sibling:
    settings = {"steps": 3, "batch_size": 4, "learning_rate": 3e-3, **more.pop("settings", {})}
    options = {
        "text_sources": [files / "train.txt"], "eval_sources": [files / "held.txt"], "eval_tokens": 256, "layers": 2,
        "block_tokens": BLOCK, "device": "cpu", "quiet": True, **more,
    }  # fmt: skip
    return distill_proxy(files / "target", output, distillation=ProxyDistillation(**settings), **options)


# --- where it starts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "wanted", "expected"),
    [
        (30, 4, [0, 10, 19, 29]), (30, 2, [0, 29]), (30, 1, [0]), (3, 3, [0, 1, 2]), (3, None, [0, 1, 2]),
        (30, [0, 1, 7], [0, 1, 7]),
    ],
)  # fmt: skip
def test_layers_that_are_kept(total: int, wanted: Any, expected: list[int]) -> None:
    assert choose_layers(total, wanted) == expected


@pytest.mark.parametrize("wanted", [0, 4, [], [1, 1], [2, 1], [-1, 0], [0, 3]])
def test_layers_that_are_not_there(wanted: Any) -> None:
    with pytest.raises(ValueError, match="layers"):
        choose_layers(3, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_compute_what_the_target_s_first_layers_do(family: str) -> None:
    target, ids = tiny_model(family), random_ids(2, 20)
    sibling = fewer_layers(target, [0, 1])
    with torch.no_grad():
        expected = target.model(ids, output_hidden_states=True).hidden_states[2]
        found = sibling.model(ids, output_hidden_states=True).hidden_states
        # The last hidden state has been through the norm.
        assert torch.equal(found[-1], target.model.norm(expected))
    assert sibling.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 3
    assert sibling.dtype == torch.float64


def test_lists_of_a_configuration_follow_the_layers() -> None:
    fields = tiny_config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = SmolLM3Config(
        **{name: fields[name] for name in names}, num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1], pad_token_id=0
    )
    sibling = fewer_layers(AutoModelForCausalLM.from_config(config), [0, 2])
    assert sibling.config.no_rope_layers == [1, 0] and len(sibling.config.layer_types) == 2
    assert [layer.self_attn.use_rope for layer in sibling.model.layers] == [1, 0]


def _blocks(count: int, tokens: int = 24) -> TokenBlocks:
    return TokenBlocks(random_ids(1, count * tokens)[0].numpy().astype("uint16"), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turned_residual_stream_of_full_width_is_the_same_model(family: str) -> None:
    """Gains folded into what reads them, both sides turned: nothing may change until something is left out."""
    target, ids = tiny_model(family), random_ids(2, 20)
    assert not target.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.ndim == 1:  # gains and biases that are not 1 and 0
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    components = residual_components(target, _blocks(8))
    basis, energies = components
    torch.testing.assert_close(basis.T @ basis, torch.eye(32, dtype=torch.float64))
    assert torch.equal(energies, energies.sort(descending=True).values) and energies.sum() == pytest.approx(32, 1e-4)
    turned = narrower(target, 32, components)
    with torch.no_grad():
        expected, found = target(ids).logits, turned(ids).logits
    assert (found - expected).norm() < 1e-6 * expected.norm()  # RMSNorm computes in float32


def test_a_narrower_model_keeps_what_matters_most() -> None:
    """A stream in which half the numbers are next to nothing loses next to nothing without them."""
    target, ids = tiny_model("llama"), random_ids(2, 20)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "embed_tokens" in name:
                parameter[:, 16:] *= 1e-4
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[16:] *= 1e-4
    sibling = narrower(target, 16, residual_components(target, _blocks(8)))
    assert sibling.config.hidden_size == 16 and sibling.config.head_dim == 8
    assert sibling.model.layers[0].self_attn.q_proj.weight.shape == (32, 16)
    with torch.no_grad():
        expected, found = target(ids).logits, sibling(ids).logits
        assert (found - expected).norm() < 1e-3 * expected.norm()
        # Thrown out instead of projected, the other half would leave nothing alike.
        basis, energies = residual_components(target, _blocks(8))
        worst = narrower(target, 16, (basis.flip(1), energies.flip(0).clamp(min=1e-9)))
        assert (worst(ids).logits - expected).norm() > 0.5 * expected.norm()


# --- distillation ----------------------------------------------------------------------------------------------------


def test_temperature_of_the_divergence() -> None:
    student, teacher = (torch.randn(2, 5, 11, dtype=torch.float64) for _ in range(2))
    ours, theirs = (student / 3).log_softmax(-1), (teacher / 3).log_softmax(-1)
    expected = 9 * F.kl_div(ours, theirs, log_target=True, reduction="sum") / 10
    torch.testing.assert_close(logits_loss(student, teacher, 3.0).double(), expected, rtol=1e-5, atol=1e-6)


def test_distillation_brings_the_student_to_the_teacher(tmp_path: Path) -> None:
    teacher = tiny_model("llama", dtype=torch.float32)
    student, blocks = fewer_layers(teacher, [0, 2]), _blocks(32)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    ids = torch.stack([blocks[i]["input_ids"] for i in range(8)])

    def divergence() -> float:
        with torch.no_grad():
            return float(logits_loss(student(ids).logits, teacher(ids).logits))

    start = divergence()
    settings = ProxyDistillation(steps=30, batch_size=8, learning_rate=1e-2, next_token_weight=0.1)
    report = distill_logits(student, teacher, blocks, tmp_path, settings, quiet=True)
    assert divergence() < 0.7 * start
    assert report.steps == 30 and report.tokens == 30 * 8 * 24 and report.loss > 0
    assert torch.equal(student.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    assert not torch.equal(student.model.norm.weight, before["model.norm.weight"])
    assert all(parameter.requires_grad for parameter in student.parameters()) and not student.training


def test_seconds_end_it_and_its_learning_rate(tmp_path: Path) -> None:
    teacher = tiny_model("llama", dtype=torch.float32)
    student = fewer_layers(teacher, [0])
    settings = ProxyDistillation(steps=100_000, seconds=1.0, batch_size=2, train_embedding=True, save_steps=5)
    report = distill_logits(student, teacher, _blocks(32), tmp_path, settings, quiet=True)
    assert 1.0 <= report.seconds < 10 and 1 < report.steps < 100_000
    assert not torch.equal(student.model.embed_tokens.weight, teacher.model.embed_tokens.weight)
    state = json.loads(max(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
                       .joinpath("trainer_state.json").read_text())  # fmt: skip
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    if rates:  # ten steps took longer than that on a very busy machine
        assert max(rates) <= settings.learning_rate
    # Time that is over stays over.
    again = distill_logits(student, teacher, _blocks(32), tmp_path, settings, quiet=True)
    assert again.steps <= report.steps + 5


# --- the whole conversion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["model", "float8"])
def test_an_ordinary_checkpoint_comes_out(files: Path, tmp_path: Path, storage: Any) -> None:
    made = _distill(files, tmp_path / "sibling", embedding_storage=storage)
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    model = AutoModelForCausalLM.from_pretrained(made.output)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert type(model) is type(target) and model.config.num_hidden_layers == 2
    assert model.config.use_cache == target.config.use_cache, "a Trainer turns it off"
    assert AutoTokenizer.from_pretrained(made.output).get_vocab() == tiny_tokenizer().get_vocab()
    embedding = target.model.embed_tokens.weight
    if storage == "float8":
        embedding = embedding.to(torch.float8_e4m3fn).to(torch.bfloat16)
    assert (
        torch.equal(model.model.embed_tokens.weight, embedding)
        and model.lm_head.weight is model.get_input_embeddings().weight
    )
    with safe_open(made.output / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dtype = torch.float8_e4m3fn if storage == "float8" else torch.bfloat16
    assert stored["model.embed_tokens.weight"].dtype == dtype and "lm_head.weight" not in stored
    record = json.loads((made.output / "conversion.json").read_text())
    assert record["bytes"]["sibling"] == sum(tensor.nbytes for tensor in stored.values())
    assert record["parameters"]["sibling"] == model.num_parameters() < target.num_parameters()
    assert record["layers"] == [0, 2] and record["distillation"]["steps"] == 3
    # What the card says is what the checkpoint does.
    blocks = load_token_blocks([files / "held.txt"], tiny_tokenizer(), BLOCK).part(0, 8)
    ids = torch.stack([block["input_ids"] for block in blocks])[:8]
    with torch.no_grad():
        nats = model.float()(input_ids=ids, labels=ids).loss
    assert record["perplexity"]["distilled"] == pytest.approx(float(nats.exp()), rel=0.1)
    card = (made.output / "README.md").read_text()
    assert f"{record['perplexity']['distilled']:.4g}" in card and "train.txt" in card and str(files) not in card
    assert set(made.perplexity) == {"target", "initialised", "distilled"} and made.table().count("sibling") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sibling"]


def test_narrower_and_untied_and_in_shards(files: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny_checkpoint(source)  # untied
    options = {"layers": None, "hidden_size": 16, "settings": {"steps": 2, "train_embedding": True}}
    made = _distill(files, tmp_path / "a", **options)
    assert made.record["hidden_size"] == 16
    made = distill_proxy(
        source, tmp_path / "b", text_sources=files / "train.txt", layers=1, hidden_size=16, device="cpu", quiet=True,
        block_tokens=BLOCK, eval_tokens=128, embedding_storage="float8", max_shard_size="10KB",
        distillation=ProxyDistillation(steps=0),
    )  # fmt: skip
    assert set(made.perplexity) == {"target", "initialised"}
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.record["bytes"]["sibling"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert model.config.hidden_size == 16 and model.lm_head.weight.shape == (261, 16)
    with safe_open(tmp_path / "b" / index["weight_map"]["lm_head.weight"], "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.float8_e4m3fn
    assert "held out of the same text" in (tmp_path / "b" / "README.md").read_text()


def test_an_interrupted_distillation_leaves_nothing_half_and_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 6, "save_steps": 2}
    whole = _distill(files, tmp_path / "whole", settings=settings)
    distill = conversion.distill_logits

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        return distill(*args, **kwargs, callbacks=[Stop()])

    monkeypatch.setattr(conversion, "distill_logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _distill(files, tmp_path / "sibling", settings=settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sibling.partial", "whole"]
    monkeypatch.setattr(conversion, "distill_logits", distill)
    with pytest.raises(ValueError, match="unfinished conversion with layers"):
        _distill(files, tmp_path / "sibling", settings=settings, layers=1)
    made = _distill(files, tmp_path / "sibling", settings=settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sibling", "whole"]
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole.output, made.output))
    assert all(torch.equal(a[name], b[name]) for name in a)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 4}, "all 3 layers of its target, got 4"),
        ({"layers": [0, 3]}, "ascending indices from 0 to 2"),
        ({"layers": 3}, "is the target itself"),
        ({"hidden_size": 33}, "between 1 and the target's 32, got 33"),
        ({"hidden_size": 30}, "multiple of the target's 4 attention heads, got 30"),
        ({"block_tokens": 5000}, "the model's 4096 positions, got 5000"),
        ({"block_tokens": 2048}, "fewer than one batch of 4|do not fill one block"),
        ({"eval_tokens": 0}, "eval_tokens must be at least 1"),
        ({"embedding_storage": "int4"}, "'model' or 'float8', got 'int4'"),
        ({"text_sources": "nowhere.txt"}, "nowhere.txt"),
        ({"settings": {"steps": -1}}, "steps must be 0 or more"),
        ({"settings": {"seconds": 0}}, "seconds must be positive"),
        ({"settings": {"temperature": 0}}, "temperature must be positive"),
        ({"settings": {"learning_rate": float("inf")}}, "learning_rate must be positive, got inf"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(
    files: Path, tmp_path: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "load_target", lambda *args, **kwargs: pytest.fail("the weights were read"))
    with pytest.raises((ValueError, OSError), match=message):
        _distill(files, tmp_path / "sibling", **options)
    assert not any(tmp_path.iterdir())


def test_other_models_tokenizers_and_full_folders(files: Path, tmp_path: Path) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path / "neox")
    with pytest.raises(ValueError, match="model_type 'gpt_neox': a sibling can be made of llama"):
        distill_proxy(tmp_path / "neox", tmp_path / "out", text_sources="x.txt", layers=1)
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        distill_proxy(tmp_path / "nowhere", tmp_path / "out", text_sources="x.txt", layers=1)
    other = tiny_tokenizer()
    other.add_tokens(["more"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="different tokenizers"):
        _distill(files, tmp_path / "out", tokenizer=tmp_path / "other")
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer that can be read"):
        distill_proxy(tmp_path / "bare", tmp_path / "out", text_sources=files / "train.txt", layers=1)
    with pytest.raises(ValueError, match="the tokenizer gives id"):  # 61 ids, and text in 261
        distill_proxy(
            tmp_path / "bare", tmp_path / "out", text_sources=files / "train.txt", layers=1, block_tokens=BLOCK,
            tokenizer=files / "target", quiet=True,
        )  # fmt: skip
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep this")
    for overwrite, message in ((False, "not empty"), (True, "no config.json")):
        with pytest.raises(ValueError, match=message):
            _distill(files, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep this"


# --- the command -----------------------------------------------------------------------------------------------------


def _arguments(files: Path, output: Path, *more: object) -> list[str]:
    common = (
        "convert", "proxy", "--from", files / "target", "--to", output, "--text", files / "train.txt",
        "--block-tokens", BLOCK, "--eval-tokens", 256, "--device", "cpu", "--threads", 1, *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


def test_command(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--layers", "0,2", "--steps", 2, "--embedding-storage", "float8")
    assert cli.main(_arguments(files, tmp_path / "sibling", *more)) == 0
    shown = capsys.readouterr()
    for part in ("parameters", "MB of weights", "sibling, undistilled", "sibling, distilled", "saved: "):
        assert part in shown.out
    assert "perplexity, target" in shown.err and "{'loss'" not in shown.out
    record = json.loads((tmp_path / "sibling" / "conversion.json").read_text())
    assert record["layers"] == [0, 2] and record["distillation"]["settings"]["train_embedding"] is False


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--layers", "9"), "got 9"),
        (("--layers", "1,0"), "ascending"),
        (("--layers", ","), "names no layer"),
        (("--layers", "0"), "positive number"),
        (("--layers", "two"), "whole number"),
        (("--layers", "2", "--steps", "-1"), "0 or more"),
        (("--layers", "2", "--dtype", "float16"), "computes in float32 or bfloat16"),
        (("--layers", "2", "--seconds", "-1"), "seconds must be positive"),
        ((), "is the target itself"),
    ],
)
def test_command_refuses_in_one_line(
    files: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(_arguments(files, tmp_path / "sibling", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())
