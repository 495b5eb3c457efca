"""Adapters of the `peft` package on both models: default targets, saving, loading, merging, and quantised bases.

The logits of a model with an adapter are those of the model that the adapter is merged into.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from proxyformer_models import tiny_proxyformer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

peft = pytest.importorskip("peft")
TARGETS = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

Make = Callable[..., Any]
MODELS: list[tuple[Make, set[str]]] = [
    (tiny_dar, {"query_key_value", "bottleneck_down", "bottleneck_up"}),
    (tiny_proxyformer, {"q_proj", "v_proj", "proxy_k_proj", "proxy_v_proj"}),
]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("make", "targets"), MODELS)
def test_save_load_merge(make: Make, targets: set[str], tmp_path: Path) -> None:
    """With the targets that peft is told, whatever it knew before."""
    base = make()
    base.save_pretrained(tmp_path / "base")
    TARGETS.pop(base.config.model_type, None)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora(init_lora_weights=False))
    model.eval()
    assert model.peft_config["default"].target_modules == targets
    tokens = ids(2, 23)
    with torch.no_grad():
        adapted = model(tokens).logits
        assert (adapted - base(tokens).logits).abs().max() > 0.1
        with model.disable_adapter():
            assert (model(tokens).logits - base(tokens).logits).abs().max() < 1e-10
    answer = model.generate(tokens, max_new_tokens=6, do_sample=False)
    model.save_pretrained(tmp_path / "adapter")

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", trust_remote_code=True).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(merged, tmp_path / "adapter").merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, adapted)
        for other in (merged, saved):
            assert (other(tokens).logits - adapted).abs().max() < 1e-10
            assert torch.equal(other.generate(tokens, max_new_tokens=6, do_sample=False), answer)


@pytest.mark.parametrize(("make", "targets"), MODELS)
def test_an_adapter_learns_and_the_model_stays(make: Make, targets: set[str]) -> None:
    """With dropout in it, and gradient checkpointing around it."""
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    adapted = peft.get_peft_model(model, lora(lora_dropout=0.1)).train()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    tokens, losses = ids(2, 23), []
    for _ in range(8):
        loss = adapted(tokens, labels=tokens).loss
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    for name, value in adapted.merge_and_unload().state_dict().items():
        adapts = name.split(".")[-2] in targets and name.endswith("weight")
        assert torch.equal(value, before[name]) != adapts, name


def test_a_user_s_own_targets_are_kept() -> None:
    model = peft.get_peft_model(tiny_dar(), lora(target_modules=["dense"]))
    assert model.peft_config["default"].target_modules == {"dense"}
    TARGETS["dar"] = ["dense_h_to_4h"]
    try:
        model = peft.get_peft_model(tiny_dar(), lora())
        assert model.peft_config["default"].target_modules == {"dense_h_to_4h"}
    finally:
        TARGETS.pop("dar")


FRESH = """
import sys
sys.modules["nearfar"] = None
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
for folder in map(Path, sys.argv[1:]):
    tokens, logits = torch.load(folder / "expected.pt")
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", trust_remote_code=True).eval()
    assert type(loaded.base_model.model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        assert (loaded(tokens).logits - logits).abs().max() < 1e-10
    plain = AutoModelForCausalLM.from_pretrained(folder / "base", trust_remote_code=True)
    print(sorted(get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM")).peft_config["default"].target_modules))
"""


def test_without_nearfar(tmp_path: Path) -> None:
    """In a process that has only the checkpoint's own code: the adapter loads, and a new one finds its targets."""
    folders = []
    for make, _ in MODELS:
        folder = tmp_path / make.__name__
        model = make()
        model.save_pretrained(folder / "base")
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        model = peft.get_peft_model(model, lora(init_lora_weights=False)).eval()
        model.save_pretrained(folder / "adapter")
        tokens = ids(1, 20)
        with torch.no_grad():
            torch.save((tokens, model(tokens).logits), folder / "expected.pt")
        folders.append(str(folder))
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path / "code")}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *folders],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == [str(sorted(targets)) for _, targets in MODELS]


@pytest.mark.parametrize(
    ("make", "more"), [(tiny_dar, {"bottleneck_size": 16}), (tiny_proxyformer, {"history_hidden_size": 16})]
)
def test_qlora(make: Make, more: dict[str, Any], tmp_path: Path) -> None:
    """A frozen base in 4 bits, its far path and its head included: an adapter trains on it, is saved and loaded."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = make(dtype=torch.float32, hidden_size=64, intermediate_size=128, **more)
    model.save_pretrained(tmp_path / "base")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def quantised() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=four, device_map="cpu")

    base = quantised()
    kinds = {type(module).__name__ for module in base.modules()}
    assert "Linear4bit" in kinds
    tokens = ids(2, 23)
    with torch.no_grad():
        whole, rounded = model(tokens).logits, base.eval()(tokens).logits
    assert 0.0 < (whole - rounded).std() / whole.std() < 0.5
    adapted = peft.get_peft_model(peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False), lora())
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = adapted(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    adapted.eval().save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(quantised(), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (loaded(tokens).logits - adapted(tokens).logits).abs().max() < 1e-4
    assert loaded.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 26)
