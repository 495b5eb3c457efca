"""Caches of commands: their arguments, and the proxies and mappers that they need."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nearfar import cli_loading
from nearfar.cli_arguments import positive_int, positive_share
from nearfar.cli_messages import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_BUDGET = 512
# And proxykv, where it can be had. KVzip reads a context twice and H2O in pieces: `--caches all` has them.
DEMO_CACHES = ("full", "streaming_llm", "snapkv", "proactive")
# A proxy of the packaged model and its mapper, in a checkout.
KEPT_PROXY, KEPT_MAPPER = "checkpoints/smollm2-proxy", "checkpoints/smollm2-mapper"


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budget")
    group.add_argument(
        "--budget", type=positive_int, default=None, metavar="N",
        help=f"tokens kept per layer and key-value head on average (default: {DEFAULT_BUDGET})",
    )  # fmt: skip
    group.add_argument(
        "--retention-ratio", type=positive_share, default=None, metavar="R",
        help="share of the context's pairs to keep, in (0, 1], instead of a budget",
    )  # fmt: skip
    group.add_argument(
        "--prototypes", default=None, metavar="DIR_OR_ID",
        help="fitted prototypes for the caches that need them (default: those that come with nearfar for this model)",
    )  # fmt: skip
    group.add_argument(
        "--proxy", default=None, metavar="DIR_OR_ID",
        help="the small model that the iam and proxykv caches read the prompt with (for the packaged model: "
        f"{KEPT_PROXY}, where it is there)",
    )  # fmt: skip
    group.add_argument(
        "--mapper", default=None, metavar="DIR_OR_ID",
        help="the mapper of the proxykv cache, trained for both models (for the packaged model: "
        f"{KEPT_MAPPER}, where it is there)",
    )  # fmt: skip
    group.add_argument(
        "--cache-option", action="append", default=[], type=cache_option, metavar="[CACHE.]KEY=VALUE",
        help="a further argument of a cache, for example proactive.head=mlp or sink_tokens=8; repeatable",
    )  # fmt: skip


def cache_option(text: str) -> tuple[str | None, str, Any]:
    """`[CACHE.]KEY=VALUE` as (cache or None, key, value); the value is a Python literal, or else a string."""
    target, equals, value = text.partition("=")
    cache, _, key = target.rpartition(".")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"must look like KEY=VALUE or CACHE.KEY=VALUE, got {text!r}")
    try:
        return cache or None, key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return cache or None, key, value


def resolve_budget(args: argparse.Namespace) -> None:
    if args.budget is not None and args.retention_ratio is not None:
        raise UserError("give --budget or --retention-ratio, not both")
    if args.budget is None and args.retention_ratio is None:
        args.budget = DEFAULT_BUDGET


def check_cache_names(names: Sequence[str]) -> None:
    from nearfar.modeling.cache_registry import CACHES

    for name in names:
        if name not in CACHES:
            known = ", ".join(CACHES)
            raise UserError(f"unknown cache {name!r}; known caches: {known}")
    if len(set(names)) != len(names):
        raise UserError(f"a cache is named twice in {','.join(names)}")


def cache_options(args: argparse.Namespace, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keyword arguments for each cache, out of --prototypes and --cache-option; refuses a budget it cannot honour."""
    from nearfar.modeling.budgets import check_budget
    from nearfar.modeling.cache_registry import CACHES, check_options
    from nearfar.modeling.pruned_cache import SINK_TOKENS, PrunedCache

    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for flag, needed in (("proxy", "needs_proxy"), ("mapper", "needs_mapper")):
        if getattr(args, flag) is not None and not any(getattr(CACHES[name], needed) for name in names):
            raise UserError(f"--{flag} was given, but none of {', '.join(names)} uses a {flag}")
    for name in names:
        for flag, needed in (("proxy", "needs_proxy"), ("mapper", "needs_mapper")):
            if getattr(CACHES[name], needed) and proxy_sources(args)[flag] is None:
                raise UserError(
                    f"the {name} cache needs --{flag}: {_HOW_TO_MAKE[flag]} (with the packaged model it is looked for "
                    f"in {KEPT_PROXY if flag == 'proxy' else KEPT_MAPPER})"
                )
    wanting = [name for name in names if CACHES[name].needs_prototypes]
    if args.prototypes is not None:
        if not wanting:
            raise UserError(f"--prototypes was given, but none of {', '.join(names)} uses prototypes")
        for name in wanting:
            options[name]["prototypes"] = args.prototypes
    for cache, key, value in args.cache_option:
        if cache is not None and cache not in options:
            raise UserError(f"--cache-option {cache}.{key}: {cache} is not among the caches {', '.join(names)}")
        # Without a name an option goes to every cache that prunes.
        for name in [cache] if cache is not None else [name for name in names if name != "full"]:
            options[name][key] = value
    for name in names:
        factory, given = CACHES[name].factory, options[name]
        try:
            check_options(name, given)
            if isinstance(factory, type) and issubclass(factory, PrunedCache):
                sinks, recent = given.get("sink_tokens", SINK_TOKENS), given.get("recent_tokens")
                check_budget(args.budget, args.retention_ratio, sinks, recent)
        except TypeError as error:
            raise UserError(f"--cache-option: {error}") from None
    return options


_HOW_TO_MAKE = {
    "proxy": "a small model with the same tokenizer; `nearfar convert proxy` makes one",
    "mapper": "`nearfar train-mapper` trains one for a proxy and a target",
}


def proxy_sources(args: argparse.Namespace) -> dict[str, str | None]:
    """Where the proxy and the mapper are: as given, or for the packaged model those that are kept with the source."""
    found: dict[str, str | None] = {"proxy": args.proxy, "mapper": args.mapper}
    if args.model in (None, cli_loading.DEMO_MODEL) and args.proxy is None:
        kept = {"proxy": cli_loading.kept_checkpoint(KEPT_PROXY), "mapper": cli_loading.kept_checkpoint(KEPT_MAPPER)}
        for name, folder in kept.items():  # a mapper goes with its proxy
            if found[name] is None and all(kept.values()):
                found[name] = str(folder)
    return found


def own_cache(config: PreTrainedConfig) -> str | None:
    """The kind of a model that compresses by itself and makes its own cache; None for all others."""
    from nearfar.evaluation.context_reading import OWN_CACHE_MODELS

    kind: str = config.model_type
    return kind if kind in OWN_CACHE_MODELS and getattr(config, "has_bottleneck", True) else None


def add_scorers(
    options: dict[str, dict[str, Any]],
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load the proxy and the mapper for the caches that need them, as their option `scorer`.

    Raises:
        UserError: they cannot be loaded, or do not go together.
    """
    from transformers import AutoConfig

    from nearfar.configuration.configuration_axial_mapper import HybridAxialMapperConfig
    from nearfar.modeling.cache_iam import IAMScorer
    from nearfar.modeling.cache_registry import CACHES
    from nearfar.modeling.kvzip_scores import RepeatPrompt
    from nearfar.modeling.modeling_axial_mapper import HybridAxialMapper
    from nearfar.modeling.proxy_scorer import ProxyScorer

    wanting = [name for name in options if CACHES[name].needs_proxy and "scorer" not in options[name]]
    if not wanting:
        return
    sources = proxy_sources(args)
    assert sources["proxy"] is not None
    source = cli_loading.model_source(sources["proxy"])
    tokenizers = (cli_loading.load_tokenizer(source), tokenizer)
    proxy = cli_loading.load_model(source, device, dtype)
    prompt = RepeatPrompt.from_tokenizer(tokenizer)
    for name in wanting:
        if not CACHES[name].needs_mapper:
            options[name]["scorer"] = IAMScorer(
                proxy, prompt, prefix_length=None, proxy_tokenizer=tokenizers[0], target_tokenizer=tokenizers[1]
            )
            continue
        assert sources["mapper"] is not None
        with cli_loading.loading_errors(sources["mapper"]):
            kind = AutoConfig.from_pretrained(sources["mapper"]).model_type
            if kind != HybridAxialMapperConfig.model_type:
                raise ValueError(f"it is no mapper, but a {kind} model; {_HOW_TO_MAKE['mapper']}")
            # In float32 also on a GPU: scores that differ by little would be equal in half precision.
            mapper = HybridAxialMapper.from_pretrained(sources["mapper"], dtype="float32").to(device).eval()
        options[name]["scorer"] = ProxyScorer(proxy, mapper, *tokenizers, prefix_ids=prompt.prefix)
