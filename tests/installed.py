"""Interpreters that have no more packages than some extras of this project bring."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Hides packages, also from who only asks whether it is there, and runs a module of this repository.
_RUN = """
import importlib.machinery, runpy, sys

find = importlib.machinery.PathFinder.find_spec
def only(name, path=None, target=None):
    top = name.split(".")[0]
    return None if top in {hidden!r} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = only
sys.path.insert(0, {root!r})
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def provided(extras: str) -> set[str]:
    """Top-level names that can be imported where `tiled-mlp[extras]` was installed, of what is installed here."""
    found: set[str] = set()
    wanted = [Requirement(f"tiled-mlp[{extras}]" if extras else "tiled-mlp")]
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:
            lists = [
                PROJECT["dependencies"],
                *(PROJECT["optional-dependencies"][extra] for extra in requirement.extras),
            ]
            texts = [text for each in lists for text in each]
        else:
            try:
                texts = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue  # what only other systems or builds need
        found.add(name)
        for each in map(Requirement, texts):
            chosen = [{"extra": extra} for extra in requirement.extras or {""}]
            key = f"{canonicalize_name(each.name)} {sorted(each.extras)}"
            if key not in seen and (each.marker is None or any(map(each.marker.evaluate, chosen))):
                seen.add(key)
                wanted.append(each)
    tops = metadata.packages_distributions().items()
    return {top for top, owners in tops if found & {canonicalize_name(owner) for owner in owners}}


def run_with(extras: str, module: str, *words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m module words...` where only `tiled-mlp[extras]` is installed; root: the folder that holds the project."""
    hidden = metadata.packages_distributions().keys() - provided(extras) - {"shared_specs", "tiled_torch", "tiled_jax"}
    script = _RUN.format(hidden=hidden, root=str(root), module=module)
    return subprocess.run([sys.executable, "-c", script, *words], cwd=root, text=True, capture_output=True)


def hinted(message: str) -> str:
    """The extras that a message says to install."""
    match = re.search(r"tiled-mlp\[([a-z,]+)\]", message)
    assert match, message
    return match[1]
