"""`parity`: what it prints, and that a wrong result, a missing one and one of another kind make it fail."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from shared_specs.app import parity as of_cases
from shared_specs.app.options import ParityOptions
from shared_specs.app.parity import GROUPS, Place, chosen, measured, parity
from shared_specs.core.rounding import DTYPES, compute_dtype
from shared_specs.errors import UnsupportedError
from tests.core.jax_compiling import compiled_plainly
from tiled_jax.commands.parity import JaxRunner
from tiled_torch.commands.parity import TorchRunner


class Specification:
    """The plain implementation of the specification as a half, whose results `change` may spoil."""

    def __init__(self, change=lambda name, array: array):
        self.change = change

    def places(self, group):
        yield Place(device="cpu", backend="numpy")

    def run(self, group, case, place):
        _, plain = of_cases._truth(case)
        outputs = ("loss", "log_probs", "lse", "entropy", "accuracy")
        dtypes = {name: compute_dtype(case.dtype) if name in outputs else DTYPES[case.dtype] for name in plain}
        return {name: self.change(name, array.astype(dtypes[name])) for name, array in plain.items()}


def shown(runner, **options):
    file = io.StringIO()
    code = parity(ParityOptions(fast=True, **options), "half", runner, Console(file=file, width=80))
    return code, file.getvalue()


def test_what_is_right():
    code, text = shown(Specification(), op="mlp")
    assert code == 0
    assert "mlp        bfloat16   cpu      numpy" in text
    assert text.rstrip().endswith("every error is within its limit")


@pytest.mark.parametrize(
    "change",
    [
        lambda name, a: a * (1 + 1e-5 * (name == "dw_up")),
        lambda name, a: np.where(name == "dx", np.nan, a).astype(a.dtype),
        lambda name, a: a.astype(np.float64) if name == "y" else a,
        lambda name, a: a[..., :1] if name == "dw_down" else a,
        lambda name, a: None if name == "dw_up" else a,
    ],
    ids=["a little off", "no number", "another dtype", "another shape", "none"],
)
def test_what_is_wrong(change):
    code, text = shown(Specification(change), op="mlp")
    assert code == 1
    assert "wrong: " in text
    assert "have an error over its limit" in text


def test_json_and_refused_cases(capsys):
    class Refuses(Specification):
        def run(self, group, case, place):
            if case.dtype == "float16":
                raise UnsupportedError("none")
            return super().run(group, case, place)

    assert parity(ParityOptions(op="linear", fast=True, json=True), "half", Refuses()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["dtype"], row["cases"] > 0, row["refused"] > 0) for row in rows] == [
        ("float64", True, False), ("float32", True, False), ("bfloat16", True, False), ("float16", False, True),
    ]  # fmt: skip


def test_pytorch_is_right_on_one_case_of_each_kind(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")  # in which they take ten times as long
    rows = list(measured(TorchRunner(), GROUPS, fast=True))
    assert {row.group for row in rows} == set(GROUPS)
    assert [(row.group, row.dtype, row.case, row.quantity) for row in rows if not row.right] == []
    assert sum(row.cases for row in rows) == sum(len(chosen(group, True)) for group in GROUPS)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("group", GROUPS)
def test_jax_is_right(group, monkeypatch):
    """The last of each dtype: compiling them all is minutes."""
    last = list({case.dtype: case for case in chosen(group, True)}.values())
    fused = [case for case in chosen(group, True) if getattr(case, "fused", False)][:1]
    monkeypatch.setattr(of_cases, "chosen", lambda group, fast: last + fused)
    with compiled_plainly():
        rows = list(measured(JaxRunner(), [group], fast=True))
    assert sum(row.cases for row in rows) == len(last + fused) > 0
    assert [(row.dtype, row.case, row.quantity) for row in rows if not row.right] == []
