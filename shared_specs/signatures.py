"""The public face: names, arguments, order and defaults. A test compares both halves with this list."""

from dataclasses import dataclass
from typing import Any

from shared_specs.config import HALVES, Half, LossOptions, ParallelLinearOptions


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
VARIADIC: Any = "*"  # the "default" of `*args`


@dataclass(frozen=True)
class Argument:
    """One argument; `halves` names where it exists (a framework's own, like rngs or device, exists in one)."""

    name: str
    default: Any = REQUIRED
    keyword_only: bool = False
    halves: tuple[Half, ...] = HALVES


def _keyword(name: str, default: Any = REQUIRED, halves: tuple[Half, ...] = HALVES) -> Argument:
    return Argument(name, default, keyword_only=True, halves=halves)


_TORCH: tuple[Half, ...] = ("torch",)
_JAX: tuple[Half, ...] = ("jax",)
_TILING = (_keyword("num_shards", None), _keyword("keep", 0.0), _keyword("tiling", None), _keyword("backend", "auto"))
_LOSS_TILING = (_keyword("num_shards", None), _keyword("tiling", None), _keyword("backend", "auto"))
_LOSS = (_keyword("bias", None), _keyword("loss", LossOptions()), *_LOSS_TILING)
_VOCAB_PARALLEL = (
    _keyword("vocab_size", None),
    _keyword("group", None, _TORCH),  # a process group; None: all ranks
    _keyword("axis_name", REQUIRED, _JAX),  # a mesh axis of the surrounding shard_map
)

_TILED_LINEAR = (
    Argument("in_features"),
    Argument("out_features"),
    _keyword("bias", True),
    _keyword("in_splits", 1),
    _keyword("out_splits", 1),
    _keyword("input_is_already_split", False),
    _keyword("combine_out_splits", True),
    _keyword("linear_cls", None),
    _keyword("linear_args", None),
    _keyword("init_linear", None),
    _keyword("device", None, _TORCH),
    _keyword("dtype", None),
    _keyword("param_dtype", REQUIRED, _JAX),
    _keyword("rngs", REQUIRED, _JAX),
    _keyword("sharding", None, _JAX),
)

# path inside the package -> arguments in order. "Class" stands for the arguments of its constructor.
SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "tiled_mlp": (
        Argument("x"),
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        _keyword("biases", None),
        _keyword("activation", "silu"),
        *_TILING,
    ),
    "tile": (
        Argument("fn"),
        _keyword("num_shards", None),
        _keyword("tiling", None),
        _keyword("rngs", None, _JAX),
    ),
    "TiledMLP": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        _keyword("activation", "silu"),
        _keyword("gated", True),
        _keyword("bias", False),
        _keyword("fused_gate_up", False),
        *_TILING,
        _keyword("device", None, _TORCH),
        _keyword("dtype", None),
        _keyword("param_dtype", REQUIRED, _JAX),  # the default is jax.numpy.float32, which this file cannot name
        _keyword("rngs", REQUIRED, _JAX),
        _keyword("sharding", None, _JAX),
    ),
    "TiledMLP.from_weights": (
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        _keyword("biases", None),
        _keyword("activation", "silu"),
        _keyword("fused_gate_up", False),
        *_TILING,
    ),
    "tiled_linear_cross_entropy": (Argument("x"), Argument("weight"), Argument("targets"), *_LOSS),
    "tiled_loss": (
        Argument("fn"),
        Argument("x"),
        Argument("args", VARIADIC),
        _keyword("num_shards", None),
        _keyword("tiling", None),
    ),
    "TiledLinearCrossEntropy": (
        Argument("hidden_size"),
        Argument("vocab_size"),
        _keyword("bias", False),
        _keyword("loss", LossOptions()),
        *_LOSS_TILING,
        _keyword("device", None, _TORCH),
        _keyword("dtype", None),
        _keyword("param_dtype", REQUIRED, _JAX),  # jax.numpy.float32
        _keyword("rngs", REQUIRED, _JAX),
        _keyword("sharding", None, _JAX),
    ),
    "TiledLinearCrossEntropy.from_weights": (
        Argument("weight"),
        _keyword("bias", None),
        _keyword("loss", LossOptions()),
        *_LOSS_TILING,
    ),
    "vocab_parallel_cross_entropy": (
        Argument("vocab_parallel_logits"),
        Argument("target"),
        Argument("label_smoothing", 0.0),
        *_VOCAB_PARALLEL,
    ),
    "vocab_parallel_linear_cross_entropy": (
        Argument("x"),
        Argument("weight"),
        Argument("targets"),
        *_LOSS,
        _VOCAB_PARALLEL[0],
        _keyword("sequence_parallel", False),
        _keyword("split_sizes", None),
        *_VOCAB_PARALLEL[1:],
    ),
    "TiledLinear": _TILED_LINEAR,
    "TiledLinearReturnBias": _TILED_LINEAR,
    "TiledLinear.from_linear": (
        Argument("linear"),
        _keyword("in_splits", 1),
        _keyword("out_splits", 1),
        _keyword("input_is_already_split", False),
        _keyword("combine_out_splits", True),
    ),
    "usable_backends": (),
}

_GROUP = (_keyword("group", None, _TORCH), _keyword("axis_name", REQUIRED, _JAX))
_ON_MESH = (  # of a module: where its weights live
    _keyword("group", None, _TORCH),
    _keyword("mesh", REQUIRED, _JAX),
    _keyword("axis_name", "tp", _JAX),
)
_PARAMETERS = (
    _keyword("device", None, _TORCH),
    _keyword("dtype", None),
    _keyword("param_dtype", REQUIRED, _JAX),  # jax.numpy.float32
    _keyword("rngs", REQUIRED, _JAX),
)
_TENSOR_PARALLEL = (_keyword("sequence_parallel", False), _keyword("split_sizes", None))


def _collective(*more: Argument) -> tuple[Argument, ...]:
    return (Argument("x"), *more, *_GROUP)


_DIM, _SIZES = _keyword("dim", 0), _keyword("split_sizes", None)

# path inside the package's `parallel` -> arguments in order.
PARALLEL_SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "copy_to_tensor_parallel_region": _collective(),
    "reduce_from_tensor_parallel_region": _collective(),
    "scatter_to_tensor_parallel_region": _collective(),
    "gather_from_tensor_parallel_region": _collective(),
    "scatter_to_sequence_parallel_region": _collective(_DIM, _SIZES),
    "gather_from_sequence_parallel_region": _collective(_DIM, _SIZES, _keyword("tensor_parallel_output_grad", True)),
    "reduce_scatter_to_sequence_parallel_region": _collective(_DIM, _SIZES),
    "all_gather_last_dim_from_tensor_parallel_region": _collective(),
    "reduce_scatter_last_dim_to_tensor_parallel_region": _collective(),
    "all_to_all": _collective(_keyword("output_split_sizes", None), _keyword("input_split_sizes", None)),
    "all_to_all_sequence_to_hidden": _collective(),
    "all_to_all_hidden_to_sequence": _collective(),
    "column_parallel_linear": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        _keyword("gather_output", False),
        _keyword("sequence_parallel", False),
        _keyword("split_sizes", None, _TORCH),
        _keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "row_parallel_linear": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        _keyword("input_is_parallel", False),
        _keyword("sequence_parallel", False),
        _keyword("split_sizes", None, _TORCH),
        _keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "linear_with_frozen_weight": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        _keyword("sequence_parallel", False),
        _keyword("split_sizes", None, _TORCH),
        _keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "vocab_parallel_embedding": (
        Argument("ids"),
        Argument("weight"),
        _keyword("vocab_size", None),
        _keyword("reduce_scatter_embeddings", False),
        _keyword("sequence_dim", 0),
        _keyword("split_sizes", None, _TORCH),
        _keyword("deterministic", False),
        *_GROUP,
    ),
    "ColumnParallelLinear": (
        Argument("in_features"),
        Argument("out_features"),
        _keyword("bias", True),
        _keyword("gather_output", False),
        _keyword("sequence_parallel", False),
        _keyword("skip_bias_add", False),
        _keyword("allocate_weight", True),
        _keyword("init_method", None),
        _keyword("options", ParallelLinearOptions()),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "RowParallelLinear": (
        Argument("in_features"),
        Argument("out_features"),
        _keyword("bias", True),
        _keyword("input_is_parallel", False),
        _keyword("sequence_parallel", False),
        _keyword("skip_bias_add", False),
        _keyword("init_method", None),
        _keyword("options", ParallelLinearOptions()),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "VocabParallelEmbedding": (
        Argument("num_embeddings"),
        Argument("embedding_dim"),
        _keyword("reduce_scatter_embeddings", False),
        _keyword("sequence_dim", 0),
        _keyword("deterministic", False),
        _keyword("init_method", None),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "tensor_parallel_mlp": (
        Argument("x"),
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        _keyword("biases", None),
        _keyword("activation", "silu"),
        *_TENSOR_PARALLEL,
        *_TILING,
        *_GROUP,
    ),
    "TensorParallelTiledMLP": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        _keyword("activation", "silu"),
        _keyword("gated", True),
        _keyword("bias", False),
        _keyword("fused_gate_up", False, _TORCH),
        _keyword("sequence_parallel", False),
        *_TILING,
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "norm_column_parallel_linear": (
        Argument("x"),
        Argument("norm_weight"),
        Argument("weight"),
        Argument("bias", None),
        _keyword("eps", 1e-6),
        _keyword("sequence_parallel", False),
        *_GROUP,
    ),
    "row_parallel_linear_residual_norm": (
        Argument("x"),
        Argument("weight"),
        Argument("residual"),
        Argument("norm_weight"),
        Argument("bias", None),
        _keyword("eps", 1e-6),
        _keyword("gather", True),
        _keyword("path", "auto"),
        *_GROUP,
    ),
    "context_attention": (Argument("q"), Argument("k"), Argument("v"), Argument("attend", None), *_GROUP),
    "context_slice": (Argument("batch"), _keyword("ignore_index", -100), *_GROUP),
    "RandomStates": (_keyword("device", None, _TORCH),),
    "broadcast_data": (  # an entry whose every argument is one half's exists in that half only
        Argument("keys", halves=_TORCH),
        Argument("data", halves=_TORCH),
        Argument("dtype", None, halves=_TORCH),
        _keyword("device", None, _TORCH),
        _keyword("group", None, _TORCH),
    ),
    "deferred_weight_grad": (Argument("weight", halves=_TORCH),),
    "sharded_state_dict": (Argument("module", halves=_TORCH), Argument("tensors", None, halves=_TORCH)),
    "inference_path": (
        Argument("device", halves=_TORCH),
        Argument("dtype", None, halves=_TORCH),
        _keyword("group", None, _TORCH),
    ),
    "seed_parallel": (
        Argument("seed"),
        _keyword("data", 0),
        _keyword("tensor", 0),
        _keyword("expert", 0),
    ),
    "parallelize": (
        Argument("model"),
        Argument("mesh"),
        Argument("config"),
        _keyword("loss_fn", None, _JAX),
        _keyword("optimizer", None, _JAX),
    ),
}

# Arguments of the classes above that their twins in tiled_jax.linen have no field for -> why. The others have the same name.
LINEN_WITHOUT: dict[str, dict[str, str]] = {
    "TiledMLP": {"rngs": "`init` is given them."},
    "TiledLinearCrossEntropy": {"rngs": "`init` is given them."},
    "TiledLinear": {"rngs": "`init` is given them.", "init_linear": "The module holds no values: see `tile_params`."},
    "TiledLinearReturnBias": {"rngs": "`init` is given them.", "init_linear": "As TiledLinear."},
}

# Public names of the package root, both halves.
PUBLIC = (
    "Checkpointing",
    "Compile",
    "DataParallel",
    "LossOptions",
    "LossResult",
    "ParallelConfig",
    "ParallelLinearOptions",
    "SpecError",
    "TensorParallel",
    "TiledLinear",
    "TiledLinearCrossEntropy",
    "TiledLinearReturnBias",
    "TiledMLP",
    "Tiling",
    "UnsupportedError",
    "parallelize",
    "tile",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
)
PUBLIC_ONLY: dict[Half, tuple[str, ...]] = {"torch": ("tile_model", "untile_model"), "jax": ("linen",)}

# Public names of `parallel` that PARALLEL_SIGNATURES leaves out: those whose form is a framework's own.
PARALLEL_ONLY: dict[Half, tuple[str, ...]] = {
    "torch": (
        "CheckpointWithoutOutput",
        "InferencePath",
        "Plan",
        "apply_checkpointing",
        "backward_context",
        "checkpoint",
        "materialize",
        "plan_of",
        "register_plan",
        "whole_state_dict",
    ),
    "jax": (
        "ModelRules",
        "Parallelized",
        "RandomStates",  # without an argument there
        "TrainState",
        "checkpoint_without_output",
        "checkpointed",
        "mesh_coordinates",
        "register_rules",
        "scan_layers",
    ),
}


def exists_in(half: Half, path: str) -> bool:
    """Whether a half has a name of PARALLEL_SIGNATURES: one whose every argument is the other's is the other's alone."""
    arguments = PARALLEL_SIGNATURES[path]
    return not arguments or any(half in argument.halves for argument in arguments)
