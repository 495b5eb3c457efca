"""GPT-NeoX (Pythia) checkpoints to DAR: first bottleneck weights from text, optionally distilled, saved with a card.

    convert_gpt_neox_to_dar("EleutherAI/pythia-70m", "dar-70m", calibration_sources=["book.txt"], distill_steps=300)

The base weights come out as they went in, bit for bit, unless all weights are trained (stage 2 of the distillation).
The output is written beside its place and renamed when it is complete. While there is a distillation, what is done so
far lies in `<output>.partial`, and the same call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from nearfar import __version__
from nearfar.configuration.configuration_dar import DARConfig
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
from nearfar.conversion.dar_initialisation import collect_moments, initialise_bottlenecks, needs_moments
from nearfar.conversion.dar_model_card import STAGES, model_card, perplexity_rows, source_card_data
from nearfar.evaluation.comparison import aligned_table
from nearfar.evaluation.perplexity import Perplexity
from nearfar.modeling.atomic_file import write_beside
from nearfar.modeling.modeling_dar import DARForCausalLM
from nearfar.training.dar_distillation import DistillationReport, DistillationSettings, distill_dar
from nearfar.training.token_blocks import TokenBlocks, load_token_blocks

__all__ = [
    "Conversion",
    "block_perplexity",
    "cache_bytes_per_far_token",
    "convert_dar_to_gpt_neox",
    "convert_gpt_neox_to_dar",
    "dar_around",
    "dar_config",
    "load_gpt_neox",
    "read_base_config",
    "spread_blocks",
]

# What a configuration says about the file it came from, and what only DAR has.
_NOT_CARRIED = (
    "model_type",
    "architectures",
    "auto_map",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_name_or_path",
)
_DAR_FIELDS = ("window_size", "bottleneck_size", "bottleneck_activation", "uniform_bottleneck", "far_cache")
# So many times as much text is read as is calibrated or measured on: blocks spread over it are less alike.
SPREAD = 8


@dataclass(frozen=True)
class Conversion:
    """What came out.

    Attributes:
        output: the folder that was written.
        perplexity: of the same held-out text: "source", "initialised" and, if there was a distillation, "distilled".
        record: what `conversion.json` in that folder says.
        is_main_process: whether this is the process that wrote it.
    """

    output: Path
    perplexity: dict[str, Perplexity]
    record: dict[str, Any]
    is_main_process: bool = True

    def table(self) -> str:
        """The perplexities as plain text."""
        header, *rows = perplexity_rows({stage: value.perplexity for stage, value in self.perplexity.items()})
        return aligned_table(header, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The conversion
# ---------------------------------------------------------------------------------------------------------------------


def convert_gpt_neox_to_dar(
    source: str | Path,
    output: str | Path,
    *,
    calibration_sources: Sources,
    bottleneck_size: int | None = None,
    window_size: int = 128,
    method: str = "weighted",
    far_cache: str = "fast",
    calibration_tokens: int = 131_072,
    eval_sources: Sources | None = None,
    eval_tokens: int = 131_072,
    distill_steps: int = 0,
    distillation: DistillationSettings | None = None,
    distill_sources: Sources | None = None,
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
) -> Conversion:
    """Convert a GPT-NeoX checkpoint to a self-contained DAR checkpoint.

    Under `accelerate launch` all processes call it; the distillation is shared among them, and one of them writes.

    Args:
        source: a folder or a Hub id: GPT-NeoX, or a DAR with `window_size=None`, whose weights are GPT-NeoX's.
        output: the folder to write; it must not exist or be empty.
        calibration_sources: text to initialise from; see `load_token_blocks` for what it may be.
        bottleneck_size: numbers a token, from 1 to the hidden size; `None` for a quarter of it.
        window_size: tokens that are seen in full.
        method: "weighted", "svd" or "pca"; see `dar_initialisation`.
        far_cache: "fast" or "small", the default of the model's cache; see `DARConfig`.
        calibration_tokens: tokens that the initialisation is made from, at most, in blocks spread over the first
            `SPREAD` times as many.
        eval_sources: text that perplexity is measured on; `None` holds the last blocks of the calibration text out.
        eval_tokens: tokens that perplexity is measured on, at most; spread over `eval_sources` in the same way.
        distill_steps: steps of distillation with the base frozen, all else by default.
        distillation: how to distill, instead of `distill_steps`.
        distill_sources: text to distill on; `None` for the calibration text (as much of it as the steps read).
        block_tokens: tokens of a block; `None` for 2,048 or the model's longest sequence.
        text_field, split: of JSON files and datasets.
        tokenizer: a folder or Hub id to take the tokenizer from; `None` for the source.
        revision: of a Hub id, for instance "step3000".
        batch_size: blocks a forward pass in calibrating and measuring.
        device: `None` for a GPU if there is one.
        autocast: bfloat16 autocast for everything that is computed; `None` for that on a GPU. Weights are float32
            meanwhile and saved in the source's dtype.
        max_shard_size: of the saved weights.
        work_dir: where unfinished work lies, in a folder `<output's name>.partial`; `None` for beside the output.
        overwrite: replace a checkpoint at `output`, at the end.
        restart: throw away unfinished work instead of going on from it.
        quiet: no messages and no progress bars.

    Returns:
        What was written and measured.

    Raises:
        ValueError: a source that is no GPT-NeoX or lacks tensors, a value out of range, text too short, an output that
            is not empty, unfinished work with other settings; before anything is computed or written.
        OSError: a source, a text or a folder that is not there.
    """
    output, source = Path(output), str(source)
    if distillation is None:
        distillation = DistillationSettings(steps=distill_steps)
    elif distill_steps:
        raise ValueError("give distill_steps or distillation, not both")
    numbers = {"calibration_tokens": calibration_tokens, "eval_tokens": eval_tokens, "batch_size": batch_size}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_output(output, source, overwrite)
    base = read_base_config(source, revision)
    config = dar_config(base, bottleneck_size=bottleneck_size, window_size=window_size, far_cache=far_cache)
    assert config.bottleneck_size is not None
    calibrates = needs_moments(method, config.bottleneck_size, config.hidden_size)
    longest = config.max_position_embeddings
    block_tokens = min(2048, longest) if block_tokens is None else block_tokens
    if not window_size < block_tokens <= longest:
        raise ValueError(
            f"block_tokens must be more than window_size = {window_size} (or no token is ever far) and at most the "
            f"model's {longest} positions, got {block_tokens}"
        )
    if distillation.total_steps:
        distillation.check_blocks(block_tokens, window_size)

    state = PartialState()
    say = speaker(quiet or not state.is_main_process)
    notes: list[str] = []
    if base.attention_dropout:
        notes.append(
            f"attention_dropout, {base.attention_dropout} in the source, is set to 0: DAR's fast attention has none"
        )
        say(notes[-1])
    named = (source, revision) if tokenizer is None else (str(tokenizer), None)
    text = _load_text(
        AutoTokenizer.from_pretrained(named[0], revision=named[1]),
        block_tokens,
        calibration_sources, calibration_tokens, eval_sources, eval_tokens, distill_sources, distillation,
        {"text_field": text_field, "split": split}, state.num_processes, config.vocab_size,
    )  # fmt: skip

    say(f"loading {source}")
    device = find_device(device, state)
    model = load_gpt_neox(source, base, revision=revision)
    saved_dtype = model.dtype
    model = model.to(torch.float64 if saved_dtype == torch.float64 else torch.float32).to(device)
    precision = Precision(device, autocast)
    settings = {
        "source": source, "revision": revision, "weights": _fingerprint(model), "method": method,
        **{name: getattr(config, name) for name in ("bottleneck_size", "window_size")},
        "block_tokens": block_tokens, "distillation": asdict(distillation), "processes": state.num_processes,
        "calibration text": text_digest(text.calibration), "held-out text": text_digest(text.evaluation),
        "distillation text": None if text.distillation is None else text_digest(text.distillation),
    }  # fmt: skip
    work = _Work(output, work_dir, settings, restart, bool(distillation.total_steps), state)

    dar = dar_around(model, config)
    perplexity: dict[str, Perplexity] = {}

    def measure(stage: str, measured: PreTrainedModel) -> None:
        with precision.context():
            perplexity[stage] = block_perplexity(measured, text.evaluation, batch_size=batch_size, quiet=quiet)
        say(f"perplexity {STAGES[stage]}: {perplexity[stage].perplexity:.3f}")

    if work.initialised():
        say(f"going on from {work.folder}")
        perplexity = work.load(dar)
    else:
        measure("source", model)
        moments = None
        if calibrates:
            with precision.context():
                moments = collect_moments(
                    model, text.calibration, window=window_size, batch_size=batch_size, quiet=quiet
                )
        initialise_bottlenecks(dar, moments, method=method)
        # What is measured is what will be saved.
        round_weights(dar, saved_dtype, only="bottleneck")
        measure("initialised", dar)
        work.save(dar, perplexity)
    report = None
    if text.distillation is not None:
        report = distill_dar(
            dar, text.distillation, work.folder / "distillation", distillation, bf16=precision.autocast, quiet=quiet
        )
        round_weights(dar, saved_dtype)
        measure("distilled", dar)

    record = {
        "source": Path(source).name if Path(source).is_dir() else source,
        "revision": revision,
        "method": method,
        "window_size": window_size,
        "bottleneck_size": config.bottleneck_size,
        "hidden_size": config.hidden_size,
        "far_cache": far_cache,
        "dtype": str(saved_dtype).removeprefix("torch."),
        "block_tokens": block_tokens,
        "calibration": _described(text.calibration, calibration_sources) if calibrates else None,
        "evaluation": _described(text.evaluation, calibration_sources if eval_sources is None else eval_sources),
        "held_out_of_calibration_text": eval_sources is None,
        "perplexity": {stage: value.perplexity for stage, value in perplexity.items()},
        "distillation": _described_distillation(distillation, report, distill_sources or calibration_sources),
        "cache_bytes_per_far_token": cache_bytes_per_far_token(config, saved_dtype),
        "notes": notes,
        "versions": {"nearfar": __version__, "torch": torch.__version__, "transformers": transformers_version},
    }
    if state.is_main_process:
        dar.to(saved_dtype)
        # Dropout was switched off for the distillation, whose teacher and student must not differ by it.
        dar.config.hidden_dropout = base.hidden_dropout
        dar.generation_config = model.generation_config

        def write(folder: Path) -> None:
            dar.save_pretrained(folder, max_shard_size=max_shard_size)
            text.tokenizer.save_pretrained(folder)
            card = model_card(record, output.name, source_card_data(source, revision))
            (folder / "README.md").write_text(card, encoding="utf-8")
            (folder / "conversion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

        publish(write, output, overwrite)
        work.delete()
    state.wait_for_everyone()
    say(f"saved {output}")
    return Conversion(output, perplexity, record, state.is_main_process)


def convert_dar_to_gpt_neox(source: str | Path, output: str | Path | None = None) -> NoReturn:
    """There is no way back, and this says why.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"a DAR cannot be converted to GPT-NeoX ({source}): its far tokens pass trained weights (bottleneck_down and "
        "bottleneck_up) that GPT-NeoX has no place for; left out, queries would see other keys and values "
        "than they were trained on. Go back to the checkpoint that it was made from (conversion.json names it)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Source model, and DAR around its weights
# ---------------------------------------------------------------------------------------------------------------------


def read_base_config(source: str | Path, revision: str | None = None) -> GPTNeoXConfig:
    """The source's configuration, if DAR can be made of it.

    Raises:
        ValueError: another kind of model, a DAR, or a quantised model.
        FileNotFoundError: a path that leads nowhere.
        OSError: a Hub id that cannot be reached.
    """
    source = str(source)
    # What can only be a path is not looked for on the Hub.
    if not Path(source).expanduser().exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise FileNotFoundError(f"no such checkpoint folder: {source}")
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(f"{source} is a folder without config.json, not a saved model")
    fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    model_type = fields.get("model_type")
    if model_type == "dar" and fields.get("window_size", 0) is not None:
        raise ValueError(
            f"{source} is a DAR already (window_size={fields.get('window_size')}, "
            f"bottleneck_size={fields.get('bottleneck_size')}): convert the GPT-NeoX checkpoint that it was made from"
        )
    if model_type not in ("gpt_neox", "dar"):
        raise ValueError(
            f"{source} has model_type {model_type!r}: only GPT-NeoX checkpoints (model_type 'gpt_neox', as Pythia's) "
            "can become DAR"
        )
    if fields.get("quantization_config"):
        raise ValueError(
            f"{source} is quantised: convert the checkpoint that it was made from, and quantise the result"
        )
    kept = {name: value for name, value in fields.items() if name not in (*_NOT_CARRIED, *_DAR_FIELDS)}
    config = GPTNeoXConfig(**kept)
    config.dtype = fields.get("dtype", fields.get("torch_dtype"))
    return config


def dar_config(
    base: GPTNeoXConfig, *, bottleneck_size: int | None = None, window_size: int = 128, far_cache: str = "fast"
) -> DARConfig:
    """A GPT-NeoX's configuration as a DAR's, every field carried over but dropout, which is 0.

    Raises:
        TypeError: sizes that are no whole numbers.
        ValueError: sizes out of range, or an unknown `far_cache`.
    """
    for name, value in (("window_size", window_size), ("bottleneck_size", bottleneck_size)):
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
    if window_size is None:
        raise ValueError("window_size=None would be the GPT-NeoX that is there already: give a number of tokens")
    if far_cache not in ("fast", "small"):
        raise ValueError(f"far_cache must be 'fast' or 'small', got {far_cache!r}")
    fields = {name: value for name, value in base.to_dict().items() if name not in _NOT_CARRIED}
    fields.update(attention_dropout=0.0, hidden_dropout=0.0)
    return DARConfig(**fields, bottleneck_size=bottleneck_size, window_size=window_size, far_cache=far_cache)


def load_gpt_neox(
    source: str | Path, config: GPTNeoXConfig | None = None, *, revision: str | None = None
) -> GPTNeoXForCausalLM:
    """The source model on the CPU, in the checkpoint's dtype and in eval mode.

    Args:
        source: folder or Hub id.
        config: from `read_base_config`.
        revision: of a Hub id.

    Raises:
        ValueError: tensors that are missing, of another shape, or in a damaged file.
        OSError: no weights there.
    """
    if config is None:
        config = read_base_config(source, revision)
    try:
        model, info = GPTNeoXForCausalLM.from_pretrained(
            str(source), config=config, revision=revision, dtype="auto", output_loading_info=True
        )
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: shapes that differ
        raise ValueError(f"the weights of {source} cannot be read: {' '.join(str(error).split())}") from error
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f"the checkpoint {source} lacks {len(missing)} tensor(s): {shown}")
    return model.eval()


def dar_around(model: GPTNeoXForCausalLM, config: DARConfig) -> DARForCausalLM:
    """A DAR on the very tensors of `model`, its bottlenecks beside them still without values.

    Args:
        model: on any device, in any dtype.
        config: from `dar_config`.
    """
    with torch.device("meta"):
        dar = DARForCausalLM(config)
    dar.load_state_dict(model.state_dict(), strict=False, assign=True)
    dar.gpt_neox.rotary_emb = model.gpt_neox.rotary_emb  # has buffers that no state dict holds
    for layer in dar.gpt_neox.layers:
        for name in ("bottleneck_down", "bottleneck_up"):
            projection = getattr(layer.attention, name)
            projection.weight = nn.Parameter(
                torch.zeros_like(projection.weight, device=model.device, dtype=model.dtype)
            )
    dar.tie_weights()
    left = [name for name, tensor in (*dar.named_parameters(), *dar.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(f"the source model has no values for {', '.join(left)}")
    return dar.eval()


@torch.no_grad()
def block_perplexity(
    model: PreTrainedModel, blocks: TokenBlocks, *, batch_size: int = 4, quiet: bool = False
) -> Perplexity:
    """Perplexity of a causal language model on blocks, each read on its own; the mean is over all predicted tokens.

    Args:
        model: in eval mode.
        blocks: each of n tokens gives n - 1 predictions.
        batch_size: blocks a forward pass.
        quiet: no progress bar.
    """
    device = model.get_input_embeddings().weight.device
    total, count = 0.0, 0
    starts = range(0, len(blocks), batch_size)
    for start in tqdm(starts, desc="perplexity", unit="batch", leave=False, disable=quiet or None, file=sys.stderr):
        ids = torch.stack([blocks[i]["input_ids"] for i in range(start, min(start + batch_size, len(blocks)))]).to(
            device
        )
        for row, targets in zip(model(input_ids=ids, use_cache=False).logits, ids[:, 1:], strict=True):
            total += F.cross_entropy(row[:-1].float(), targets, reduction="sum").item()
            count += targets.numel()
    return Perplexity(nats=total / count, tokens=count)


def cache_bytes_per_far_token(config: DARConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a token beyond the window takes in all layers: an ordinary cache, and `DARCache`'s two modes."""
    layer = {
        "ordinary": 2 * config.hidden_size,
        "fast": config.bottleneck_size + config.num_attention_heads * config.rotary_dims,
        "small": config.bottleneck_size,
    }
    sizes = {mode: config.num_hidden_layers * numbers * dtype.itemsize for mode, numbers in layer.items()}
    sizes["small"] += torch.int.itemsize  # its position
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    tokenizer: Any
    calibration: TokenBlocks
    evaluation: TokenBlocks
    distillation: TokenBlocks | None


def _load_text(
    tokenizer: Any,
    block_tokens: int,
    calibration_sources: Sources,
    calibration_tokens: int,
    eval_sources: Sources | None,
    eval_tokens: int,
    distill_sources: Sources | None,
    distillation: DistillationSettings,
    options: dict[str, str],
    processes: int,
    vocab_size: int,
) -> _Text:
    """Blocks to calibrate on, to measure on and to distill on.

    Raises:
        ValueError: too little text, or ids that the model does not have.
    """

    def load(sources: Sources, tokens: int) -> TokenBlocks:
        blocks = load_token_blocks(sources, tokenizer, block_tokens, max_tokens=max(tokens, block_tokens), **options)
        if (highest := int(blocks.tokens.max())) >= vocab_size:
            raise ValueError(f"the tokenizer gives id {highest}, and the model has {vocab_size}: give the model's own")
        return blocks

    distilled_tokens = distillation.tokens(block_tokens, processes)
    shared = distilled_tokens if distill_sources is None else 0
    calibration_blocks, eval_blocks = (max(1, tokens // block_tokens) for tokens in (calibration_tokens, eval_tokens))
    wanted = max(SPREAD * calibration_blocks * block_tokens, shared)
    if eval_sources is not None:
        text = load(calibration_sources, wanted)
        evaluation = spread_blocks(load(eval_sources, SPREAD * eval_blocks * block_tokens), eval_blocks)
    else:
        everything = load(calibration_sources, wanted + eval_blocks * block_tokens)
        if len(everything) < 2:
            raise ValueError(
                f"the calibration text fills one block of {block_tokens} tokens, which leaves none to measure "
                "perplexity on: give more text, eval_sources, or a smaller block_tokens"
            )
        held_out = min(eval_blocks, max(1, len(everything) // 5))
        text = everything.part(0, len(everything) - held_out)
        evaluation = everything.part(len(everything) - held_out, len(everything))
    further = None
    if distillation.total_steps:
        further = text if distill_sources is None else load(distill_sources, distilled_tokens)
        if len(further) < distillation.batch_size * processes:
            raise ValueError(
                f"the text to distill on has {len(further)} blocks of {block_tokens} tokens, fewer than one batch of "
                f"{distillation.batch_size} for each of {processes} process(es): give more text or a smaller "
                "batch_size"
            )
    return _Text(tokenizer, spread_blocks(text, calibration_blocks), evaluation, further)


def spread_blocks(blocks: TokenBlocks, count: int) -> TokenBlocks:
    """`count` of the blocks, evenly spaced; all of them if there are no more."""
    if len(blocks) <= count:
        return blocks
    rows = blocks.tokens.reshape(len(blocks), -1)
    return TokenBlocks(rows[np.arange(count) * len(blocks) // count].reshape(-1), blocks.block_tokens)


def _fingerprint(model: GPTNeoXForCausalLM) -> str:
    """Tells checkpoints apart by some of their numbers; all of them would take a while."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for weight in (model.gpt_neox.layers[-1].attention.dense.weight[:64], model.lm_head.weight[:64]):
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _described(blocks: TokenBlocks, sources: Sources) -> dict[str, Any]:
    """Blocks in a record."""
    return {"text": source_names(sources), "tokens": len(blocks) * blocks.block_tokens}


def _described_distillation(
    settings: DistillationSettings, report: DistillationReport | None, sources: Sources
) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "text": source_names(sources),
        **asdict(settings),
        "tokens": report.tokens,
        "epochs": report.epochs,
        "losses": report.losses,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Unfinished work
# ---------------------------------------------------------------------------------------------------------------------


class _Work(UnfinishedWork):
    """What an unfinished distillation has done so far: the initialised bottlenecks, perplexities, and checkpoints."""

    @property
    def _bottlenecks(self) -> Path:
        return self.folder / "initialised.safetensors"

    @property
    def _perplexities(self) -> Path:
        return self.folder / "perplexity.json"

    def initialised(self) -> bool:
        """Whether the initialisation is there."""
        return self.kept and self._bottlenecks.is_file()

    def save(self, model: DARForCausalLM, perplexity: dict[str, Perplexity]) -> None:
        """Keep the initialised bottlenecks, and what was measured."""
        if self.kept and self.state.is_main_process:
            tensors = {name: tensor for name, tensor in model.state_dict().items() if "bottleneck" in name}
            measured = json.dumps({stage: asdict(value) for stage, value in perplexity.items()}) + "\n"
            write_beside(self._perplexities, lambda path: path.write_text(measured, encoding="utf-8"))
            write_beside(self._bottlenecks, lambda path: save_file(tensors, path))  # last: it says that both are there
        self.state.wait_for_everyone()

    def load(self, model: DARForCausalLM) -> dict[str, Perplexity]:
        """Put the bottlenecks into the model; returns what was measured."""
        model.load_state_dict(load_file(self._bottlenecks), strict=False)
        measured = json.loads(self._perplexities.read_text(encoding="utf-8"))
        return {stage: Perplexity(**value) for stage, value in measured.items()}
