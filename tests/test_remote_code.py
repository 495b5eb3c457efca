"""Checkpoints that carry their own code: how sources become flat files, and what they do where nearfar is missing.

The second half saves a tiny DAR model here and loads it in fresh processes in which nearfar and triton do not exist.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from local_hub import LocalHub
from tiny_models import VOCABULARY, random_ids
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig
from transformers.dynamic_module_utils import get_relative_imports

from nearfar.configuration import remote_code
from nearfar.configuration.configuration_dar import DARConfig
from nearfar.configuration.remote_code import RemoteCodeConfig, collect_sources
from nearfar.modeling import modeling_dar

ROOT = Path(__file__).resolve().parent.parent


def read(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------------------------
# Sources become flat files
# ---------------------------------------------------------------------------------------------------------------------

ENTRY = {"AutoModel": "modeling_toy.ToyModel"}


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Write files (path -> text or bytes) into a package of folders, and collect what `ToyModel` needs."""

    def collect(files: Mapping[str, str | bytes], classes: Mapping[str, str] = ENTRY) -> dict[str, bytes]:
        for name, content in files.items():
            path = tmp_path / "toy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        (tmp_path / "toy" / "configuration").mkdir(parents=True, exist_ok=True)
        return collect_sources(classes, tmp_path / "toy" / "configuration", "toy")

    return collect


BEFORE = '''"""Überschrift: from ..configuration import nothing, said in the middle of a line."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .parts import (  # Größe
    größe as size,
    weight,
)
from ..configuration.configuration_toy import ToyConfig; SEMICOLON = 1
from    ..configuration . constants   import    π  # spaces stay outside the module's name

if TYPE_CHECKING:
    from ..kernels.deep.fused import Fused
try:
    from .optional import fast
except ImportError:
    fast = None


class ToyModel:
\tdef lazy(self) -> "Fused":
\t\tfrom ..configuration.late import late
\t\tfrom ..configuration.later import later
\t\tasync def inner():
\t\t\tfrom .parts import weight
\t\treturn "from ..configuration.text import nothing"
'''
AFTER = (
    BEFORE.replace("..configuration.configuration_toy import", ".configuration_toy import")
    .replace("..configuration . constants ", ".constants ")
    .replace("..kernels.deep.fused", ".fused")
    .replace("..configuration.late import", ".late import")
    .replace("..configuration.later import", ".later import")
)
NEIGHBOURS = {
    "configuration/configuration_toy.py": "class ToyConfig: ...\n",
    "configuration/constants.py": "π = 3\n",
    "configuration/late.py": "from ..modeling.modeling_toy import ToyModel\nlate = 1\n",  # a circle
    "configuration/later.py": "later = 1\n",
    "kernels/deep/fused.py": "from ...modeling.parts import weight\nclass Fused: ...\n",
    "modeling/parts.py": "größe = weight = 1\n",
    "modeling/optional.py": "fast = 1",
    "modeling/unused.py": "from .missing import nothing\n",
}


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_only_the_modules_of_relative_imports_change(sources: Callable[..., dict[str, bytes]], newline: str) -> None:
    found = sources({"modeling/modeling_toy.py": BEFORE.replace("\n", newline), **NEIGHBOURS})
    assert found["modeling_toy.py"].decode() == AFTER.replace("\n", newline)
    assert found["late.py"] == b"from .modeling_toy import ToyModel\nlate = 1\n"
    assert found["fused.py"] == b"from .parts import weight\nclass Fused: ...\n"
    same = {"configuration/configuration_toy.py", "configuration/constants.py", "configuration/later.py"}
    same |= {"modeling/parts.py", "modeling/optional.py"}
    assert {name: found[Path(name).name] for name in same} == {name: NEIGHBOURS[name].encode() for name in same}
    assert list(found) == sorted([*(Path(name).name for name in same), "modeling_toy.py", "late.py", "fused.py"])


def test_entries_beside_the_configuration_come_first(sources: Callable[..., dict[str, bytes]]) -> None:
    files = {
        "configuration/configuration_toy.py": "class ToyConfig: ...\n",
        "configuration/modeling_toy.py": "from .configuration_toy import ToyConfig\nclass ToyModel: ...\n",
        "modeling/modeling_toy.py": "class ToyModel: 'another one'\n",
    }
    classes = {"AutoConfig": "configuration_toy.ToyConfig", **ENTRY}
    assert sources(files, classes) == {Path(name).name: text.encode() for name, text in list(files.items())[:2]}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            r"'modeling_toy.ToyModel', but there is no \S*configuration/modeling_toy.py or \S*/toy/modeling/modeling_",
        ),
        ({"modeling/modeling_toy.py": "class Other: ...\n"}, r"class 'ToyModel', which \S*modeling_toy.py does not"),
        (
            {"modeling/modeling_toy.py": "def f():\n    class ToyModel: ...\n"},
            r"class 'ToyModel', which \S*modeling_toy.py does not",
        ),
        (
            {
                "modeling/modeling_toy.py": "from .a import x\nfrom ..kernels.a import y\nclass ToyModel: ...\n",
                "modeling/a.py": "x = 1\n",
                "kernels/a.py": "y = 1\n",
            },
            r"both be saved as a.py",
        ),
        (
            {"modeling/modeling_toy.py": "x = 1\nfrom .gone import y\nclass ToyModel: ...\n"},
            r"modeling_toy.py, line 2: imports from \S*/modeling/gone.py, which is not a file",
        ),
        (
            {
                "modeling/modeling_toy.py": "from ..parts import y\nclass ToyModel: ...\n",
                "parts/__init__.py": "y = 1\n",
            },
            r"imports from \S*/toy/parts.py, which is not a file",
        ),
        (
            {"modeling/modeling_toy.py": "from . import a\nclass ToyModel: ...\n", "modeling/a.py": ""},
            r"line 1: transformers does not collect",
        ),
        (
            {"modeling/modeling_toy.py": "def f():\n    import torch, toy.modeling\nclass ToyModel: ...\n"},
            r"line 2: a file that travels must run where toy is not installed",
        ),
        (
            {"modeling/modeling_toy.py": "from toy.modeling.a import x\nclass ToyModel: ...\n"},
            r"line 1: a file that travels must run where toy is not installed",
        ),
        (
            {
                "modeling/modeling_toy.py": "é = 'é'; from .a import x\nclass ToyModel: ...\n",
                "modeling/a.py": "x = 1\n",
            },
            r"line 1: transformers sees a relative import only where a line begins with it",
        ),
        (
            {
                "modeling/modeling_toy.py": "from .a import x; from .a import y\nclass ToyModel: ...\n",
                "modeling/a.py": "",
            },
            r"line 1: transformers sees a relative import only where a line begins with it",
        ),
        (
            {"modeling/modeling_toy.py": "from .a \\\n  import x\nclass ToyModel: ...\n", "modeling/a.py": ""},
            r"line 1: transformers sees a relative import only where a line begins with it, with no backslash",
        ),
        (
            {"modeling/modeling_toy.py": "'''\nfrom .prose import x\n'''\nclass ToyModel: ...\n"},
            r"modeling_toy.py: transformers would look for \['prose'\]",
        ),
        ({"modeling/modeling_toy.py": "class ToyModel(: ...\n"}, r"modeling_toy.py cannot be saved .* invalid syntax"),
        ({"modeling/modeling_toy.py": b"# \xe9\nclass ToyModel: ...\n"}, r"modeling_toy.py cannot be saved .*utf-8"),
        (
            {"modeling/modeling_toy.py": b"\xef\xbb\xbfclass ToyModel: ...\n"},
            r"modeling_toy.py cannot be saved .*U\+FEFF",
        ),
    ],
)
def test_what_cannot_travel(
    sources: Callable[..., dict[str, bytes]], files: dict[str, str | bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sources(files)


@pytest.mark.parametrize("reference", ["modeling_toy", "modeling_toy.", "toy.modeling_toy.ToyModel", "../x.ToyModel"])
def test_an_entry_names_a_file_and_a_class(sources: Callable[..., dict[str, bytes]], reference: str) -> None:
    with pytest.raises(ValueError, match=r"remote_classes\['AutoModel'\] must look like 'file.Class'"):
        sources({"modeling/modeling_toy.py": "class ToyModel: ...\n"}, {"AutoModel": reference})


# ---------------------------------------------------------------------------------------------------------------------
# Saving a configuration
# ---------------------------------------------------------------------------------------------------------------------

TOY_CONFIG = """
from transformers import PreTrainedConfig

from .remote_code import RemoteCodeConfig


class ToyConfig(RemoteCodeConfig, PreTrainedConfig):
    model_type = "toy"
    remote_classes = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
    size: int = 1


class PlainConfig(RemoteCodeConfig, PreTrainedConfig):
    model_type = "plain"


class BrokenConfig(ToyConfig):
    remote_classes = {"AutoModel": "modeling_toy.Nothing"}
"""
TOY_MODEL = "from ..configuration.configuration_toy import ToyConfig\n\n\nclass ToyModel: ...\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The configuration module of an importable package, `toy_package`, with its own copy of `remote_code`."""
    package = tmp_path / "site" / "toy_package"
    for folder in ("", "configuration", "modeling"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").touch()
    shutil.copy(str(remote_code.__file__), package / "configuration")
    (package / "configuration" / "configuration_toy.py").write_text(TOY_CONFIG)
    (package / "modeling" / "modeling_toy.py").write_text(TOY_MODEL)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield import_module("toy_package.configuration.configuration_toy")
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_package"]:
        del sys.modules[name]


def toy_sources(toy: ModuleType) -> dict[str, bytes]:
    folder = Path(str(toy.__file__)).parent
    sources = {name: (folder / name).read_bytes() for name in ("configuration_toy.py", "remote_code.py")}
    return {**sources, "modeling_toy.py": TOY_MODEL.replace("..configuration.", ".").encode()}


def test_saving_writes_the_sources_and_names_the_classes(toy: ModuleType, tmp_path: Path) -> None:
    config = toy.ToyConfig(size=3)
    config.save_pretrained(tmp_path / "new" / "saved")
    saved = read(tmp_path / "new" / "saved")
    values = json.loads(saved.pop("config.json"))
    assert values["auto_map"] == config.remote_classes and values["size"] == 3
    assert saved == toy_sources(toy)
    assert not hasattr(config, "auto_map") and "auto_map" not in config.to_dict()
    (tmp_path / "new" / "saved" / "modeling_toy.py").write_text("an older one")
    config.save_pretrained(str(tmp_path / "new" / "saved"))
    assert read(tmp_path / "new" / "saved").items() > saved.items()


def test_auto_map_is_of_the_folder_not_of_the_configuration(toy: ModuleType, tmp_path: Path) -> None:
    toy.ToyConfig(size=3).save_pretrained(tmp_path / "saved")
    loaded = toy.ToyConfig.from_pretrained(tmp_path / "saved")
    assert loaded.size == 3 and not hasattr(loaded, "auto_map")
    assert not hasattr(GPTNeoXConfig(**loaded.to_dict()), "auto_map")
    # What somebody adds on purpose is written beside our own and stays as it was set.
    loaded.auto_map = {"AutoModelForTokenClassification": "mine.Tagger"}
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
    assert written == {**toy.ToyConfig.remote_classes, "AutoModelForTokenClassification": "mine.Tagger"}
    assert loaded.auto_map == {"AutoModelForTokenClassification": "mine.Tagger"}


def test_errors_of_saving(toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AssertionError, match="should be a directory"):
        toy.ToyConfig().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="Nothing"):
        toy.BrokenConfig().save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists(), "a fault of the sources shows before anything is written"

    config = toy.ToyConfig()
    monkeypatch.setattr(toy.ToyConfig, "to_json_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        config.save_pretrained(tmp_path / "saved")
    assert not hasattr(config, "auto_map")


def test_no_half_written_file(toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "configuration_toy.py").write_text("an older one")

    def fail(self: Path, content: bytes) -> int:
        self.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        toy.ToyConfig().save_pretrained(tmp_path / "saved")
    assert read(tmp_path / "saved") == {"configuration_toy.py": b"an older one"}


def test_a_configuration_without_remote_classes_saves_as_ever(toy: ModuleType, tmp_path: Path) -> None:
    toy.PlainConfig().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["config.json"]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_subclass_elsewhere_carries_the_files_of_its_parent(toy: ModuleType, tmp_path: Path) -> None:
    class Mine(toy.ToyConfig):  # type: ignore[name-defined]
        pass

    Mine().save_pretrained(tmp_path / "saved")
    assert read(tmp_path / "saved").items() > toy_sources(toy).items()


def test_a_class_without_a_file_says_so(toy: ModuleType, tmp_path: Path) -> None:
    notebook = type("Notebook", (toy.ToyConfig,), {"remote_classes": {"AutoModel": "x.Y"}, "__module__": "notebook"})
    with pytest.raises(ValueError, match=r"Notebook is defined in 'notebook', which has no source file"):
        notebook().save_pretrained(tmp_path / "saved")


def test_code_from_a_checkpoint_is_left_to_transformers(
    toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformers_modules.saved.configuration_toy"
    monkeypatch.setitem(sys.modules, name, toy)
    monkeypatch.setattr(toy.ToyConfig, "__module__", name)
    monkeypatch.setattr(toy.ToyConfig, "_auto_class", "AutoConfig")
    config = toy.ToyConfig(auto_map={"AutoModel": "modeling_toy.ToyModel"})
    assert config.auto_map == {"AutoModel": "modeling_toy.ToyModel"}, "AutoModel looks for its class there"
    config.save_pretrained(tmp_path / "saved")
    assert set(read(tmp_path / "saved")) == {"config.json", "configuration_toy.py", "remote_code.py"}


def test_the_mixin_leaves_the_defaults_of_the_other_base_alone() -> None:
    ours = {field.name: field.default for field in fields(DARConfig)}
    theirs = {field.name: field.default for field in fields(GPTNeoXConfig)}
    assert theirs.items() <= ours.items()
    assert RemoteCodeConfig.remote_classes == {}


# ---------------------------------------------------------------------------------------------------------------------
# DAR in processes that do not know nearfar
# ---------------------------------------------------------------------------------------------------------------------

# Goes before each script that must not find nearfar, which may be installed, or triton. torch and transformers ask for
# triton with find_spec, so nothing may raise here.
HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ("nearfar", "triton") else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
for name in ("nearfar", "triton"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is there")
"""

# Runs where nearfar can be imported, but loads what is saved before it imports anything of it.
PUSH = """
import sys
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
(saved,) = sys.argv[1:]
remote = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
assert type(remote).__module__.startswith("transformers_modules."), type(remote)

from nearfar.modeling.modeling_dar import DARForCausalLM

model = AutoModelForCausalLM.from_pretrained(saved)
assert type(model) is DARForCausalLM, type(model)
model.push_to_hub("me/model")
model.config.save_pretrained("only_config", push_to_hub=True, repo_id="me/config")
"""

READ = """
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

torch.set_num_threads(1)
saved, classifier, changed, only_config, results = sys.argv[1:]
ids = torch.load("ids.pt")
said = {"classes": {}, "tensors": {}}

def load(auto_class, source, **options):
    loaded = auto_class.from_pretrained(source, trust_remote_code=True, **options)
    said["classes"][f"{auto_class.__name__} {source}"] = f"{type(loaded).__module__}.{type(loaded).__name__}"
    return loaded

@torch.no_grad()
def logits(model):
    assert not model.training
    return model(input_ids=ids).logits

config = load(AutoConfig, saved)
load(AutoConfig, classifier)
with torch.no_grad():
    said["tensors"]["hidden"] = load(AutoModel, saved)(input_ids=ids).last_hidden_state
    said["tensors"]["class"] = logits(load(AutoModelForSequenceClassification, classifier))
first, second = load(AutoModelForCausalLM, saved), load(AutoModelForCausalLM, saved)
assert type(first) is type(second) and type(load(AutoModel, saved)) is type(first.base_model)
for name, model in {"first": first, "second": second}.items():
    said["tensors"][f"logits {name}"] = logits(model)
    said["tensors"][f"tokens {name}"] = model.generate(ids, max_new_tokens=12, do_sample=False)

# Other code under another name, and then the earlier one once more.
other = load(AutoModelForCausalLM, changed)
third = load(AutoModelForCausalLM, saved)
said["marks"] = [getattr(sys.modules[type(model).__module__], "MARK", "none") for model in (first, other, third)]

first.save_pretrained("saved_2")
again = load(AutoModelForCausalLM, "saved_2")
said["tensors"]["logits again"] = logits(again)
again.save_pretrained("saved_3")

made = AutoModelForCausalLM.from_config(load(AutoConfig, only_config), trust_remote_code=True)
said["made"] = type(made).__name__
made.save_pretrained("made")
said["tensors"]["made"] = logits(made.eval())
said["tensors"]["made again"] = logits(load(AutoModelForCausalLM, "made"))

said["tensors"]["logits hub"] = logits(load(AutoModelForCausalLM, "me/model"))
assert load(AutoConfig, "me/config").to_dict().keys() == config.to_dict().keys()
AutoModel.from_config(load(AutoConfig, "me/config"), trust_remote_code=True)
torch.save(said, results)
"""

READ_ONE = """
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
saved, result = sys.argv[1:]
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    torch.save(model(input_ids=torch.load("ids.pt")).logits, result)
"""


def start(script: str, *arguments: Path, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """A fresh Python in which the checkout is not on the search path, with a module cache of its own."""
    # Anything else on the path stays: another release of transformers, for instance.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(entry for entry in entries if entry and Path(entry).resolve() != ROOT)
    environment = {**os.environ, "HF_HOME": str(cwd / "home"), "HF_MODULES_CACHE": str(cwd / "modules"), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=cwd,
        env={"PYTHONPATH": path, **{key: value for key, value in environment.items() if key != "PYTHONPATH"}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    return output


def tiny_dar() -> DARConfig:
    return DARConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        window_size=4,
        bottleneck_size=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


@dataclass(frozen=True)
class Saved:
    """A language model and a classifier in folders of their own, and what they compute in this process."""

    folder: Path
    classifier: Path
    ids: torch.Tensor
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    ids = random_ids(2, 15)
    model = modeling_dar.DARForCausalLM(tiny_dar()).eval()
    classifier = modeling_dar.DARForSequenceClassification(tiny_dar()).eval()
    for network in (model, classifier):
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "model-1.4b")
    classifier.save_pretrained(folder / "classifier")
    with torch.no_grad():
        tensors = {
            "logits": model(input_ids=ids).logits,
            "hidden": model.base_model(input_ids=ids).last_hidden_state,
            "class": classifier(input_ids=ids).logits,
            "tokens": model.generate(ids, max_new_tokens=12, do_sample=False),
        }
    return Saved(folder / "model-1.4b", folder / "classifier", ids, tensors)


@dataclass(frozen=True)
class Fresh:
    """What a process without nearfar said about the saved folders, and where it saved its own."""

    said: dict[str, Any]
    saved_again: Path
    saved_once_more: Path
    pushed: dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def fresh(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh")
    changed, only_config = folder / "changed", folder / "only_config"
    shutil.copytree(saved.folder, changed)
    with (changed / "modeling_dar.py").open("a") as file:
        file.write("\nMARK = 'changed'\n")
    tiny_dar().save_pretrained(only_config)
    torch.save(saved.ids, folder / "ids.pt")
    with LocalHub() as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_TOKEN": "hf_x"}
        pusher = tmp_path_factory.mktemp("pusher")
        find_nearfar = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        finish(start(find_nearfar + PUSH, saved.folder, cwd=pusher, **online))
        folders = (saved.folder, saved.classifier, changed, only_config)
        finish(start(HIDE + READ, *folders, folder / "said.pt", cwd=folder, **online))
    return Fresh(
        torch.load(folder / "said.pt"),
        folder / "saved_2",
        folder / "saved_3",
        {name: hub.files(name) for name in hub.repositories},
    )


def closure(*modules: ModuleType) -> dict[str, Path]:
    """Stem -> file of modules and of all that they import relatively, as Python's own import system finds them."""
    found: dict[str, Path] = {}
    waiting = [module.__name__ for module in modules]
    while waiting:
        name = waiting.pop()
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        if Path(spec.origin).stem in found:
            continue
        found[Path(spec.origin).stem] = Path(spec.origin)
        for node in ast.walk(ast.parse(Path(spec.origin).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                waiting.append(resolve_name("." * node.level + str(node.module), name.rpartition(".")[0]))
    return found


def test_a_checkpoint_carries_exactly_what_it_imports(saved: Saved, fresh: Fresh) -> None:
    files = read(saved.folder)
    values = json.loads(files.pop("config.json"))
    assert values["auto_map"] == DARConfig.remote_classes
    assert values["architectures"] == ["DARForCausalLM"]
    sources = {Path(name).stem: content.decode() for name, content in files.items() if name.endswith(".py")}
    assert set(files) - {f"{stem}.py" for stem in sources} == {"generation_config.json", "model.safetensors"}
    expected = closure(import_module(DARConfig.__module__), modeling_dar)
    assert set(sources) == set(expected)

    for stem, text in sources.items():
        compile(text, f"{stem}.py", "exec")
        original = expected[stem].read_text("utf-8")
        trees = ast.parse(original), ast.parse(text)
        for was, now in zip(*map(ast.walk, trees), strict=True):
            assert not isinstance(now, ast.Import) or all(a.name.split(".")[0] != "nearfar" for a in now.names)
            if isinstance(now, ast.ImportFrom):
                assert isinstance(was, ast.ImportFrom) and str(now.module).split(".")[0] != "nearfar"
                if now.level:
                    assert (now.level, now.module) == (1, str(was.module).rpartition(".")[2])
                    was.level, was.module = now.level, now.module
        assert ast.dump(trees[0]) == ast.dump(trees[1]), f"more than imports has changed in {stem}"
        for was_line, now_line in zip(original.splitlines(), text.splitlines(), strict=True):
            assert was_line == now_line or now_line.lstrip().startswith("from .")
        assert set(get_relative_imports(saved.folder / f"{stem}.py")) <= set(sources)
    assert read(saved.classifier).items() >= {f"{stem}.py": text.encode() for stem, text in sources.items()}.items()


def test_all_auto_classes_load_without_nearfar(fresh: Fresh) -> None:
    classes = {name: path.split(".") for name, path in fresh.said["classes"].items()}
    assert all(path[0] == "transformers_modules" for path in classes.values())
    found = {(name.split()[0], path[-1]) for name, path in classes.items()}
    named = {(auto_class, reference.split(".")[1]) for auto_class, reference in DARConfig.remote_classes.items()}
    assert found == named


def test_logits_and_generation_are_equal(saved: Saved, fresh: Fresh) -> None:
    assert saved.tensors["logits"].abs().mean() > 0.1
    found = fresh.said["tensors"]
    for name in ("logits first", "logits second", "logits again", "logits hub"):
        assert torch.equal(found[name], saved.tensors["logits"]), name
    for name in ("tokens first", "tokens second"):
        assert torch.equal(found[name], saved.tensors["tokens"]), name
    for name in ("hidden", "class"):
        assert torch.equal(found[name], saved.tensors[name]), name


def test_other_code_under_another_name_is_other_code(fresh: Fresh) -> None:
    assert fresh.said["marks"] == ["none", "changed", "none"]


def test_loading_and_saving_again_changes_no_byte(saved: Saved, fresh: Fresh) -> None:
    files = read(saved.folder)
    assert read(fresh.saved_again) == files
    assert read(fresh.saved_once_more) == files


def test_a_saved_configuration_is_enough_to_make_a_model(saved: Saved, fresh: Fresh) -> None:
    assert fresh.said["made"] == "DARForCausalLM"
    assert torch.equal(fresh.said["tensors"]["made"], fresh.said["tensors"]["made again"])


def test_uploads_carry_the_sources(saved: Saved, fresh: Fresh) -> None:
    sources = {name: content for name, content in read(saved.folder).items() if name.endswith(".py")}
    for repository in ("me/model", "me/config"):
        pushed = fresh.pushed[repository]
        assert {name: content for name, content in pushed.items() if name.endswith(".py")} == sources
        assert json.loads(pushed["config.json"])["auto_map"] == DARConfig.remote_classes
    assert "model.safetensors" in fresh.pushed["me/model"]


def test_where_nearfar_is_installed_its_own_classes_load(saved: Saved, tmp_path: Path) -> None:
    assert type(AutoConfig.from_pretrained(saved.folder)) is DARConfig
    model = AutoModelForCausalLM.from_pretrained(saved.folder)
    assert type(model) is modeling_dar.DARForCausalLM and not hasattr(model.config, "auto_map")
    assert type(AutoModel.from_pretrained(saved.folder)) is modeling_dar.DARModel
    classifier = AutoModelForSequenceClassification.from_pretrained(saved.classifier, trust_remote_code=True)
    assert type(classifier) is modeling_dar.DARForSequenceClassification
    with torch.no_grad():
        assert torch.equal(model(input_ids=saved.ids).logits, saved.tensors["logits"])
    model.save_pretrained(tmp_path)
    assert read(tmp_path) == read(saved.folder)


@pytest.mark.slow
def test_eight_processes_share_an_empty_module_cache(saved: Saved, tmp_path: Path) -> None:
    torch.save(saved.ids, tmp_path / "ids.pt")
    results = [tmp_path / f"{number}.pt" for number in range(8)]
    started = [start(HIDE + READ_ONE, saved.folder, result, cwd=tmp_path) for result in results]
    outputs = [process.communicate(timeout=250)[0] for process in started]
    for process, output, result in zip(started, outputs, results, strict=True):
        if process.returncode:
            # transformers copies the files without a lock, and a process may read what another has just begun to write
            # (its issue 27421). That is no fault of the files, so such a process must succeed when started again.
            assert "transformers_modules" in output, output
            finish(start(HIDE + READ_ONE, saved.folder, result, cwd=tmp_path))
    assert all(torch.equal(torch.load(result), saved.tensors["logits"]) for result in results)
