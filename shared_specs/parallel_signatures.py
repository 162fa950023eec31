"""The public face of `parallel` in both halves: names, arguments, order and defaults."""

from shared_specs.arguments import ONLY_JAX, ONLY_TORCH, REQUIRED, TILING, Argument, keyword
from shared_specs.config import Half, ParallelLinearOptions

_GROUP = (keyword("group", None, ONLY_TORCH), keyword("axis_name", REQUIRED, ONLY_JAX))
_ON_MESH = (  # of a module: where its weights live
    keyword("group", None, ONLY_TORCH),
    keyword("mesh", REQUIRED, ONLY_JAX),
    keyword("axis_name", "tp", ONLY_JAX),
)
_PARAMETERS = (
    keyword("device", None, ONLY_TORCH),
    keyword("dtype", None),
    keyword("param_dtype", REQUIRED, ONLY_JAX),  # jax.numpy.float32
    keyword("rngs", REQUIRED, ONLY_JAX),
)
_TENSOR_PARALLEL = (keyword("sequence_parallel", False), keyword("split_sizes", None))

_EXPERT_GROUPS = (
    keyword("group", None, ONLY_TORCH),
    keyword("expert_group", None, ONLY_TORCH),
    keyword("expert_parallel_group", None, ONLY_TORCH),
)


def _collective(*more: Argument) -> tuple[Argument, ...]:
    return (Argument("x"), *more, *_GROUP)


_DIM, _SIZES = keyword("dim", 0), keyword("split_sizes", None)

# path inside the package's `parallel` -> arguments in order.
PARALLEL_SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "copy_to_tensor_parallel_region": _collective(),
    "reduce_from_tensor_parallel_region": _collective(),
    "scatter_to_tensor_parallel_region": _collective(),
    "gather_from_tensor_parallel_region": _collective(),
    "scatter_to_sequence_parallel_region": _collective(_DIM, _SIZES),
    "gather_from_sequence_parallel_region": _collective(_DIM, _SIZES, keyword("tensor_parallel_output_grad", True)),
    "reduce_scatter_to_sequence_parallel_region": _collective(_DIM, _SIZES),
    "all_gather_last_dim_from_tensor_parallel_region": _collective(),
    "reduce_scatter_last_dim_to_tensor_parallel_region": _collective(),
    "all_to_all": _collective(keyword("output_split_sizes", None), keyword("input_split_sizes", None)),
    "all_to_all_sequence_to_hidden": _collective(),
    "all_to_all_hidden_to_sequence": _collective(),
    "column_parallel_linear": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        keyword("gather_output", False),
        keyword("sequence_parallel", False),
        keyword("split_sizes", None, ONLY_TORCH),
        keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "row_parallel_linear": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        keyword("input_is_parallel", False),
        keyword("sequence_parallel", False),
        keyword("split_sizes", None, ONLY_TORCH),
        keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "linear_with_frozen_weight": (
        Argument("x"),
        Argument("weight"),
        Argument("bias", None),
        keyword("sequence_parallel", False),
        keyword("split_sizes", None, ONLY_TORCH),
        keyword("options", ParallelLinearOptions()),
        *_GROUP,
    ),
    "vocab_parallel_embedding": (
        Argument("ids"),
        Argument("weight"),
        keyword("vocab_size", None),
        keyword("reduce_scatter_embeddings", False),
        keyword("sequence_dim", 0),
        keyword("split_sizes", None, ONLY_TORCH),
        keyword("deterministic", False),
        *_GROUP,
    ),
    "ColumnParallelLinear": (
        Argument("in_features"),
        Argument("out_features"),
        keyword("bias", True),
        keyword("gather_output", False),
        keyword("sequence_parallel", False),
        keyword("skip_bias_add", False),
        keyword("allocate_weight", True),
        keyword("init_method", None),
        keyword("options", ParallelLinearOptions()),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "RowParallelLinear": (
        Argument("in_features"),
        Argument("out_features"),
        keyword("bias", True),
        keyword("input_is_parallel", False),
        keyword("sequence_parallel", False),
        keyword("skip_bias_add", False),
        keyword("init_method", None),
        keyword("options", ParallelLinearOptions()),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "VocabParallelEmbedding": (
        Argument("num_embeddings"),
        Argument("embedding_dim"),
        keyword("reduce_scatter_embeddings", False),
        keyword("sequence_dim", 0),
        keyword("deterministic", False),
        keyword("init_method", None),
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "tensor_parallel_mlp": (
        Argument("x"),
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        keyword("biases", None),
        keyword("activation", "silu"),
        *_TENSOR_PARALLEL,
        *TILING,
        *_GROUP,
    ),
    "TensorParallelTiledMLP": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        keyword("activation", "silu"),
        keyword("gated", True),
        keyword("bias", False),
        keyword("fused_gate_up", False, ONLY_TORCH),
        keyword("sequence_parallel", False),
        *TILING,
        *_ON_MESH,
        *_PARAMETERS,
    ),
    "norm_column_parallel_linear": (
        Argument("x"),
        Argument("norm_weight"),
        Argument("weight"),
        Argument("bias", None),
        keyword("eps", 1e-6),
        *_TENSOR_PARALLEL,
        *_GROUP,
    ),
    "row_parallel_linear_residual_norm": (
        Argument("x"),
        Argument("weight"),
        Argument("residual"),
        Argument("norm_weight"),
        Argument("bias", None),
        keyword("eps", 1e-6),
        keyword("gather", True),
        _SIZES,
        keyword("path", "auto"),
        *_GROUP,
    ),
    "context_attention": (
        Argument("q"),
        Argument("k"),
        Argument("v"),
        Argument("attend", None),
        keyword("documents", None),
        *_GROUP,
    ),
    "ring_attention": (
        Argument("q"),
        Argument("k"),
        Argument("v"),
        keyword("scale", None),
        keyword("window", None),
        keyword("softcap", None),
        keyword("documents", None),
        *_GROUP,
    ),
    "context_slice": (Argument("batch"), keyword("ignore_index", -100), keyword("order", "tokens"), *_GROUP),
    "RandomStates": (keyword("device", None, ONLY_TORCH),),
    "broadcast_data": (  # an entry whose every argument is one half's exists in that half only
        Argument("keys", halves=ONLY_TORCH),
        Argument("data", halves=ONLY_TORCH),
        Argument("dtype", None, halves=ONLY_TORCH),
        keyword("device", None, ONLY_TORCH),
        keyword("group", None, ONLY_TORCH),
    ),
    "deferred_weight_grad": (Argument("weight", halves=ONLY_TORCH),),
    "split_tensor_along_last_dim": (
        Argument("tensor"),
        Argument("num_partitions"),
        Argument("contiguous_split_chunks", False, halves=ONLY_TORCH),
    ),
    "split_tensor_into_1d_equal_chunks": (
        Argument("tensor"),
        Argument("new_buffer", False, halves=ONLY_TORCH),
        *_GROUP,
    ),
    "gather_split_1d_tensor": (Argument("tensor"), *_GROUP),
    "get_grad_norm": (
        Argument("parameters", halves=ONLY_TORCH),
        Argument("norm_type", 2.0, halves=ONLY_TORCH),
        *_EXPERT_GROUPS,
    ),
    "clip_grad_norm_": (
        Argument("parameters", halves=ONLY_TORCH),
        Argument("max_norm", halves=ONLY_TORCH),
        Argument("norm_type", 2.0, halves=ONLY_TORCH),
        *_EXPERT_GROUPS,
    ),
    "reduce_sequence_parallel_grads": (Argument("parameters", halves=ONLY_TORCH), keyword("group", None, ONLY_TORCH)),
    "set_tensor_model_parallel_attributes": (
        Argument("tensor", halves=ONLY_TORCH),
        Argument("is_parallel", halves=ONLY_TORCH),
        Argument("dim", halves=ONLY_TORCH),
        Argument("stride", halves=ONLY_TORCH),
    ),
    "set_defaults_if_not_set_tensor_model_parallel_attributes": (Argument("tensor", halves=ONLY_TORCH),),
    "copy_tensor_model_parallel_attributes": (
        Argument("destination_tensor", halves=ONLY_TORCH),
        Argument("source_tensor", halves=ONLY_TORCH),
    ),
    "param_is_not_tensor_parallel_duplicate": (
        Argument("param", halves=ONLY_TORCH),
        Argument("group", None, halves=ONLY_TORCH),
        Argument("expert_group", None, halves=ONLY_TORCH),
    ),
    "sharded_state_dict": (Argument("module", halves=ONLY_TORCH), Argument("tensors", None, halves=ONLY_TORCH)),
    "inference_path": (
        Argument("device", halves=ONLY_TORCH),
        Argument("dtype", None, halves=ONLY_TORCH),
        keyword("group", None, ONLY_TORCH),
    ),
    "seed_parallel": (
        Argument("seed"),
        keyword("data", 0),
        keyword("tensor", 0),
        keyword("expert", 0),
    ),
    "parallelize": (
        Argument("model"),
        Argument("mesh"),
        Argument("config"),
        keyword("loss_fn", None, ONLY_JAX),
        keyword("optimizer", None, ONLY_JAX),
        keyword("wrt", REQUIRED, ONLY_JAX),  # nnx.Param by default
    ),
}

# Public names of `parallel` that PARALLEL_SIGNATURES leaves out: those whose form is a framework's own.
PARALLEL_ONLY: dict[Half, tuple[str, ...]] = {
    "torch": (
        "CheckpointWithoutOutput",
        "InferencePath",
        "Plan",
        "VocabUtility",  # one class of shared_specs
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
        "VocabUtility",
        "checkpoint_without_output",
        "checkpointed",
        "mesh_coordinates",
        "register_rules",
        "scan_layers",
    ),
}


def exists_in(half: Half, path: str) -> bool:
    """Return whether a half has a name of PARALLEL_SIGNATURES: one whose every argument is the other's is the other's alone."""
    arguments = PARALLEL_SIGNATURES[path]
    return not arguments or any(half in argument.halves for argument in arguments)
