"""`check` in both halves: its bad inputs, and the command with its exit codes."""

import json
from importlib import import_module

import pytest

from shared_specs.app.command import main
from shared_specs.check.bad_inputs import BAD_CHECKS
from tests.check import jax_models, torch_models
from tiled_jax import __main__ as jax_main
from tiled_torch import __main__ as torch_main

HALVES = {"torch": torch_main, "jax": jax_main}
GOOD = {"torch": (torch_models.tiny, torch_models.tokens), "jax": (jax_models.TinyLM, jax_models.tokens)}


def run(half, name, *words):
    target = () if name is None else (f"tests.check.{half}_subjects:{name}",)
    return main(f"tiled_{half}", HALVES[half].COMMANDS, ["check", *target, *words])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", BAD_CHECKS, ids=lambda case: case.id)
def test_a_bad_input_is_one_sentence(half, case):
    model, batch = GOOD[half]
    check = import_module(f"tiled_{half}").check
    with pytest.raises(case.error) as caught:
        check(**{"model": model(), "batch": batch()} | case.arguments)
    assert str(caught.value) == case.message


@pytest.mark.parametrize("half", HALVES)
def test_a_right_training_is_equal(half, capsys):
    assert run(half, "right", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["first"], found["reference"], found["notes"]) == (True, None, "float64", [])
    assert set(found["paths"].values()) == {"tiled_mlp"}
    assert 0 < found["tiled_bytes"] < found["plain_bytes"]
    assert {result["kind"] for result in found["results"]} >= {"forward", "loss", "gradient", "parameter"}
    hooks = set(found["hooks"].values())
    assert hooks == ({1} if half == "torch" else set())


@pytest.mark.parametrize("half", HALVES)
def test_a_wrong_one_says_where(half, capsys):
    assert run(half, "wrong") == 1
    *_, last = capsys.readouterr().out.splitlines()
    part = "layers.0.mlp" if half == "torch" else "mlp"
    assert last.startswith(f"differs first at step 1, the result of {part}: error ")


NEITHER = {
    None: "check: one function must be given, such as check package.module:function.",
    "absent": "check: the function must be package.module:name, got {target}: {module} has no absent.",
    "NUMBER": "check: {target} must be a function that returns a dict, got int.",
    "nothing": "check: {target} must return a dict with model and batch, got NoneType.",
    "without_batch": "check: {target} must return a dict with model and batch, got one without batch.",
    "failing": "check: {target} fails (ValueError: no batch today).",
    "unknown": "optimizer, steps, seed{wrt}), got tiles.",
    "lossless": "check: step must be a function that returns the loss, ",
    "broken": "check: training, untiled, fails (",
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NEITHER)
def test_what_cannot_run_is_one_line(half, name, capsys):
    assert run(half, name) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    module = f"tests.check.{half}_subjects"
    wrt = ", wrt" if half == "jax" else ""
    assert NEITHER[name].format(target=f"{module}:{name}", module=module, wrt=wrt) in shown.err
