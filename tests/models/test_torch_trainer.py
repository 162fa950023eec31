"""Hugging Face's Trainer with a tiled model: trains, evaluates and predicts what the untiled model does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import FLOOR, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tests.models import supported
from tests.models.test_torch_models import build
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.lazy import Values

transformers = pytest.importorskip("transformers")

Row = dict[str, Tensor]


def rows() -> list[Row]:
    """Sequences of several lengths whose first tokens are a prompt."""
    found = []
    for number in range(6):
        ids = torch.arange(5 + number % 3) * 7 % 30 + 1 + number % 2
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < 2, -100, ids)})
    return found


def padded(batch: list[Row]) -> Row:
    longest = max(len(row["input_ids"]) for row in batch)

    def stacked(name: str, value: int) -> Tensor:
        return torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=value) for row in batch])

    ids = stacked("input_ids", 0)
    return {"input_ids": ids, "labels": stacked("labels", -100), "attention_mask": (ids != 0).long()}


def mean_of_the_trainers_own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def probabilities(logits: Any, labels: Any) -> Tensor:
    return (logits[0] if isinstance(logits, tuple) else logits).softmax(-1)


def measures(seen: Any, compute_result: bool = True) -> dict[str, float]:
    predictions = seen.predictions[0] if isinstance(seen.predictions, tuple) else seen.predictions
    known = torch.as_tensor(predictions)[torch.as_tensor(seen.label_ids) != -100].float()
    found = {"best": known.argmax(-1).sum().item(), "norm": known.norm().item()}
    if getattr(seen, "losses", None) is not None:
        found["losses"] = float(np.asarray(seen.losses).sum())
    return found


# (arguments of TrainingArguments, of Trainer, the path of the loss in training and evaluation)
TILED = "tiled_linear_cross_entropy"
POPPED = "untiled: it was called without labels, which makes the logits of all tokens"
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({}, {}, TILED),
    "accumulated": ({"gradient_accumulation_steps": 2}, {}, TILED),
    "label-smoothing": ({"label_smoothing_factor": 0.1}, {}, POPPED),
    "own-loss": ({}, {"compute_loss_func": mean_of_the_trainers_own}, POPPED),
    "eval-accumulation": ({"eval_accumulation_steps": 1}, {}, TILED),
    "for-metrics": ({"include_for_metrics": ["inputs", "loss"]}, {}, TILED),
    "batch-metrics": ({"batch_eval_metrics": True}, {}, TILED),
    "preprocessed": ({}, {"preprocess_logits_for_metrics": probabilities}, TILED),
    "checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {},
        TILED,
    ),
    "reentrant": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {},
        TILED,
    ),
}


def trainer(model: Any, folder: Path, arguments: dict[str, Any], others: dict[str, Any]) -> Any:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": 2,
        "learning_rate": 0.05, "optim": "sgd", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "report_to": [],
        "logging_strategy": "no",
    }  # fmt: skip
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**(given | arguments)),
        train_dataset=rows(),
        eval_dataset=rows(),
        data_collator=padded,
        **({"compute_metrics": measures} | others),
    )


def results(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.split("_")[-1] in ("loss", "best", "norm", "losses")}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", SETUPS)
def test_what_the_trainer_computes_is_the_untiled_models(name: str, tmp_path: Path) -> None:
    """Training, evaluate and predict; a loss that goes past the tiled one says so once."""
    arguments, others, path = SETUPS[name]
    model, untiled = tile_model(build("llama").float(), num_shards=3), build("llama").float()
    expected, found = (trainer(each, tmp_path, arguments, others) for each in (untiled, model))
    expected.train()
    if path == TILED:
        found.train()
    else:
        with pytest.warns(UserWarning, match="it was called without labels") as told:
            found.train()
        assert len([warning for warning in told if "tile_model" in str(warning.message)]) == 1
    assert tiling_paths(model)["lm_head"] == path
    assert tiling_paths(model)["model.layers.0.mlp"] == "tiled_mlp"
    weights = zip(model.parameters(), untiled.parameters(), strict=True)
    assert all(
        relative_error(ours.detach().numpy(), plain.detach().numpy()) <= MODEL_FLOAT32 for ours, plain in weights
    )
    scores, plain_scores = results(found.evaluate()), results(expected.evaluate())
    assert scores.keys() == plain_scores.keys() > {"eval_loss", "eval_best"}
    assert relative_error(np.array([*scores.values()]), np.array([*plain_scores.values()])) <= MODEL_FLOAT32
    assert tiling_paths(model)["lm_head"] == path
    ours, plain = found.predict(rows()), expected.predict(rows())
    assert ours.predictions.shape == plain.predictions.shape == (6, 7, 32)
    assert relative_error(ours.predictions, plain.predictions) <= MODEL_FLOAT32
    assert np.array_equal(ours.label_ids, plain.label_ids)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["accumulated", "checkpointing", "reentrant"])
def test_layers_as_one_function_train_as_the_untiled_model(name: str, tmp_path: Path) -> None:
    """Rows of several lengths, padded, so that attention has a mask."""
    arguments, others, _ = SETUPS[name]
    untiled, model = build("llama").float(), tile_model(build("llama").float(), scope="block", num_shards=3)
    for each in (untiled, model):
        trainer(each, tmp_path, arguments, others).train()
    assert {path for name, path in tiling_paths(model).items() if name != "lm_head"} == {"tiled_block"}
    for ours, plain in zip(model.parameters(), untiled.parameters(), strict=True):
        assert relative_error(ours.detach().numpy(), plain.detach().numpy()) <= MODEL_FLOAT32


@pytest.mark.parametrize("arguments", [{"bf16": True}, {}], ids=["bf16", "float32"])
def test_an_evaluation_of_the_loss_alone_makes_no_logits(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does training, with the casts that mixed precision makes of outputs."""

    def get(self: Values) -> Tensor:
        raise AssertionError("the logits were computed")

    monkeypatch.setattr(Values, "get", get)
    model = tile_model(build("llama", vocab_size=2048).float(), num_shards=8)
    long = [{"input_ids": torch.arange(64) % 31, "labels": torch.arange(64) % 31} for _ in range(4)]
    with LiveBytes() as live:
        session = trainer(model, tmp_path, {"prediction_loss_only": True, **arguments}, {"compute_metrics": None})
        session.train_dataset = session.eval_dataset = long
        session.train()
        assert np.isfinite(session.evaluate()["eval_loss"])
        session.args.prediction_loss_only = False  # Trainer then asks for the loss alone where there are no metrics
        session.evaluate()
    assert 2048 * 16 * 4 <= live.largest < 2 * 64 * 2048 * 2


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "stablelm"])
def test_a_model_of_any_class_trains_evaluates_and_predicts(
    kind: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Its own forward, with a head whose logits are there for metrics."""
    untiled, model = supported.build(kind).float(), tile_model(supported.build(kind).float(), num_shards=3)
    start = [p.detach().clone() for p in untiled.parameters()]
    expected, found = (trainer(each, tmp_path, arguments, {}) for each in (untiled, model))
    for each in (expected, found):
        each.train()
    assert tiling_paths(model)["lm_head"] == TILED
    limit = MODEL_FLOAT32 if not arguments.get("bf16") else FLOOR["bfloat16"]
    assert not all(torch.equal(first, plain) for first, plain in zip(start, untiled.parameters(), strict=True))
    for ours, plain in zip(model.parameters(), untiled.parameters(), strict=True):
        assert relative_error(ours.detach().numpy(), plain.detach().numpy()) <= limit
    scores, plain_scores = results(found.evaluate()), results(expected.evaluate())
    assert scores.keys() == plain_scores.keys() > {"eval_loss", "eval_best"}
    assert abs(scores["eval_loss"] - plain_scores["eval_loss"]) <= limit * abs(plain_scores["eval_loss"])
    ours, plain = found.predict(rows()), expected.predict(rows())
    assert ours.predictions.shape == plain.predictions.shape == (6, 7, 64)
    assert relative_error(ours.predictions, plain.predictions) <= 10 * limit
