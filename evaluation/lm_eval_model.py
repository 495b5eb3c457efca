"""`nearfar` as a model type of EleutherAI's lm-eval: its tasks with any of nearfar's caches and models.

    lm_eval --model nearfar --model_args pretrained=my/model,cache=snapkv,retention_ratio=0.3 --tasks gsm8k

lm-eval (0.4) knows the model types in its own package and those that have been registered in the same process, and has
no entry points, so this module must have been imported before `--model nearfar` is looked up. Three ways do that:

- `nearfar lm-eval …`, or `python -m nearfar.evaluation.lm_eval_model …`: lm-eval's own command with all its arguments;
- `lm_eval … --tasks "$(nearfar lm-eval plugin),gsm8k"`: the plain command, which imports what a task file given by its
  path names. That file holds no task and adds an empty group to the results;
- `import nearfar.evaluation.lm_eval_model` before `lm_eval.simple_evaluate(model="nearfar", …)`.

Arguments, beside all of `--model hf`: `cache` (default: full), `retention_ratio` or `budget`, and whatever that cache
takes: `head=linear`, `sink_tokens=8`, `prototypes=…`; `proxy=…` and `mapper=…` for proxykv, `proxy=…` for iam.

What is measured. `loglikelihood`: the context is read and compressed, then the continuation is scored without further
eviction; requests with one context share its prefill. `generate_until`: generation starts from the compressed prompt.
In both the question is part of what is compressed, for lm-eval does not tell it from the context. In
`loglikelihood_rolling` the text streams through the cache, which evicts after every `rolling_chunk_tokens`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from nearfar.evaluation.context_reading import SCORED_BY_A_PROXY, CacheChoice, ContextReader, ReadContext
from nearfar.evaluation.restoring import restored
from nearfar.modeling.cache_registry import CACHES, option_names
from nearfar.modeling.compat import cache_argument

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"this needs lm-eval: pip install 'nearfar[eval]' ({error})") from error

# A task file without a task: reading it imports this module.
PLUGIN_FILE = Path(__file__).with_name("lm_eval_plugin.yaml")


class NearfarLM(HFLM):
    """lm-eval's Hugging Face model with a cache of nearfar's.

    Args:
        pretrained: a folder, a Hub id, or a loaded model.
        cache: a name of `context_reading.known_caches()`.
        budget, retention_ratio: one of them, for a cache that prunes.
        device: default: a GPU if there is one.
        rolling_chunk_tokens: tokens between evictions in `loglikelihood_rolling`.
        kwargs: options of the cache, and arguments of lm-eval's `HFLM`.

    Raises:
        ValueError, TypeError: see `CacheChoice` and `ContextReader`.
    """

    def __init__(
        self,
        pretrained: Any,
        cache: str = "full",
        budget: int | None = None,
        retention_ratio: float | None = None,
        device: str | None = None,
        rolling_chunk_tokens: int = 256,
        **kwargs: Any,
    ) -> None:
        if rolling_chunk_tokens < 1:
            raise ValueError(f"rolling_chunk_tokens must be at least 1, got {rolling_chunk_tokens}")
        from nearfar import ProxyFormerConfig

        _ = ProxyFormerConfig  # the first public name makes transformers know nearfar's models
        known = _option_names(cache)
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in known}
        choice = CacheChoice(cache, budget, retention_ratio, options)  # wrong arguments are told before loading
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(pretrained=pretrained, device=device, **kwargs)
        self.reader = ContextReader(self.model, self.tokenizer, choice)
        self.rolling_chunk_tokens = rolling_chunk_tokens

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about the model, and the cache."""
        return {**super().get_model_info(), "nearfar": self.reader.choice.settings()}

    # -- scoring ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if not self.reader.prunes:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        size = override_bs or self.batch_size
        if not isinstance(size, int) or size < 1:  # "auto": what fits is not known before something was evicted
            size = 1
        # Requests by context: one prefill for all continuations of it. Those of a rolling score have no key.
        groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        continuations = []
        for index, (key, context, continuation) in enumerate(requests):
            if not context or not continuation or len(continuation) > self.max_length:
                raise ValueError(
                    f"a request needs a context and a continuation of at most {self.max_length} tokens, got "
                    f"{len(context)} and {len(continuation)}"
                )
            continuations.append(list(continuation))
            context = context[-(self.max_length + 1 - len(continuation)) :]
            groups.setdefault((key is None, tuple(context)), []).append(index)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Scoring continuations") as bar:
            for rolling, contexts in _batches(list(groups), size):
                rows = [groups[rolling, context] for context in contexts]
                self._score(contexts, rows, continuations, rolling, answers)
                for index in (index for row in rows for index in row):
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                    bar.update()
        return answers

    @torch.no_grad()
    def _score(
        self,
        contexts: list[tuple[int, ...]],
        rows: list[list[int]],
        continuations: list[list[int]],
        rolling: bool,
        answers: list[tuple[float, bool]],
    ) -> None:
        """Fill in the answers of requests `rows[i]`, which continue `contexts[i]`."""
        longest = max(map(len, contexts))
        ids = torch.zeros(len(contexts), longest, dtype=torch.long)
        mask = torch.zeros(len(contexts), longest, dtype=torch.long)
        for place, context in enumerate(contexts):
            ids[place, longest - len(context) :] = torch.tensor(context)
            mask[place, longest - len(context) :] = 1
        with torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        ):
            read = self.reader.read(ids, mask)
            for turn in range(max(map(len, rows))):
                asked = [(place, row[turn]) for place, row in enumerate(rows) if turn < len(row)]
                texts = [[0]] * len(rows)
                for place, index in asked:
                    texts[place] = continuations[index]
                with restored(read.cache):
                    scored = self._log_probabilities(replace(read), texts, rolling)
                for place, index in asked:
                    total, greedy = scored[place]
                    answers[index] = (total, greedy)

    def _log_probabilities(self, read: ReadContext, texts: list[list[int]], rolling: bool) -> list[tuple[float, bool]]:
        """Of each row's text: its log-probability, and whether greedy decoding would write it."""
        longest = max(map(len, texts))
        targets = torch.zeros(len(texts), longest, dtype=torch.long)
        for place, text in enumerate(texts):
            targets[place, : len(text)] = torch.tensor(text)
        targets = targets.to(self.reader.device)
        assert read.logits is not None
        logits, start = read.logits[:, None], 0
        found, best = [], []
        chunk = self.rolling_chunk_tokens if rolling else longest
        while True:
            wanted = targets[:, start : start + logits.shape[1]]
            scores = F.log_softmax(logits, -1, dtype=self.softmax_dtype)
            found.append(scores.gather(2, wanted[..., None])[..., 0].float())
            best.append(scores.argmax(-1) == wanted)
            start += logits.shape[1]
            if start == longest:
                break
            inputs = targets[:, start - 1 : min(start - 1 + chunk, longest - 1)]
            logits = self.reader.continue_with(read, inputs, evict=rolling)
        total, right = torch.cat(found, 1), torch.cat(best, 1)
        return [
            (float(total[place, : len(text)].sum()), bool(right[place, : len(text)].all()))
            for place, text in enumerate(texts)
        ]

    # -- generating -------------------------------------------------------------------------------------------------

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        cache = self.reader.cache_for(context, generation_kwargs.get("attention_mask"))
        if cache is not None:
            generation_kwargs[cache_argument(self.model)] = cache
        output: torch.Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return output


def _option_names(cache: str) -> set[str]:
    """Model arguments that are meant for the cache."""
    if cache in CACHES and cache not in SCORED_BY_A_PROXY:
        # A factory that takes anything takes what the base class names; the rest is the model's.
        return set(option_names(cache) or option_names("streaming_llm") or ())
    if cache in SCORED_BY_A_PROXY:
        return {"proxy", "mapper", *(option_names("streaming_llm") or ())}
    return set()


def _batches(groups: list[tuple[bool, tuple[int, ...]]], size: int) -> list[tuple[bool, list[tuple[int, ...]]]]:
    """Contexts of about equal length, rolling ones and single tokens by themselves; the longest first."""
    ordered = sorted(groups, key=lambda group: (group[0], -len(group[1]), group[1]))
    batches: list[tuple[bool, list[tuple[int, ...]]]] = []
    for rolling, context in ordered:
        if batches:
            last_rolling, last = batches[-1]
            alike = last_rolling == rolling and (len(last[0]) == 1) == (len(context) == 1)
            if alike and len(last) < size:
                last.append(context)
                continue
        batches.append((rolling, [context]))
    return batches


def run_lm_eval(arguments: list[str]) -> int:
    """lm-eval's own command line with `nearfar` among its model types."""
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    from nearfar.evaluation import lm_eval_model  # under its own name, which registers the class that it holds

    sys.exit(lm_eval_model.run_lm_eval(sys.argv[1:]))
else:
    register_model("nearfar")(NearfarLM)
