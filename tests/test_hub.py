"""Pushing and pulling with the real huggingface_hub client, against a Hub on this machine.

One process that knows nearfar pushes; another, in which nearfar cannot be imported, pulls and pushes again. How
sources travel at all is in `test_remote_code.py`; fitted prototypes have their own test beside their class.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from local_hub import LocalHub
from safetensors.torch import load
from test_remote_code import HIDE, finish, start

from nearfar.evaluation.card_data import Metric, card_data

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("dar", "proxyformer", "mapper")

# What both sides compute of a model, so that it can be compared.
COMPUTE = """
import torch

torch.set_num_threads(1)

@torch.no_grad()
def compute(model):
    model = model.double().eval()
    if model.config.model_type == "hybrid_axial_mapper":
        shape = (model.config.proxy_num_layers, model.config.proxy_num_heads, 40)
        return model.predict(torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return model(torch.arange(3, 30)[None], use_cache=False).logits
"""

PUSH = """
import huggingface_hub
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from tiny_models import tiny_model
from tiny_texts import tiny_tokenizer
from nearfar import HybridAxialMapper

result, card = sys.argv[1:]
expected, api = {}, HfApi()
dar = tiny_dar(dtype=torch.float32)
proxyformer = tiny_proxyformer(dtype=torch.float32, vocab_size=200, retained_blocks=1, distance_ratios=[[8, 8]])
sizes = {"hidden_size": 32, "intermediate_size": 64}
mapper = HybridAxialMapper.for_models(tiny_model("llama"), tiny_model("qwen3"), **sizes)

# A first push, and the weights changed and pushed again; the tag stays with the first.
first = dar.push_to_hub("dar")
expected["dar v1"] = compute(dar)
api.create_tag("me/dar", tag="v1")
with torch.no_grad():
    dar.float().lm_head.weight.mul_(2)
second = dar.push_to_hub("me/dar")
expected["dar"] = compute(dar)
dar.float().push_to_hub("me/dar")  # nothing has changed

# Another branch of the same repository.
with torch.no_grad():
    dar.lm_head.weight.mul_(2)
api.create_branch("me/dar", branch="wide")
dar.push_to_hub("me/dar", revision="wide")
expected["dar wide"] = compute(dar)

# In shards, beside a tokenizer, with a card that says what was measured; a push leaves the card's data alone.
proxyformer.push_to_hub("me/proxyformer", max_shard_size="10KB")
tiny_tokenizer().push_to_hub("me/proxyformer")
card = ModelCard.load(card)
if int(huggingface_hub.__version__.partition(".")[0]) < 2:
    card.validate = lambda **options: None  # it asks huggingface.co, whatever HF_ENDPOINT says
card.push_to_hub("me/proxyformer")
proxyformer.push_to_hub("me/proxyformer", max_shard_size="10KB")
expected["proxyformer"] = compute(proxyformer)
mapper.float().push_to_hub("me/mapper")
expected["mapper"] = compute(mapper)

# Here the Hub's repositories load as the library's own classes.
for name, pushed in {"dar": dar, "proxyformer": proxyformer, "mapper": mapper}.items():
    auto_class = AutoModel if name == "mapper" else AutoModelForCausalLM
    loaded = auto_class.from_pretrained(f"me/{name}", revision="main")
    assert type(loaded) is type(pushed), type(loaded)
    assert torch.equal(compute(loaded), expected[name]), name
torch.save({"expected": expected, "commits": [first.oid, second.oid]}, result)
"""

PULL = """
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

result, first = sys.argv[1:]
found = {}

def load(auto_class, name, **options):
    model = auto_class.from_pretrained(f"me/{name}", trust_remote_code=True, **options)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model

found["dar"] = compute(load(AutoModelForCausalLM, "dar"))
found["dar v1"] = compute(load(AutoModelForCausalLM, "dar", revision="v1"))
found["dar commit"] = compute(load(AutoModelForCausalLM, "dar", revision=first))
found["dar wide"] = compute(load(AutoModelForCausalLM, "dar", revision="wide"))
proxyformer = load(AutoModelForCausalLM, "proxyformer")
found["proxyformer"] = compute(proxyformer)
ids = AutoTokenizer.from_pretrained("me/proxyformer")("abc", return_tensors="pt").input_ids
found["tokens"] = proxyformer.generate(ids, max_new_tokens=9, do_sample=False)
mapper = load(AutoModel, "mapper")
found["mapper"] = compute(mapper)
# And from here, where nothing of nearfar is installed, to another repository.
proxyformer.float().push_to_hub("me/proxyformer-again", max_shard_size="10KB")
mapper.float().push_to_hub("me/mapper-again")
load(AutoModelForCausalLM, "dar").push_to_hub("me/dar-again")
found["again"] = compute(load(AutoModelForCausalLM, "dar-again"))
torch.save(found, result)
"""

LOAD_ONE = """
from transformers import AutoModel, AutoModelForCausalLM

name, result = sys.argv[1:]
auto_class = AutoModel if name == "mapper" else AutoModelForCausalLM
torch.save(compute(auto_class.from_pretrained(f"me/{name}", trust_remote_code=True)), result)
"""


@dataclass(frozen=True)
class Exchange:
    hub: LocalHub
    expected: dict[str, torch.Tensor]
    found: dict[str, Any]
    commits: list[str]


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exchange]:
    folder = tmp_path_factory.mktemp("hub")
    card = card_data("proxyformer", ["proxyformer"], [Metric("perplexity", 12.5, "Some text")], license="apache-2.0")
    (folder / "README.md").write_text(f"---\n{card.to_yaml()}\n---\n\n# A card of its own\n", encoding="utf-8")
    find = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
    with LocalHub() as hub:
        for name in ("pusher", "puller"):
            (folder / name).mkdir()
        online = hub.client_environment(folder / "home")
        pushed, pulled = folder / "pushed.pt", folder / "pulled.pt"
        finish(start(find + COMPUTE + PUSH, pushed, folder / "README.md", cwd=folder / "pusher", **online))
        said = torch.load(pushed)
        finish(start(HIDE + COMPUTE + PULL, pulled, said["commits"][0], cwd=folder / "puller", **online))
        yield Exchange(hub, said["expected"], torch.load(pulled), said["commits"])


def sources(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".py")}


def weights(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    shards = [load(content) for name, content in files.items() if name.endswith(".safetensors")]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def test_what_was_pushed_is_what_is_pulled(exchange: Exchange) -> None:
    for name, expected in exchange.expected.items():
        assert expected.abs().mean() > 1e-3 and torch.equal(exchange.found[name], expected), name
    assert torch.equal(exchange.found["dar commit"], exchange.expected["dar v1"])
    assert not torch.equal(exchange.expected["dar"], exchange.expected["dar v1"])
    assert exchange.found["tokens"].shape[1] >= 4


def test_a_second_push_changes_only_what_has_changed(exchange: Exchange) -> None:
    first, second = (exchange.hub.files("me/dar", commit) for commit in exchange.commits)
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}
    assert first.keys() == second.keys()
    # The third push of the same weights made no commit: first, second, and that of the other branch.
    assert len([c for c in exchange.hub.repositories["me/dar"].commits.values() if c]) == 3
    assert exchange.hub.files("me/dar", "v1") == first
    assert exchange.hub.files("me/dar") == second != exchange.hub.files("me/dar", "wide")


@pytest.mark.parametrize("kind", KINDS)
def test_pushing_from_a_process_without_nearfar_changes_no_file(exchange: Exchange, kind: str) -> None:
    before, after = exchange.hub.files(f"me/{kind}"), exchange.hub.files(f"me/{kind}-again")
    assert sources(before) and sources(before) == sources(after)
    assert json.loads(before["config.json"])["auto_map"] == json.loads(after["config.json"])["auto_map"]
    if kind == "proxyformer":  # transformers cuts a model that it has loaded into other shards
        first, second = weights(before), weights(after)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    else:
        assert before["model.safetensors"] == after["model.safetensors"]


def test_shards(exchange: Exchange) -> None:
    files = exchange.hub.files("me/proxyformer")
    index = json.loads(files["model.safetensors.index.json"])
    shards = set(index["weight_map"].values())
    assert len(shards) > 2 and shards <= files.keys() and "model.safetensors" not in files


@pytest.mark.parametrize("kind", KINDS)
def test_cards(exchange: Exchange, kind: str) -> None:
    card = ModelCard(exchange.hub.files(f"me/{kind}")["README.md"].decode())
    tag = {"mapper": "proxykv"}.get(kind, kind)
    assert card.data.library_name == "transformers" and {"nearfar", tag} <= set(card.data.tags)
    if kind == "proxyformer":  # the user's own card
        assert "# A card of its own" in card.text and card.data.license == "apache-2.0"
        assert card.data.pipeline_tag == "text-generation"
        (result,) = card.data.eval_results
        assert (result.metric_type, result.metric_value, result.dataset_name) == ("perplexity", 12.5, "Some text")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eight_processes_at_once(exchange: Exchange, kind: str, tmp_path: Path) -> None:
    """All with one empty cache of files and of modules."""
    online = exchange.hub.client_environment(tmp_path / "home")
    results = [tmp_path / f"{number}.pt" for number in range(8)]
    script = HIDE + COMPUTE + LOAD_ONE
    started = [start(script, Path(kind), result, cwd=tmp_path, **online) for result in results]
    outputs = [process.communicate(timeout=280)[0] for process in started]
    for process, output, result in zip(started, outputs, results, strict=True):
        if process.returncode:  # transformers copies modules without a lock (its issue 27421): see test_remote_code.py
            assert "transformers_modules" in output, output
            finish(start(script, Path(kind), result, cwd=tmp_path, **online))
    assert all(torch.equal(torch.load(result), exchange.expected[kind]) for result in results)
