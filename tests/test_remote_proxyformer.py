"""A saved ProxyFormer in a process that does not know nearfar."""

import json
from pathlib import Path

import torch
from proxyformer_models import tiny_proxyformer
from test_remote_code import HIDE, finish, start

READ = """
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
saved, again, result = sys.argv[1:]
given = torch.load("ids.pt")
found = []
for source in (saved, again):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, dtype=torch.float64)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        logits = model(given["ids"], use_cache=False).logits
        base = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float64)
        hidden = base(given["ids"], use_cache=False).last_hidden_state
        cache = model.encode_history(given["ids"])
        told = model(given["query"], past_key_values=cache).logits
    tokens = model.generate(given["ids"], max_new_tokens=12, do_sample=False, eos_token_id=None)
    found.append({"logits": logits, "hidden": hidden, "told": told, "tokens": tokens})
    if source == saved:
        model.save_pretrained(again)
torch.save(found, result)
"""


def test_a_checkpoint_carries_its_code(tmp_path: Path) -> None:
    # Everything that has a file of its own is used.
    model = tiny_proxyformer(
        compression_ratio=4,
        retained_blocks=1,
        distance_ratios=[[8, 8]],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randint(3, 61, (2, length), generator=generator) for name, length in (("ids", 27), ("query", 5))
    }
    torch.save(given, tmp_path / "ids.pt")
    finish(
        start(
            HIDE + READ,
            tmp_path / "model",
            tmp_path / "again",
            tmp_path / "result.pt",
            cwd=tmp_path,
        )
    )
    with torch.no_grad():
        expected = {
            "logits": model(given["ids"], use_cache=False).logits,
            "hidden": model.model(given["ids"], use_cache=False).last_hidden_state,
            "told": model(given["query"], history_ids=given["ids"], use_cache=False).logits,
            "tokens": model.generate(given["ids"], max_new_tokens=12, do_sample=False, eos_token_id=None),
        }
    for found in torch.load(tmp_path / "result.pt"):
        assert torch.equal(found["tokens"], expected["tokens"])
        for name in ("logits", "hidden", "told"):
            assert (found[name] - expected[name]).abs().max() < 1e-10, name
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("model", "again")
    )
    assert first.keys() == second.keys()
    for name, content in first.items():
        assert content == second[name] or name == "config.json", name
    saved, again = (json.loads(files["config.json"]) for files in (first, second))
    assert saved == again
