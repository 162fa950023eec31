"""Schedule, decay, clipping and evaluation of `finetune`: the same in both halves, over ranks, and behind a resume."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rich.console import Console

from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import finetune
from shared_specs.app.finetune.schedule import decays, learning_rate
from shared_specs.app.finetune.trainer import ADAMW
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.tolerances import DEMO_LOSS_RTOL, FLOOR, MODEL_FLOAT32
from tests.app.test_both_finetune import _programs_are_not_optimized, inputs, run  # noqa: F401  (fixtures)
from tests.asserting import assert_within
from tiled_jax.commands.finetune import optimizing as jax_optimizing
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_torch.commands.finetune import optimizing as torch_optimizing
from tiled_torch.commands.finetune.trainer import TorchTrainer

TRAINING = {
    "schedule": "cosine", "warmup": 2, "weight_decay": 0.5, "clip": 0.5, "lr": 1e-2, "eval_fraction": 0.2, "eval_every": 2,
}  # fmt: skip


def curves(out):
    """Losses, norms of gradients and losses of what is held out, by step."""
    log = read_log(out)
    steps, held_out = step_records(log), step_records(log, "eval")
    return {
        "loss": [record["loss"] for record in steps],
        "norm": [record["gradient_norm"] for record in steps],
        "held out": [record["loss"] for record in held_out],
        "evaluated": [record["step"] for record in held_out],
        "lr": [record["lr"] for record in steps],
    }


def assert_same_curves(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=DEMO_LOSS_RTOL), name


@pytest.fixture(scope="module")
def torch_run(inputs, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("torch") / "run"
    run(TorchTrainer, inputs, out, num_shards=5, **TRAINING)
    return out


def test_both_halves_and_a_resumed_run_have_one_curve(inputs, torch_run, tmp_path):  # noqa: F811
    """PyTorch's run is gone on with by JAX, from a state whose schedule nobody wrote down: it follows from the steps done."""
    whole = curves(torch_run)
    assert whole["evaluated"] == [0, 2, 4, 6]
    assert whole["loss"][-1] < whole["loss"][0]
    assert whole["held out"][-1] < whole["held out"][0]
    assert min(whole["norm"]) > TRAINING["clip"], "every gradient was scaled"
    run(JaxTrainer, inputs, tmp_path / "jax", num_shards=5, **TRAINING)
    assert_same_curves(curves(tmp_path / "jax"), whole)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("trainer", [TorchTrainer, JaxTrainer])
def test_a_resumed_run_goes_on_with_its_schedule(inputs, tmp_path, trainer, capsys):  # noqa: F811
    """A run that is stopped by its fourth step and one that is not; the other half's moments are taken on the way."""
    changes = {"num_shards": 5, "save_every": 3} | TRAINING
    whole, out = tmp_path / "whole", tmp_path / "run"
    run(trainer, inputs, whole, **changes)

    class Stops(trainer):
        def step(self, batch):
            if self.steps == 4:
                raise KeyboardInterrupt
            self.steps += 1
            return super().step(batch)

        steps = 0

    with pytest.raises(KeyboardInterrupt):
        run(Stops, inputs, out, **changes)
    for name, value in (("schedule", "linear"), ("steps", 7), ("clip", None), ("warmup", 1), ("eval_fraction", 0.1)):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} must be .*, as the run in .* began, got"):
            run(trainer, inputs, out, **changes | {name: value, "resume": True})
    run(trainer, inputs, out, **changes | {"resume": True})
    assert_same_curves(curves(out), curves(whole))


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp": 2, "fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2, "grad_accumulation": 2}], ids=str)
def test_clipping_and_evaluation_over_a_mesh_in_jax(inputs, tmp_path, mesh):  # noqa: F811
    shared = {"tokens": 24, "num_shards": 3, "steps": 3, **TRAINING}
    batches = mesh.get("grad_accumulation", 1)
    run(TorchTrainer, inputs, tmp_path / "alone", **shared, batch=4 * batches)
    run(JaxTrainer, inputs, tmp_path / "mesh", **shared, batch=4, **mesh)
    assert_same_curves(curves(tmp_path / "mesh"), curves(tmp_path / "alone"))


def test_an_update_is_adamws(inputs, tmp_path):  # noqa: F811
    """The first step of PyTorch by the formula: of a gradient that is scaled, with decay of matrices alone."""
    from shared_specs.app.models.weights import read_model

    plain = {"plain": True, "steps": 1, "schedule": "linear", "lr": 1e-2, "weight_decay": 0.5, "clip": 0.5}
    before = read_model(inputs / "model").tensors
    gradients = {}

    class Seen(TorchTrainer):
        def _loss_of(self, part, valid):
            loss = super()._loss_of(part, valid)
            for name, parameter in self._parameters.items():
                parameter.register_hook(
                    lambda gradient, name=name: gradients.__setitem__(name, gradient.numpy().copy())
                )
            return loss

    run(Seen, inputs, tmp_path / "run", **plain)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values()))
    assert curves(tmp_path / "run")["norm"] == pytest.approx([norm], rel=MODEL_FLOAT32)
    after = read_model(tmp_path / "run" / "model").tensors
    for name, weight in before.items():
        g = gradients[name].astype(np.float64) * 0.5 / norm
        expected = weight * (1 - 1e-2 * (0.0 if weight.ndim == 1 else 0.5)) - 1e-2 * g / (abs(g) + ADAMW.eps)
        assert_within(after[name], expected, DEMO_LOSS_RTOL, name)


@pytest.mark.parametrize(("longest", "kept"), [(10.0, 1.0), (2.5, 0.5)])
def test_long_gradients_are_scaled_down_and_short_ones_stay(longest, kept):
    """A gradient of norm 5, told in both halves."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert torch_optimizing.clip([parameter], longest) == 5
    assert parameter.grad.tolist() == [3 * kept, 4 * kept]
    found, state = jax_optimizing.clip(longest).update({"w": jnp.array([3.0, 4.0])}, None)
    assert state.gradient_norm == 5
    assert found["w"].tolist() == [3 * kept, 4 * kept]


def test_what_decays():
    matrices = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
    others = ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"]
    assert [decays(name.split(".")) for name in matrices + others] == [True] * 3 + [False] * 3
    jax = [("embed", "embedding"), ("layers", "attention", "q", "kernel"), ("layers", "mlp", "w_up")]
    jax += [("layers", "mlp_norm", "scale"), ("layers", "attention", "q", "bias"), ("layers", "mlp", "b_up")]
    assert [decays(path) for path in jax] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_begin_and_end(schedule):
    options = FinetuneOptions(lr=0.1, schedule=schedule, warmup=3, steps=13)
    rates = [learning_rate(options, done) for done in range(13)]
    assert rates[:4] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1], rel=FLOOR["float64"])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    ends = {"constant": 0.1, "linear": 0.01, "cosine": 0.05 * (1 + np.cos(0.9 * np.pi))}
    assert rates[-1] == pytest.approx(ends[schedule], rel=FLOOR["float64"])
    whole = FinetuneOptions(lr=0.1, schedule=schedule, warmup=13, steps=13)
    assert learning_rate(whole, 12) == pytest.approx(0.1, rel=FLOOR["float64"]), "all of it warm-up"


def test_json_is_a_line_of_each_step(inputs, tmp_path, capfd):  # noqa: F811
    options = {"model": str(inputs / "model"), "text": str(inputs / "text"), "tokens": 24, "steps": 2, "device": "cpu"}
    given = FinetuneOptions(**options, out=str(tmp_path / "run"), json=True, eval_fraction=0.1, lr=1e-3)
    assert finetune(TorchTrainer(), given) == 0
    shown = capfd.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["event"] for line in lines] == ["eval", "step", "step", "eval", "end"]
    assert [line["loss"] for line in lines if line["event"] == "step"] == [
        record["loss"] for record in step_records(read_log(tmp_path / "run"))
    ]
    assert "tiled_torch finetune: model" in shown.err


def test_a_changed_option_is_told(inputs, tmp_path):  # noqa: F811
    shared = {"num_shards": 5, "lr": 1e-3}
    run(TorchTrainer, inputs, tmp_path / "run", **shared, steps=1)
    options = {"model": str(inputs / "model"), "text": str(inputs / "text"), "tokens": 48, "batch": 2, "device": "cpu"}
    given = FinetuneOptions(**options, out=str(tmp_path / "run"), steps=2, lr=1e-3, num_shards=2, resume=True)
    shown = io.StringIO()
    assert finetune(TorchTrainer(), given, Console(file=shown, width=200)) == 0
    assert "--num-shards was 5 before, and is 2 from here on\n" in shown.getvalue()
