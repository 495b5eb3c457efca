"""A pruning policy of your own: one method, and it works with `generate`, beams, batches, files and the demo.

    python examples/own_policy.py --model DIR --prompt "…"

This one keeps the pairs whose values are longest: a value near zero adds nothing to any output.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearfar import PrunedCache
from nearfar.modeling.cache_registry import make_cache, register_cache
from nearfar.modeling.pruned_cache import TokenStates


class LongestValuesCache(PrunedCache):
    """Score: the norm of the value, on a common scale for all heads of a layer."""

    default_allocation = "head"

    def score(self, states: TokenStates) -> torch.Tensor:
        return states.values.float().norm(dim=-1)  # (batch, heads, tokens)


def register() -> None:
    register_cache(
        "longest_values",
        LongestValuesCache,
        label="Longest values",
        description="keeps the pairs whose values have the largest norm",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--budget", type=int, default=64)
    args = parser.parse_args()

    register()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    cache = make_cache("longest_values", model, budget=args.budget)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    print(cache)


if __name__ == "__main__":
    main()
