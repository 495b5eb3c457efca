"""One pass of a ProxyFormer over both streams: finished blocks become proxies, and the tokens given read them."""

from typing import Any

import torch
from transformers.utils import logging

from .proxy_buffers import rows_tensor
from .proxy_generation import GenerationView
from .proxy_grid import Grid, Rows, join_pending, make_grid, read_rows
from .proxy_history import HistoryResult
from .proxy_reading import Visibility
from .proxy_rotary import RotaryAngles
from .proxyformer_history import ProxyFormerHistory
from .proxyformer_record import last_ids, note_tokens, with_context

logger = logging.get_logger(__name__)


class ProxyFormerStreams(ProxyFormerHistory):
    """Both streams of a ProxyFormer; the modules are made by `ProxyFormerModel`."""

    def _is_middle(self, index: int) -> bool:
        """Whether the auxiliary head reads what comes out of this layer."""
        return bool(self.config.auxiliary_loss_weight) and index == max(len(self.layers) // 2 - 1, 0)

    def _two_streams(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        history_ids: torch.Tensor | None,
        history_mask: torch.Tensor | None,
        condition: torch.Tensor | None,
        wanted: torch.Tensor | None,
        states: list[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Grid]:
        config = self.config
        wanted = None if states is not None else wanted
        batch, block = input_ids.shape[0], config.block_size
        groups = 1
        if history_ids is not None:
            if history_ids.ndim != 2 or history_ids.shape[0] == 0 or batch % history_ids.shape[0]:
                raise ValueError(
                    f"The rows of input_ids must be a multiple of those of history_ids, got {batch} and "
                    f"{tuple(history_ids.shape)}."
                )
            groups = batch // history_ids.shape[0]
            if cache is not None:
                self.encode_history(history_ids, history_mask, condition, cache, count_columns=False)
                cache.batch_repeat_interleave(groups)
        seen = 0 if cache is None else cache.get_seq_length()
        rows = read_rows(input_ids, attention_mask, seen)
        if cache is not None:
            cache.start(batch, block, self._stem_tokens, input_ids.device)
        fill = [0] * batch if cache is None else list(cache.fill)
        known = [0] * batch if cache is None else list(cache.retained)
        last = [max(have + new - 1, 0) // block for have, new in zip(fill, rows.counts, strict=True)]
        if max(last):
            self._check_blocks(cache, last)
        sequence = join_pending(None if cache is None else cache.pending, fill, rows)

        history: HistoryResult | None = None
        ahead: list[list[int]] = [[0] * batch for _ in self.layers]  # proxies there are before block 0
        lengths = [0] * batch
        valid: list[torch.Tensor | None] | None = None
        if cache is not None:
            ahead = [cache.num_proxies(index) for index in range(len(self.layers))]
            lengths = [length - have for length, have in zip(cache.lengths, fill, strict=True)]
        elif history_ids is not None:
            history, told, told_ids = self._encode(history_ids, history_mask, condition, max(last) > 0)
            lengths = [length for length in told for _ in range(groups)]
            ahead = [[-(-length // ratio) for length in lengths] for ratio in config.ratios]
            valid = history.valid
            if max(last):
                context = last_ids(told_ids, told, self._stem_tokens).repeat_interleave(groups, dim=0)
                history = self._continue_history(history, groups, sequence, context, last, condition, ahead)
                valid = None
        if max(last) and (cache is not None or history_ids is None):
            history = self._compress(cache, sequence, last, condition, ahead)
        unread = history is None and cache is None and self._waits_for_others()
        if unread:  # one block that nobody sees: other processes may have rows with a history
            history = self._history(input_ids.new_zeros(batch, block), None, 0, condition=condition)

        step = cache is not None and input_ids.shape[1] == 1 and min(rows.counts) == 1
        hidden_ids, grid = self._grid(rows, sequence, fill, last, wanted, cache is not None, step)
        visible = self._visible(grid, ahead, last, cache, valid, step)
        if unread:
            visible = {ratio: Visibility(counts=torch.zeros_like(grid.numbers)) for ratio in visible}
        view = GenerationView(
            grid=grid,
            block=block,
            retained=config.retained_blocks,
            angles=self._raw_angles(grid, lengths, fill, step),
            turns_proxies=config.proxy_rope,
            visible=visible,
            fill=fill,
            known=known,
            last=last,
            step=step,
            recomputes=config.reversible_history and self.training,
        )
        hidden = self._embed(hidden_ids)
        middle = None
        for index, layer in enumerate(self.layers):
            proxies = None if history is None or cache is not None else history.proxies[index]
            if states is not None:
                states.append(hidden)
            hidden = layer(hidden, proxies, view, cache)
            middle = hidden if self._is_middle(index) else middle
        if states is not None:
            states.append(hidden)
        if cache is not None:
            note_tokens(cache, sequence, rows, fill, known, last, grid, block, config.retained_blocks, step)
            cache.counter.columns += input_ids.shape[1]
        return hidden, middle, grid

    def _check_blocks(self, cache: Any, last: list[int]) -> None:
        """Before blocks of the generation region itself are compressed."""
        first: Any = self.history_layers[0]
        if not first.interaction.causal:
            raise ValueError(
                f"proxy_interaction={self.config.proxy_interaction!r} lets proxies see later ones, so that it serves "
                "histories given whole, as history_ids, in front of one generation block of at most "
                f"{self.config.block_size} tokens."
            )
        if cache is None:
            return
        self._check_even(last)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.history_layers.parameters()):
            logger.warning_once("Gradients stop at a ProxyCache: none reaches the history stream through one.")

    def _compress(
        self, cache: Any, sequence: torch.Tensor, last: list[int], condition: torch.Tensor | None,
        ahead: list[list[int]],
    ) -> HistoryResult:  # fmt: skip
        """Run the blocks that are finished through the history stream; store what comes of them, with a cache."""
        block = self.config.block_size
        tokens = max(last) * block
        ids = sequence[:, :tokens]
        even = min(last) == max(last)
        real = None
        if not even:
            ends = rows_tensor(last, ids.device)[:, None] * block
            real = torch.arange(tokens, device=ids.device) < ends
        if cache is None:
            return self._history(ids, real, 0, condition=condition)
        halo = 0
        if self._stem_tokens and any(cache.lengths):
            ids, real, halo = with_context(ids, real, cache.context)
        result = self._history(
            ids, real, halo, [layer.interaction_past() for layer in cache.layers],
            [layer.before for layer in cache.layers], condition, ahead, True, cache.released.wanted,
        )  # fmt: skip
        self._store_history(cache, result, [number * block for number in last])
        return result

    def _continue_history(
        self,
        history: HistoryResult,
        groups: int,
        sequence: torch.Tensor,
        context: torch.Tensor,
        last: list[int],
        condition: torch.Tensor | None,
        ahead: list[list[int]],
    ) -> HistoryResult:
        """A given history, and behind it the blocks that the generation region itself has finished; differentiable."""
        if any(valid is not None and not bool(valid.all()) for valid in history.valid) or min(last) != max(last):
            raise ValueError(
                "A generation region of more than one block behind histories of unequal length needs a cache: call "
                "the model with use_cache=True, or give rows of equal length."
            )
        if self.config.partition_overlap:
            raise ValueError(
                "partition_overlap and a generation region of more than one block need the plain form: put the "
                "history in front of input_ids."
            )

        def repeated(x: torch.Tensor) -> torch.Tensor:
            return x if groups == 1 else x.repeat_interleave(groups, dim=0)

        past = [
            (*(repeated(x) for x in state), None) if len(state) == 2 else tuple(repeated(x) for x in state) or None
            for state in history.states
        ]
        ids = sequence[:, : max(last) * self.config.block_size]
        real, halo = None, 0
        if self._stem_tokens:
            ids, real, halo = with_context(ids, real, context)
        condition = None if condition is None else repeated(condition)
        new = self._history(ids, real, halo, past, condition=condition, begin=ahead)
        proxies = [
            torch.cat([repeated(old), fresh], dim=1) for old, fresh in zip(history.proxies, new.proxies, strict=True)
        ]
        return HistoryResult(proxies, [None] * len(proxies), new.states, new.tails, None)

    def _grid(
        self,
        rows: Rows,
        sequence: torch.Tensor,
        fill: list[int],
        last: list[int],
        wanted: torch.Tensor | None,
        cached: bool,
        step: bool,
    ) -> tuple[torch.Tensor, Grid]:
        if step:
            numbers = rows_tensor(last, rows.ids.device)[:, None]
            return rows.ids[:, :1], Grid(1, 1, None, numbers, False, True, None, None)
        retained = self.config.retained_blocks
        if torch.compiler.is_compiling():
            wanted = None
        grid = make_grid(rows, fill, self.config.block_size, retained * len(self.layers), wanted, cached, retained > 0)
        return grid.gather_ids(sequence), grid

    def _raw_angles(self, grid: Grid, lengths: list[int], fill: list[int], step: bool) -> RotaryAngles | None:
        if self.config.rope_parameters is None:
            return None
        weight = self.embed_tokens.weight
        if step:
            positions = rows_tensor([a + b for a, b in zip(lengths, fill, strict=True)], weight.device)[:, None]
        else:
            begin = rows_tensor(lengths, weight.device)[:, None]
            place = torch.arange(grid.width, device=weight.device)
            positions = begin + (grid.numbers[:, :, None] * self.config.block_size + place).flatten(1)
        return self._angles(positions, weight.dtype)

    def _visible(
        self,
        grid: Grid,
        ahead: list[list[int]],
        last: list[int],
        cache: Any,
        valid: list[torch.Tensor | None] | None,
        step: bool,
    ) -> dict[int, Visibility]:
        """For each ratio, which proxies the grid's tokens see."""
        found = {}
        block = self.config.block_size
        for index, ratio in enumerate(self.config.ratios):
            if ratio in found:
                continue
            each = block // ratio
            have = ahead[index]
            even = min(have) == max(have) and min(last) == max(last)
            if even and (step or grid.only_last):
                found[ratio] = Visibility()
            elif valid is not None and grid.blocks == 1:
                mask = valid[index]
                found[ratio] = Visibility(valid=None if mask is None else mask.sum(1))
            else:
                begin = rows_tensor(have, grid.numbers.device)[:, None]
                begin = begin[:1] if min(have) == max(have) else begin
                counts = begin + grid.numbers * each
                plain = grid.complete and not any(have)
                found[ratio] = Visibility(counts=counts, step=each if plain else 0)
        return found

    def _waits_for_others(self) -> bool:
        """Whether other processes wait until every layer has been run, and in training has had gradients."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        trains = self.training and torch.is_grad_enabled()
        return trains or any(layer._forward_pre_hooks for layer in self.history_layers)  # of sharded layers
