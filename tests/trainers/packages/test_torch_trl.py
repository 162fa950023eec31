"""trl's trainers with a tiled model: what they log and what they train is the untiled model's, through the tiled head."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_specs.app.bench.workloads import LOSS_WORKLOADS
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32
from tests.models.test_torch_models import build
from tests.trainers.packages.words import WORDS, tokenizer
from tiled_torch import UnsupportedError, tile_model, tiling_paths
from tiled_torch.commands.bench import loss as bench_loss
from tiled_torch.compat import trl as adapter
from tiled_torch.compat.trl import tile_trainer

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pyarrow = pytest.importorskip("pyarrow")

CLASSES = {
    "sft": (trl.SFTConfig, trl.SFTTrainer),
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of trl's own; tile_model's are asked for below

TEXTS = [" ".join(WORDS[(start + 3 * step) % len(WORDS)] for step in range(6 + start % 4)) for start in range(8)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 0.05, "optim": "sgd", "use_cpu": True, "bf16": False,
    "save_strategy": "no", "disable_tqdm": True, "report_to": [], "logging_steps": 1, "seed": 3,
    "gradient_checkpointing": False,
}  # fmt: skip


def head(text: str) -> str:
    return " ".join(text.split()[:3])


def rows_of(kind: str) -> Any:
    """With a fingerprint: making one pickles Arrow's own classes, which not every version of it lets be pickled."""
    rows = {
        "sft": [{"prompt": head(text), "completion": text.removeprefix(head(text))} for text in TEXTS],
        "dpo": [
            {"prompt": text, "chosen": f" {WORDS[at]} mu", "rejected": " nu xi omicron"}
            for at, text in enumerate(TEXTS)
        ],
        "grpo": [{"prompt": text} for text in TEXTS],
    }[kind]
    return datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint=kind)


def longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def make(kind: str, model: Any, folder: Path, **settings: Any) -> Any:
    given = SETTINGS | {"output_dir": str(folder)} | settings
    lora = given.pop("lora", None)
    others: dict[str, Any] = {"peft_config": lora} if lora else {}
    if kind == "grpo":
        given |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        others |= {"reward_funcs": longer}
    if kind == "dpo":
        others |= {"ref_model": copy.deepcopy(model)}
    config, trainer = CLASSES[kind]
    rows = rows_of(kind)
    return trainer(model=model, args=config(**given), train_dataset=rows, processing_class=tokenizer(), **others)


def history(trainer: Any) -> list[dict[str, float]]:
    """Train, and return every number that was logged and does not depend on the clock."""
    trainer.train()
    skipped = ("runtime", "per_second", "step_time", "epoch", "flos", "/tokens_per")
    return [
        {name: value for name, value in row.items() if isinstance(value, float) and not any(s in name for s in skipped)}
        for row in trainer.state.log_history
    ]


def model_of_words() -> Any:
    return build("llama", vocab_size=len(WORDS) + 4, eos_token_id=3, pad_token_id=0, bos_token_id=2).float()


def loaded(folder: Path) -> Any:
    """From a folder, which GRPO's trainer loads its reference from."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


CASES = {
    "sft": {},
    "sft-dft": {"loss_type": "dft"},
    "sft-lora": {"lora": True},
    "dpo": {},
    "grpo": {},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_logged_and_trained_is_the_untiled_models(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    settings = dict(CASES[name])
    if settings.pop("lora", None):
        settings["lora"] = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian")
    model_of_words().save_pretrained(tmp_path / "model")
    untiled, model = loaded(tmp_path / "model"), tile_model(loaded(tmp_path / "model"), num_shards=3)
    kind = name.partition("-")[0]
    torch.manual_seed(5)
    expected = history(make(kind, untiled, tmp_path, **settings))
    torch.manual_seed(5)
    trainer = tile_trainer(make(kind, model, tmp_path, **settings))
    mlps = "tile: up_proj is peft.tuners.lora.layer.Linear" if "lora" in settings else "tiled_mlp"
    ran = []
    monkeypatch.setattr(
        adapter._TiledHead, "apply", lambda *a, given=adapter._TiledHead.apply: ran.append(1) or given(*a)
    )
    found = history(trainer)
    assert len(ran) >= 3
    assert tiling_paths(model)["lm_head"] == adapter.PATH
    assert set(tiling_paths(model).values()) - {adapter.PATH} == {mlps}
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        for key, value in wanted.items():
            assert abs(row[key] - value) <= MODEL_FLOAT32 * max(1.0, abs(value)), key
    moved = dict(untiled.named_parameters())
    for key, parameter in model.named_parameters():
        assert relative_error(parameter.detach().numpy(), moved[key].detach().numpy()) <= MODEL_FLOAT32, key


def test_without_the_adapter_the_layers_say_that_the_loss_is_another(tmp_path: Path) -> None:
    model = tile_model(model_of_words(), num_shards=3)
    with pytest.warns(UserWarning, match="its layers were called past its forward"):
        make("sft", model, tmp_path).train()


def test_two_trainers_in_two_threads_have_a_head_each(tmp_path: Path, monkeypatch: Any) -> None:
    """Both are inside their forward, the first returns, and only then does the second come to its head."""
    counts = {"first": 2, "second": 3}
    trainers = {
        name: tile_trainer(make("sft", tile_model(model_of_words(), num_shards=count), tmp_path / name))
        for name, count in counts.items()
    }
    ids = torch.arange(12)[None] % len(WORDS)
    given = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
    expected = {name: trainer.model(**given).loss.item() for name, trainer in trainers.items()}
    both, returned, called = threading.Barrier(2), threading.Event(), []

    def wait(name: str) -> None:
        both.wait(60)
        assert name == "first" or returned.wait(60)

    def forward(name: str) -> float:
        loss = trainers[name].model(**given).loss.item()
        if name == "first":
            returned.set()
        return loss

    for name, trainer in trainers.items():
        trainer.model.model.norm.register_forward_hook(lambda *_, name=name: wait(name))
    monkeypatch.setattr(
        adapter._TiledHead,
        "apply",
        lambda head, *a, given=adapter._TiledHead.apply: called.append(head.tiling.num_shards) or given(head, *a),
    )
    theirs = trl.trainer.utils._ChunkedLogProbFunction
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(counts, pool.map(forward, counts), strict=True))
    assert called == list(counts.values())
    assert found == expected
    assert trl.trainer.utils._ChunkedLogProbFunction is theirs


def test_what_cannot_be_given_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^tile_trainer: trainer must be a trainer of trl, got int\.$"):
        tile_trainer(3)
    trainer = make("sft", model_of_words(), tmp_path)
    text = (
        r"^tile_trainer: trainer\.model must be a tiled causal language model, got LlamaForCausalLM\. Call tile_model"
    )
    with pytest.raises(UnsupportedError, match=text):
        tile_trainer(trainer)
    trainer.model = tile_model(model_of_words())
    with pytest.raises(
        UnsupportedError, match=r"^tile_trainer: trainer\.model must be one whose head trl has replaced"
    ):
        tile_trainer(trainer)


def test_its_chunked_loss_is_a_peer_of_the_benchmark() -> None:
    """Of all rows, as trl calls it without a GPU, and of the rows with a label, as on one; `measure` compares the results."""
    workload = replace(LOSS_WORKLOADS[0], name="small", tokens=256, hidden=16, vocab=96, ignored=0.9)
    names = [row["variant"] for row in bench_loss.measure(workload, repeats=1)]
    assert {"trl", "trl-chosen-rows"} <= {*names}
