"""A capability is a folder of one name with files of the same names in both halves, but for what only one framework has."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    "core",
    "collectives",
    "tile",
    "mlp",
    "loss",
    "linear",
    "moe",
    "layers",
    "distillation",
    "plans",
    "check",
    "plan",
    "commands",
)

# Why a file stands in one half alone -> the files.
ONLY_TORCH = {
    "autograd in place: dtypes, buffers and main_grad are the library's own work": (
        "core/autocast.py core/gradients.py core/operands.py core/tensors.py distillation/call.py "
        "linear/sums.py loss/call.py moe/sums.py"
    ),
    "forward mode is an operation's own in JAX (core/linear_call.py)": (
        "core/tangents.py loss/with_tangents.py mlp/with_tangents.py tile/forward_mode.py"
    ),
    "torch.compile and torch.export": (
        "core/exporting.py distillation/compiled.py loss/compiled.py mlp/compiled.py plans/compile.py"
    ),
    "Triton": "core/triton_blocks.py core/launch.py",
    "oneDNN": "mlp/steps_onednn.py",
    "fn has state that a trace does not show": (
        "core/replay.py tile/captures.py tile/probe.py tile/state.py tile/versions.py"
    ),
    "engines that shard parameters behind the library's back: FSDP2, DeepSpeed": "core/partitioned.py tile/fsdp_units.py",
    "process groups: JAX has mesh axes in one program": (
        "collectives/broadcast_data.py collectives/consistency.py collectives/failures.py collectives/groups.py "
        "collectives/transport.py collectives/same_batch.py"
    ),
    "parameters that every rank makes and saves its part of": (
        "collectives/initialise.py collectives/split_module.py layers/parameters/state.py linear/state.py"
    ),
    "norms of gradients, which JAX's global arrays need not": ("layers/parameters/grad_norm.py"),
    "symmetric memory": "layers/inference_symmetric.py",
    "an autograd function beside its call": "layers/linear_autodiff.py",
    "the module of a call over ranks": "mlp/ranks_module.py",
    "tokens that ranks hold parts of; JAX: collectives/gathered_tokens.py": "loss/split_tokens.py",
    "DTensor": "plans/tensor.py plans/tensor_styles.py",
    "models on the meta device": "plans/meta_device.py",
    "torchao": "plans/float8.py",
    "experts that transformers makes one parameter of; JAX: models/weights.py": "commands/finetune/experts.py",
    "checkpointing of a finished model": "plans/recompute.py",
    "models of any family of transformers, whose layers say their sizes or are measured": (
        "plan/inputs.py plan/structure.py plan/twin.py plan/units.py plan/whole.py commands/plan/any_config.py"
    ),
    "layers that are called one by one; a compiled program tells of them from inside": "commands/finetune/watched_layers.py",
    "XLA says itself what a program needs": "check/live_bytes.py",
}
ONLY_JAX = {
    "operations that JAX does not have: loops with a carry, functions with a tangent of their own, a device's own tokens": (
        "core/arrays.py core/linear_call.py core/loops.py core/own_tokens.py core/products.py core/turns.py loss/rows.py"
    ),
    "Mosaic GPU": "core/activations.py core/mosaic.py mlp/kernels/glu_up_aux.py mlp/kernels/main_loop.py",
    "differentiation rules, apart from the call": (
        "distillation/autodiff.py linear/autodiff.py loss/autodiff.py mlp/autodiff.py"
    ),
    "linen, and what it shares with nnx": (
        "core/params.py linear/linen.py linear/params.py loss/linen.py loss/params.py mlp/linen.py mlp/params.py "
        "moe/linen.py moe/params.py "
        "tile/linen_modules.py tile/module_state.py"
    ),
    "attention over a pair of blocks, written out: PyTorch has kernels": "layers/attention_blocks.py layers/ring_steps.py",
    "meshes": "collectives/mesh.py collectives/padding.py tile/closures.py tile/split.py",
    "forward mode": "mlp/shard_tangents.py",
    "layers of Flax that a module calls, LoRA around one; peft's are found where they stand, by `tile_model`": (
        "mlp/projections.py"
    ),
    "one program for many devices": "commands/bench/mesh.py",
    "Triton's launch wrappers take block sizes from a table": "commands/gpu/candidates.py",
    "programs that are compiled for GPUs that are not there; filters of parameters, which PyTorch's hold themselves": (
        "plan/described.py plan/trained.py"
    ),
    "plans of a function of arrays: PyTorch's are of modules": (
        "plans/accumulation.py plans/checks.py plans/decoder_ends.py plans/decoder_layers.py "
        "plans/decoder_tokens.py plans/variables.py"
    ),
}


def files(package: str) -> set[str]:
    paths = (path for room in ROOMS for path in (ROOT / package / room).rglob("*.py"))
    return {path.relative_to(ROOT / package).as_posix() for path in paths if path.name != "__init__.py"}


def listed(reasons: dict[str, str]) -> set[str]:
    return {path for paths in reasons.values() for path in paths.split()}


def test_files_have_their_twins_or_a_reason() -> None:
    torch, jax = files("tiled_torch"), files("tiled_jax")
    assert torch - jax == listed(ONLY_TORCH)
    assert jax - torch == listed(ONLY_JAX)
    assert len(torch & jax) >= 40


def test_every_capability_is_a_room_of_both_halves() -> None:
    for room in ROOMS:
        for package in ("tiled_torch", "tiled_jax"):
            assert (ROOT / package / room / "__init__.py").exists(), f"{package}/{room}"


def test_no_folder_holds_more_than_a_reader_keeps_in_mind():
    """Twelve files beside `__init__`."""
    folders = {
        path.parent
        for package in ("shared_specs", "tiled_torch", "tiled_jax")
        for path in (ROOT / package).rglob("*.py")
    }
    counts = {
        folder.relative_to(ROOT).as_posix(): len({*folder.glob("*.py")} - {folder / "__init__.py"})
        for folder in folders
    }
    assert {folder: count for folder, count in counts.items() if count > 12} == {}


def members(path: str, kind: type[ast.AST]) -> dict[str, list[str]]:
    """Return the fields (ast.AnnAssign) or methods (ast.FunctionDef) of each class of a file, in order."""
    classes = (node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.ClassDef))
    return {
        node.name: [getattr(a, "name", None) or a.target.id for a in node.body if isinstance(a, kind)]  # type: ignore[attr-defined]
        for node in classes
    }


def test_the_loss_is_written_in_one_vocabulary() -> None:
    """Classes, fields and steps are called what shared_specs/README.md calls them, in both halves."""
    fields = [members(f"{package}/loss/math.py", ast.AnnAssign) for package in ("tiled_torch", "tiled_jax")]
    assert [sorted(found) for found in fields] == [["Coefficients", "Labels", "Part", "Rules", "Statistics"]] * 2
    said = (ROOT / "shared_specs/README.md").read_text()
    for name, count in (("Labels", 3), ("Statistics", 5), ("Coefficients", 4)):
        first = [found[name][:count] for found in fields]
        assert first[0] == first[1], name
        assert f"`{name}({', '.join(first[0])})`" in said
    steps = [
        members(f"{package}/loss/steps.py", ast.FunctionDef)["LossSteps"] for package in ("tiled_torch", "tiled_jax")
    ]
    in_place, functional = ([name.rstrip("_") for name in names] for names in steps)
    assert set(in_place) <= set(functional)
