"""The README of a checkpoint that was converted to DAR, or trained as one, with the Hub's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from nearfar.evaluation.card_data import Metric, card_data

STAGES = {"source": "source", "initialised": "after initialisation", "distilled": "after distillation"}


def perplexity_rows(perplexity: dict[str, float]) -> list[list[str]]:
    """Header and rows of the table that is printed and stored."""
    rows = [["model", "perplexity", "relative to the source"]]
    for stage, value in perplexity.items():
        rows.append([STAGES[stage], f"{value:.4g}", f"{100 * value / perplexity['source']:.2f} %"])
    return rows


def _last_stage(record: dict[str, Any]) -> str:
    """What the saved weights are."""
    return [stage for stage in STAGES if stage in record["perplexity"]][-1]


def source_card_data(source: str, revision: str | None) -> ModelCardData | None:
    """The metadata of the source's own card."""
    path: str | Path = Path(source) / "README.md" if Path(source).is_dir() else source
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data
    except Exception:  # a card that is missing, cannot be reached or read costs a line about the licence, no more
        return None


def model_card(record: dict[str, Any], name: str, source_card: ModelCardData | None) -> str:
    """README.md of a converted checkpoint, with the Hub's metadata."""
    on_hub = "/" in record["source"]
    inherited = {
        field: value
        for field in ("license", "license_name", "license_link", "language", "datasets")
        if (value := getattr(source_card, field, None)) is not None
    }
    evaluation = record["evaluation"]
    where = (
        "the end of the calibration text" if record["held_out_of_calibration_text"] else ", ".join(evaluation["text"])
    )
    data = card_data(
        name,
        ["dar", "kv-cache", "custom_code"],
        [Metric("perplexity", record["perplexity"][_last_stage(record)], where)],
        base_model=record["source"] if on_hub else None,
        **inherited,
    )
    source = f"[{record['source']}](https://huggingface.co/{record['source']})" if on_hub else f"`{record['source']}`"
    if record["revision"]:
        source += f" (revision `{record['revision']}`)"
    sizes, calibration = record["cache_bytes_per_far_token"], record["calibration"]
    made = [f"- Initialisation: `{record['method']}`, float64"]
    if calibration is not None:
        made[0] += f", from {calibration['tokens']:,} tokens of {', '.join(calibration['text'])}"
    distillation = record["distillation"]
    trained = distillation is not None and distillation["unfrozen_steps"] > 0
    if distillation is not None:
        made.append(
            f"- Distillation: {distillation['steps']} steps with the base frozen and {distillation['unfrozen_steps']} "
            f"with all weights trained, {distillation['tokens']:,} tokens ({distillation['epochs']:.2g} times "
            f"{', '.join(distillation['text'])}); the teacher is the source model"
        )
    made.append(
        "- All weights differ from the source's" if trained else "- The base weights are the source's, unchanged"
    )
    made += [f"- {note}" for note in record["notes"]]
    perplexities = markdown_table(perplexity_rows(record["perplexity"]))
    cache = markdown_table(
        [["cache", "bytes a far token", "of ordinary"]]
        + [
            [label, f"{sizes[mode]:,}", f"1/{sizes['ordinary'] / sizes[mode]:.3g}"]
            for mode, label in (
                ("ordinary", "keys and values"),
                ("fast", '`DARCache`, `far_cache="fast"`'),
                ("small", '`DARCache`, `far_cache="small"`'),
            )
        ]
    )
    return f"""---
{data.to_yaml()}
---

# {name}

{source} as a DAR (distance-adaptive representation): a query sees the last {record["window_size"]} tokens in full,
and those before through a bottleneck of {record["bottleneck_size"]} of {record["hidden_size"]} numbers.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Perplexity

{perplexities}

{evaluation["tokens"]:,} tokens of {where}, in blocks of {record["block_tokens"]:,} tokens, each read on its own; the
mean is over all predicted tokens, and the blocks are the same for every row.

## Cache

{cache}

All layers, {record["dtype"]}. Of a far token the cache keeps the bottleneck and, to decode faster, the rotated part of
its keys (`fast`), or the bottleneck alone (`small`); of the last {record["window_size"]} tokens also keys and values.

## How it was made

{chr(10).join(made)}
- nearfar {record["versions"]["nearfar"]}, torch {record["versions"]["torch"]}, transformers \
{record["versions"]["transformers"]}; `conversion.json` has all settings
"""


def trained_model_card(record: dict[str, Any], name: str, license: str | None = None) -> str:
    """README.md of a model that `examples/train_dar.py` trained from random weights or from another checkpoint.

    Args:
        record: what its `training.json` says.
        name: of the model.
        license: the metadata's, such as `"apache-2.0"`.
    """
    shape, evaluation, twin = record["shape"], record["evaluation"], record["vanilla"]
    where = {
        key: evaluation["text"].get(key, key) if isinstance(evaluation["text"], dict) else evaluation["text"]
        for key in record["perplexity"]
    }
    metrics = [
        Metric("perplexity", value, where[key]) for key, value in record["perplexity"].items() if value is not None
    ]
    data = card_data(name, ["dar", "kv-cache", "custom_code"], metrics, license=license)
    if shape["window_size"] is None:
        kind = "An ordinary GPT-NeoX, the twin that DAR models are compared with"
    elif shape["uniform_bottleneck"]:
        kind = f"A control of DAR: every token is seen through a bottleneck of {shape['bottleneck_size']} numbers"
    else:
        kind = (
            f"A DAR (distance-adaptive representation): a query sees the last {shape['window_size']} tokens in full, "
            f"and those before through a bottleneck of {shape['bottleneck_size']} of {shape['hidden_size']} numbers"
        )
    rows = [["model", "parameters", *(f"perplexity, {where[key]}" for key in record["perplexity"])]]
    for label, result in ((name, record), ("vanilla GPT-NeoX, the same blocks in the same order", twin)):
        if result:
            values = (result["perplexity"].get(key) for key in record["perplexity"])
            rows.append(
                [label, f"{result['parameters']:,}", *("–" if value is None else f"{value:.3f}" for value in values)]
            )
    tied, vocabulary = ", embeddings tied" if shape["tied_embeddings"] else "", shape["vocabulary"]
    versions = record["versions"]
    return f"""---
{data.to_yaml()}
---

# {name}

{kind}. {record["parameters"]:,} parameters.

- {shape["layers"]} layers, width {shape["hidden_size"]}, {shape["heads"]} heads, {vocabulary:,} token ids{tied}
- trained on {record["trained_on_tokens"]:,} tokens of {", ".join(record["text"])} in {record["seconds"]:,.0f} s on
  {record["machine"]}: {record["steps"]:,} steps of {record["batch_tokens"]:,} tokens in blocks of
  {record["block_tokens"]:,}, AdamW at {record["learning_rate"]:g}, seed {record["seed"]}
- nearfar {versions["nearfar"]}, torch {versions["torch"]}, transformers {versions["transformers"]}

{markdown_table(rows)}

Perplexity: at most {evaluation["blocks"]:,} blocks of {record["block_tokens"]:,} tokens, each read on its own, in
{record["computed_in"]}, before the weights were saved as {record["saved_as"]}. `training.json` has all of this.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    header, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "|" + "---|" + "---:|" * (len(rows[0]) - 1), *others])
