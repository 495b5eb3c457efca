"""The Trainer's progress bar with the loss in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["LossBar", "show_loss_bar"]


class LossBar(ProgressCallback):
    """A progress bar with the loss in it, and nothing printed in between.

    Args:
        name: in front of the bar; None for none.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None and self.name is not None:
            self.training_bar.set_description(self.name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")


def show_loss_bar(trainer: Trainer, name: str | None = None) -> None:
    """Let a trainer show a `LossBar` in place of what it would print."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossBar(name))
