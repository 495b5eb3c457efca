"""The package as its users meet it: a bare checkout, a wheel, an editable install; and the one-way flow of imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nearfar

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("configuration", "modeling", "conversion", "training", "evaluation")
# A folder may import what has a lower rank. Folders of one rank may use each other, but not in a circle.
RANK = {
    "configuration": 0,
    "modeling": 1,
    "conversion": 2,
    "training": 2,
    "evaluation": 2,
    "nearfar": 3,
    "benchmarks": 4,
    "examples": 4,
}
TRAVELLING = ("configuration", "modeling")  # their files are copied into checkpoints


def run(*command: str | Path, cwd: Path, pythonpath: str | Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def pip(*arguments: str | Path, cwd: Path, python: Path | None = None) -> str:
    target: list[str | Path] = ["--python", python] if python is not None else []
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *target, *arguments, cwd=cwd)


def copy_checkout(destination: Path) -> Path:
    """The files a build reads; builds write into their source, so none is made in the checkout itself."""
    destination.mkdir()
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / file).exists():
            shutil.copy2(ROOT / file, destination / file)
    for folder in ("nearfar", *SUBPACKAGES):
        shutil.copytree(ROOT / folder, destination / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return destination


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout."""
    base = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(base / "source")
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", base, source, cwd=base)
    (built,) = base.glob("nearfar-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that the wheel is installed into."""
    target = wheel.parent / "installed"
    pip("install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=wheel.parent)
    return target


# Prints where each part was found, without importing torch.
REPORT = f"""
import importlib, sys
import nearfar
print(nearfar.__file__)
for name in {SUBPACKAGES!r}:
    print(importlib.import_module("nearfar." + name).__file__)
assert "torch" not in sys.modules and "transformers" not in sys.modules, "import nearfar must be light"
"""


def imported_files(output: str) -> list[Path]:
    return [Path(file) for file in output.splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Three ways of having it
# ---------------------------------------------------------------------------------------------------------------------


def test_checkout_without_install(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source")
    files = imported_files(run(sys.executable, "-c", REPORT, cwd=source, pythonpath="."))
    assert [file.resolve().relative_to(source) for file in files] == [
        Path(folder, "__init__.py") for folder in ("nearfar", *SUBPACKAGES)
    ]


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(info["METADATA"]).decode()
        entry_points = archive.read(info["entry_points.txt"]).decode()
    expected = {"nearfar/py.typed", "nearfar/evaluation/lm_eval_plugin.yaml"}
    expected |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "nearfar").glob("*.py")}
    prototypes = ROOT / "nearfar" / "prototypes"
    expected |= {file.relative_to(ROOT).as_posix() for file in prototypes.rglob("*") if file.is_file()}
    for folder in SUBPACKAGES:
        expected |= {f"nearfar/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / folder).rglob("*.py")}
    assert names == expected
    assert "LICENSE" in info
    assert "nearfar = nearfar.cli:main" in entry_points
    assert f"Version: {nearfar.__version__}" in metadata
    assert set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE)) >= {
        "train",
        "eval",
        "flash",
        "image",
        "dev",
    }


def test_installed_wheel(installed: Path, tmp_path: Path) -> None:
    files = imported_files(run(sys.executable, "-c", REPORT, cwd=tmp_path, pythonpath=installed))
    assert [file.relative_to(installed).as_posix() for file in files] == [
        "nearfar/__init__.py",
        *(f"nearfar/{folder}/__init__.py" for folder in SUBPACKAGES),
    ]
    code = "import nearfar; print(*nearfar.__path__); print(nearfar.StreamingLLMCache.__module__)"
    paths, module = run(sys.executable, "-c", code, cwd=tmp_path, pythonpath=installed).splitlines()
    assert paths == str(installed / "nearfar"), "an installed package must not look beside itself"
    assert module == "nearfar.modeling.cache_streaming_llm"
    assert (installed / "nearfar" / "py.typed").is_file()


def test_commands_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    as_module = run(sys.executable, "-m", "nearfar", "--help", cwd=tmp_path, pythonpath=installed)
    script = next(installed / folder / "nearfar" for folder in ("bin", "Scripts") if (installed / folder).is_dir())
    as_script = run(sys.executable, script, "--help", cwd=tmp_path, pythonpath=installed)
    for command in ("demo", "generate"):
        assert command in as_module
        assert command in as_script


def test_editable_install(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source")
    venv.create(tmp_path / "venv", with_pip=False)
    python = next(tmp_path.glob("venv/bin/python")) if os.name != "nt" else tmp_path / "venv/Scripts/python.exe"
    # torch, transformers and setuptools are borrowed from the environment that runs the tests.
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(purelib, "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    pip("install", "-q", "--no-deps", "--no-build-isolation", "-e", source, cwd=tmp_path, python=python)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files = imported_files(run(python, "-c", REPORT, cwd=elsewhere))
    assert [file.resolve().relative_to(source).as_posix() for file in files] == [
        f"{folder}/__init__.py" for folder in ("nearfar", *SUBPACKAGES)
    ]
    # Editing the checkout changes what is imported, a new file included.
    (source / "evaluation" / "brand_new.py").write_text("ANSWER = 42\n", encoding="utf-8")
    code = "from nearfar.evaluation.brand_new import ANSWER; print(ANSWER)"
    assert run(python, "-c", code, cwd=elsewhere).strip() == "42"
    assert (tmp_path / "venv" / python.parent.name / "nearfar").exists(), "the console script is missing"


# ---------------------------------------------------------------------------------------------------------------------
# Names and pins
# ---------------------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert set(nearfar._PUBLIC_NAMES) | {"__version__"} == set(nearfar.__all__)
    for name, submodule in nearfar._PUBLIC_NAMES.items():
        value = getattr(nearfar, name)
        assert value is getattr(import_module(f"nearfar.{submodule}"), name)
    assert set(nearfar.__all__) <= set(dir(nearfar))
    with pytest.raises(AttributeError, match="NoSuchCache"):
        _ = nearfar.NoSuchCache


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "nearfar" / "__init__.py").read_text("utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert seen == nearfar._PUBLIC_NAMES


@pytest.mark.parametrize("python_version", ["3.10", "3.11", "3.12", "3.13"])
def test_pins_cover_what_the_makefile_installs(wheel: Path, python_version: str) -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python_version}):
            (specifier,) = pin.specifier
            assert specifier.operator == "==", f"{line}: a pin is name==version"
            assert pin.name not in pins, f"{pin.name} is pinned twice for Python {python_version}"
            pins[pin.name] = specifier.version
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for text in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE):
        requirement = Requirement(text)
        extras = ("", "demo", "dev", "docs", "train")
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            pinned = pins.get(requirement.name)
            assert pinned is not None, f"{requirement.name} has no pin in constraints.txt"
            assert requirement.specifier.contains(pinned), f"{requirement.name}=={pinned} is outside {text}"


# ---------------------------------------------------------------------------------------------------------------------
# Imports flow one way
# ---------------------------------------------------------------------------------------------------------------------


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def imported_modules(file: Path, nodes: Iterator[ast.AST]) -> set[str]:
    """Full names (`nearfar.modeling.rotary`) of the parts of nearfar that a file in the checkout imports."""
    folder = file.relative_to(ROOT).parts[0]
    package = ["nearfar"] if folder == "nearfar" else ["nearfar", folder]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "nearfar"}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            if full == "nearfar":
                for alias in node.names:
                    inside = nearfar._PUBLIC_NAMES.get(alias.name)
                    if inside is not None or alias.name in SUBPACKAGES or alias.name.startswith("cli"):
                        found.add(f"nearfar.{inside or alias.name}")
            elif full.startswith("nearfar."):
                found.add(full)
    return found


def executed_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not in functions, not under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def folder_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else "nearfar"
    return part if part in SUBPACKAGES else "nearfar"


def find_circle(edges: dict[str, set[str]]) -> list[str]:
    """Names along one circle of a directed graph; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for following in sorted(edges.get(name, ())):
            if circle := visit(following, [*path, name]):
                return circle
        done.add(name)
        return []

    for start in sorted(edges):
        if circle := visit(start, []):
            return circle
    return []


def test_find_circle() -> None:
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_imports_flow_one_way() -> None:
    between: dict[str, set[str]] = {}
    for file in sources(*RANK):
        if file == ROOT / "nearfar" / "__init__.py":
            continue  # the face names what is below it
        folder = file.relative_to(ROOT).parts[0]
        for module in imported_modules(file, ast.walk(ast.parse(file.read_text("utf-8")))):
            target = folder_of(module)
            assert RANK[target] <= RANK[folder], f"{file.relative_to(ROOT)} imports {module}: that flows back"
            if target != folder:
                between.setdefault(folder, set()).add(target)
    assert find_circle(between) == []


def test_no_circle_of_files() -> None:
    edges: dict[str, set[str]] = {}
    for file in sources("nearfar", *SUBPACKAGES):
        inside = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(["nearfar", *inside[inside[0] == "nearfar" :]]).removesuffix(".__init__")
        edges[name] = imported_modules(file, executed_at_import(ast.parse(file.read_text("utf-8"))))
    assert find_circle(edges) == []


# ---------------------------------------------------------------------------------------------------------------------
# Files that travel inside a checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def travelling_files() -> list[Path]:
    return [file for file in sources(*TRAVELLING) if file.name != "__init__.py"]


def test_travelling_files_lie_flat_with_unique_names() -> None:
    stems = [file.stem for file in travelling_files()]
    assert sorted(stems) == sorted(set(stems))
    assert all(file.parent.parent == ROOT for file in travelling_files())


@pytest.mark.parametrize("file", travelling_files(), ids=lambda file: file.stem)
def test_travelling_file_imports(file: Path) -> None:
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    tree = ast.parse(file.read_text("utf-8"))
    relative: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] != "nearfar" for alias in node.names), "no import of nearfar"
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "nearfar", "no import of nearfar"
            assert node.level == 0 or node.module, "`from . import x` is never collected: import from .x"
            if node.level:
                relative.add("." * (node.level - 1) + (node.module or ""))
    # transformers finds relative imports with a regular expression, which a line of a docstring can fool.
    assert set(get_relative_imports(file)) == relative
    # What transformers demands to be installed before it loads the file must come with the library.
    always_there = {"accelerate", "huggingface_hub", "numpy", "safetensors", "torch", "tqdm", "transformers"}
    assert set(get_imports(file)) <= always_there | sys.stdlib_module_names
