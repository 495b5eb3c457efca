"""`nearfar generate`: arguments and command. Like `cli`, importing it imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nearfar import cli_loading
from nearfar.cli_arguments import add_command, positive_int, positive_share, random_seed, temperature
from nearfar.cli_caches import (
    add_budget_arguments,
    add_scorers,
    cache_options,
    check_cache_names,
    own_cache,
    resolve_budget,
)
from nearfar.cli_machine import add_machine_arguments, find_device, find_dtype, set_threads
from nearfar.cli_messages import UserError, say


def add_generate(commands: Any) -> None:
    """Add `generate`."""
    parser = add_command(
        commands,
        "generate",
        _generate,
        help="generate text from a prompt with a pruned cache",
        description="Generate from a prompt, printing the text as it comes; to standard error, what the cache held.",
    )
    parser.add_argument(
        "--model", default=None, metavar="ID_OR_DIR", help="a causal language model (default: the packaged one)"
    )
    parser.add_argument(
        "--cache",
        default="proactive",
        metavar="NAME",
        help="which cache; `full` prunes nothing, and is what a DAR or a ProxyFormer makes itself",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", default=None, metavar="TEXT")
    prompt.add_argument("--prompt-file", default=None, metavar="FILE", help="UTF-8 text; - for standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, metavar="N")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy decoding")
    parser.add_argument(
        "--top-p",
        type=positive_share,
        default=1.0,
        metavar="P",
        help="with a temperature: sample from the likeliest tokens of this total probability",
    )
    parser.add_argument("--seed", type=random_seed, default=0, help="of the sampling")
    add_budget_arguments(parser)
    add_machine_arguments(parser)


def _generate(args: argparse.Namespace) -> int:
    resolve_budget(args)
    prompt = _read_prompt(args)
    check_cache_names([args.cache])
    options = cache_options(args, [args.cache])[args.cache]
    device = find_device(args)
    dtype = find_dtype(args, device)

    import torch
    from transformers import TextStreamer, set_seed

    from nearfar.modeling.cache_kvzip import KVzipCache
    from nearfar.modeling.cache_proxykv import ProxyKVCache
    from nearfar.modeling.cache_registry import CACHES, cache_kept_pairs, cache_nbytes, make_cache
    from nearfar.modeling.compat import CACHE_FIELD, cache_argument

    source = cli_loading.model_source(args.model)
    tokenizer = cli_loading.load_tokenizer(source)
    if args.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"--chat: the tokenizer of {args.model} has no chat template")
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise UserError("the prompt is empty")
    loaded = cli_loading.load_config(source)
    cli_loading.check_length(loaded, length + args.max_new_tokens, "the prompt with the new tokens")
    cli_loading.check_vocabulary(loaded, tokenizer, source)
    own = own_cache(loaded)
    if own is not None and args.cache != "full":
        raise UserError(
            f"--cache {args.cache}: {args.model} is a {own} model, which compresses by itself and makes its own "
            "cache; give --cache full"
        )

    set_threads(args, device)
    model = cli_loading.load_model(source, device, dtype)
    add_scorers({args.cache: options}, args, tokenizer, device, dtype)
    cache: Any = None  # its own
    try:
        if own is None:
            cache = make_cache(args.cache, model, budget=args.budget, retention_ratio=args.retention_ratio, **options)
    except TypeError as error:  # an option of the wrong type
        raise UserError(f"--cache {args.cache}: {error}") from None
    # Greedy decoding must not inherit sampling settings from the checkpoint: they would be warned about.
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    set_seed(args.seed)
    if isinstance(cache, KVzipCache):
        if length < 2:
            raise UserError("--cache kvzip reads the prompt but for its last token first: give a longer one")
        cache.compress_context(model, inputs["input_ids"][:, :-1], tokenizer)  # generate reads the last token
    if isinstance(cache, ProxyKVCache):
        cache.score_prompt(inputs["input_ids"].to(device))
    with torch.no_grad():
        generated = model.generate(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            **({} if own is not None else {cache_argument(model): cache}),
            return_dict_in_generate=True,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    sys.stdout.flush()
    new = generated.sequences.shape[1] - length
    if own is not None:
        held = getattr(generated, CACHE_FIELD, None) or generated.past_key_values
        say(f"[own cache of {own}: {length} prompt tokens, {new} new; {cache_nbytes(held):,} bytes]")
        return 0
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    seen = cache.get_seq_length() * heads * config.num_hidden_layers
    say(
        f"[{CACHES[args.cache].label}: {length} prompt tokens, {new} new; "
        f"{cache_kept_pairs(cache):,} key-value pairs held of {seen:,} seen, {cache_nbytes(cache):,} bytes]"
    )
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file == "-":
        prompt = sys.stdin.read()
    else:
        path = Path(args.prompt_file)
        if path.is_dir():
            raise UserError(f"--prompt-file {path} is a folder; give a file")
        if not path.is_file():
            raise UserError(f"no such prompt file: {path}")
        try:
            prompt = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text") from None
    if not prompt.strip():
        raise UserError("the prompt is empty")
    return str(prompt)
