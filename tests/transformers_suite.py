"""The tests that transformers keeps for all of its models, out of its source package, for the models here.

The source package on the package index holds what the wheel does not: `tests/test_modeling_common.py` and some of its
neighbours. It is fetched once, with pip, checked against a digest, and kept in the user's cache; nothing of it is
installed or comes into this repository. From a shell::

    python tests/transformers_suite.py

What the package leaves out (`tests/generation`, `tests/exporters`) has an empty class in its place here, or our own
values; generation and export have tests of ours.
"""

import importlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import transformers

from nearfar.conversion.packaged_model import cache_root

# sha256 of transformers-VERSION.tar.gz
DIGESTS = {
    "5.24.0": "906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3",
}
PACKAGE = "transformers_common_tests"
_STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    # Fields of every configuration, with values that are no defaults.
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}
""",
}


class SuiteMissing(RuntimeError):
    """The tests cannot be had; the message says why."""


def suite_folder() -> Path:
    """Where the installed release's tests lie in the user's cache."""
    return cache_root() / "tests" / f"transformers-{transformers.__version__}"


def fetch() -> Path:
    """The folder that holds the package of tests; downloaded on the first call (11 MB).

    Raises:
        SuiteMissing: no digest is known for the installed release, or pip cannot fetch it.
    """
    folder = suite_folder()
    if (folder / PACKAGE / "test_modeling_common.py").is_file():
        return folder
    version = transformers.__version__
    if version not in DIGESTS:
        raise SuiteMissing(
            f"transformers {version} is installed, and tests/transformers_suite.py has no digest of its source package"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch, "made")
        _unpack(_download(version, Path(scratch)), made / PACKAGE)
        if not folder.exists():  # another process may have been faster
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def _download(version: str, scratch: Path) -> Path:
    """With this interpreter's pip, so that the user's index, proxy and certificate settings hold."""
    # With a digest beside it, pip checks the archive before it looks inside.
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"transformers=={version} --hash=sha256:{DIGESTS[version]}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformers"]
    command += ["--no-build-isolation", "--no-input", "--disable-pip-version-check", "-q"]
    command += ["--require-hashes", "-r", str(requirement), "--dest", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archive = scratch / f"transformers-{version}.tar.gz"
    if done.returncode or not archive.is_file():
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-3:]
        raise SuiteMissing(f"pip could not download the source package of transformers {version}: {' '.join(last)}")
    return archive


def _unpack(archive: Path, package: Path) -> None:
    package.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                source = tar.extractfile(member)
                assert source is not None
                with source, open(package / parts[2], "wb") as target:
                    shutil.copyfileobj(source, target)
    (package / "__init__.py").touch()
    for name, text in _STUBS.items():
        stub = package / name
        if not stub.exists():
            stub.parent.mkdir(exist_ok=True)
            (stub.parent / "__init__.py").touch()
            stub.write_text(text)


def load(name: str) -> ModuleType:
    """One of the suite's files as a module.

    Raises:
        SuiteMissing: see `fetch`; or a package that the file imports is not installed.
    """
    folder = str(fetch())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        raise SuiteMissing(f"transformers' tests need the package {error.name}: pip install 'nearfar[dev]'") from error


if __name__ == "__main__":
    try:
        print(fetch())
    except SuiteMissing as error:
        sys.exit(f"error: {error}")
