"""GPT-NeoX checkpoints to DAR: what is carried over, what is measured and written, and what is left when it fails."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_texts import english, save_tiny_checkpoint, tiny_tokenizer
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

import nearfar
from nearfar import DARCache, DARConfig, DARForCausalLM, cli
from nearfar.conversion import dar_from_pythia
from nearfar.conversion.dar_from_pythia import (
    Conversion,
    block_perplexity,
    cache_bytes_per_far_token,
    convert_dar_to_gpt_neox,
    convert_gpt_neox_to_dar,
    load_gpt_neox,
    read_base_config,
    spread_blocks,
)
from nearfar.training.dar_distillation import DARDistillationTrainer, DistillationSettings
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

ROOT = Path(nearfar.__file__).resolve().parent.parent
WINDOW, BLOCK = 4, 32


def _source_model(**fields: Any) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        **{
            "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64, "rotary_pct": 0.5, "layer_norm_eps": 1e-4,
            "bos_token_id": 256, "eos_token_id": 256, "hidden_dropout": 0.1, "use_parallel_residual": False, **fields,
        }
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2)
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, top_k=7, eos_token_id=256)
    return model.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source in bfloat16 and one in float32, and two texts."""
    folder = tmp_path_factory.mktemp("files")
    for name, dtype in (("source", torch.float32), ("source16", torch.bfloat16)):
        _source_model().to(dtype).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "train.txt").write_text(english(400, seed=0), encoding="utf-8")
    (folder / "held.txt").write_text(english(60, seed=1), encoding="utf-8")
    return folder


def _options(files: Path, **more: Any) -> dict[str, Any]:
    return {
        "calibration_sources": [files / "train.txt"], "calibration_tokens": 512, "eval_sources": [files / "held.txt"],
        "eval_tokens": 256, "window_size": WINDOW, "bottleneck_size": 8, "block_tokens": BLOCK, "device": "cpu",
        "quiet": True, **more,
    }  # fmt: skip


def _convert(files: Path, output: Path, source: str = "source", **more: Any) -> Conversion:
    return convert_gpt_neox_to_dar(files / source, output, **_options(files, **more))


@pytest.fixture(scope="module")
def converted(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return _convert(files, tmp_path_factory.mktemp("out") / "dar", source="source16")


# --- what is carried over --------------------------------------------------------------------------------------------


def test_weights_are_the_sources(files: Path, converted: Conversion) -> None:
    source = GPTNeoXForCausalLM.from_pretrained(files / "source16", dtype="auto")
    model = AutoModelForCausalLM.from_pretrained(converted.output, dtype="auto")
    assert type(model) is DARForCausalLM and model.dtype == torch.bfloat16
    found = model.state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(found.pop(name), value), name
    assert sorted(found) == sorted(
        f"gpt_neox.layers.{layer}.attention.bottleneck_{way}.weight" for layer in (0, 1) for way in ("down", "up")
    )
    assert all(value.dtype == torch.bfloat16 and bool(value.any()) for value in found.values())


def test_configuration_is_the_sources(files: Path, converted: Conversion) -> None:
    source = GPTNeoXConfig.from_pretrained(files / "source16").to_dict()
    config = DARConfig.from_pretrained(converted.output)
    assert (config.window_size, config.bottleneck_size, config.far_cache) == (WINDOW, 8, "fast")
    found = config.to_dict()
    for name in source.keys() - {"model_type", "architectures", "transformers_version"}:
        assert found[name] == source[name], name
    assert source["rope_parameters"]["partial_rotary_factor"] == 0.5  # neither default, and carried over above
    assert source["hidden_dropout"] == 0.1 and source["layer_norm_eps"] == 1e-4


def test_tokenizer_generation_config_and_code_are_there(files: Path, converted: Conversion) -> None:
    text = "Some text, and <|end|> 123"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (files / "source16", converted.output)]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert tokenizers[1].eos_token == "<|end|>" and tokenizers[1].chat_template == tokenizers[0].chat_template
    generation = GenerationConfig.from_pretrained(converted.output)
    assert (generation.temperature, generation.top_k, generation.eos_token_id) == (0.7, 7, 256)
    assert (converted.output / "modeling_dar.py").is_file()
    assert "auto_map" in json.loads((converted.output / "config.json").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": 31, "block_tokens": 32},  # all tokens of the text below are near
        {"bottleneck_size": 32},
    ],
)
def test_where_nothing_is_lost_it_is_gpt_neox(files: Path, tmp_path: Path, change: dict[str, int]) -> None:
    done = _convert(files, tmp_path / "dar", **change)
    source = GPTNeoXForCausalLM.from_pretrained(files / "source").eval()
    model = DARForCausalLM.from_pretrained(done.output).eval()
    ids = torch.arange(30)[None] * 7 % 256
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)
    if "bottleneck_size" in change:
        assert done.perplexity["initialised"].nats == pytest.approx(done.perplexity["source"].nats, abs=1e-6)


def test_sharded_in_and_out(files: Path, tmp_path: Path) -> None:
    GPTNeoXForCausalLM.from_pretrained(files / "source").save_pretrained(tmp_path / "source", max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 2
    _convert(files, tmp_path / "whole")
    convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "shards", max_shard_size="30KB", **_options(files))
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    expected, found = (DARForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "shards"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_pythias_own_names(files: Path, tmp_path: Path) -> None:
    """Its checkpoints call the head `embed_out` and hold buffers that no model has any more."""
    shutil.copytree(files / "source", tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    if "lm_head.weight" in tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config.pop("rope_parameters")
    config.update(rotary_pct=0.5, rotary_emb_base=10000, torch_dtype="float32")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", **_options(files))
    found = DARForCausalLM.from_pretrained(tmp_path / "dar")
    assert torch.equal(found.lm_head.weight, tensors["embed_out.weight"])
    assert found.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_tied_head(files: Path, tmp_path: Path) -> None:
    _source_model(tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    settings = DistillationSettings(steps=2, unfrozen_steps=2, batch_size=4)
    convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", distillation=settings, **_options(files))
    model = DARForCausalLM.from_pretrained(tmp_path / "dar")
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.gpt_neox.embed_in.weight


def test_a_dar_without_bottleneck_is_a_source(files: Path, tmp_path: Path) -> None:
    source = GPTNeoXForCausalLM.from_pretrained(files / "source")
    fields = {k: v for k, v in source.config.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
    vanilla = DARForCausalLM(DARConfig(**fields, window_size=None))
    vanilla.load_state_dict(source.state_dict())
    vanilla.save_pretrained(tmp_path / "vanilla")
    tiny_tokenizer().save_pretrained(tmp_path / "vanilla")
    done = convert_gpt_neox_to_dar(tmp_path / "vanilla", tmp_path / "dar", **_options(files))
    other = _convert(files, tmp_path / "other")
    assert done.perplexity == other.perplexity


# --- what is measured and written ------------------------------------------------------------------------------------


def test_perplexity_by_hand(files: Path, converted: Conversion) -> None:
    source = GPTNeoXForCausalLM.from_pretrained(files / "source16", dtype=torch.float32).eval()
    model = DARForCausalLM.from_pretrained(converted.output, dtype=torch.float32).eval()
    blocks = spread_blocks(load_token_blocks([files / "held.txt"], tiny_tokenizer(), BLOCK), 8)
    assert len(blocks) == 8
    for stage, measured in (("source", source), ("initialised", model)):
        losses = []
        for block in blocks:
            ids = block["input_ids"][None]
            with torch.no_grad():
                losses.append(F.cross_entropy(measured(ids).logits[0, :-1], ids[0, 1:]))
        expected = math.exp(torch.stack(losses).mean())
        found = converted.perplexity[stage]
        assert found.perplexity == pytest.approx(expected, rel=1e-5) and found.tokens == 8 * (BLOCK - 1)
        assert block_perplexity(measured, blocks, batch_size=3, quiet=True).nats == pytest.approx(found.nats, rel=1e-6)
    assert "distilled" not in converted.perplexity
    assert converted.perplexity["initialised"].nats != converted.perplexity["source"].nats


def test_held_out_text_is_the_end_of_the_calibration_text(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    for name in ("collect_moments", "block_perplexity"):
        monkeypatch.setattr(dar_from_pythia, name, _noting(seen, name, getattr(dar_from_pythia, name)))
    done = _convert(files, tmp_path / "dar", eval_sources=None, eval_tokens=4 * BLOCK, calibration_tokens=9 * BLOCK)
    blocks = load_token_blocks([files / "train.txt"], tiny_tokenizer(), BLOCK)
    ids = [block["input_ids"].tolist() for block in blocks]
    # Of 8 times as much text as is calibrated on, and of what is held out behind it.
    assert [block["input_ids"].tolist() for block in seen["block_perplexity"]] == ids[72:76]
    assert [block["input_ids"].tolist() for block in seen["collect_moments"]] == ids[:72:8]
    assert done.record["held_out_of_calibration_text"] is True
    assert "the end of the calibration text" in (done.output / "README.md").read_text()


def test_spread_blocks() -> None:
    blocks = TokenBlocks(np.arange(22, dtype=np.uint16), 2)
    assert [int(block["input_ids"][0]) // 2 for block in spread_blocks(blocks, 3)] == [0, 3, 7]
    assert spread_blocks(blocks, 11) is blocks and spread_blocks(blocks, 99) is blocks
    assert len(spread_blocks(blocks, 1)) == 1


def _noting(seen: dict[str, Any], name: str, function: Any) -> Any:
    def call(model: Any, blocks: Any, **options: Any) -> Any:
        seen[name] = blocks
        return function(model, blocks, **options)

    return call


def test_card_and_record(files: Path, converted: Conversion) -> None:
    record = json.loads((converted.output / "conversion.json").read_text())
    assert record == converted.record
    assert record["perplexity"] == {stage: value.perplexity for stage, value in converted.perplexity.items()}
    assert record["source"] == "source16" and record["method"] == "weighted" and record["dtype"] == "bfloat16"
    assert record["calibration"] == {"text": ["train.txt"], "tokens": 512}
    card = ModelCard.load(converted.output / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.base_model is None  # a folder of this machine is no Hub id
    (result,) = card.data.eval_results
    assert result.metric_type == "perplexity" and result.metric_value == list(record["perplexity"].values())[-1]
    text = card.text
    assert "last 4 tokens" in text and "bottleneck of 8 of 32 numbers" in text and "trust_remote_code=True" in text
    for value in record["perplexity"].values():
        assert f"{value:.4g}" in text
    assert f"{converted.perplexity['initialised'].perplexity:.4g}" in converted.table()
    # 2 layers of 2 bytes: 2 · 32; 8 + 4 heads · 4 rotary dims; 8, and 4 bytes for the position.
    assert record["cache_bytes_per_far_token"] == {"ordinary": 256, "fast": 96, "small": 36}
    for value in ("256", "96", "36"):
        assert f"| {value} |" in text
    for file in converted.output.iterdir():
        if file.suffix != ".safetensors":
            assert str(files) not in file.read_text() and str(converted.output.parent) not in file.read_text(), file


def test_card_of_a_source_on_the_hub(converted: Conversion, tmp_path: Path) -> None:
    source = "---\nlicense: apache-2.0\nlanguage:\n- en\ndatasets:\n- some/pile\n---\n\n# Pythia\n"
    (tmp_path / "README.md").write_text(source)
    inherited = dar_from_pythia.source_card_data(str(tmp_path), None)
    record = {**converted.record, "source": "EleutherAI/pythia-70m", "revision": "step3000"}
    card = ModelCard(dar_from_pythia.model_card(record, "mine", inherited))
    assert card.data.base_model == "EleutherAI/pythia-70m" and card.data.license == "apache-2.0"
    assert card.data.language == ["en"] and card.data.datasets == ["some/pile"]
    assert "https://huggingface.co/EleutherAI/pythia-70m" in card.text and "step3000" in card.text


@pytest.mark.parametrize("mode", ["fast", "small"])
def test_cache_bytes_are_the_caches(converted: Conversion, mode: str) -> None:
    model = DARForCausalLM.from_pretrained(converted.output, dtype="auto")
    cache = DARCache(model, far_cache=mode)
    with torch.no_grad():
        model(torch.arange(9)[None], past_key_values=cache)
    assert cache.bytes_per_far_token() == cache_bytes_per_far_token(model.config, model.dtype)[mode]


@pytest.mark.parametrize("method", ["svd", "pca"])
def test_other_methods(files: Path, tmp_path: Path, method: str) -> None:
    done = _convert(files, tmp_path / "dar", method=method, far_cache="small")
    assert done.record["method"] == method and (done.record["calibration"] is None) == (method == "svd")
    assert DARConfig.from_pretrained(done.output).far_cache == "small"


# --- distillation, and going on --------------------------------------------------------------------------------------

SETTINGS = DistillationSettings(steps=6, batch_size=4, save_steps=2, learning_rate=1e-2)


def _interrupt(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Stop the distillation at its `calls`-th loss."""
    count, compute = [0], DARDistillationTrainer.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == calls:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(DARDistillationTrainer, "compute_loss", compute_loss)


def test_distilled_and_resumed(files: Path, tmp_path: Path) -> None:
    whole = _convert(files, tmp_path / "whole", distillation=SETTINGS)
    assert list(whole.perplexity) == ["source", "initialised", "distilled"]
    assert whole.record["distillation"]["steps"] == 6 and whole.record["distillation"]["text"] == ["train.txt"]
    card = (whole.output / "README.md").read_text()
    assert "6 steps with the base frozen" in card and "after distillation" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]

    work = tmp_path / "work"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, 5)
        _convert(files, tmp_path / "cut", distillation=SETTINGS, work_dir=work)
    assert not (tmp_path / "cut").exists() and [path.name for path in work.iterdir()] == ["cut.partial"]
    with pytest.MonkeyPatch.context() as patch:  # what has been done is not done again
        patch.setattr(dar_from_pythia, "collect_moments", None)
        _interrupt(patch, 3)  # two steps are left
        again = _convert(files, tmp_path / "cut", distillation=SETTINGS, work_dir=work)
    assert not any(work.iterdir())
    expected, found = (load_file(done.output / "model.safetensors") for done in (whole, again))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    for stage, value in whole.perplexity.items():
        assert again.perplexity[stage].nats == pytest.approx(value.nats, abs=1e-6)


def test_unfinished_work_with_other_settings(files: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, 1)
        _convert(files, tmp_path / "dar", distillation=SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["dar.partial"]
    for change, name in (
        ({"method": "svd"}, "method = 'weighted'"),
        ({"calibration_tokens": 256}, "calibration text"),
        ({"source": "source16"}, "source"),
    ):
        with pytest.raises(ValueError, match=f"unfinished conversion with {name}.*restart"):
            _convert(files, tmp_path / "dar", **{"distillation": SETTINGS, **change})
    _convert(files, tmp_path / "dar", distillation=SETTINGS, method="svd", restart=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dar"]


def test_foreign_folder_in_the_place_of_unfinished_work(files: Path, tmp_path: Path) -> None:
    (tmp_path / "dar.partial").mkdir()
    (tmp_path / "dar.partial" / "novel.txt").write_text("mine")
    with pytest.raises(ValueError, match="something other than an unfinished conversion"):
        _convert(files, tmp_path / "dar", distillation=SETTINGS)
    _convert(files, tmp_path / "dar", restart=True)
    assert (tmp_path / "dar.partial" / "novel.txt").read_text() == "mine"


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "tokenizer", "card"])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_conversion_leaves_nothing_half(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, existing: bool
) -> None:
    output = tmp_path / "dar"
    if existing:
        save_tiny_checkpoint(output)
    before = {file.name: file.read_bytes() for file in output.iterdir()} if existing else None

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if where == "model":
        save = DARForCausalLM.save_pretrained

        def half(self: Any, folder: Any, **kwargs: Any) -> None:
            save(self, folder, **kwargs)
            fail()

        monkeypatch.setattr(DARForCausalLM, "save_pretrained", half)
    elif where == "tokenizer":
        monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    else:
        monkeypatch.setattr(dar_from_pythia, "model_card", fail)
    with pytest.raises(KeyboardInterrupt):
        _convert(files, output, overwrite=existing)
    assert [path.name for path in tmp_path.iterdir()] == (["dar"] if existing else [])
    if existing:
        assert {file.name: file.read_bytes() for file in output.iterdir()} == before


def test_a_killed_conversions_remains_are_cleared(files: Path, tmp_path: Path) -> None:
    """Old ones; not those of another output, nor what another process may be writing."""
    names = {".dar.abcdefgh.unfinished": True, ".dar.zyxwvuts.unfinished": False, ".dar.v2.abcdefgh.unfinished": True}
    for name, old in names.items():
        (tmp_path / name / "new").mkdir(parents=True)
        if old:
            os.utime(tmp_path / name, (0, 0))
    (tmp_path / "dar").mkdir()  # empty: it may be there
    _convert(files, tmp_path / "dar")
    assert {path.name for path in tmp_path.iterdir()} == {"dar", *list(names)[1:]}


def test_overwrite(files: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "dar")
    (tmp_path / "dar" / "old.txt").write_text("old")
    with pytest.raises(ValueError, match="not empty"):
        _convert(files, tmp_path / "dar")
    _convert(files, tmp_path / "dar", overwrite=True)
    assert not (tmp_path / "dar" / "old.txt").exists() and (tmp_path / "dar" / "conversion.json").is_file()
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no config\.json\): it is not overwritten"):
        _convert(files, tmp_path / "novels", overwrite=True)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bottleneck_size": 0}, ValueError, "between 1 and hidden_size = 32, got 0"),
        ({"bottleneck_size": 33}, ValueError, "between 1 and hidden_size = 32, got 33"),
        ({"bottleneck_size": 8.5}, TypeError, "bottleneck_size must be a whole number, got 8.5"),
        ({"window_size": -1}, ValueError, "window_size must be 0 or more tokens.*got -1"),
        ({"window_size": None}, ValueError, "window_size=None"),
        ({"window_size": 32}, ValueError, "more than window_size = 32"),
        ({"window_size": 2048}, ValueError, "more than window_size = 2048"),
        ({"block_tokens": 65}, ValueError, "at most the model's 64 positions, got 65"),
        ({"method": "best"}, ValueError, "method must be one of weighted, svd, pca, got 'best'"),
        ({"far_cache": "tiny"}, ValueError, "far_cache must be 'fast' or 'small', got 'tiny'"),
        ({"calibration_tokens": 0}, ValueError, "calibration_tokens must be at least 1, got 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"calibration_sources": []}, ValueError, "sources is empty"),
        ({"calibration_sources": ["nowhere.txt"]}, FileNotFoundError, r"nowhere\.txt"),
        ({"distill_steps": 1, "window_size": 5}, ValueError, "at least 8 windows, 40 tokens, and they have 32"),
        ({"distill_steps": 1, "distillation": SETTINGS}, ValueError, "not both"),
        ({"distillation": DistillationSettings(steps=1, batch_size=999)}, ValueError, "fewer than one batch of 999"),
    ],
)
def test_bad_input_before_any_work(
    files: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(dar_from_pythia, "load_gpt_neox", None)
    with pytest.raises(error, match=message):
        _convert(files, tmp_path / "dar", **change)
    assert not any(tmp_path.iterdir())


def test_too_little_text(files: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    with pytest.raises(ValueError, match=r"short\.txt: 12 tokens do not fill one block of 32"):
        _convert(files, tmp_path / "dar", calibration_sources=[short])
    short.write_text("Some more words, which fill one block. ")
    with pytest.raises(ValueError, match="one block of 32 tokens, which leaves none to measure perplexity"):
        _convert(files, tmp_path / "dar", calibration_sources=[short], eval_sources=None)
    _convert(files, tmp_path / "dar", calibration_sources=[short])


def test_other_models_are_refused(files: Path, converted: Conversion, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "llama")
    with pytest.raises(ValueError, match="model_type 'llama': only GPT-NeoX"):
        convert_gpt_neox_to_dar(tmp_path / "llama", tmp_path / "dar", **_options(files))
    with pytest.raises(ValueError, match=r"DAR already \(window_size=4, bottleneck_size=8\)"):
        convert_gpt_neox_to_dar(converted.output, tmp_path / "dar", **_options(files))
    with pytest.raises(ValueError, match=r"cannot be converted to GPT-NeoX.*bottleneck_down"):
        convert_dar_to_gpt_neox(converted.output, tmp_path / "neox")
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        convert_gpt_neox_to_dar(tmp_path / "nothing", tmp_path / "dar", **_options(files))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"without config\.json"):
        convert_gpt_neox_to_dar(tmp_path / "empty", tmp_path / "dar", **_options(files))
    quantised = json.loads((files / "source" / "config.json").read_text())
    (tmp_path / "empty" / "config.json").write_text(json.dumps({**quantised, "quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="is quantised"):
        convert_gpt_neox_to_dar(tmp_path / "empty", tmp_path / "dar", **_options(files))
    assert not (tmp_path / "dar").exists()


def test_the_output_must_not_hold_the_source(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "source", tmp_path / "models" / "source")
    for output in (tmp_path / "models" / "source", tmp_path / "models"):
        with pytest.raises(ValueError, match="is or holds the source"):
            convert_gpt_neox_to_dar(tmp_path / "models" / "source", output, **_options(files), overwrite=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "note").touch()
    with pytest.raises(ValueError, match="note is a file; give another folder"):
        convert_gpt_neox_to_dar(files / "source", tmp_path / "note" / "dar", **_options(files))
    with pytest.raises(ValueError, match="is a file"):
        _convert(files, tmp_path / "file")


@pytest.mark.parametrize("damage", ["missing", "shape", "cut"])
def test_damaged_weights(files: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(files / "source", tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    tensors = load_file(weights)
    name = "gpt_neox.layers.1.attention.dense.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:16].contiguous()
    save_file(tensors, weights, {"format": "pt"})
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    expected = rf"lacks 1 tensor\(s\): {name}" if damage == "missing" else "cannot be read"
    with pytest.raises(ValueError, match=expected):
        convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", **_options(files))
    assert not (tmp_path / "dar").exists()


def test_tokenizer_of_another_model(files: Path, tmp_path: Path) -> None:
    _source_model(vocab_size=100, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="the model has 100: give the model's own"):
        convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", tokenizer=files / "source", **_options(files))


def test_attention_dropout_is_set_to_zero_and_said(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _source_model(attention_dropout=0.25).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    options = _options(files, quiet=False)
    done = convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", **options)
    assert DARConfig.from_pretrained(done.output).attention_dropout == 0
    for text in (capsys.readouterr().err, (done.output / "README.md").read_text()):
        assert "attention_dropout, 0.25 in the source, is set to 0" in text


def test_loading_keeps_the_dtype(files: Path) -> None:
    assert load_gpt_neox(files / "source16").dtype == torch.bfloat16
    assert load_gpt_neox(files / "source", read_base_config(files / "source")).dtype == torch.float32


def test_length_dependent_rotation_is_refused_for_the_small_cache(files: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
    _source_model(rope_parameters=rope).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="far_cache='small'"):
        convert_gpt_neox_to_dar(tmp_path / "source", tmp_path / "dar", **_options(files, far_cache="small"))


# --- command line ----------------------------------------------------------------------------------------------------


def _arguments(files: Path, output: Path, *more: object) -> list[str]:
    common = (
        "convert", "dar", "--from", files / "source", "--to", output, "--calibration-text", files / "train.txt",
        "--eval-text", files / "held.txt", "--window-size", WINDOW, "--bottleneck-size", 8, "--block-tokens", BLOCK,
        "--calibration-tokens", 512, "--eval-tokens", 256, "--device", "cpu", "--threads", 1, *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


def test_command(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--distill-steps", 2, "--distill-batch-size", 4, "--method", "pca", "--max-shard-size", "30KB")
    assert cli.main(_arguments(files, tmp_path / "dar", *more)) == 0
    captured = capsys.readouterr()
    for part in ("after initialisation", "after distillation", "relative to the source", f"saved: {tmp_path / 'dar'}"):
        assert part in captured.out
    assert "perplexity source" in captured.err and "{'loss'" not in captured.out
    record = json.loads((tmp_path / "dar" / "conversion.json").read_text())
    assert record["method"] == "pca" and record["distillation"]["batch_size"] == 4
    assert (tmp_path / "dar" / "model.safetensors.index.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["dar"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--bottleneck-size", "99"), "between 1 and hidden_size = 32, got 99"),
        (("--window-size", "-3"), "must be 0 or more, got -3"),
        (("--method", "best"), "method must be one of"),
        (("--learning-rate", "fast"), "must be a number, got 'fast'"),
        (("--dtype", "float16"), "computes in float32 or bfloat16"),
        (("--calibration-text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_command_refuses_in_one_line(
    files: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(_arguments(files, tmp_path / "dar", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_command_for_the_way_back(converted: Conversion, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "gpt-neox", "--from", str(converted.output)]) == 2
    assert "cannot be converted to GPT-NeoX" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["convert", "--help"], ["convert", "dar", "--help"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys; from nearfar.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0 and done.stderr == "" and "usage: nearfar convert" in done.stdout


@pytest.mark.slow
def test_benchmark(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("dar_retrofit", ROOT / "benchmarks" / "dar_retrofit.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = (
        "--model", files / "source16", "--text", files / "train.txt", "--divisors", "1,4", "--window-size", WINDOW,
        "--block-tokens", BLOCK, "--calibration-tokens", 512, "--eval-tokens", 128, "--distill-steps", 2,
        "--distill-batch-size", 4, "--training-tokens", 10_000, "--device", "cpu", "--threads", 1,
        "--out", tmp_path / "out.json",
    )  # fmt: skip
    assert script.main([str(argument) for argument in arguments]) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(row["bottleneck_size"], row["method"]) for row in result["rows"]] == [
        (size, method) for size in (32, 8) for method in ("weighted", "svd", "pca")
    ]
    assert "2.6 % of the training's" in shown and "8 (d/4)" in shown and "KL" in shown
    for row in result["rows"]:
        lossless = row["bottleneck_size"] == 32
        assert (abs(row["initialised"]["kl"]) < 1e-6) == lossless
        assert (row["initialised"]["perplexity"] == pytest.approx(result["source"], rel=1e-5)) == lossless
        assert row["distillation"]["steps"] == 2
    with pytest.raises(SystemExit):
        script.main(["--model", str(files / "source"), "--text", "nowhere.txt", "--device", "cpu"])
