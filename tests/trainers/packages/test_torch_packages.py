"""peft and Lightning with a tiled model: the curve of the loss and the weights are the untiled model's."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.documents import ROOT, unrun
from tests.models.supported import build as build_supported
from tests.models.supported import difference, step
from tests.models.test_torch_block import assert_equal, gradients, layer_paths
from tests.models.test_torch_block_experts import build as build_experts
from tests.models.test_torch_block_forms import form
from tests.models.test_torch_models import build
from tests.models.test_torch_trainer import padded, rows, trainer
from tiled_torch import plan, tile_model, tiling_paths

peft = pytest.importorskip("peft")
lightning = pytest.importorskip("pytorch_lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers' own


def same_weights(model: nn.Module, untiled: nn.Module) -> None:
    expected = dict(untiled.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.detach().numpy(), expected[name].detach().numpy()) <= MODEL_FLOAT32, name


def curve(found: Any) -> list[float]:
    return [row[name] for row in found.state.log_history for name in ("loss", "eval_loss") if name in row]


TRAINERS = ROOT / "docs/recipes/trainers.md"
ADAPTED = ["q_proj", "gate_proj", "down_proj"]


def test_the_plan_of_a_model_with_adapters() -> None:
    """Adapters are what is trained, with what is saved beside them; and `plan` takes a tiled model as well."""
    for more, head in (({}, False), ({"modules_to_save": ["lm_head"]}, True)):
        model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=ADAPTED, **more))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for each in (model, tile_model(model, num_shards=3)):
            held = plan(each, 4096).plan.decoder.held
            assert held is not None
            assert (held.trained, held.trains_head) == (trained, head)
            assert 0 < held.mlp_trained < held.layer_trained


@pytest.mark.parametrize("order", ["tiled-then-peft", "peft-then-tiled"])
def test_peft_under_the_trainer_of_transformers(order: str, tmp_path: Path) -> None:
    settings = {
        "logging_strategy": "steps",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
    }

    def adapted(tiled: bool) -> Any:
        model = build("llama").float()
        if tiled and order == "tiled-then-peft":
            tile_model(model, num_shards=3)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=ADAPTED, init_lora_weights="gaussian"))
        return tile_model(model, num_shards=3) if tiled and order == "peft-then-tiled" else model

    untiled, model = adapted(False), adapted(True)
    expected, found = (trainer(each, tmp_path, settings, {}) for each in (untiled, model))
    expected.train()
    found.train()
    assert len(curve(found)) == 6
    assert torch.tensor(curve(found)) == pytest.approx(torch.tensor(curve(expected)), rel=MODEL_FLOAT32)
    paths = tiling_paths(model)
    assert paths.pop("base_model.model.lm_head") == "tiled_linear_cross_entropy"
    assert set(paths.values()) == {"tile: gate_proj is peft.tuners.lora.layer.Linear"}
    same_weights(model, untiled)
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    merged, batch = model.merge_and_unload(), padded(rows())
    assert float(merged(**batch).loss) == pytest.approx(float(untiled(**batch).loss), rel=MODEL_FLOAT32)
    assert set(tiling_paths(merged).values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}


@pytest.mark.parametrize("order", ["tiled-then-peft", "peft-then-tiled"])
@pytest.mark.parametrize("dora", [False, True])
def test_peft_on_layers_that_call_fc1_and_fc2_themselves(order: str, dora: bool) -> None:
    """OPT's: gradients of the adapters, and the model into which they are merged, are the untiled one's."""
    settings = {"r": 2, "target_modules": ["fc1", "fc2"], "init_lora_weights": False, "use_dora": dora}

    def adapted(tiled: bool) -> Any:
        model = build_supported("opt")
        if tiled and order == "tiled-then-peft":
            tile_model(model, num_shards=3)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(**settings))
        return tile_model(model, num_shards=3) if tiled and order == "peft-then-tiled" else model

    untiled, model = adapted(False), adapted(True)
    expected = step(untiled, "opt")
    assert {name.split(".")[-4] for name in expected[2] if "lora_B" in name} == {"fc1", "fc2"}
    assert difference(step(model, "opt"), expected) <= DISTRIBUTED_FLOAT64
    paths = tiling_paths(model)
    assert paths.pop("base_model.model.lm_head") == "tiled_linear_cross_entropy"
    assert set(paths.values()) == {"tile: fc1 is peft.tuners.lora.layer.Linear"}
    merged, plain = (each.merge_and_unload().requires_grad_(True) for each in (model, untiled))
    assert difference(step(merged, "opt"), step(plain, "opt")) <= DISTRIBUTED_FLOAT64
    assert set(tiling_paths(merged).values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}


def test_lightning(tmp_path: Path) -> None:
    class Task(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.curve = model, []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = self.model(**batch).loss
            self.curve.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.curve.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def trained(model: nn.Module) -> tuple[nn.Module, list[float]]:
        batches = torch.utils.data.DataLoader(rows(), batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
        task = Task(model)
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        run = lightning.Trainer(
            accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, precision="32-true",
            default_root_dir=tmp_path, enable_model_summary=False, **quiet,
        )  # fmt: skip
        run.fit(task, batches, batches)
        return model, task.curve

    untiled, expected = trained(build("llama").float())
    model, found = trained(tile_model(build("llama").float(), num_shards=3))
    assert len(found) >= 12
    assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=MODEL_FLOAT32)
    assert set(tiling_paths(model).values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}
    same_weights(model, untiled)


def test_the_lines_of_the_page_for_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train what the page's loop of one's own trains with the untiled model: two micro-batches a step, clipped."""
    monkeypatch.chdir(tmp_path)
    loader = torch.utils.data.DataLoader(rows()[:4], collate_fn=padded)  # type: ignore[arg-type]
    untiled, model = build("llama").float(), build("llama").float()
    quiet = partial(lightning.Trainer, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    given = SimpleNamespace(LightningModule=lightning.LightningModule, Trainer=quiet)
    exec(unrun(TRAINERS, "LightningModule"), {
        "pytorch_lightning": given, "torch": torch, "tile_model": tile_model, "model": model, "loader": loader,
    })  # fmt: skip
    assert set(tiling_paths(model).values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}
    optimizer = torch.optim.AdamW(untiled.parameters(), lr=1e-4)
    for at in (0, 2):
        for row in rows()[at : at + 2]:
            (untiled(**padded([row])).loss / 2).backward()
        nn.utils.clip_grad_norm_(untiled.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    same_weights(model, untiled)


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [
        ("deepseek_v3", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
        ("gpt_neox", ["query_key_value", "dense", "dense_h_to_4h"]),
        ("gpt_oss", ["q_proj", "v_proj", "o_proj"]),
        ("phi", ["k_proj", "dense", "fc1", "fc2"]),
    ],
)
def test_peft_in_layers_that_run_as_one(kind: str, adapted: list[str]) -> None:
    """The gradients of every adapter, and of nothing else, are those of the untiled model."""
    model = form(kind)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=adapted, init_lora_weights="gaussian"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    expected = gradients(model)
    assert len(expected) == 2 * len(adapted) * model.config.num_hidden_layers
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3)), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("order", ["tiled-then-peft", "peft-then-tiled"])
@pytest.mark.parametrize("router", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_peft_on_the_parameters_of_experts(kind: str, router: bool, order: str) -> None:
    """In layers that run as one: every adapter's gradient. An adapted router sees all tokens at once."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", *(["mlp.gate.weight"] if router else [])]

    def adapted(tiled: bool) -> Any:
        model = build_experts(kind)
        if tiled and order == "tiled-then-peft":
            tile_model(model, scope="block", num_shards=3)
        torch.manual_seed(1)
        settings = {"target_modules": ["q_proj"], "target_parameters": names, "init_lora_weights": "gaussian"}
        peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        return tile_model(model, scope="block", num_shards=3) if tiled and order == "peft-then-tiled" else model

    untiled, model = adapted(False), adapted(True)
    expected = gradients(untiled)
    assert len(expected) == 2 * (1 + len(names)) * model.config.num_hidden_layers
    assert_equal(gradients(model), expected)
    paths = tiling_paths(model)
    assert layer_paths(model) == {"tiled_block"}
    assert {path for name, path in paths.items() if ".experts." in name} == {"tiled_experts"}
    routers = {path for name, path in paths.items() if ".gate" in name}
    assert routers == {"untiled: its weights are parametrized for this call" if router else "tile"}
