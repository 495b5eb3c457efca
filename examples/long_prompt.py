"""Generate from a long prompt with a cache that keeps a fixed number of tokens a layer.

    python examples/long_prompt.py --model HuggingFaceTB/SmolLM2-135M-Instruct --prompt-file book.txt --budget 512

Any Llama, Qwen 2/3, Mistral, Gemma 3 or GPT-NeoX checkpoint works; `generate` is transformers' own.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearfar import StreamingLLMCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=512, help="tokens to keep a layer and head")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    inputs = tokenizer(args.prompt_file.read_text(encoding="utf-8"), return_tensors="pt")

    cache = StreamingLLMCache(model, budget=args.budget)  # or ProactiveCache(model, budget=…) with fitted prototypes
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=args.max_new_tokens, do_sample=False)

    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    print(f"{cache.get_seq_length()} tokens seen, {cache.kept_pairs()} pairs kept, {cache.nbytes() / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
