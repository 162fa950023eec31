"""The import table holds for every module, each of its rules can fail, and shared_specs loads no framework."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.import_rules import PACKAGES, circles, violations

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN = [
    ("shared_specs/shards.py", "import torch"),
    ("shared_specs/shards.py", "import jax.numpy as jnp"),
    ("shared_specs/shards.py", "def f():\n    import scipy"),
    ("shared_specs/shards.py", "import rich"),
    ("shared_specs/shards.py", "from shared_specs.app import text"),
    ("shared_specs/shards.py", "from .app.text import windows"),
    ("shared_specs/mlp/oracle.py", "from ..app import text"),
    ("shared_specs/mlp/oracle.py", "from shared_specs.loss import costs"),
    ("shared_specs/core/checks.py", "from shared_specs.mlp.costs import MLPShape"),
    ("shared_specs/config.py", "from shared_specs.core.rounding import DTYPES"),
    ("shared_specs/app/data/text.py", "import torch"),
    ("shared_specs/app/data/text.py", "import transformers"),
    ("shared_specs/app/demo/run.py", "from tiled_torch import tiled_mlp"),
    ("shared_specs/shards.py", "import importlib\nimportlib.import_module('torch')"),
    ("tiled_torch/mlp/api.py", "from tiled_jax import tiled_mlp"),
    ("tiled_torch/mlp/api.py", "def f():\n    import jax"),
    ("tiled_torch/mlp/api.py", "import transformers"),
    ("tiled_torch/mlp/api.py", "from shared_specs.app import text"),
    ("tiled_torch/mlp/api.py", "from tiled_torch.layers.modules import ColumnParallelLinear"),
    ("tiled_torch/mlp/api.py", "from ..loss.api import tiled_linear_cross_entropy"),
    ("tiled_torch/mlp/api.py", "from tiled_torch import tiled_mlp"),
    ("tiled_torch/mlp/api.py", "from tiled_torch.modules import TiledMLP"),
    ("tiled_torch/core/gated.py", "from tiled_torch.mlp.api import tiled_mlp"),
    ("tiled_torch/mlp/module.py", "from tiled_torch import models"),
    ("tiled_torch/models/llama.py", "from tiled_torch.plans import api"),
    ("tiled_torch/models/llama.py", "from tiled_torch.commands import finetune"),
    ("tiled_torch/__init__.py", "from tiled_torch.commands import finetune"),
    ("tiled_torch/bridge/arrays.py", "import jax"),
    ("tiled_torch/bridge/arrays.py", "if jax_wanted:\n    import jax"),
    ("tiled_torch/bridge/arrays.py", "def f():\n    import tiled_jax"),
    ("tiled_torch/mlp/module.py", "if TYPE_CHECKING:\n    import jax"),
    ("tiled_torch/nowhere.py", "import torch"),
    ("tiled_jax/mlp/api.py", "import torch"),
    ("tiled_jax/mlp/api.py", "def f():\n    from tiled_torch.bridge import jax_function"),
    ("tiled_jax/commands/finetune/trainer.py", "import torch"),
    ("tiled_jax/models/llama.py", "import transformers"),
    ("tiled_jax/mlp/api.py", "from tiled_jax.layers.modules import ColumnParallelLinear"),
]

ALLOWED = [
    ("shared_specs/shards.py", "import math\nimport numpy as np\nimport ml_dtypes\nfrom shared_specs import errors"),
    ("shared_specs/app/data/text.py", "import rich\nimport typer\nfrom shared_specs.app import log"),
    (
        "tiled_torch/mlp/module.py",
        "import torch\nfrom tiled_torch.mlp import api\nfrom shared_specs import costs",
    ),
    (
        "tiled_torch/commands/finetune/trainer.py",
        "from tiled_torch.models import tile_model\nfrom shared_specs.app import loop",
    ),
    ("tiled_torch/bridge/arrays.py", "def f():\n    import jax"),
    ("tiled_torch/bridge/arrays.py", "if TYPE_CHECKING:\n    import jax"),
    ("tiled_torch/__init__.py", "from tiled_torch.functional import tiled_mlp\nfrom .models import tile_model"),
    ("tiled_jax/mlp/module.py", "from flax import nnx\nfrom ..core import arrays"),
]

# Runs in a fresh interpreter: blocks every package but those named, imports the modules, and prints what it loaded.
LOAD = """
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {packages!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
sys.path.insert(0, {root!r})
for module in {modules!r}:
    importlib.import_module(module)
print(*sorted({{name.split(".")[0] for name in sys.modules}}))
"""


def test_every_module_keeps_to_the_table():
    assert [fault for path in MODULES for fault in violations(path, (ROOT / path).read_text())] == []


def test_no_files_import_in_a_circle():
    """Nor inside functions."""
    sources = {path: (ROOT / path).read_text() for path in MODULES}
    assert circles(sources) == []


def test_a_circle_is_found():
    sources = {
        "tiled_torch/a.py": "import tiled_torch.b",
        "tiled_torch/b.py": "def f():\n    from tiled_torch.c import g",
    }
    sources |= {"tiled_torch/c.py": "from . import a", "tiled_torch/d.py": "from tiled_torch import a"}
    assert circles(sources) == [["tiled_torch.a", "tiled_torch.b", "tiled_torch.c"]]


@pytest.mark.parametrize(
    "name", ["torch.modules.mlp TiledMLP", "torch.parallel.layers ColumnParallelLinear", "jax.modules.mlp TiledMLP"]
)
def test_pickles_of_earlier_versions_find_their_classes(name):
    """Written where files stood in folders by layer."""
    pytest.importorskip(name.partition(".")[0])
    found = pickle.loads(f"ctiled_{name.replace(' ', chr(10))}\n.".encode())
    assert found.__name__ == name.rpartition(" ")[2]


@pytest.mark.parametrize("half", ["torch", "jax"])
def test_tile_is_the_function_whatever_is_imported(half):
    """Its room has the same name."""
    pytest.importorskip(half)
    script = f"import tiled_{half}.tile.loss, tiled_{half}; assert tiled_{half}.tile is tiled_{half}.functional.tile"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("path", "source"), FORBIDDEN)
def test_each_rule_can_fail(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_what_the_table_allows_passes(path, source):
    assert violations(path, source) == []


def load(root: Path, modules: list[str], packages: set[str]) -> subprocess.CompletedProcess[str]:
    script = LOAD.format(root=str(root), modules=modules, packages=packages)
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_the_specification_needs_only_numpy_and_ml_dtypes():
    modules = [dotted(p) for p in MODULES if p.startswith("shared_specs/") and not p.startswith("shared_specs/app/")]
    assert "shared_specs.shards" in modules
    run = load(ROOT, modules, {"shared_specs", "numpy", "ml_dtypes"})
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert {"shared_specs", "numpy"} <= loaded
    assert loaded.isdisjoint({"torch", "triton", "jax", "jaxlib", "flax", "transformers"})


@pytest.mark.parametrize("source", ["import rich", "def f():\n    import torch\nf()", "import shared_specs"])
def test_the_blocked_interpreter_can_fail(tmp_path, source):
    (tmp_path / "specimen.py").write_text(source)
    run = load(tmp_path, ["specimen"], {"specimen", "numpy", "ml_dtypes"})
    assert run.returncode != 0
    assert "is blocked" in run.stderr
