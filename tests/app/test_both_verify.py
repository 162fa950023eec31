"""`verify`: a module of the user's own and a model, by the command of both halves."""

import json

import numpy as np
import pytest

from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.app.test_both_finetune import _programs_are_not_optimized, inputs  # noqa: F401  (fixtures)
from tiled_jax import __main__ as jax_main
from tiled_torch import __main__ as torch_main

HALVES = {"torch": torch_main, "jax": jax_main}
HERE = "tests.app.verify_subjects"


def run(half, *words):
    from shared_specs.app.command import main

    return main(f"tiled_{half}", HALVES[half].COMMANDS, ["verify", *map(str, words)])


@pytest.mark.parametrize(("half", "name"), [("torch", "TorchMLP"), ("torch", "MADE"), ("jax", "JaxMLP")])
def test_a_token_wise_module_is_right(half, name, capsys):
    assert run(half, f"{HERE}:{name}", "--hidden", 8, "--tokens", 30, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in found["errors"]} == {"float64", "float32"}
    results = {"y", "dx", *(f"d{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias"))}
    named = {row["result"].replace("kernel", "weight") for row in found["errors"]}
    assert named == results
    assert found["wrong"] == []
    reasons = {
        "torch": "a probe shows another formula than that of tiled_mlp",
        "jax": "it is not the formula of an MLP",
    }
    assert found["paths"] == {"": f"tile: {reasons[half]}"}
    assert 0 < found["tiled_bytes"] < 10 * found["plain_bytes"]
    assert found["hooks"] == (
        dict.fromkeys(["up.weight", "up.bias", "down.weight", "down.bias"], 1) if half == "torch" else None
    )


def test_a_token_wise_module_without_an_mlp_is_tiled_whole(capsys):
    assert run("torch", f"{HERE}:TorchNormed", "--hidden", 8, "--tokens", 30, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paths"] == {"": "tile: the whole of it is one token-wise function"}
    assert found["hooks"] == dict.fromkeys(["norm.weight", "norm.bias", "mix.weight", "mix.bias"], 1)


@pytest.mark.parametrize(("half", "name"), [("torch", "TorchMixing"), ("jax", "JaxMixing")])
def test_a_module_that_looks_at_other_tokens_is_wrong(half, name, capsys):
    assert run(half, f"{HERE}:{name}", "--hidden", 8, "--tokens", 30, "--device", "cpu") == 1
    shown = capsys.readouterr().out
    assert "path tile: the whole of it is one token-wise function" in shown
    assert "wrong: y in float64" in shown
    assert "What looks at other tokens, as attention does, cannot be tiled whole" in shown


@pytest.mark.deep
def test_mlps_inside_a_module_are_what_is_tiled(capsys):
    """Of one that looks at all tokens, and by the paths that ran: not all is what its modules would do for x alone."""
    assert run("jax", f"{HERE}:JaxLayer", "--hidden", 8, "--tokens", 30, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == []
    assert found["paths"] == {
        "first": "tiled_mlp",
        "last": "tile: it is called with more than x",
        "other": "tile: it is not the formula of an MLP",
    }


def test_a_wrong_formula_is_told(monkeypatch, capsys):
    """In float64 as well, where a dtype that a module names is that of its own products."""
    from tiled_jax.models.others import tiled

    run_right = tiled.tiled_mlp
    monkeypatch.setattr(tiled, "tiled_mlp", lambda *w, **options: 2 * run_right(*w, **options))
    assert run("jax", f"{HERE}:JaxGated", "--hidden", 8, "--tokens", 30, "--device", "cpu") == 1
    shown = capsys.readouterr().out
    assert "path tiled_mlp: the module itself" in shown
    assert "wrong: y in float64" in shown
    assert "y in float32" in shown


@pytest.mark.parametrize("half", HALVES)
def test_every_result_is_compared(half, capsys):
    assert run(half, f"{HERE}:{half.title()}Second", "--hidden", 8, "--tokens", 30, "--json", "--device", "cpu") == 1
    found = json.loads(capsys.readouterr().out)
    evaluated = [row for row in found["errors"] if row["mode"] == "evaluation"]
    assert {row["result"] for row in evaluated if row["result"][0] == "y"} == {"y.first", "y.more[0]"}
    assert "y.more[0] in float64" in found["wrong"]
    assert "y.first in float64" not in found["wrong"]


@pytest.mark.parametrize("half", HALVES)
def test_training_is_compared_too(half, capsys):
    assert run(half, f"{HERE}:{half.title()}Training", "--hidden", 8, "--tokens", 30, "--device", "cpu") == 1
    shown = capsys.readouterr().out
    assert "wrong: y in float64, training; " in shown


@pytest.mark.deep
@pytest.mark.parametrize("name", ["TorchDropped", "TorchOnce", "JaxDropped", "JaxOnce"])
def test_dropout_is_compared_where_it_can_be(name, capsys):
    half = "torch" if name.startswith("Torch") else "jax"
    assert run(half, f"{HERE}:{name}", "--hidden", 8, "--tokens", 30, "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    if name.endswith("Once"):
        assert {row["mode"] for row in found["errors"]} == {"evaluation", "training"}
        assert found["notes"] == []
    else:
        assert {row["mode"] for row in found["errors"]} == {"evaluation"}
        (note,) = found["notes"]
        assert note.startswith("training: not comparable. It draws random numbers, as dropout does;")


def test_a_parameter_that_takes_no_part_has_no_hook(capsys):
    """PyTorch calls its hook where an operation has it among its operands, without a gradient."""
    assert run("torch", f"{HERE}:TorchSpare", "--hidden", 8, "--tokens", 30, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hooks"] == dict.fromkeys(["norm.weight", "norm.bias", "mix.weight", "mix.bias"], 1) | {
        "spare.weight": 0
    }


@pytest.mark.parametrize("half", HALVES)
def test_a_language_model_that_somebody_makes(half, capsys):
    assert run(half, f"{HERE}:{half.title()}LM", "--tokens", 30, "--json", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    results = {row["result"] for row in found["errors"]}
    assert {"y.logits", "loss" if half == "torch" else "y.loss"} <= results
    assert "dx" not in results
    assert any(name.startswith("dembed.") for name in results)
    assert {row["dtype"] for row in found["errors"]} == {"float32"}
    assert set(found["paths"]) == {"mlp"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_gradient_that_is_rounding_may_be_another(dtype):
    """As that of a key's bias is, in front of a softmax: by what a dtype rounds all of them by, and by no more."""
    from shared_specs.app.verification.verify import _errors

    rounding = float(np.finfo(dtype).eps)
    truth = {"dw": np.ones(4), "db": np.full(4, 0.1 * rounding)}

    def right(db):
        rows = _errors(dtype, truth, truth, truth | {"db": np.full(4, db)}, alone=False)
        return [row["right"] for row in rows]

    assert right(-0.5 * rounding) == [True, True]
    assert right(2 * rounding) == [True, False]
    truth["db"] = np.full(4, 1e-3)  # of which digits are known
    assert right(1e-3 * (1 + 2 * max(limit(0.0, dtype), DISTRIBUTED_FLOAT64))) == [True, False]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("half", HALVES)
def test_a_model_says_which_paths_ran(half, inputs, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "60")
    words = ("--model", inputs / "model", "--tokens", 40, "--device", "cpu")
    assert run(half, *words) == 0
    shown = capsys.readouterr().out
    assert "path tiled_mlp: " in shown
    assert "path tiled_linear_cross_entropy: " in shown
    assert "right: the same values and gradients" in shown
    long = ("tiled_", "path ", "hooks ", "peak ", "right")  # sentences are one line each, tables fit
    assert max(len(line) for line in shown.splitlines() if not line.startswith(long)) <= 60
    assert run(half, *words, "--scope", "block") == 0
    assert "path tiled_block: " in capsys.readouterr().out


def test_a_hook_that_fires_for_every_shard_is_told(monkeypatch, capsys):
    """As with libraries whose backward runs `torch.autograd.backward` once a shard."""
    import torch

    from tiled_torch.commands import verify

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, inner):
            ctx.x, ctx.inner = x.detach().requires_grad_(), inner
            with torch.no_grad():
                return inner(x)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                ctx.inner(ctx.x).backward(dy)
            return ctx.x.grad, None

    def each_shard(inner, num_shards):
        return lambda x: torch.cat([Again.apply(part, inner) for part in x.chunk(num_shards, 1)], 1)

    def nothing(*_, **__):
        raise UnsupportedError("tile_model: no MLP")

    monkeypatch.setattr(verify, "tile", each_shard)
    assert run("torch", f"{HERE}:TorchNormed", "--hidden", 8, "--tokens", 32, "--device", "cpu") == 1
    shown = capsys.readouterr().out
    assert "of 4 parameters each fired 4 time" in shown
    assert "wrong: the hook of norm.weight in float64; the hook of norm.weight in float32" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "verify: one module or --model must be given"),
        (("nowhere",), "verify: the module must be package.module:name, got nowhere."),
        (
            ("nowhere:x", "--hidden", 8),
            "verify: nowhere cannot be imported (ModuleNotFoundError: No module named 'nowhere').",
        ),
        ((f"{HERE}:absent", "--hidden", 8), f"got {HERE}:absent: {HERE} has no absent."),
        ((f"{HERE}:of_two", "--hidden", 8), "got one that needs first, second."),
        ((f"{HERE}:failing", "--hidden", 8), "fails (ValueError: no module today)."),
        ((f"{HERE}:NUMBER", "--hidden", 8), "must be a torch.nn.Module, or return one, got int."),
        ((f"{HERE}:MADE", "--hidden", 9, "--device", "cpu"), "MADE fails by itself, untiled (RuntimeError: "),
        ((f"{HERE}:MADE",), "verify: --hidden must be given with a module"),
        ((f"{HERE}:TorchMLP",), f"verify: --hidden must be given: {HERE}:TorchMLP needs hidden."),
        ((f"{HERE}:TorchLM", "--tokens", 1), "verify: --tokens must be >= 2 with a language model, got 1."),
        ((f"{HERE}:TorchWordless",), "must have a torch.nn.Embedding for the input_ids that it takes."),
        ((f"{HERE}:MADE", "--hidden", 8, "--scope", "block"), "verify: --scope block needs a language model: "),
        (("--model", "owner/absent"), "got owner/absent, which is neither in this folder nor in "),
        (("--model", "m", "--tokens", 1), "verify: --tokens must be >= 2 with --model, got 1."),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_one_line(words, message, capsys):
    assert run("torch", *words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert message in shown.err
