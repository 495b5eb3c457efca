"""The small checkpoints that come with the source."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearfar import ProxyFormerForCausalLM
from nearfar.configuration.remote_code import collect_sources
from nearfar.evaluation.multi_needle import evaluate_needles
from nearfar.evaluation.needle_documents import NeedleTemplates, encode_background

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
NEEDLES = CHECKPOINTS / "proxyformer-needles-12m"


@pytest.fixture(scope="module")
def model() -> ProxyFormerForCausalLM:
    return AutoModelForCausalLM.from_pretrained(NEEDLES, dtype=torch.float32).eval()


def test_the_code_beside_the_weights_is_the_library_s(model: ProxyFormerForCausalLM) -> None:
    root = CHECKPOINTS.parent
    expected = collect_sources(type(model.config).remote_classes, root / "configuration")
    found = {file.name: file.read_bytes() for file in NEEDLES.glob("*.py")}
    assert found == expected, "run make checkpoints"


def test_it_finds_needles(model: ProxyFormerForCausalLM) -> None:
    """As its card says: nearly all of them; by the ordinary interface, on text that it has not seen."""
    tokenizer = AutoTokenizer.from_pretrained(NEEDLES)
    templates = NeedleTemplates(tokenizer)
    words = "the river ran past old walls and nobody in town could say who had built them or why . "
    background = encode_background(words * 150, tokenizer)
    results = evaluate_needles(
        model, tokenizer, background, [2048], num_documents=1, num_needles=20, templates=templates, progress=False
    )
    assert results.lengths[2048].accuracy >= 0.9
    control = evaluate_needles(
        model, tokenizer, background, [2048], num_documents=2, num_needles=20, templates=templates, progress=False,
        control=True,
    )  # fmt: skip
    assert control.lengths[2048].accuracy <= 0.1


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in NEEDLES.iterdir()) < 30e6
