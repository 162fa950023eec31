"""The public face: names, arguments, order and defaults. A test compares both halves with this list."""

from shared_specs.arguments import KEYWORDS as KEYWORDS
from shared_specs.arguments import ONLY_JAX, ONLY_TORCH, TILING, keyword
from shared_specs.arguments import REQUIRED as REQUIRED
from shared_specs.arguments import VARIADIC as VARIADIC
from shared_specs.arguments import Argument as Argument
from shared_specs.config import Half, LossOptions
from shared_specs.parallel_signatures import PARALLEL_ONLY as PARALLEL_ONLY
from shared_specs.parallel_signatures import PARALLEL_SIGNATURES as PARALLEL_SIGNATURES
from shared_specs.parallel_signatures import exists_in as exists_in

_CUT = (keyword("num_shards", None), keyword("tiling", None), keyword("backend", "auto"))
_LOSS = (keyword("bias", None), keyword("loss", LossOptions()), *_CUT)
# How the tokens of a mixture of experts choose, and what it returns.
_EXPERTS = (
    keyword("scoring", "softmax"),
    keyword("normalize_top_k", True),
    keyword("activation", "silu"),
    keyword("return_router_logits", False),
)
_EXPERT_WEIGHTS = (Argument("w_router"), Argument("w_gate"), Argument("w_up"), Argument("w_down"))
_VOCAB_PARALLEL = (
    keyword("vocab_size", None),
    keyword("group", None, ONLY_TORCH),  # a process group; None: all ranks
    keyword("axis_name", REQUIRED, ONLY_JAX),  # a mesh axis of the surrounding shard_map
)

# Arguments of nnx.Linear and nn.Dense. The defaults of the first two are initialisers, which this file cannot name.
_INITIALISERS = (keyword("kernel_init", REQUIRED, ONLY_JAX), keyword("bias_init", REQUIRED, ONLY_JAX))
_OF_FLAX = (keyword("use_bias", None, ONLY_JAX), keyword("precision", None, ONLY_JAX))
_PRODUCTS = tuple(
    keyword(name, None, ONLY_JAX) for name in ("dot_general", "promote_dtype", "kernel_metadata", "bias_metadata")
)

_TILED_LINEAR = (
    Argument("in_features"),
    Argument("out_features"),
    keyword("bias", True),
    keyword("in_splits", 1),
    keyword("out_splits", 1),
    keyword("input_is_already_split", False),
    keyword("combine_out_splits", True),
    keyword("linear_cls", None),
    keyword("linear_args", None),
    keyword("init_linear", None),
    keyword("device", None, ONLY_TORCH),
    keyword("dtype", None),
    keyword("param_dtype", REQUIRED, ONLY_JAX),
    keyword("rngs", None, ONLY_JAX),
    keyword("sharding", None, ONLY_JAX),
    *_INITIALISERS,
    *_OF_FLAX,
)

_PLAN = (
    Argument("model"),
    Argument("tokens"),
    keyword("devices", 1),
    keyword("device_memory", "80GB"),
    keyword("host_memory", None),
    keyword("sequences", 1),
    keyword("dtype", "bfloat16"),
    keyword("optimizer", "adamw"),
    keyword("wrt", None, ONLY_JAX),
    keyword("loss_fn", None),
)

# path inside the package -> arguments in order. "Class" stands for the arguments of its constructor.
SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "tiled_mlp": (
        Argument("x"),
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        keyword("biases", None),
        keyword("activation", "silu"),
        *TILING,
    ),
    "tiled_moe": (Argument("x"), *_EXPERT_WEIGHTS, keyword("top_k"), *_EXPERTS, *_CUT),
    "tile": (
        Argument("fn"),
        keyword("num_shards", None),
        keyword("tiling", None),
        keyword("rngs", None, ONLY_JAX),
    ),
    "tile_model": (
        Argument("model"),
        keyword("scope", "mlp"),
        keyword("strict", False),
        *TILING,
    ),
    "untile_model": (Argument("model"),),
    "tiling_paths": (Argument("model"),),
    "check": (
        Argument("model"),
        Argument("batch"),
        keyword("tile", None),
        keyword("plain", None),
        keyword("step", None),
        keyword("plain_step", None),
        keyword("optimizer", None),
        keyword("steps", 2),
        keyword("seed", 0),
        keyword("wrt", REQUIRED, ONLY_JAX),  # flax.nnx.Param
    ),
    "plan": _PLAN,
    "fits": _PLAN,
    "TiledMLP": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        keyword("activation", "silu"),
        keyword("gated", True),
        keyword("bias", False),
        keyword("fused_gate_up", False),
        *TILING,
        keyword("device", None, ONLY_TORCH),
        keyword("dtype", None),
        keyword("param_dtype", REQUIRED, ONLY_JAX),  # the default is jax.numpy.float32, which this file cannot name
        keyword("rngs", None, ONLY_JAX),
        *_INITIALISERS,
        keyword("sharding", None, ONLY_JAX),
        *_OF_FLAX,
        *_PRODUCTS,
    ),
    "TiledMLP.from_weights": (
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        keyword("biases", None),
        keyword("activation", "silu"),
        keyword("fused_gate_up", False),
        *TILING,
    ),
    "TiledMLP.from_linears": (
        Argument("gate"),
        Argument("up"),
        Argument("down"),
        keyword("activation", "silu"),
        *TILING,
    ),
    "TiledMLP.to_linears": (Argument("self"),),
    "TiledMoE": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        Argument("num_experts"),
        Argument("top_k"),
        *_EXPERTS,
        *_CUT,
        keyword("device", None, ONLY_TORCH),
        keyword("dtype", None),
        keyword("param_dtype", REQUIRED, ONLY_JAX),  # jax.numpy.float32
        keyword("rngs", None, ONLY_JAX),
        _INITIALISERS[0],
    ),
    "TiledMoE.from_weights": (*_EXPERT_WEIGHTS, keyword("top_k"), *_EXPERTS, *_CUT),
    "tiled_linear_cross_entropy": (
        Argument("x"),
        Argument("weight"),
        Argument("targets"),
        *_LOSS,
        keyword("token_weight", None),
    ),
    "tiled_distillation_loss": (
        Argument("student"),
        Argument("w_student"),
        Argument("teacher"),
        Argument("w_teacher"),
        Argument("targets", None),
        keyword("kind", "forward_kl"),
        keyword("temperature", 1.0),
        keyword("beta", 0.5),
        keyword("weight_hard", 0.0),
        keyword("weight_soft", None),
        keyword("bias_student", None),
        keyword("bias_teacher", None),
        keyword("loss", LossOptions()),
        keyword("loss_teacher", None),
        keyword("token_weight", None),
        keyword("num_shards", None),
        keyword("tiling", None),
    ),
    "tiled_loss": (
        Argument("fn"),
        Argument("x"),
        Argument("args", VARIADIC),
        keyword("num_shards", None),
        keyword("tiling", None),
    ),
    "tiled_model_loss": (
        Argument("model"),
        Argument("targets"),
        Argument("args", VARIADIC),
        keyword("loss", LossOptions()),
        keyword("num_shards", None),
        keyword("tiling", None),
        keyword("backend", "auto"),
        keyword("token_weight", None),
        keyword("has_aux", False),
        Argument("kwargs", KEYWORDS),
    ),
    "TiledLinearCrossEntropy": (
        Argument("hidden_size"),
        Argument("vocab_size"),
        keyword("bias", False),
        keyword("loss", LossOptions()),
        *_CUT,
        keyword("device", None, ONLY_TORCH),
        keyword("dtype", None),
        keyword("param_dtype", REQUIRED, ONLY_JAX),  # jax.numpy.float32
        keyword("rngs", None, ONLY_JAX),
        *_INITIALISERS,
        keyword("sharding", None, ONLY_JAX),
        *_OF_FLAX,
    ),
    "TiledLinearCrossEntropy.from_weights": (
        Argument("weight"),
        keyword("bias", None),
        keyword("loss", LossOptions()),
        *_CUT,
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
        keyword("sequence_parallel", False),
        keyword("split_sizes", None),
        *_VOCAB_PARALLEL[1:],
        keyword("token_weight", None),
    ),
    "TiledLinear": _TILED_LINEAR,
    "TiledLinearReturnBias": _TILED_LINEAR,
    "TiledLinear.from_linear": (
        Argument("linear"),
        keyword("in_splits", 1),
        keyword("out_splits", 1),
        keyword("input_is_already_split", False),
        keyword("combine_out_splits", True),
    ),
    "usable_backends": (),
}

# Arguments of the classes above that their twins in tiled_jax.linen have no field for -> why. The others have the same name.
LINEN_WITHOUT: dict[str, dict[str, str]] = {
    "TiledMLP": {
        "rngs": "`init` is given them.",
        "kernel_metadata": "linen's layers have none: its parameters are boxed, see sharding.",
        "bias_metadata": "As kernel_metadata.",
    },
    "TiledMoE": {"rngs": "`init` is given them."},
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
    "TiledMoE",
    "Tiling",
    "UnsupportedError",
    "check",
    "fits",
    "parallelize",
    "plan",
    "tile",
    "tile_model",
    "tiled_distillation_loss",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "tiled_model_loss",
    "tiled_moe",
    "tiling_paths",
    "untile_model",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
)
PUBLIC_ONLY: dict[Half, tuple[str, ...]] = {"torch": ("AutoTiledModelForCausalLM",), "jax": ("linen",)}
