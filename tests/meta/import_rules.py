"""Who may import what, as a table, and the checker that reads source text against it (DESIGN of the repository).

`shared_specs` needs numpy and ml_dtypes only, and `app` is its one room with more. The halves never see each other.
Inside a half a capability is a room, and imports go one way:
core <- collectives <- tile <- mlp, loss, linear <- moe, layers, distillation <- models, bridge <- plans, compat <- commands.
"""

import ast
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

PACKAGES = ("shared_specs", "tiled_torch", "tiled_jax")

# The specification's rooms, lowest first; its files at the top but `reference` are below all of them.
SPEC_LEVELS = {
    "core": 1,
    "collectives": 2,
    "tile": 3,
    "mlp": 4,
    "loss": 4,
    "linear": 4,
    "moe": 5,
    "layers": 5,
    "distillation": 5,
    "plans": 6,
    "kernels": 6,
    "check": 6,
    "reference": 6,
    "app": 7,
}

# A module may import rooms of a lower level and its own room; rooms of one level do not know each other.
# "root" is the package's own __init__, which re-exports the public names.
LEVELS = {
    "backends": 0,
    "core": 1,
    "collectives": 2,
    "tile": 3,
    "mlp": 4,
    "loss": 4,
    "linear": 4,
    "moe": 5,  # an expert is an MLP
    "layers": 5,
    "distillation": 5,
    "models": 6,
    "bridge": 6,
    "plans": 7,  # above models: a plan is applied to a finished model
    "compat": 7,
    "check": 8,  # of whatever is trained
    "plan": 9,  # how long a context fits, of a model; with the meter of `check`
    "functional": 8,  # from here on nothing but public names, collected
    "modules": 8,
    "parallel": 8,
    "root": 10,
    "commands": 11,
    "__main__": 12,
}

EVERYWHERE = {
    "shared_specs": {"shared_specs", "numpy", "ml_dtypes"},
    "tiled_torch": {"tiled_torch", "shared_specs", "numpy", "ml_dtypes", "torch", "triton"},
    "tiled_jax": {"tiled_jax", "shared_specs", "numpy", "ml_dtypes", "jax", "flax"},
}

IN_ROOM = {
    ("shared_specs", "app"): {
        "gguf",
        "safetensors",
        "tokenizers",
        "jinja2",
        "rich",
        "typer",
        "matplotlib",
        "packaging",
        "psutil",
    },
    ("tiled_torch", "models"): {"transformers"},
    ("tiled_torch", "compat"): {"trl"},
    ("tiled_torch", "plan"): {"transformers"},
    ("tiled_torch", "plans"): {"torchao"},
    ("tiled_torch", "commands"): {"transformers", "liger_kernel", "quack", "deepspeed", "trl"},
    ("tiled_jax", "plans"): {"optax", "orbax"},
    ("tiled_jax", "commands"): {"optax", "orbax", "tokamax"},
}

# Loaded only when a function runs (or by a type checker), so that the package imports where they are missing.
INSIDE_FUNCTIONS = {("tiled_torch", "bridge"): {"jax", "flax"}}

# The base install of a half has none of what `shared_specs.app` needs; `plan` takes of it what numpy is enough for.
ROOMS_WITH_APP = {"models", "plan", "commands", "__main__"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, the line it stands on, and whether importing the module leaves it alone."""

    name: str
    line: int
    deferred: bool


def violations(path: str, source: str) -> list[str]:
    """Every import in `source`, the text of the module at `path` (relative to the repository), that is not allowed."""
    package, room = locate(path)
    if package != "shared_specs" and room not in LEVELS:
        return [f"{path}: {room} is in no room; add it to LEVELS in tests/meta/import_rules.py"]
    found = imports_of(path, source)
    return [f"{path}:{i.line}: must not import {i.name} ({why})" for i in found if (why := fault(package, room, i))]


def locate(path: str) -> tuple[str, str]:
    """The package and the room of the module at `path`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return parts[0], "root" if parts[1] == "__init__" else parts[1]


def fault(package: str, room: str, found: Import) -> str | None:
    """The rule that `found` breaks when it stands in `room` of `package`, or None."""
    top, *rest = found.name.split(".")
    if top in sys.stdlib_module_names:
        return None
    if top in INSIDE_FUNCTIONS.get((package, room), ()):
        return None if found.deferred else f"{top} is loaded inside functions only"
    if top not in EVERYWHERE[package] | IN_ROOM.get((package, room), set()):
        return f"{top} does not belong in {package}/{room}"
    if top == "shared_specs":
        return fault_of_app(package, room, rest) or (fault_of_spec(room, rest) if package == top else None)
    if top == package:
        return fault_of_direction(room, rest)
    return None


def fault_of_app(package: str, room: str, rest: list[str]) -> str | None:
    if rest[:1] != ["app"] or (package == "shared_specs" and room == "app"):
        return None
    if package == "shared_specs":
        return "nothing in shared_specs outside app imports app"
    return None if room in ROOMS_WITH_APP else "only models, plan and commands of a half import shared_specs.app"


def fault_of_spec(room: str, rest: list[str]) -> str | None:
    own, target = SPEC_LEVELS.get(room, 0), SPEC_LEVELS.get(rest[0], 0) if rest else 0
    if own > target or own == target == 0 or rest[0] == room:
        return None
    return f"imports go one way, and {rest[0]} is not below {room}"


def fault_of_direction(room: str, rest: list[str]) -> str | None:
    target = rest[0] if rest and rest[0] in LEVELS else "root"
    if target == room or LEVELS[target] < LEVELS[room]:
        return None
    return f"imports go one way, and {target} is not below {room}"


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """The modules, by dotted name, that import each other in a circle; sources: the text of every module, by its path."""
    paths = {".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    imported = {name: {_module(i.name, paths) for i in imports_of(path, sources[path])} for name, path in paths.items()}
    reached = {name: _reachable(name, imported) for name in imported}
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in reached if a in reached[a]}
    return sorted(map(list, found))


def _module(name: str, known: Collection[str]) -> str:
    """The module that an imported name belongs to; "" where it is none of these."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _reachable(name: str, imported: Mapping[str, Iterable[str]]) -> set[str]:
    """What a module imports, by way of others too; itself where it stands in a circle."""
    reached: set[str] = set()
    waiting = [other for other in imported[name] if other and other != name]
    while waiting:
        if (other := waiting.pop()) not in reached:
            reached.add(other)
            waiting += [each for each in imported[other] if each and each != other]
    return reached


def imports_of(path: str, source: str) -> list[Import]:
    """Every import of the module, those by literal name through importlib included."""
    return list(_walk(ast.parse(source, path), path, deferred=False))


def _walk(node: ast.AST, path: str, deferred: bool) -> Iterator[Import]:
    match node:
        case ast.Import():
            names = [alias.name for alias in node.names]
        case ast.ImportFrom():
            names = [f"{_origin(node, path)}.{alias.name}" for alias in node.names]
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]):
            names = [name] if called in ("import_module", "__import__") else []
        case _:
            names = []
    for name in names:
        yield Import(name, getattr(node, "lineno", 0), deferred)
    deeper = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types(node)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, path, deeper)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _origin(node: ast.ImportFrom, path: str) -> str:
    """The absolute dotted name that a `from` import starts at; one dot means the module's own folder."""
    if not node.level:
        return node.module or ""
    folder = PurePosixPath(path).parent.parts
    base = folder[: len(folder) - node.level + 1]
    return ".".join((*base, node.module) if node.module else base)
