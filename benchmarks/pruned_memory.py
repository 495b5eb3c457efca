"""Memory of a pruned cache: what the allocator gives it, against the pairs it keeps.

    python benchmarks/pruned_memory.py                       # Llama-3.1-8B's shape, random weights, 32 K tokens (GPU)
    python benchmarks/pruned_memory.py --layers 4 --hidden-size 256 --context-tokens 2048 --device cpu --dtype float32

One prefill with each cache, same model and tokens. Columns:

- pairs: key-value pairs kept, all layers and heads;
- pairs x bytes: what their keys and values take at the model's dtype;
- cache bytes: all tensors of the cache, bookkeeping and spare places included;
- allocated: growth of the device allocator's memory from before the prefill to after it (GPU only);
- peak held: the most the cache held at any moment of the prefill, with the layer then being evicted, and the same over
  (kept + one full layer);
- allocator peak: the allocator's high-water mark of the prefill less that of the same prefill without any cache;
- prefill: seconds of a second prefill with a new cache, eviction included;
- scoring: of these, the time in the policy's `score` (on a GPU between two events on its stream), in %.

Proactive scores with random prototypes of the model's shape: they cost what fitted ones cost.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from decode_scaling import random_prototypes
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.cache_proactive import ProactiveCache
from nearfar.modeling.cache_random import RandomCache
from nearfar.modeling.cache_registry import cache_kept_pairs, cache_nbytes
from nearfar.modeling.cache_streaming_llm import StreamingLLMCache
from nearfar.modeling.compat import cache_argument
from nearfar.modeling.pruned_cache import PrunedCache, TokenStates


def watched(policy: type[PrunedCache]) -> Any:
    """`policy`, noting at each layer's eviction what the cache and the arriving layer hold together, and its time."""

    class Watched(policy):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.peak_bytes = 0
            self.clocks: list[tuple[Any, Any]] = []

        def score(self, states: TokenStates) -> torch.Tensor:
            arriving = states.keys.numel() * states.keys.element_size()
            arriving += states.values.numel() * states.values.element_size()
            self.peak_bytes = max(self.peak_bytes, self.nbytes() + arriving)
            start = _now(states.keys)
            scores = super().score(states)
            self.clocks.append((start, _now(states.keys)))
            return scores

        def scoring_seconds(self) -> float:
            return sum(_seconds(start, end) for start, end in self.clocks)

    Watched.__name__ = policy.__name__
    return Watched


def _now(states: torch.Tensor) -> Any:
    if not states.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


def prefill(model: Any, ids: torch.Tensor, cache: Any) -> tuple[int, int, float]:
    """Allocated bytes added by the prefill, its high-water mark above the start (0 off the GPU), and seconds."""
    on_gpu = ids.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    options = {"use_cache": False} if cache is None else {cache_argument(model): cache}
    start = time.perf_counter()
    with torch.no_grad():
        model(ids, logits_to_keep=1, **options)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if not on_gpu:
        return 0, 0, seconds
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--retention-ratio", type=float, default=0.3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file too")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2 * args.context_tokens,
    )
    dtype = getattr(torch, args.dtype)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.randint(0, config.vocab_size, (1, args.context_tokens), device=args.device)
    head_dim = args.hidden_size // args.heads
    pair_bytes = 2 * head_dim * dtype.itemsize
    layer_bytes = args.context_tokens * args.kv_heads * pair_bytes

    prefill(model, ids, None)
    _, bare_peak, _ = prefill(model, ids, None)
    options = {"retention_ratio": args.retention_ratio}
    prototypes = random_prototypes(model)
    policies = [
        ("full", lambda: DynamicCache(config=config)),
        ("streaming_llm", lambda: watched(StreamingLLMCache)(model, **options)),
        ("random, global budgets", lambda: watched(RandomCache)(model, **options)),
        ("proactive, head budgets",
         lambda: watched(ProactiveCache)(model, prototypes=prototypes, allocation="head", **options)),
        ("proactive, global budgets", lambda: watched(ProactiveCache)(model, prototypes=prototypes, **options)),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, make in policies:
        cache = make()
        allocated, peak, _ = prefill(model, ids, cache)
        again = make()
        _, _, seconds = prefill(model, ids, again)
        scoring = again.scoring_seconds() if hasattr(again, "scoring_seconds") else 0.0
        del again
        kept = cache_kept_pairs(cache)
        row = {
            "cache": name,
            "pairs": kept,
            "pair_bytes": kept * pair_bytes,
            "cache_bytes": cache_nbytes(cache),
            "allocated": allocated,
            "peak_held": getattr(cache, "peak_bytes", cache_nbytes(cache)),
            "allocator_peak": peak - bare_peak,
            "prefill_seconds": seconds,
            "scoring_seconds": scoring,
        }
        row["peak_over_kept_and_a_layer"] = row["peak_held"] / (row["pair_bytes"] + layer_bytes)
        rows.append(row)
        del cache

    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(
        f"{device}; Llama shape, random weights: {args.layers} layers, {args.heads}/{args.kv_heads} heads of "
        f"{head_dim}, {args.dtype}; {args.context_tokens} tokens, batch 1, retention ratio {args.retention_ratio}; "
        f"one layer in full: {layer_bytes / 2**20:.1f} MiB"
    )
    mib = 2**20
    print(f"{'cache':24} {'pairs':>10} {'pairs x bytes':>14} {'cache bytes':>16} {'allocated':>16} "
          f"{'peak held':>18} {'allocator peak':>15} {'prefill':>9} {'scoring':>8}")  # fmt: skip
    for row in rows:
        kept_mib = row["pair_bytes"] / mib
        over = 100 * (row["cache_bytes"] / row["pair_bytes"] - 1)
        grown = 100 * (row["allocated"] / row["pair_bytes"] - 1)
        allocated_text = f"{row['allocated'] / mib:.1f} ({grown:+.1f} %)" if row["allocated"] else "-"
        print(
            f"{row['cache']:24} {row['pairs']:>10} {kept_mib:>10.1f} MiB {row['cache_bytes'] / mib:>7.1f} "
            f"({over:+.1f} %) {allocated_text:>16} {row['peak_held'] / mib:>9.1f} "
            f"(x {row['peak_over_kept_and_a_layer']:.3f}) {row['allocator_peak'] / mib:>11.1f} MiB "
            f"{row['prefill_seconds']:>7.2f} s {100 * row['scoring_seconds'] / row['prefill_seconds']:>6.2f} %"
        )
    if args.out:
        figures = json.dumps({"device": device, "arguments": vars(args) | {"out": None}, "rows": rows}, indent=2)
        write_beside(args.out, lambda file: file.write_text(figures + "\n", encoding="utf-8"))


if __name__ == "__main__":
    main()
