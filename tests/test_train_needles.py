"""The loop of `training/needle_training.py` and `examples/train_needles.py` from end to end, on tiny models."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_texts import english
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nearfar import ProxyFormerConfig, ProxyFormerForCausalLM
from nearfar.evaluation.multi_needle import NeedleResults
from nearfar.evaluation.needle_documents import NeedleDocuments, NeedleTemplates, encode_background
from nearfar.training.digit_tokenizer import train_digit_tokenizer
from nearfar.training.needle_curriculum import NEEDLE_PLANS, NeedlePlan, NeedleStage
from nearfar.training.needle_training import LOG_NAME, NeedleTrainer, NeedleTraining, last_checkpoint

SCRIPT = Path(__file__).parent.parent / "examples" / "train_needles.py"
STAGES = (
    NeedleStage(48, 1, 4, 1, max_steps=2, history=False),
    NeedleStage(48, 1, 8, 1, max_steps=4, question_weight=0.5),
    NeedleStage(96, 3, 4, 3, rope=False),
)
PLAN = NeedlePlan(name="tiny", stages=STAGES, steps=10, warmup_steps=2, dense=0.2)


@pytest.fixture(scope="module")
def documents() -> NeedleDocuments:
    text = english(3000)
    tokenizer = train_digit_tokenizer([text], 400)
    return NeedleDocuments(encode_background(text, tokenizer), NeedleTemplates(tokenizer, num_ids=4))


def tiny_model(**changes: Any) -> ProxyFormerForCausalLM:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 400, "hidden_size": 32, "history_hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "compression_ratio": 8, "generation_block_size": 32, **changes,
    }  # fmt: skip
    return ProxyFormerForCausalLM(ProxyFormerConfig(**options))


def trainer(
    documents: NeedleDocuments, folder: Path, plan: NeedlePlan = PLAN, *, model: Any = None, **options: Any
) -> NeedleTrainer:
    settings = NeedleTraining(**{"log_every": 2, **options})
    return NeedleTrainer(model or tiny_model(), plan, documents, folder, settings, cpu=True, progress=False)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG_NAME).read_text(encoding="utf-8").splitlines()]


def figures(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock says."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in log_of(folder)]


# --- the loop --------------------------------------------------------------------------------------------------------


def test_stages_follow_one_another(documents: NeedleDocuments, tmp_path: Path) -> None:
    run = trainer(documents, tmp_path)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    result = run.train()
    assert (result["steps"], result["ended"], result["stage"]) == (10, "10 steps", 2)
    assert [(entry["steps"], entry["reason"]) for entry in result["left"]] == [(2, "2 steps"), (4, "4 steps")]
    lines = log_of(tmp_path)
    assert [(line["step"], line["stage"]) for line in lines] == [(2, 0), (4, 1), (6, 1), (8, 2), (10, 2)]
    assert [line.get("question_loss", 0) > 0 for line in lines] == [line["stage"] == 1 for line in lines]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["learning_rate"] < lines[1]["learning_rate"]
    for name, parameter in run.model.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} was not trained"
    assert run.model.config.rope_parameters is None, "the last stage has none"
    assert run.model.config.generation_block_size == 32


@pytest.mark.parametrize("kind", ["muon", "mano"])
@pytest.mark.parametrize("pure_bf16", [False, True])
def test_resumed_run_is_the_uninterrupted_one(
    documents: NeedleDocuments, tmp_path: Path, kind: str, pure_bf16: bool
) -> None:
    plan = NeedlePlan(**{**PLAN.__dict__, "optimizer": kind, "accumulation": 2})
    options = {"save_every": 2, "pure_bf16": pure_bf16}
    whole = trainer(documents, tmp_path / "whole", plan, **options)
    whole.train()
    for end in (2, 6):  # where a stage has just been left, and inside of the last one
        folder = tmp_path / f"cut{end}"
        cut = trainer(documents, folder, plan, **options)
        cut.plan = cut.curriculum.plan = NeedlePlan(**{**plan.__dict__, "steps": 10})
        save = cut.save_checkpoint

        def stop(save: Any = save, cut: NeedleTrainer = cut, end: int = end) -> Path:
            path = save()
            if cut.step == end:
                raise KeyboardInterrupt
            return path

        cut.save_checkpoint = stop  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            cut.train()
        checkpoint = last_checkpoint(folder)
        assert checkpoint is not None
        assert checkpoint.name == f"checkpoint-{end}"
        with open(folder / LOG_NAME, "a", encoding="utf-8") as file:  # a line of after the checkpoint
            file.write(json.dumps({"step": end + 2}) + "\n")
        again = trainer(documents, folder, plan, model=tiny_model(hidden_size=32), **options)
        again.train(checkpoint)
        assert figures(folder) == figures(tmp_path / "whole")
        for (name, mine), its in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, its), name
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-10"]


def test_documents_depend_on_seed_and_step(documents: NeedleDocuments, tmp_path: Path) -> None:
    plan = NeedlePlan(**{**PLAN.__dict__, "steps": 2})
    losses = []
    for index, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(index)
        trainer(documents, folder, plan, seed=seed).train()
        losses.append(log_of(folder)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_accumulated_batches_are_averaged(documents: NeedleDocuments, tmp_path: Path) -> None:
    """With a plain gradient step, two batches of a step move weights by the mean of what each moves them by."""
    stage = (NeedleStage(48, 1, 4, 1),)
    plan = NeedlePlan(name="t", stages=stage, steps=1, accumulation=2, clip=0.0)
    run = trainer(documents, tmp_path, plan, model=tiny_model().double(), log_every=1)
    given: list[dict[str, torch.Tensor]] = []
    update = run._update

    def note() -> None:
        given.append({name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None})
        update()

    run._update = note  # type: ignore[method-assign]
    reference = tiny_model().double().train()
    from nearfar.training.needle_curriculum import apply_stage, needle_loss, sample_stage

    apply_stage(reference, stage[0], 32, 18)
    for part in range(2):
        batch = sample_stage(run.documents, plan, stage[0], run._generator(part))
        (needle_loss(reference, batch).loss / 2).backward()
    run.train()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert given[0].keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(given[0][name], grad, rtol=1e-10, atol=1e-14)


def test_time_in_place_of_steps(documents: NeedleDocuments, tmp_path: Path) -> None:
    result = trainer(documents, tmp_path, seconds=0.5, log_every=1).train()
    assert result["ended"] == "0.5 seconds"
    assert 0.5 <= result["seconds"] < 30
    assert result["steps"] == log_of(tmp_path)[-1]["step"]


def test_run_ends_where_the_loss_is_not_finite(documents: NeedleDocuments, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite at step 2"):
        trainer(documents, tmp_path, model=model, save_every=2).train()
    assert not list(tmp_path.glob("checkpoint-*")), "none that is not worth going on from"


def test_trainer_refuses(documents: NeedleDocuments, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generation_block_size is 8: make it"):
        trainer(documents, tmp_path, model=tiny_model(generation_block_size=8))
    with pytest.raises(ValueError, match="no proxies"):
        trainer(documents, tmp_path, model=tiny_model(compression_ratio=None, generation_block_size=None))
    for stage, message in (
        (NeedleStage(20, 2, 1, 1), "2 needles take"),
        (NeedleStage(900, 5, 1, 1), "only 4 different"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(documents, tmp_path, NeedlePlan(name="bad", stages=(stage,), steps=1))
    for options, message in (
        ({"save_every": 3}, "multiple of log_every"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"log_every": 0}, "log_every"),
    ):
        with pytest.raises(ValueError, match=message):
            NeedleTraining(**{"log_every": 2, **options})


def test_checkpoint_of_another_run_is_refused(documents: NeedleDocuments, tmp_path: Path) -> None:
    plan = NeedlePlan(**{**PLAN.__dict__, "steps": 2})
    trainer(documents, tmp_path, plan, save_every=2).train()
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    with pytest.raises(ValueError, match="another steps: 2 there, 10 now"):
        trainer(documents, tmp_path).train(checkpoint)
    with pytest.raises(ValueError, match="seed 0, this one has 5"):
        trainer(documents, tmp_path, plan, seed=5).train(checkpoint)


@pytest.mark.slow
def test_tiny_model_leaves_chance(tmp_path: Path) -> None:
    """Digits guessed at random cost ln 10 each, the space nothing: 1.92 a token."""
    text = english(5000)
    tokenizer = train_digit_tokenizer([text], 512)
    documents = NeedleDocuments(encode_background(text, tokenizer), NeedleTemplates(tokenizer, num_ids=4))
    torch.manual_seed(0)
    model = ProxyFormerForCausalLM(
        ProxyFormerConfig(
            vocab_size=512, hidden_size=128, history_hidden_size=64, num_hidden_layers=3, num_attention_heads=2,
            compression_ratio=16, generation_block_size=32,
        )
    )  # fmt: skip
    plan = NeedlePlan(name="one", stages=(NeedleStage(48, 1, 64, 1, leave_at=0.5),), steps=120, warmup_steps=20)
    trainer(documents, tmp_path, plan, model=model, log_every=10).train()
    last = log_of(tmp_path)[-1]
    assert last["loss"] < 1.4
    assert last["token_accuracy"] > 0.4


# --- the script ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example as a module; what it sets for its process is put back afterwards."""
    verbosity = transformers.logging.get_verbosity()
    spec = importlib.util.spec_from_file_location("train_needles", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_needles"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_needles"]
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text(english(4000), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(PLAN.to_dict()), encoding="utf-8")
    return folder


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    common = (
        "--text", files / "text.txt", "--plan-file", files / "plan.json", "--output", output, "--data", files / "data",
        "--hidden-size", 32, "--layers", 2, "--heads", 2, "--compression-ratio", 8, "--vocabulary", 400,
        "--eval-lengths", 96, 200, "--eval-documents", 2, "--log-every", 2, "--save-every", 2, "--cpu", *more,
    )  # fmt: skip
    return [str(argument) for argument in common]


def test_script_trains_a_checkpoint_on(
    script: ModuleType, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    quick = ("--eval-documents", 1, "--steps", 4)
    assert script.main(arguments(files, first, *quick)) == 0
    sizes = ("--hidden-size", "--layers", "--heads", "--compression-ratio")
    longer = NeedlePlan(name="longer", stages=(NeedleStage(192, 3, 2, 3),), steps=2)
    (tmp_path / "longer.json").write_text(json.dumps(longer.to_dict()), encoding="utf-8")
    given = arguments(files, second, "--start-from", first / "model", "--seed", 1, "--learning-rate", 1e-9)
    on = [word for i, word in enumerate(given) if word not in sizes and given[i - 1] not in sizes]

    def put(name: str, value: object) -> None:
        on[on.index(name) + 1] = str(value)

    put("--plan-file", tmp_path / "longer.json")
    put("--data", tmp_path / "data")
    assert script.main(on) == 0
    loaded = [ProxyFormerForCausalLM.from_pretrained(folder / "model") for folder in (first, second)]
    for one, other in zip(*(model.parameters() for model in loaded), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert [model.config.proxy_sharpen_from for model in loaded] == [12, 12], "as the checkpoint has it"
    card = (second / "model" / "README.md").read_text(encoding="utf-8")
    assert f"trained on from {first / 'model'}" in card
    for name, expected in (("--sharpen", 24), ("--no-sharpen", None)):
        put("--output", tmp_path / name)
        assert script.main([*on, name, "--eval-lengths"]) == 0
        config = ProxyFormerConfig.from_pretrained(tmp_path / name / "model")
        assert config.proxy_sharpen_from == expected, "of the longest stage, in proxies"

    def refused(*more: object) -> str:
        with pytest.raises(SystemExit):
            script.main([*on, *map(str, more)])
        return capsys.readouterr().err

    put("--output", tmp_path / "third")
    assert "--layers is the checkpoint's with --start-from" in refused("--layers", 3)
    put("--start-from", tmp_path / "nothing")
    assert "nothing" in refused()
    plain = tmp_path / "plain"
    tiny_model(compression_ratio=None, generation_block_size=None).save_pretrained(plain)
    put("--start-from", plain)
    assert "is a plain decoder" in refused()
    put("--start-from", first / "model")
    put("--data", files / "other")
    other = ("--vocabulary", 300, "--data", files / "other", "--prepare-only")
    assert script.main(arguments(files, tmp_path / "x", *other)) == 0
    del on[on.index("--text") : on.index("--text") + 2]
    assert "was not made with the tokenizer of" in refused()


def test_script_from_end_to_end(
    script: ModuleType,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert script.main(arguments(files, whole)) == 0
    run = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    assert run["result"]["steps"] == 10
    assert [row["length"] for row in run["result"]["accuracy"]] == [96, 200]
    assert [row["asked"] for row in run["result"]["accuracy"]] == [6, 6]
    assert not list(whole.glob("checkpoint-*"))
    assert (whole / "needles.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    results = NeedleResults.read(whole / "needles.json")
    assert results.lengths[96].found == run["result"]["accuracy"][0]["found"]

    model = AutoModelForCausalLM.from_pretrained(whole / "model", trust_remote_code=True, dtype=torch.float32)
    assert model.config.generation_block_size % 8 == 0
    assert model.config.use_cache
    longest = max(stage.length for stage in PLAN.stages)
    assert model.config.proxy_sharpen_from == -(-longest // 8), "queries of longer documents are sharpened"
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    ids = tokenizer(" The passkey_1 is 12345.", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    card = (whole / "model" / "README.md").read_text(encoding="utf-8")
    assert "| 96 | " in card
    assert "of 6 |" in card
    assert (whole / "model" / "modeling_proxyformer.py").is_file()

    # The same, interrupted and gone on with.
    save = NeedleTrainer.save_checkpoint

    def stop(trainer: NeedleTrainer) -> Path:
        path = save(trainer)
        if trainer.step == 6:
            raise KeyboardInterrupt
        return path

    monkeypatch.setattr(NeedleTrainer, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments(files, cut))
    monkeypatch.setattr(NeedleTrainer, "save_checkpoint", save)
    with pytest.raises(SystemExit):
        script.main(arguments(files, cut))
    assert "add --resume" in capsys.readouterr().err
    assert script.main(arguments(files, cut, "--resume")) == 0
    assert figures(cut) == figures(whole)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (cut / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()
    assert script.main(arguments(files, cut)) == 0, "finished already"
    with pytest.raises(SystemExit):
        script.main(arguments(files, cut, "--layers", 3))
    assert "layers = 2, and now it is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--steps", 5, "--seconds", 3), "--steps or --seconds"),
        (("--plan", "fast"), "--plan or --plan-file"),
        (("--dataset", "some/data"), "--text or --dataset"),
        (("--heads", 5), "--heads must divide"),
        (("--eval-lengths", 20), "--eval-lengths must be at least"),
        (("--eval-documents", 1, 2, 3), "--eval-documents has 3 numbers for 2 --eval-lengths"),
        (("--eval-documents", 1, 0), "--eval-documents must be at least 1, got 0"),
        (("--eval-documents", 1, 2, "--eval-lengths", 96, 96), "names a length twice"),
        (("--eval-batch-size", 0), "--eval-batch-size must be at least 1, got 0"),
        (("--vocabulary", 300), "data of another vocabulary"),
        (("--layers", 0), "--layers must be at least 1, got 0"),
        (("--save-every", 3), "multiple of log_every"),
    ],
)
def test_script_refuses(
    script: ModuleType, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Any, message: str
) -> None:
    if not (files / "data" / "data.json").is_file():
        assert script.main(arguments(files, tmp_path / "prepared", "--prepare-only")) == 0
    with pytest.raises(SystemExit) as leaving:
        script.main(arguments(files, tmp_path / "output", *more))
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_documents_by_length(script: ModuleType) -> None:
    assert script.document_counts([200, 96], [3, 5]) == {200: 3, 96: 5}
    assert script.document_counts([200, 96, 96], [3]) == {200: 3, 96: 3}
    assert script.document_counts([], [20]) == {}


@pytest.mark.slow  # all 100,000 passkeys are encoded
def test_digits_that_merge_and_documents_by_length(
    script: ModuleType, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer such as GPT-2's, whose tokens of several digits make passkeys of unequal length; the long plan."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    numbers = " ".join(f"{(7919 * index) % 100_000:05d} {index % 1000}" for index in range(3000))
    trained = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([english(300), numbers], trained)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path / "merging")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merging")
    lengths = {len(tokenizer(f" {value:05d}").input_ids) for value in range(0, 100_000, 1111)}
    assert len(lengths) > 1
    assert max(lengths) < 6

    stages = tuple(
        dataclasses.replace(
            stage, length=160 * 2**number, needles=number + 1, documents=1, queries=number + 1, max_steps=1
        )
        for number, stage in enumerate(NEEDLE_PLANS["long"].stages)
    )
    plan = dataclasses.replace(NEEDLE_PLANS["long"], stages=stages, steps=9, warmup_steps=1)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    more = (
        "--plan-file", tmp_path / "plan.json", "--tokenizer", tmp_path / "merging", "--data", tmp_path / "data",
        "--eval-lengths", 400, 300, "--eval-documents", 1, 2, "--eval-batch-size", 3,
        "--log-every", 1, "--save-every", 9,
    )  # fmt: skip
    assert script.main(arguments(files, tmp_path / "run", *more)) == 0
    assert '"merged" asks for the names' in capsys.readouterr().err
    assert [line["stage"] for line in log_of(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert log_of(tmp_path / "run")[-1]["length"] == 2560
    results = NeedleResults.read(tmp_path / "run" / "needles.json")
    assert {length: len(result.hits) for length, result in results.lengths.items()} == {300: 2, 400: 1}
    assert all(result.asked == 5 * len(result.hits) for result in results.lengths.values())


def test_plans_are_written(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--plan", "paper", "--steps", "7", "--write-plan", str(tmp_path / "plan.json")]) == 0
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (written["name"], written["steps"], len(written["stages"])) == ("paper", 7, 5)
