"""README and docs/: every Python snippet runs, every command is understood, and the pages render without a warning.

Snippets of a page run one after the other in one scope, with tiny models in place of those they name.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dar_models import tiny_dar
from finetune_files import IDS
from proxyformer_models import tiny_proxyformer
from tiny_prototypes import SMALL
from tiny_texts import english, tiny_llama, tiny_tokenizer

import nearfar
from nearfar import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL_MODEL, LARGE_MODEL = (f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "1.7B"))


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Tiny models behind the names in the pages; what snippets save is loaded for real. Returns their scope."""
    large = tiny_llama(torch.float32, seed=1)
    models = {
        SMALL_MODEL: tiny_llama(torch.float32),
        LARGE_MODEL: large,
        "pythia-410m-dar": tiny_dar(dtype=torch.float32, **IDS),
        "checkpoints/proxyformer-needles-12m": tiny_proxyformer(dtype=torch.float32, **IDS),
        "my-mapper/model": nearfar.HybridAxialMapper(
            nearfar.HybridAxialMapperConfig(
                proxy_num_layers=2, proxy_num_heads=4, target_num_layers=2, target_num_heads=2, hidden_size=16,
                num_hidden_layers=1, num_attention_heads=2, head_dim=8, window_tokens=64, window_stride=32,
            )
        ),
    }  # fmt: skip

    def behind(auto_class: Any, tokenizer: bool = False) -> None:
        load = auto_class.from_pretrained

        def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
            if str(name) in models:
                return tiny_tokenizer() if tokenizer else models[str(name)]
            assert Path(name).is_dir(), f"{name} has no stand-in here, and no snippet has saved it"
            return load(name, *args, **kwargs)

        monkeypatch.setattr(auto_class, "from_pretrained", from_pretrained)

    behind(transformers.AutoModelForCausalLM)
    behind(transformers.AutoModel)
    behind(transformers.AutoTokenizer, tokenizer=True)
    fitted = nearfar.KeyPrototypes.fit(models[SMALL_MODEL], tiny_tokenizer(), [english(60)], **SMALL)
    monkeypatch.setattr("nearfar.modeling.cache_proactive.find_prototypes", lambda *args: fitted)
    monkeypatch.setattr(nearfar.KeyPrototypes, "fit", classmethod(lambda cls, *args, **kwargs: fitted))
    monkeypatch.chdir(tmp_path)
    return {"long_text": english(400), "texts": [english(20)]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_snippets(page: Path, stand_ins: dict[str, Any], capsys: Any) -> None:
    if "from peft" in page.read_text(encoding="utf-8"):
        pytest.importorskip("peft")
    found = blocks(page, "python")
    assert found
    scope = dict(stand_ins)
    for snippet in found:
        exec(compile(snippet, str(page), "exec"), scope)
    if "output" in scope:  # something was generated from what was read
        assert scope["output"].shape[1] > scope["inputs"].input_ids.shape[1]
    if page.stem in ("README", "pruned_caches"):
        assert scope["KeyPrototypes"] is nearfar.KeyPrototypes


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Lines of the blocks without a language, in which comments may follow."""
    lines = (line.strip() for page in PAGES for block in blocks(page, "") for line in block.splitlines())
    return sorted({line for line in lines if line})


def parse(script: Path, arguments: list[str]) -> None:
    """What the script's own parser says of these arguments."""
    spec = importlib.util.spec_from_file_location(f"docs_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    if script.stem == "train_mapper":
        cli._build_parser().parse_args(["train-mapper", *arguments])
    else:
        module.build_parser().parse_args(arguments)


@pytest.mark.parametrize("line", commands())
def test_commands(line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Parsed, not run: the names of options and the values they allow."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[0] == "pip":
        extras = re.findall(r"\[(\w+)\]", line)
        setup = (ROOT / "setup.py").read_text(encoding="utf-8")
        assert all(f'"{extra}": ' in setup for extra in extras)
    elif words[0] == "nearfar":
        try:
            cli._build_parser().parse_args(words[1:])
        except SystemExit as end:
            assert end.code == 0, capsys.readouterr().err
    else:
        assert words[0] == "python" or words[:2] == ["accelerate", "launch"], line
        at = next(index for index, word in enumerate(words) if word.endswith(".py"))
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        parse(ROOT / words[at], words[at + 1 :])


# --- pages -----------------------------------------------------------------------------------------------------------


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_name_every_public_class() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"^::: nearfar\.(\w+)$", text, re.MULTILINE))
    left_out = {"__version__", "DARModel", "DARForSequenceClassification", "ProxyFormerModel"}
    assert named == set(nearfar.__all__) - left_out


def test_rendering(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    page = (tmp_path / "site" / "dar.html").read_text(encoding="utf-8")
    assert "A token beyond the window costs" in page
    assert 'id="nearfar.DARCache.bytes_per_far_token"' in page
