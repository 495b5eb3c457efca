"""What holds for every test: no hub, one thread, fixed seeds, and slow tests only when asked for."""

import os
import random

# Before any import of transformers or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

# Markers that transformers' own tests carry (test_transformers_suite.py).
TRANSFORMERS_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_training_test",
    "order",
    "torch_compile_test",
)

# Tiny models gain nothing from threads, and on a busy machine threads that wait for each other cost minutes.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=False, help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    for name in TRANSFORMERS_MARKERS:
        config.addinivalue_line("markers", f"{name}: of transformers' tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or os.environ.get("NEARFAR_SLOW", "0") not in ("", "0"):
        return
    skip = pytest.mark.skip(reason="slow; runs with --slow or NEARFAR_SLOW=1")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
