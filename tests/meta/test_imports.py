"""The import table holds for every module, each of its rules can fail, and shared_specs loads no framework."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.import_rules import PACKAGES, violations

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN = [
    ("shared_specs/shards.py", "import torch"),
    ("shared_specs/shards.py", "import jax.numpy as jnp"),
    ("shared_specs/shards.py", "def f():\n    import scipy"),
    ("shared_specs/shards.py", "import rich"),
    ("shared_specs/shards.py", "from shared_specs.app import text"),
    ("shared_specs/shards.py", "from .app.text import windows"),
    ("shared_specs/oracle/mlp.py", "from ..app import text"),
    ("shared_specs/app/text.py", "import torch"),
    ("shared_specs/app/text.py", "import transformers"),
    ("shared_specs/app/demo.py", "from tiled_torch import tiled_mlp"),
    ("shared_specs/shards.py", "import importlib\nimportlib.import_module('torch')"),
    ("tiled_torch/functional/mlp.py", "from tiled_jax import tiled_mlp"),
    ("tiled_torch/functional/mlp.py", "def f():\n    import jax"),
    ("tiled_torch/functional/mlp.py", "import transformers"),
    ("tiled_torch/functional/mlp.py", "from shared_specs.app import text"),
    ("tiled_torch/functional/mlp.py", "from tiled_torch.modules import TiledMLP"),
    ("tiled_torch/functional/mlp.py", "from ..modules.mlp import TiledMLP"),
    ("tiled_torch/functional/mlp.py", "from tiled_torch import tiled_mlp"),
    ("tiled_torch/kernels/gated.py", "from tiled_torch.functional.mlp import tiled_mlp"),
    ("tiled_torch/modules/mlp.py", "from tiled_torch import models"),
    ("tiled_torch/models/llama.py", "from tiled_torch.parallel import plans"),
    ("tiled_torch/models/llama.py", "from tiled_torch.commands import finetune"),
    ("tiled_torch/__init__.py", "from tiled_torch.commands import finetune"),
    ("tiled_torch/bridge/arrays.py", "import jax"),
    ("tiled_torch/bridge/arrays.py", "if jax_wanted:\n    import jax"),
    ("tiled_torch/bridge/arrays.py", "def f():\n    import tiled_jax"),
    ("tiled_torch/modules/mlp.py", "if TYPE_CHECKING:\n    import jax"),
    ("tiled_torch/nowhere.py", "import torch"),
    ("tiled_jax/functional/mlp.py", "import torch"),
    ("tiled_jax/functional/mlp.py", "def f():\n    from tiled_torch.bridge import jax_function"),
    ("tiled_jax/commands/finetune.py", "import torch"),
    ("tiled_jax/models/llama.py", "import transformers"),
    ("tiled_jax/functional/mlp.py", "from tiled_jax.modules import TiledMLP"),
]

ALLOWED = [
    ("shared_specs/shards.py", "import math\nimport numpy as np\nimport ml_dtypes\nfrom shared_specs import errors"),
    ("shared_specs/app/text.py", "import rich\nimport typer\nfrom shared_specs.app import log"),
    (
        "tiled_torch/modules/mlp.py",
        "import torch\nfrom tiled_torch.functional import mlp\nfrom shared_specs import costs",
    ),
    (
        "tiled_torch/commands/finetune.py",
        "from tiled_torch.models import tile_model\nfrom shared_specs.app import loop",
    ),
    ("tiled_torch/bridge/arrays.py", "def f():\n    import jax"),
    ("tiled_torch/bridge/arrays.py", "if TYPE_CHECKING:\n    import jax"),
    ("tiled_torch/__init__.py", "from tiled_torch.functional import tiled_mlp\nfrom .models import tile_model"),
    ("tiled_jax/modules/mlp.py", "from flax import nnx\nfrom ..functional import mlp"),
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


@pytest.mark.parametrize("path", MODULES)
def test_every_module_keeps_to_the_table(path):
    assert violations(path, (ROOT / path).read_text()) == []


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
