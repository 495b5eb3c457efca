"""TRL's SFTTrainer on both models: chats, an adapter, packed rows where the model takes them, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dar_models import tiny_dar
from finetune_files import IDS
from proxyformer_models import tiny_proxyformer
from tiny_texts import english, tiny_tokenizer

pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

Make = Callable[..., Any]
MODELS: tuple[Make, ...] = (tiny_dar, tiny_proxyformer)


def chats() -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": english(4, seed)},
                    {"role": "assistant", "content": english(5 + seed % 4, 100 + seed)},
                ]
            }
            for seed in range(8)
        ]
    )


def trainer_of(make: Make, folder: Path, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    peft_config = options.pop("peft_config", None)
    arguments = SFTConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, max_length=96, save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    return SFTTrainer(
        make(dtype=torch.float32, **IDS), arguments, train_dataset=chats(), eval_dataset=chats(),
        processing_class=tiny_tokenizer(), peft_config=peft_config,
    )  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("make", MODELS)
def test_sft_with_an_adapter(make: Make, tmp_path: Path) -> None:
    """It evaluates, and what it calls loss is the next token's cross-entropy, without ProxyFormer's auxiliary one."""
    from peft import LoraConfig

    trainer = trainer_of(make, tmp_path, peft_config=LoraConfig(task_type="CAUSAL_LM", r=4))
    before = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator([trainer.eval_dataset[index] for index in range(8)])
    model = trainer.model.eval()
    with torch.no_grad():
        by_hand = float(model(**batch, use_cache=False).loss)
    assert before == pytest.approx(by_hand, rel=1e-4)
    trainer.train()
    assert len(losses(trainer)) == 4
    assert trainer.evaluate()["eval_loss"] < before
    assert all("lora_" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("make", MODELS)
def test_sft_of_the_whole_model(make: Make, tmp_path: Path) -> None:
    trainer = trainer_of(make, tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] - 0.3


def test_packed_rows(tmp_path: Path) -> None:
    """Several texts in a row are several texts to DAR; ProxyFormer, whose blocks would join them, says so."""
    trainer = trainer_of(tiny_dar, tmp_path, packing=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    with pytest.raises(ValueError, match="packs several sequences into a row"):
        trainer_of(tiny_proxyformer, tmp_path, packing=True).train()


def test_proxyformer_gives_logits_where_a_trainer_asks_for_them() -> None:
    """Without labels always; with labels in training mode if the configuration says so."""
    model = tiny_proxyformer().train()
    tokens = torch.randint(3, 61, (1, 11))
    assert model(tokens, use_cache=False).logits.shape == (1, 11, 61)
    plain = model(tokens, labels=tokens)
    assert plain.logits is None
    model.config.logits_in_training = True
    full = model(tokens, labels=tokens)
    assert full.logits.shape == (1, 11, 61)
    assert torch.allclose(full.loss, plain.loss, atol=1e-12)
