"""The `nearfar` command: what it prints, what it writes, and one clear line for whatever is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dar_models import tiny_dar, tiny_dar_config
from tiny_texts import english, save_tiny_checkpoint, save_tiny_proxy
from transformers import AutoTokenizer, Cache, LlamaConfig, LlamaForCausalLM

import nearfar
from nearfar import cli, cli_caches, cli_loading
from nearfar.modeling.cache_iam import IAMScorer
from nearfar.modeling.cache_kvzip import KVzipCache
from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, make_cache, register_cache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.kvzip_scores import RepeatPrompt
from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
from nearfar.modeling.proxy_scorer import PromptScorer, ProxyScorer

ROOT = Path(nearfar.__file__).resolve().parent.parent
DEMO = ["--context-tokens", "300", "--needles", "3", "--continuation-tokens", "30", "--decode-tokens", "2",
        "--budget", "64", "--threads", "1", "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def pair(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    proxy, mapper = save_tiny_proxy(tmp_path_factory.mktemp("pair"), Path(checkpoint))
    return ["--proxy", str(proxy), "--mapper", str(mapper)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(english(400), encoding="utf-8")
    return str(path)


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["generate", "--help"], ["--version"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys; from nearfar.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout


def test_help_shows_examples_and_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("demo", "generate", "fit-prototypes", "examples:", "--prompt-file"):
        assert part in shown


def test_help_names_real_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["demo", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 2048)" in shown and f"(default: {cli.DEFAULT_BUDGET})" in shown
    assert "default: None" not in shown and "default: False" not in shown


# --- errors ----------------------------------------------------------------------------------------------------------


def _error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.startswith("nearfar") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["demo", "--budget", "0"], "positive number, got 0"),
        (["demo", "--budget", "-5"], "positive number, got -5"),
        (["demo", "--budget", "many"], "whole number, got 'many'"),
        (["demo", "--retention-ratio", "0"], "(0, 1], got 0"),
        (["demo", "--retention-ratio", "1.01"], "(0, 1], got 1.01"),
        (["demo", "--retention-ratio", "nan"], "(0, 1], got nan"),
        (["demo", "--budget", "5", "--retention-ratio", "0.5"], "not both"),
        (["demo", "--needles", "-1"], "0 or more"),
        (["demo", "--caches", ","], "names nothing"),
        (["demo", "--cache-option", "head"], "KEY=VALUE"),
        (["demo", "--text", "/nowhere/text.txt"], "no such file or folder: /nowhere/text.txt"),
        (["demo", "--text", "TEXT", "--caches", "full,quest"], "unknown cache 'quest'; known caches: full, "),
        (["demo", "--text", "TEXT", "--caches", "full,full"], "twice"),
        (["demo", "--text", "TEXT", "--caches", "full", "--prototypes", "p"], "none of full uses prototypes"),
        (["demo", "--text", "TEXT", "--cache-option", "random.seed=1"], "random is not among the caches"),
        (["demo", "--text", "TEXT", "--budget", "4"], "4"),
        (["generate", "--prompt", "a", "--budget", "20", "--cache-option", "sink_tokens=20"], "20"),
        (["generate", "--prompt", "a", "--cache-option", "nosuch=1"], "no option 'nosuch'; its options are"),
        (["generate", "--prompt", "a", "--cache-option", "sink_tokens=1.5"], "whole number"),
        (["demo", "--text", "TEXT", "--device", "warp"], "unknown device 'warp'"),
        (["demo", "--text", "TEXT", "--device", "cuda:99"], "no device cuda:99"),
        (["demo", "--text", "TEXT", "--out", "TEXT"], "is a file"),
        (["demo", "--text", "EMPTY"], "is empty"),
        (["demo", "--text", "BINARY"], "not UTF-8"),
        (["demo", "--text", "TEXT", "--model", "FOLDER"], "without config.json"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", " \n "], "the prompt is empty"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["generate", "--prompt-file", "/nowhere"], "no such prompt file: /nowhere"),
        (["generate", "--prompt-file", "EMPTY"], "the prompt is empty"),
        (["generate", "--prompt-file", "BINARY"], "not UTF-8"),
        (["generate", "--prompt", "a", "--cache", "quest"], "unknown cache 'quest'; known caches: full, "),
        (
            ["generate", "--prompt", "a", "--model", "FOLDER", "--cache", "proxykv"],
            "proxykv cache needs --proxy: a small",
        ),
        (["generate", "--prompt", "a", "--model", "FOLDER", "--cache", "iam"], "iam cache needs --proxy"),
        (
            ["generate", "--prompt", "a", "--cache", "proxykv", "--proxy", "p"],
            "needs --mapper: `nearfar train-mapper`",
        ),
        (
            ["generate", "--prompt", "a", "--cache", "iam", "--proxy", "p", "--mapper", "m"],
            "none of iam uses a mapper",
        ),
        (["demo", "--text", "TEXT", "--proxy", "p"], "none of full, streaming_llm"),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], "positive"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "0 (greedy)"),
        (["generate", "--prompt", "a", "--top-p", "0"], "(0, 1]"),
        (["fit-prototypes", "--model", "m", "--out", "o"], "--texts"),
        (["generate", "--prompt", "a", "--seed", "-1"], "0 or more, got -1"),
        (["generate", "--prompt", "a", "--seed", "4294967296"], "below 2^32, got 4294967296"),
        (["generate", "--prompt-file", "FOLDER"], "is a folder; give a file"),
        (["generate", "--prompt", "a", "--cache", "full", "--device", "meta"], "--device meta does not work here"),
        (
            ["fit-prototypes", "--model", "m", "--out", "TEXT/out", "--texts", "TEXT"],
            "text.txt is a file; give another",
        ),
        (["fit-prototypes", "--model", "m", "--out", "/proc/out", "--texts", "TEXT"], "/proc takes no files"),
        (["demo", "--out", "TEXT/out"], "text.txt is a file; give another"),
        (["sample-images", "--model", "m", "--out", "TEXT/grid.png"], "--out TEXT is a file; give a folder"),
        (["sample-images", "--model", "m", "--out", "grid.doc"], "Pillow writes no .doc files"),
        (["sample-images", "--model", "m", "--out", "grid.psd"], "Pillow writes no .psd files"),
        (["eval", "needles", "m", "--out", "TEXT/out"], "text.txt is a file; give another"),
        (["eval", "latency", "m", "--out", "TEXT/out"], "text.txt is a file; give another"),
        (["train-mapper", "--proxy", "a", "--target", "b", "--out", "TEXT/out"], "text.txt is a file; give another"),
        (["fit-prototypes", "--model", "m", "--out", "o", "--texts", "/nowhere"], "no such file or folder"),
        (["fit-prototypes", "--model", "m", "--out", "o", "--texts", "FOLDER"], "holds no text"),
        (["fit-prototypes", "--model", "m", "--out", "o", "--texts", "TEXT", "--heads", "big"], "unknown head 'big'"),
    ],
)
def test_wrong_input_is_told_before_anything_is_loaded(
    arguments: list[str],
    message: str,
    text_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("something was loaded")

    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(cli_loading, name, never)
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "folder").mkdir()
    names = {
        "TEXT": text_file,
        "EMPTY": str(tmp_path / "empty.txt"),
        "BINARY": str(tmp_path / "binary.txt"),
        "FOLDER": str(tmp_path / "folder"),
    }
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
        message = message.replace(name, path)
    assert message in _error(capsys, arguments)


def test_what_only_the_tokenizer_can_tell(
    checkpoint: str,
    text_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A text that is too short or too long, a missing chat template: known before the weights are read."""

    def never(*args: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(cli_loading, "load_model", never)
    demo = ["demo", "--model", checkpoint, "--text", text_file, *DEMO]
    assert "too short" in _error(capsys, [*demo, "--context-tokens", "100000"])
    long = tmp_path / "long.txt"
    long.write_text(english(1500))
    demo[demo.index(text_file)] = str(long)
    assert "more than the 4096 positions" in _error(capsys, [*demo, "--context-tokens", "4050"])
    prompt = ["generate", "--model", checkpoint, "--cache", "full"]
    assert "more than the 4096 positions" in _error(capsys, [*prompt, "--prompt", "a", "--max-new-tokens", "4096"])
    plain = save_tiny_checkpoint(tmp_path / "plain", chat=False)
    assert "no chat template" in _error(
        capsys, ["generate", "--model", str(plain), "--cache", "full", "--prompt", "a", "--chat"]
    )


def test_what_the_configuration_can_tell(
    checkpoint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text_file: str,
) -> None:
    """A tokenizer of another model, none at all, and a cache for a model that makes its own."""

    def never(*args: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(cli_loading, "load_model", never)
    generate = ["generate", "--prompt", "a", "--model"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    other, bare, far = (tmp_path / name for name in ("other", "bare", "far"))
    LlamaConfig(vocab_size=10).save_pretrained(other)
    tokenizer.save_pretrained(other)
    assert "knows 10: give the model's own" in _error(capsys, [*generate, str(other), "--cache", "full"])
    LlamaConfig().save_pretrained(bare)
    assert f"{bare} is a folder without a tokenizer" in _error(capsys, [*generate, str(bare), "--cache", "full"])
    tiny_dar_config(vocab_size=len(tokenizer)).save_pretrained(far)
    tokenizer.save_pretrained(far)
    assert "give --cache full" in _error(capsys, [*generate, str(far), "--cache", "snapkv"])
    fit = ["fit-prototypes", "--model", str(far), "--texts", text_file, "--out", str(tmp_path / "out")]
    assert "is a dar model" in _error(capsys, fit)


def test_damaged_weights_are_named(checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"cannot load {damaged}" in _error(
        capsys, ["generate", "--model", str(damaged), "--prompt", "a", "--cache", "full", "--threads", "1"]
    )


def test_generate_lets_a_model_make_its_own_cache(
    checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tiny_dar(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ["generate", "--model", str(tmp_path), "--cache", "full", "--prompt", english(10), "--device", "cpu",
                 "--max-new-tokens", "3", "--threads", "1"]  # fmt: skip
    assert cli.main(arguments) == 0
    assert "own cache of dar" in capsys.readouterr().err


def test_errors_from_below_are_one_line_and_can_be_traced(
    checkpoint: str, text_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ["generate", "--model", checkpoint, "--prompt", "abc", "--cache", "proactive", "--device", "cpu"]
    assert "rototypes" in _error(capsys, generate)  # none come with the package for a random model
    with pytest.raises(ValueError, match="rototypes"):
        cli.main([*generate, "--traceback"])
    assert "nowhere/model" in _error(
        capsys, ["generate", "--model", "nowhere/model", "--prompt", "a", "--cache", "full"]
    )


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo(checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = ["demo", "--model", checkpoint, "--text", text_file, "--caches", "full,streaming_llm,random", *DEMO]
    assert cli.main([*arguments, "--seed", "5", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    record = json.loads((out / "comparison.json").read_text())
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(file.name for file in out.iterdir()) == ["comparison.json", "comparison.png"]
    assert str(out / "comparison.png") in shown and str(out / "comparison.json") in shown
    assert [result["name"] for result in record["results"]] == ["full", "streaming_llm", "random"]
    assert record["seed"] == 5 and record["dtype"] == "float32" and record["text"] == "text.txt"
    assert record["command"].startswith("nearfar demo --model") and record["command"].endswith(str(out))
    assert record["held_equal"]["budget"] == 64 and record["held_equal"]["needles_asked"] == 3
    for result in record["results"]:
        assert result["error"] is None
        assert f"{result['kept_pairs']:,}" in shown and f"{result['perplexity']:.2f}" in shown
    # The words at the end are about these figures.
    last = shown.splitlines()[-7:]
    share = 100 * record["results"][1]["kept_pairs"] / record["results"][0]["kept_pairs"]
    assert any(f"{share:.1f} % of the full cache's pairs" in line for line in last)


def test_demo_with_a_proxy(
    checkpoint: str, pair: list[str], text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given both, ProxyKV takes part without being named."""
    demo = ["demo", "--model", checkpoint, "--text", text_file, *DEMO, *pair, "--out", str(tmp_path)]
    names = [name for name in cli.DEMO_CACHES if name != "proactive"]  # no prototypes come with this model
    assert cli.main(demo) == 1
    results = {result["name"]: result for result in json.loads((tmp_path / "comparison.json").read_text())["results"]}
    assert list(results) == [*cli.DEMO_CACHES, "proxykv"]
    assert [name for name, result in results.items() if result["error"] is None] == [*names, "proxykv"]
    assert results["proxykv"]["kept_pairs"] == results["snapkv"]["kept_pairs"] == 64 * 4
    assert "ProxyScorer" in results["proxykv"]["options"]["scorer"]
    assert "ProxyKV" in capsys.readouterr().out
    assert cli.main([*demo[:-2], "--out", str(tmp_path / "b"), "--caches", "proxykv,kvzip,h2o,iam"]) == 0
    record = json.loads((tmp_path / "b" / "comparison.json").read_text())
    assert record["held_equal"]["budget"] == 64
    kept = {result["name"]: result["kept_pairs"] for result in record["results"]}
    assert kept["proxykv"] == kept["kvzip"] == results["proxykv"]["kept_pairs"]


def test_what_is_kept_with_the_source_is_for_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    nothing = {"proxy": None, "mapper": None}
    monkeypatch.setattr(cli_loading, "__file__", str(tmp_path / "nearfar" / "cli_loading.py"))
    args = argparse.Namespace(model=None, proxy=None, mapper=None)
    assert cli.proxy_sources(args) == nothing
    kept = {"proxy": tmp_path / cli.KEPT_PROXY, "mapper": tmp_path / cli.KEPT_MAPPER}
    for folder in kept.values():
        assert cli.proxy_sources(args) == nothing  # one without the other is of no use
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert cli.proxy_sources(args) == {name: str(folder) for name, folder in kept.items()}
    assert cli.proxy_sources(argparse.Namespace(model="other", proxy=None, mapper=None)) == nothing
    mine = argparse.Namespace(model=None, proxy="mine", mapper=None)
    assert cli.proxy_sources(mine) == {"proxy": "mine", "mapper": None}  # the kept mapper is for the kept proxy


def test_demo_with_a_registered_policy_that_fails(
    checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: object, **options: object) -> Cache:
        raise RuntimeError("no such luck")

    register_cache("unlucky", fail, label="Unlucky", description="Fails.")
    try:
        arguments = ["demo", "--model", checkpoint, "--text", text_file, "--out", str(tmp_path), *DEMO]
        assert cli.main([*arguments, "--caches", "full,unlucky"]) == 1
        shown = capsys.readouterr().out
        assert "Unlucky failed: RuntimeError: no such luck" in shown and "Full cache: " in shown
        assert (tmp_path / "comparison.png").is_file()
        assert cli.main([*arguments, "--caches", "unlucky"]) == 1
        assert "figure" not in capsys.readouterr().out
    finally:
        del CACHES["unlucky"]


def test_cache_options_go_where_they_belong(
    checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--model", checkpoint, "--text", text_file, "--out", str(tmp_path), *DEMO]
    options = ["--cache-option", "sink_tokens=2", "--cache-option", "random.recent_tokens=7"]
    assert cli.main([*arguments, "--caches", "full,streaming_llm,random", *options]) == 0
    full, streaming, chance = json.loads((tmp_path / "comparison.json").read_text())["results"]
    assert full["options"] == {}
    assert streaming["options"] == {"sink_tokens": 2}
    assert chance["options"] == {"sink_tokens": 2, "recent_tokens": 7}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head=mlp", (None, "head", "mlp")),
        ("proactive.head=mlp", ("proactive", "head", "mlp")),
        ("sink_tokens=8", (None, "sink_tokens", 8)),
        ("rerotate=True", (None, "rerotate", True)),
        ("prototypes=a/b=c", (None, "prototypes", "a/b=c")),
    ],
)
def test_cache_option_values(text: str, expected: tuple[str | None, str, object]) -> None:
    assert cli_caches.cache_option(text) == expected


# --- generate --------------------------------------------------------------------------------------------------------


def _expected(checkpoint: str, prompt: str, cache_name: str, limit: int, **options: int) -> tuple[str, int, int]:
    """What `generate` gives, decoded; how many tokens; the pairs then held: by hand, one token at a time."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cache = make_cache(cache_name, model, **options)
    said: list[int] = []
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        while len(said) < limit and tokenizer.eos_token_id not in said:
            said.append(int(model(ids, **{cache_argument(model): cache}).logits[0, -1].argmax()))
            ids = torch.tensor([said[-1:]])
    return tokenizer.decode(said, skip_special_tokens=True), len(said), cache_kept_pairs(cache)


@pytest.mark.parametrize("name", ["full", "streaming_llm", "snapkv", "h2o"])
def test_generate_streams_what_the_model_says(
    name: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = english(30)
    (tmp_path / "prompt.txt").write_text(prompt)
    arguments = ["generate", "--model", checkpoint, "--cache", name, "--budget", "32", "--max-new-tokens", "12"]
    arguments += ["--threads", "1", "--device", "cpu"]
    expected, new, kept = _expected(checkpoint, prompt, name, 12, budget=32)
    assert cli.main([*arguments, "--prompt", prompt]) == 0
    first = capsys.readouterr()
    assert first.out == expected + "\n"
    assert cli.main([*arguments, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out == first.out
    summary = first.err.strip().splitlines()[-1]
    assert (
        f"{CACHES[name].label}: {len(prompt)} prompt tokens, {new} new; {kept:,} key-value pairs held of " in summary
    )
    assert summary.endswith(" bytes]")


def test_generate_with_kvzip_compresses_the_prompt_first(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, arguments = english(30), ["--max-new-tokens", "8", "--threads", "1", "--device", "cpu"]
    arguments = ["generate", "--model", checkpoint, "--cache", "kvzip", "--budget", "32", *arguments]
    assert cli.main([*arguments, "--prompt", prompt]) == 0
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    cache = KVzipCache(model, budget=32).compress_context(model, ids[:, :-1], tokenizer)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    shown = capsys.readouterr()
    assert shown.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert (
        f"KVzip: {len(prompt)} prompt tokens" in shown.err and f"{cache.kept_pairs():,} key-value pairs" in shown.err
    )
    assert "give a longer one" in _error(capsys, [*arguments, "--prompt", "a"])


@pytest.mark.parametrize("name", ["proxykv", "iam"])
def test_generate_with_a_proxy(
    name: str, checkpoint: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, length = english(30), 8
    arguments = ["generate", "--model", checkpoint, "--cache", name, "--budget", "32", "--prompt", prompt, "--chat"]
    arguments += ["--max-new-tokens", str(length), "--threads", "1", "--device", "cpu"]
    assert cli.main([*arguments, *(pair if name == "proxykv" else pair[:2])]) == 0
    shown = capsys.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model, proxy = (LlamaForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (checkpoint, pair[1]))
    repeat = RepeatPrompt.from_tokenizer(tokenizer)
    assert repeat.prefix
    scorer: PromptScorer = IAMScorer(proxy, repeat, prefix_length=len(repeat.prefix))
    if name == "proxykv":
        mapper = HybridAxialMapper.from_pretrained(pair[3], dtype=torch.float32).eval()
        scorer = ProxyScorer(proxy, mapper, prefix_ids=repeat.prefix)
    ids = tokenizer(f"<|user|>\n{prompt}<|end|>\n<|assistant|>\n", return_tensors="pt").input_ids
    assert tuple(ids[0, : len(repeat.prefix)].tolist()) == repeat.prefix
    cache = scorer.prefill(ids, target_model_or_config=model, budget=32)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=length, do_sample=False)[0, ids.shape[1] :]
    assert shown.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert f"{CACHES[name].label}: {ids.shape[1]} prompt tokens" in shown.err
    assert f"{cache.kept_pairs():,} key-value pairs held" in shown.err


def test_a_proxy_that_does_not_fit(
    checkpoint: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ["generate", "--model", checkpoint, "--cache", "proxykv", "--prompt", "abc", "--device", "cpu"]
    assert "trained for the proxy" in _error(capsys, [*generate, "--proxy", checkpoint, *pair[2:]])
    assert "cannot load" in _error(capsys, [*generate, *pair[:2], "--mapper", str(tmp_path / "nowhere")])
    other = save_tiny_checkpoint(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    assert "different tokenizers" in _error(capsys, [*generate, "--proxy", str(other), *pair[2:]])


def test_generate_reads_standard_input_and_applies_the_chat_template(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    arguments = ["generate", "--model", checkpoint, "--cache", "full", "--max-new-tokens", "5", "--device", "cpu"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert cli.main([*arguments, "--prompt-file", "-", "--chat"]) == 0
    shown = capsys.readouterr()
    expected, *_ = _expected(checkpoint, "<|user|>\nhello<|end|>\n<|assistant|>\n", "full", 5)
    assert shown.out == expected + "\n"


def test_sampling_repeats_with_its_seed(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", checkpoint, "--cache", "full", "--prompt", "abc", "--temperature", "1.5"]
    arguments += ["--max-new-tokens", "16", "--device", "cpu", "--threads", "1"]
    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main([*arguments, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


# --- fit-prototypes --------------------------------------------------------------------------------------------------


def test_fitted_prototypes_serve_generate(
    checkpoint: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prototypes"
    fit = [
        "fit-prototypes",
        "--model",
        checkpoint,
        "--texts",
        text_file,
        "--heads",
        "linear,cosine",
        "--contexts",
        "2",
    ]
    fit += ["--context-tokens", "200", "--out", str(out), "--device", "cpu", "--threads", "1"]
    assert cli.main(fit) == 0
    assert f"saved: {out}" in capsys.readouterr().out and any(out.iterdir())
    generate = ["generate", "--model", checkpoint, "--prompt", english(40), "--cache", "proactive", "--budget", "64"]
    generate += ["--max-new-tokens", "4", "--device", "cpu", "--threads", "1", "--prototypes", str(out)]
    assert cli.main([*generate, "--cache-option", "head=cosine"]) == 0
    assert "Proactive" in capsys.readouterr().err
    assert "not fitted" in _error(capsys, [*generate, "--cache-option", "head=mlp"])
