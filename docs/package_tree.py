"""A hook of mkdocs: a copy of the package as a wheel would hold it, so that docstrings are found without imports.

In a checkout the subpackages (modeling/, training/, …) lie beside nearfar/ rather than inside it, which Python is told
when it imports nearfar, and a reader of source files is not.
"""

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "docs" / "source"


def on_startup(**kwargs: Any) -> None:
    """Called by mkdocs before its plugins look for the folder."""
    names = re.search(r"^SUBPACKAGES = \((.*)\)$", (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    if names is None:
        raise RuntimeError("setup.py has no line SUBPACKAGES = (…), which names the folders of the package")
    shutil.rmtree(TREE, ignore_errors=True)
    for name in ("nearfar", *re.findall(r'"(\w+)"', names[1])):
        folder = TREE / "nearfar" / ("" if name == "nearfar" else name)
        folder.mkdir(parents=True)
        for file in (ROOT / name).glob("*.py"):
            shutil.copyfile(file, folder / file.name)
