"""The metadata at the head of a model card: what the Hub shows, filters and ranks by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

__all__ = ["Metric", "card_data"]


@dataclass(frozen=True)
class Metric:
    """One number of a card.

    Attributes:
        kind: the metric's id, such as `"perplexity"` or `"accuracy"`.
        value: the number.
        dataset: what it was measured on, in words.
        name: what the card calls it, where the id does not say it all.
    """

    kind: str
    value: float
    dataset: str
    name: str | None = None


def card_data(
    model_name: str,
    tags: Sequence[str],
    metrics: Sequence[Metric] = (),
    *,
    pipeline_tag: str | None = "text-generation",
    library_name: str = "transformers",
    **fields: Any,
) -> ModelCardData:
    """Metadata of a model made here.

    Args:
        model_name: under which its results are listed.
        tags: beside "nearfar".
        metrics: its results.
        pipeline_tag: the task its pipeline has; `None` for what is no model of a pipeline.
        library_name: the library that loads it.
        fields: others of `ModelCardData`; those that are `None` are left out.
    """
    results = [
        EvalResult(
            task_type=pipeline_tag or "other",
            dataset_type="-".join("".join(c if c.isalnum() else " " for c in metric.dataset.lower()).split())
            or "text",
            dataset_name=metric.dataset,
            metric_type=metric.kind,
            metric_value=metric.value,
            metric_name=metric.name,
        )
        for metric in metrics
    ]
    listed: dict[str, Any] = {"model_name": model_name, "eval_results": results} if results else {}
    return ModelCardData(
        library_name=library_name,
        pipeline_tag=pipeline_tag,
        tags=["nearfar", *tags],
        **listed,
        **{name: value for name, value in fields.items() if value is not None},
    )
