"""The small checkpoints that come with the source."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from nearfar import FlowMatchingPipeline, HybridAxialMapper, ProxyFormerForCausalLM, ProxyScorer
from nearfar.configuration.remote_code import collect_sources
from nearfar.evaluation.far_caches import compare_far_caches
from nearfar.evaluation.multi_needle import evaluate_needles
from nearfar.evaluation.needle_documents import NeedleTemplates, encode_background

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
NEEDLES = CHECKPOINTS / "proxyformer-needles-12m"
DIGITS = CHECKPOINTS / "proxyformer-mnist-9m"
DAR = CHECKPOINTS / "dar-14m"
needs_dar = pytest.mark.skipif(not DAR.is_dir(), reason="the DAR is not there yet")
PROXY, MAPPER = CHECKPOINTS / "smollm2-proxy", CHECKPOINTS / "smollm2-mapper"


@pytest.fixture(scope="module")
def model() -> ProxyFormerForCausalLM:
    return AutoModelForCausalLM.from_pretrained(NEEDLES, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "folder",
    [NEEDLES, DIGITS, MAPPER, pytest.param(DAR, marks=needs_dar)],
    ids=["proxyformer-needles-12m", "proxyformer-mnist-9m", "smollm2-mapper", "dar-14m"],
)
def test_the_code_beside_the_weights_is_the_library_s(folder: Path) -> None:
    root = CHECKPOINTS.parent
    expected = collect_sources(type(AutoConfig.from_pretrained(folder)).remote_classes, root / "configuration")
    found = {file.name: file.read_bytes() for file in folder.glob("*.py")}
    assert found == expected, "run make checkpoints"


@pytest.mark.parametrize("folder", sorted(CHECKPOINTS.iterdir()), ids=lambda folder: folder.name)
def test_cards_and_configurations_say_what_anybody_can_use(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "\nlicense: " in card and "\n# " in card
    for file in [*folder.glob("*.json"), folder / "README.md"]:
        assert "/tmp/" not in file.read_text(encoding="utf-8")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")).get("use_cache", True)


def test_the_mapper_belongs_to_the_proxy() -> None:
    """It scores a text of any length with the sibling's attention, and refuses another model."""
    proxy = AutoModelForCausalLM.from_pretrained(PROXY, dtype=torch.float32).eval()
    mapper = AutoModel.from_pretrained(MAPPER, dtype=torch.float32).eval()
    assert isinstance(mapper, HybridAxialMapper)
    scorer = ProxyScorer(proxy, mapper)
    assert scorer.proxy_config.num_hidden_layers == 4 and mapper.config.target_num_layers == 30
    ids = torch.randint(0, 49_000, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = proxy(ids).logits
    assert logits.isfinite().all()
    with torch.no_grad():
        proxy.get_input_embeddings().weight.add_(torch.randn(576))
    with pytest.raises(ValueError, match="smollm2-proxy"):
        ProxyScorer(proxy, mapper)


def test_it_draws_digits() -> None:
    """White strokes on black: the ink of a digit, and classes that differ."""
    pipe = FlowMatchingPipeline.from_pretrained(DIGITS, dtype=torch.float32)
    images = pipe(4, [0, 0, 1, 1], steps=10, generator=torch.Generator().manual_seed(0), output_type="pt")
    assert images.shape == (4, 1, 32, 32)
    ink = (images > 0).float().mean((1, 2, 3))
    assert (ink[:2] > 0.08).all() and (ink[2:] < ink[:2].min()).all(), "a nought takes more ink than a one"


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


@needs_dar
def test_the_dar_reads_through_its_cache_as_without() -> None:
    model = AutoModelForCausalLM.from_pretrained(DAR, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(DAR)("The river ran past old walls, and nobody could say who built it. " * 20)
    found = compare_far_caches(model, ids.input_ids, chunk_tokens=100, decode_tokens=2, progress=False)
    for result in found.results:
        assert result.difference < 1e-3 and result.perplexity == pytest.approx(found.uncached_perplexity, rel=1e-4)
    assert found.uncached_perplexity < 100
    assert json.loads((DAR / "training.json").read_text(encoding="utf-8"))["vanilla"]["perplexity"]


@pytest.mark.parametrize(
    ("folders", "megabytes"),
    [([NEEDLES], 30), ([DIGITS], 20), ([PROXY, MAPPER], 80), pytest.param([DAR], 30, marks=needs_dar)],
    ids=["needles", "digits", "proxy", "dar"],
)
def test_they_are_small(folders: list[Path], megabytes: float) -> None:
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < megabytes * 1e6
