"""The real SmolLM2-135M-Instruct, from its package: what the fitted prototypes are worth, and exactness in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from nearfar import ProactiveCache, StreamingLLMCache
from nearfar.conversion.packaged_model import packaged_essays_dir, packaged_model_dir
from nearfar.evaluation.comparison import prefill
from nearfar.evaluation.needles import ask_needle, needle_trials

pytestmark = pytest.mark.slow
TRIALS = 5


@pytest.fixture(scope="module")
def smollm2():
    folder = packaged_model_dir(quiet=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def test_needles_survive_where_streaming_llm_loses_them(smollm2) -> None:
    model, tokenizer = smollm2
    essays = [(packaged_essays_dir(quiet=True) / f"{name}.txt").read_text() for name in ("worked", "popular")]
    found = {"full": 0, "proactive": 0, "streaming": 0}
    for trial in needle_trials(tokenizer, essays, TRIALS, context_tokens=1200, seed=3):
        full = DynamicCache(config=model.config)
        prefill(model, full, trial.context_ids)
        caches = {
            "full": full,
            "proactive": ProactiveCache(model, retention_ratio=0.5).ingest(full),
            "streaming": StreamingLLMCache(model, retention_ratio=0.25).ingest(full),
        }
        for name, cache in caches.items():
            found[name] += ask_needle(model, cache, trial.needles[0]).hit
    assert found["full"] >= 3
    assert found["proactive"] >= found["full"] - 1
    assert found["streaming"] < found["proactive"]


def test_a_prefill_with_the_cache_equals_ingesting_a_full_one(smollm2) -> None:
    model, tokenizer = smollm2
    ids = tokenizer((packaged_essays_dir(quiet=True) / "worked.txt").read_text()).input_ids[:900]
    full, direct = DynamicCache(config=model.config), ProactiveCache(model, budget=128)
    prefill(model, full, ids)
    prefill(model, direct, ids)
    ingested = ProactiveCache(model, budget=128).ingest(full)
    assert direct.kept_pairs() == 128 * 30 * 3
    for layer in range(30):
        assert direct.kept_columns(layer) == ingested.kept_columns(layer)
