"""A small sibling of a causal language model, for ProxyKV where its family has none: smaller, then distilled.

    distill_proxy("HuggingFaceTB/SmolLM2-135M-Instruct", "sibling", text_sources=["books/"], layers=4,
                  distillation=ProxyDistillation(steps=1000))

The result is an ordinary checkpoint of the target's own kind, with its tokenizer and a model card, that
`AutoModelForCausalLM` loads without nearfar. It is written beside its place and renamed when it is complete; what a
distillation has done so far lies in `<output>.partial`, and the same call goes on from there.

`embedding_storage="float8"` stores the embedding (and an output head of its own) as float8_e4m3fn, half the bytes;
`from_pretrained` turns them into the model's dtype as it reads them. The embedding is rounded before the distillation,
so that the layers learn beside the numbers that will be there (where the embedding is trained too: after it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from huggingface_hub import ModelCardData
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from nearfar import __version__
from nearfar.conversion.conversion_run import (
    Precision,
    Sources,
    UnfinishedWork,
    check_output,
    find_device,
    publish,
    round_weights,
    source_names,
    speaker,
    text_digest,
)
from nearfar.conversion.dar_from_pythia import block_perplexity, spread_blocks
from nearfar.conversion.dar_model_card import markdown_table, source_card_data
from nearfar.conversion.smaller_model import (
    choose_layers,
    fewer_layers,
    load_target,
    narrower,
    read_target_config,
    residual_components,
)
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.perplexity import Perplexity
from nearfar.modeling.proxy_scorer import check_same_vocabulary
from nearfar.training.proxy_distillation import ProxyDistillation, ProxyDistillationReport, distill_logits
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

__all__ = ["EMBEDDING_STORAGES", "Sibling", "distill_proxy"]

EMBEDDING_STORAGES = ("model", "float8")
_FLOAT8 = torch.float8_e4m3fn
# So many times as much text is read as is measured on: blocks spread over it are less alike.
SPREAD = 8
# Tokens that the components of a narrower stream are found from.
COMPONENT_TOKENS = 65_536
STAGES = {"target": "target", "initialised": "sibling, undistilled", "distilled": "sibling, distilled"}


@dataclass(frozen=True)
class Sibling:
    """What came out.

    Attributes:
        output: the folder that was written.
        perplexity: of the same held-out text: "target", "initialised" and, if there was a distillation, "distilled".
        record: what `conversion.json` in that folder says.
        is_main_process: whether this is the process that wrote it.
    """

    output: Path
    perplexity: dict[str, Perplexity]
    record: dict[str, Any]
    is_main_process: bool = True

    def table(self) -> str:
        """Parameters, bytes of weights and perplexities as plain text."""
        header, *rows = _rows(self.record)
        return aligned_table(header, rows)


def distill_proxy(
    source: str | Path,
    output: str | Path,
    *,
    text_sources: Sources,
    layers: int | Sequence[int] | None = None,
    hidden_size: int | None = None,
    distillation: ProxyDistillation | None = None,
    embedding_storage: Literal["model", "float8"] = "model",
    eval_sources: Sources | None = None,
    eval_tokens: int = 131_072,
    max_tokens: int | None = None,
    block_tokens: int | None = None,
    text_field: str = "text",
    split: str = "train",
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    batch_size: int = 4,
    device: str | torch.device | None = None,
    autocast: bool | None = None,
    max_shard_size: int | str = "5GB",
    work_dir: str | Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    quiet: bool = False,
) -> Sibling:
    """Make a sibling of a target and distill it.

    Under `accelerate launch` all processes call it; the distillation is shared among them, and one of them writes.

    Args:
        source: the target, a folder or a Hub id; a model of `smaller_model.MODEL_TYPES`.
        output: the folder to write; it must not exist or be empty.
        text_sources: text to distill on; see `load_token_blocks` for what it may be.
        layers: how many, or which; see `choose_layers`. `None` for all.
        hidden_size: width of the residual stream; `None` for the target's. Narrower is initialised by principal
            components of the text; see `smaller_model`.
        distillation: how to distill; `None` for the defaults, steps=0 for not at all.
        embedding_storage: "model" for the target's dtype, "float8" for half of it.
        eval_sources: text that perplexity is measured on; `None` holds the last blocks of the text out.
        eval_tokens: tokens that perplexity is measured on, at most; spread over the first `SPREAD` times as many.
        max_tokens: most tokens of the text to read; `None` for what the steps read.
        block_tokens: tokens of a block; `None` for 2,048 or the model's longest sequence.
        text_field, split: of JSON files and datasets.
        tokenizer: a folder or Hub id of a tokenizer, for a target that has none; it must be the target's.
        revision: of a Hub id.
        batch_size: blocks a forward pass in measuring.
        device: `None` for a GPU if there is one.
        autocast: bfloat16 autocast for everything that is computed; `None` for that on a GPU. The sibling's weights
            are float32 meanwhile and saved in the target's dtype.
        max_shard_size: of the saved weights.
        work_dir: where unfinished work lies, in a folder `<output's name>.partial`; `None` for beside the output.
        overwrite: replace a checkpoint at `output`, at the end.
        restart: throw away unfinished work instead of going on from it.
        quiet: no messages and no progress bars.

    Returns:
        What was written and measured.

    Raises:
        ValueError: a target of another kind, layers or a width that it does not have, another tokenizer than its own,
            text too short, an output that is not empty, unfinished work with other settings; before anything is
            computed or written.
        OSError: a target, a text or a folder that is not there.
    """
    output, source = Path(output), str(source)
    settings = ProxyDistillation() if distillation is None else distillation
    for name, value in (("eval_tokens", eval_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if embedding_storage not in EMBEDDING_STORAGES:
        raise ValueError(
            f"embedding_storage must be {' or '.join(map(repr, EMBEDDING_STORAGES))}, got {embedding_storage!r}"
        )
    check_output(output, source, overwrite)
    config = read_target_config(source, revision)
    chosen = choose_layers(config.num_hidden_layers, layers)
    width = config.hidden_size if hidden_size is None else hidden_size
    _check_size(config, chosen, width)
    longest = config.max_position_embeddings
    block_tokens = min(2048, longest) if block_tokens is None else block_tokens
    if not 2 <= block_tokens <= longest:
        raise ValueError(f"block_tokens must be between 2 and the model's {longest} positions, got {block_tokens}")

    state = PartialState()
    say = speaker(quiet or not state.is_main_process)
    own_tokenizer = _load_tokenizer(source, revision, tokenizer)
    text, evaluation = _load_text(
        own_tokenizer,
        block_tokens,
        text_sources,
        eval_sources,
        eval_tokens,
        max_tokens or max(settings.tokens(block_tokens, state.num_processes), COMPONENT_TOKENS),
        {"text_field": text_field, "split": split},
        config.vocab_size,
    )
    if settings.steps and len(text) < settings.batch_size * state.num_processes:
        raise ValueError(
            f"the text to distill on has {len(text)} blocks of {block_tokens} tokens, fewer than one batch of "
            f"{settings.batch_size} for each of {state.num_processes} process(es): give more text or a smaller "
            "batch_size"
        )

    say(f"loading {source}")
    device = find_device(device, state)
    target = load_target(source, revision=revision)
    saved_dtype = target.dtype
    # As teacher it needs no more than the dtype it came in; a CPU computes in float32.
    target = target.to(torch.float32 if device.type == "cpu" else saved_dtype).to(device).requires_grad_(False)
    precision = Precision(device, autocast)
    recorded = {
        "source": source, "revision": revision, "weights": _fingerprint(target), "layers": chosen,
        "hidden_size": width, "embedding_storage": embedding_storage, "block_tokens": block_tokens,
        "distillation": asdict(settings), "processes": state.num_processes, "text": text_digest(text),
        "held-out text": text_digest(evaluation),
    }  # fmt: skip
    work = UnfinishedWork(output, work_dir, recorded, restart, bool(settings.steps), state)
    perplexity: dict[str, Perplexity] = {}

    def measure(stage: str, model: PreTrainedModel) -> None:
        with precision.context() if model.dtype == torch.float32 else nullcontext():
            perplexity[stage] = block_perplexity(model, evaluation, batch_size=batch_size, quiet=quiet)
        say(f"perplexity, {STAGES[stage]}: {perplexity[stage].perplexity:.3f}")

    measure("target", target)
    sibling = fewer_layers(target, chosen).float()
    if width < config.hidden_size:
        blocks = spread_blocks(text, max(1, COMPONENT_TOKENS // block_tokens))
        components = residual_components(sibling, blocks, batch_size=batch_size, precision=precision.context())
        sibling = narrower(sibling, width, components)
    _round(sibling, saved_dtype, embedding_storage)
    measure("initialised", sibling)  # what is measured is what would be saved
    report = None
    if settings.steps:
        if any(work.folder.glob("distillation/checkpoint-*")):
            say(f"going on from {work.folder}")
        report = distill_logits(
            sibling, target, text, work.folder / "distillation", settings, bf16=precision.autocast, quiet=quiet
        )
        sibling.config.use_cache = target.config.use_cache  # the Trainer has turned it off
        _round(sibling, saved_dtype, embedding_storage)
        measure("distilled", sibling)

    sibling.to(saved_dtype)
    record = {
        "source": Path(source).name if Path(source).is_dir() else source,
        "revision": revision,
        "model_type": config.model_type,
        "layers": chosen,
        "target_layers": config.num_hidden_layers,
        "hidden_size": width,
        "target_hidden_size": config.hidden_size,
        "dtype": str(saved_dtype).removeprefix("torch."),
        "embedding_storage": embedding_storage,
        "parameters": {"target": target.num_parameters(), "sibling": sibling.num_parameters()},
        "bytes": {
            "target": _nbytes(target, saved_dtype, "model"),
            "sibling": _nbytes(sibling, saved_dtype, embedding_storage),
        },
        "block_tokens": block_tokens,
        "evaluation": {
            "text": source_names(text_sources if eval_sources is None else eval_sources),
            "tokens": len(evaluation) * block_tokens,
            "held_out_of_the_text": eval_sources is None,
        },
        "perplexity": {stage: value.perplexity for stage, value in perplexity.items()},
        "distillation": _described(settings, report, text_sources),
        "versions": {"nearfar": __version__, "torch": torch.__version__, "transformers": transformers_version},
    }
    if state.is_main_process:

        def write(folder: Path) -> None:
            sibling.save_pretrained(folder, max_shard_size=max_shard_size)
            if embedding_storage == "float8":
                _store_float8(folder)
            own_tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(_card(record, output.name, source, revision), encoding="utf-8")
            (folder / "conversion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            _check_written(folder, sibling)

        publish(write, output, overwrite)
        work.delete()
    state.wait_for_everyone()
    say(f"saved {output}")
    return Sibling(output, perplexity, record, state.is_main_process)


def _check_size(config: PreTrainedConfig, layers: Sequence[int], width: int) -> None:
    if not 1 <= width <= config.hidden_size:
        raise ValueError(f"hidden_size must be between 1 and the target's {config.hidden_size}, got {width}")
    if width % config.num_attention_heads:  # transformers would not save it
        raise ValueError(
            f"hidden_size must be a multiple of the target's {config.num_attention_heads} attention heads, got {width}"
        )
    if len(layers) == config.num_hidden_layers and width == config.hidden_size:
        raise ValueError(
            f"a sibling with all {config.num_hidden_layers} layers and the whole width of {config.hidden_size} is the "
            "target itself: give fewer layers or a smaller hidden_size"
        )


# --- text ------------------------------------------------------------------------------------------------------------


def _load_tokenizer(source: str, revision: str | None, given: str | Path | None) -> Any:
    """The target's tokenizer, or the one that was given for a target without.

    Raises:
        ValueError: one was given that differs from the target's, or there is none.
    """
    own = None
    try:
        own = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        if given is None:
            raise ValueError(f"{source} has no tokenizer that can be read ({error}): name one as tokenizer") from error
    if given is None:
        return own
    named = AutoTokenizer.from_pretrained(str(given))
    if own is not None:
        check_same_vocabulary(named, own)
    return named


def _load_text(
    tokenizer: Any,
    block_tokens: int,
    sources: Sources,
    eval_sources: Sources | None,
    eval_tokens: int,
    tokens: int,
    options: dict[str, str],
    vocab_size: int,
) -> tuple[TokenBlocks, TokenBlocks]:
    """Blocks to distill on, and to measure on."""

    def load(names: Sources, wanted: int) -> TokenBlocks:
        blocks = load_token_blocks(names, tokenizer, block_tokens, max_tokens=max(wanted, block_tokens), **options)
        if (highest := int(blocks.tokens.max())) >= vocab_size:
            raise ValueError(
                f"the tokenizer gives id {highest}, and the target has {vocab_size}: give the target's own"
            )
        return blocks

    count = max(1, eval_tokens // block_tokens)
    if eval_sources is not None:
        return load(sources, tokens), spread_blocks(load(eval_sources, SPREAD * count * block_tokens), count)
    everything = load(sources, tokens + count * block_tokens)
    if len(everything) < 2:
        raise ValueError(
            f"the text fills one block of {block_tokens} tokens, which leaves none to measure perplexity on: give "
            "more text, eval_sources, or a smaller block_tokens"
        )
    held_out = min(count, max(1, len(everything) // 5))
    cut = len(everything) - held_out
    return everything.part(0, cut), everything.part(cut, len(everything))


# --- weights ---------------------------------------------------------------------------------------------------------


def _vocabulary_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The embedding's and, where it is another one, the output head's."""
    weights = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())]
    return list({id(weight): weight for weight in weights}.values())


@torch.no_grad()
def _round(model: PreTrainedModel, dtype: torch.dtype, embedding_storage: str) -> None:
    """To what the checkpoint will hold; the weights' own dtype stays."""
    round_weights(model, dtype)
    if embedding_storage == "float8":
        largest = torch.finfo(_FLOAT8).max
        for weight in _vocabulary_weights(model):
            weight.copy_(weight.clamp(-largest, largest).to(_FLOAT8).to(weight.dtype))


def _nbytes(model: PreTrainedModel, dtype: torch.dtype, embedding_storage: str) -> int:
    """Bytes of the weights in a file."""
    total = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if embedding_storage == "float8":
        total -= sum(weight.numel() for weight in _vocabulary_weights(model)) * (dtype.itemsize - _FLOAT8.itemsize)
    return total


def _store_float8(folder: Path) -> None:
    """Rewrite the embedding and the output head, which hold float8 numbers already, as such."""
    saved = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata(), list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        for name, tensor in tensors.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensors[name] = tensor.to(_FLOAT8)
                saved += tensor.nbytes - tensors[name].nbytes
        save_file(tensors, path, metadata=metadata)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["metadata"]["total_size"] -= saved
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_written(folder: Path, model: PreTrainedModel) -> None:
    """Raise RuntimeError unless what was written loads as what was measured."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = loaded.state_dict()
    wrong = [
        name
        for name, tensor in model.state_dict().items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor.cpu())
    ]
    if wrong:
        raise RuntimeError(f"the checkpoint does not load as it was saved: {', '.join(wrong[:5])} differ")


def _fingerprint(model: PreTrainedModel) -> str:
    """Tells checkpoints apart by some of their numbers; all of them would take a while."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for weight in (model.model.layers[-1].mlp.down_proj.weight[:64], model.get_output_embeddings().weight[:64]):
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# --- what is told ----------------------------------------------------------------------------------------------------


def _described(
    settings: ProxyDistillation, report: ProxyDistillationReport | None, sources: Sources
) -> dict[str, Any] | None:
    if report is None:
        return None
    done = {**asdict(report), "seconds": round(report.seconds, 1)}
    return {"text": source_names(sources), "settings": asdict(settings), **done}


def _rows(record: dict[str, Any]) -> list[list[str]]:
    """Header and rows of the table that is printed and stored."""
    rows = [["model", "parameters", "MB of weights", "perplexity"]]
    for stage, value in record["perplexity"].items():
        role = "target" if stage == "target" else "sibling"
        size = f"{record['bytes'][role] / 1e6:.1f}"
        rows.append([STAGES[stage], f"{record['parameters'][role]:,}", size, f"{value:.4g}"])
    return rows


def _card(record: dict[str, Any], name: str, source: str, revision: str | None) -> str:
    """README.md, with the Hub's metadata."""
    on_hub = "/" in record["source"]
    inherited_from = source_card_data(source, revision)
    inherited = {
        field: value
        for field in ("license", "license_name", "license_link", "language")
        if (value := getattr(inherited_from, field, None)) is not None
    }
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=record["source"] if on_hub else None,
        tags=["nearfar", "proxykv"],
        **inherited,
    )
    target = f"[{record['source']}](https://huggingface.co/{record['source']})" if on_hub else f"`{record['source']}`"
    if record["revision"]:
        target += f" (revision `{record['revision']}`)"
    layers = ", ".join(map(str, record["layers"]))
    made = [f"- Layers {layers} of the target's {record['target_layers']}, copied"]
    if record["hidden_size"] < record["target_hidden_size"]:
        made.append(
            f"- Width {record['hidden_size']} of {record['target_hidden_size']}: the residual stream projected onto "
            "principal components of what the layers read"
        )
    if record["embedding_storage"] == "float8":
        made.append("- The embedding is stored as float8_e4m3fn; it loads in the model's dtype")
    distillation = record["distillation"]
    if distillation is None:
        made.append("- Not distilled")
    else:
        settings = distillation["settings"]
        trained = "all weights" if settings["train_embedding"] else "all weights but the embedding and output head"
        made.append(
            f"- Distillation of {trained}: {distillation['steps']} steps, {distillation['tokens']:,} tokens "
            f"({distillation['epochs']:.2g} times {', '.join(distillation['text'])}) in "
            f"{distillation['seconds']:.0f} s; divergence from the target's logits at temperature "
            f"{settings['temperature']:g}"
            + (f", next-token loss × {settings['next_token_weight']:g}" if settings["next_token_weight"] else "")
            + f", seed {settings['seed']}"
        )
    evaluation, versions = record["evaluation"], record["versions"]
    where = (
        "held out of the same text" if evaluation["held_out_of_the_text"] else "of " + ", ".join(evaluation["text"])
    )
    return f"""---
{data.to_yaml()}
---

# {name}

A small sibling of {target}, with the same tokenizer: a proxy whose attention ProxyKV maps to the target's scores. It
is a language model too, though a weak one.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

{markdown_table(_rows(record))}

Perplexity: {evaluation["tokens"]:,} tokens {where}, in blocks of {record["block_tokens"]:,} tokens, each read on its
own, with the weights as stored.

## How it was made

{chr(10).join(made)}
- nearfar {versions["nearfar"]}, torch {versions["torch"]}, transformers {versions["transformers"]}; \
`conversion.json` has all settings
"""
