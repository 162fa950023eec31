"""`doctor`: what is installed and what runs here, in both halves, and where the framework is missing."""

import io
import json

import pytest
from rich.console import Console

from shared_specs.app import doctor
from shared_specs.app.command import main
from shared_specs.app.options import DoctorOptions
from tiled_jax.__main__ import COMMANDS as JAX_COMMANDS
from tiled_torch.__main__ import COMMANDS as TORCH_COMMANDS

HALVES = {"tiled_torch": (TORCH_COMMANDS, "eager", "triton"), "tiled_jax": (JAX_COMMANDS, "xla", "pallas")}


@pytest.mark.parametrize("half", HALVES)
def test_what_is_found(half, capsys):
    commands, always, kernels = HALVES[half]
    assert main(half, commands, ["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    machine = found["machine"]
    assert machine["backends"][always] is None
    reason = machine["backends"][kernels]
    assert reason is None or "GPU" in reason  # Triton's interpreter, under which tests run, needs none
    assert {taken for of in machine["automatic"].values() for taken in of.values()} == {always}
    packages = {package["name"]: package for package in found["packages"]}
    assert {"torch", "jax", "transformers", "typer"} <= packages.keys()
    assert packages["numpy"]["fits"]
    assert packages["safetensors"]["extras"] == ["hf", "cli"]


def test_a_missing_framework_is_said_and_everything_else_told(monkeypatch):
    def find():
        raise ModuleNotFoundError("No module named 'torch'")

    old = doctor.Package(name="torch", extras=("torch",), supported=">=2.11", installed="1.0", fits=False)
    monkeypatch.setattr(doctor, "packages", lambda: (old,))
    file = io.StringIO()
    assert doctor.doctor(DoctorOptions(), "tiled_torch", find, "9", Console(file=file, width=100)) == 1
    shown = file.getvalue()
    assert "tiled_torch cannot run here: No module named 'torch'" in shown
    assert "1.0 (not supported)" in shown


@pytest.mark.parametrize("half", HALVES)
def test_which_table_of_block_sizes_is_in_use(half, capsys, tmp_path, monkeypatch):
    own = tmp_path / "own.json"
    monkeypatch.setenv("TILED_TUNED_BLOCKS", str(own))
    monkeypatch.setenv("COLUMNS", "60")
    assert main(half, HALVES[half][0], ["doctor"]) == 0
    assert f"(the package's), the defaults; tune would write {own}\n" in capsys.readouterr().out
    own.write_text("[]")
    assert main(half, HALVES[half][0], ["doctor"]) == 0
    assert f"block sizes of kernels, the first that has a shape: {own} (your own, of tune), " in capsys.readouterr().out


@pytest.mark.parametrize("half", HALVES)
def test_tune_refuses_a_table_that_cannot_be_written_before_it_measures(half, capsys, tmp_path):
    assert main(half, HALVES[half][0], ["tune", "--table", str(tmp_path)]) == 2
    assert main(half, HALVES[half][0], ["tune", "--table", "/proc/none/table.json"]) == 2
    assert main(half, HALVES[half][0], ["tune"]) == 2  # tests have no table of a user's
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"tune: --table must be a file that can be written, got {tmp_path} (Is a directory)."
    assert told[1].startswith("tune: --table must be a file that can be written, got /proc/none/table.json")
    assert told[2].startswith("tune: --table must be given where TILED_TUNED_BLOCKS is empty")


def test_version(capsys):
    assert main("tiled_torch", TORCH_COMMANDS, ["--version"]) == 0
    assert capsys.readouterr().out.startswith("tiled_torch 0.")
