"""Read a document once, keep a compressed context on disk, and ask it several questions.

    python examples/compress_once_ask_often.py --model DIR --document essay.txt \
        --question "Who is it about?" --question "What happened in the end?" --save essay.context

A second run with the same --save file does not read the document again. With --kvzip it is read twice the first time:
what the model needs to repeat the document is kept, in place of its beginning and its end.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearfar import KVzipCache, StreamingLLMCache
from nearfar.modeling.compat import cache_argument


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--question", action="append", required=True)
    parser.add_argument("--save", type=Path, required=True, help="the compressed context")
    parser.add_argument("--retention-ratio", type=float, default=0.25)
    parser.add_argument("--kvzip", action="store_true", help="choose by having the model repeat the document")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    document = tokenizer(args.document.read_text(encoding="utf-8"), return_tensors="pt").input_ids

    policy = KVzipCache if args.kvzip else StreamingLLMCache
    if args.save.is_file():
        cache = policy.load_context(args.save, model)
    else:
        cache = policy(model, retention_ratio=args.retention_ratio)
        if isinstance(cache, KVzipCache):
            cache.compress_context(model, document, tokenizer)
        else:
            with torch.no_grad():
                model(document, logits_to_keep=1, **{cache_argument(model): cache})
        cache.save_context(args.save)
    print(f"{cache.get_seq_length()} tokens read, {cache.kept_pairs()} pairs kept")

    snapshot = cache.snapshot()
    for question in args.question:
        asked = tokenizer(f"\n\n{question}\n", return_tensors="pt", add_special_tokens=False).input_ids
        prompt = torch.cat([document, asked], dim=1)  # generate feeds only what the cache has not seen
        output = model.generate(prompt, past_key_values=cache, max_new_tokens=args.max_new_tokens, do_sample=False)
        print(f"\n{question}\n  {tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()}")
        cache.restore(snapshot)


if __name__ == "__main__":
    main()
