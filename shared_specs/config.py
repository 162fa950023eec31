"""Options as frozen, keyword-only data. What a field means is said here once, for both halves."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

# The names Hugging Face configurations use for the same functions.
HF_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}

# What an expert is worth to a token, from the router's logits.
Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[str, ...] = get_args(Scoring)

Half = Literal["torch", "jax"]
HALVES: tuple[Half, ...] = ("torch", "jax")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How T tokens are split into shards: the long form of `num_shards` and `keep`. Do not pass both forms.

    Set at most one of the first three fields. If none is set, the plan chooses (`shards.plan_tokens`). A function that
    does not use a field refuses any value but its default.

    Args:
        num_shards: at most this many shards, >= 1.
        shard_tokens: tokens per shard, >= 1.
        memory_budget: bytes that the call may use in addition to its inputs, outputs and gradients. The plan takes the
            longest shard that fits (`costs.shard_tokens_within`).
        keep: fraction of the shards, in [0, 1], whose gate and up are kept for backward instead of recomputed (MLP).
        vocab_shards: the vocabulary is split into at most this many shards, >= 1. Their logits exist one at a time (losses).
            More than one shard needs a second computation of the logits: 8 THV FLOP instead of 6.
        deterministic: whether results are the same to the last bit at every shard count (MLP). A kernel of this project
            then computes every product and adds in a fixed order. It is an UnsupportedError if no such kernel can run, and
            in tiled_jax if weight gradients are needed and the shards have two lengths.
        token_axes: mesh axes that split the tokens of a call (tiled_jax), as in a PartitionSpec: a name, or for each leading
            dim of x a name, a tuple of names, or None. The call is then a `jax.shard_map` over them. With None the call
            detects how the tokens are split. It cannot detect Auto axes that a `jax.shard_map` around the call leaves out.
            There every device computes the tokens of all devices, unless the axes are named here.
    """

    num_shards: int | None = None
    shard_tokens: int | None = None
    memory_budget: int | None = None
    keep: float = 0.0
    vocab_shards: int | None = None
    deterministic: bool = False
    token_axes: Any = None

    def cut(self) -> dict[str, Any]:
        """Return the shard length options, as arguments of the planning functions (`plan_mlp`, `plan_loss` and similar)."""
        return {name: getattr(self, name) for name in ("num_shards", "shard_tokens", "memory_budget")}


LossReduction = Literal["mean", "sum", "none"]
LOSS_REDUCTIONS: tuple[str, ...] = get_args(LossReduction)
LossOutput = Literal["log_probs", "lse", "entropy", "accuracy", "prediction", "top_logprobs"]
LOSS_OUTPUTS: tuple[str, ...] = get_args(LossOutput)
# Outputs with gradients of their own per token: the gradients cannot be computed before they are known.
DIFFERENTIABLE_OUTPUTS = ("log_probs", "lse", "entropy")
# What a row has whatever its target is: where one of these is asked for, ignored rows are multiplied too.
EVERY_ROW_OUTPUTS = ("lse", "entropy", "prediction", "top_logprobs")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the cross entropy of a language-model head. `shared_specs/README.md` has the formulas.

    Args:
        ignore_index: a target with this value has no loss and no gradient, and does not count in a mean.
        label_smoothing: in [0, 1], as in torch.nn.functional.cross_entropy.
        z_loss: >= 0; z_loss * lse^2 is added to each token's loss.
        logit_softcap: > 0 or None; logits become softcap * tanh(logits / softcap), after logit_scale.
        logit_scale: factor on the logits.
        reduction: "mean" over the valid tokens (weighted by class_weight), "sum", or "none" ([*tokens]).
        class_weight: [V] array or None, as `weight` of torch.nn.functional.cross_entropy; gets no gradient.
        num_valid: the divisor of "mean", a number or 0-d array > 0. Set it if the count is not the one of this call (gradient
            accumulation, data parallelism). None counts the valid targets, or sums their class weights. An array that holds
            0 gives an infinite loss, or 0 if no target is valid.
        outputs: additional results. With any of them the result is a `LossResult`. "log_probs" (of the targets, 0 where
            ignored), "lse" and "entropy" (of every token's distribution, for any target) are each [*tokens] and have
            gradients. "accuracy" (reduced as the loss is, unweighted), "prediction" and "top_logprobs" (of every token, for
            any target) have none. The first three make backward recompute the logits: 8 THV FLOP instead of 6.
        top_k: the number of vocabulary entries that "top_logprobs" returns per token, 1 <= top_k <= V; None without it.

    A prediction is the entry with the largest logit. Among equal logits it is the first one, as in argmax. Top
    log-probabilities are a `TopLogprobs`, largest first. Among equal ones the first entry comes first. If more entries are
    equal than there are places left, tiled_jax takes the first entries and tiled_torch takes those that torch.topk takes.
    Logits are compared as stored, in the dtype of x. This is before logit_scale and logit_softcap, which could make
    different logits equal. With a negative logit_scale the smallest logit counts as the largest.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    reduction: LossReduction = "mean"
    class_weight: Any = None
    num_valid: Any = None
    outputs: tuple[LossOutput, ...] = ()
    top_k: int | None = None

    @property
    def gradients_in_forward(self) -> bool:
        """Return whether one upstream number scales every gradient, so that they can be computed with the loss."""
        return self.reduction != "none" and not set(self.outputs) & set(DIFFERENTIABLE_OUTPUTS)

    def gradients_with_loss(self, dtype: str) -> bool:
        """Return `gradients_in_forward` for logits of this dtype.

        It is False for float16 with a z_loss. The z_loss adds to the logits' gradients a part that is proportional to the
        log-sum-exp. float16 needs the size of these gradients, which is known only after the last log-sum-exp.
        """
        return self.gradients_in_forward and not (dtype == "float16" and self.z_loss)


class TopLogprobs(NamedTuple):
    """The likeliest vocabulary entries of every token, largest first: their log-probabilities and their indices.

    values: [*tokens, top_k], natural logarithms, float32 (float64 for float64). indices: [*tokens, top_k], int64 in
    tiled_torch, int32 in tiled_jax.
    """

    values: Any
    indices: Any


class LossResult(NamedTuple):
    """The results of a loss with `LossOptions.outputs`. Outputs that were not requested are None.

    prediction: [*tokens], int64 in tiled_torch, int32 in tiled_jax. top_logprobs: a `TopLogprobs`.
    """

    loss: Any
    log_probs: Any = None
    lse: Any = None
    entropy: Any = None
    accuracy: Any = None
    prediction: Any = None
    top_logprobs: Any = None


@dataclass(frozen=True, kw_only=True)
class HalfNames:
    """The words in which the two halves differ: all that `{layout}`, `{backends}` and `{package}` may become."""

    half: Half
    package: str
    backends: tuple[str, ...]
    input_dim_first: bool

    @property
    def layout(self) -> str:
        return "[in, out]" if self.input_dim_first else "[out, in]"

    def weight_shape(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return the shape of a weight from `inputs` to `outputs` features in this half's layout."""
        return (inputs, outputs) if self.input_dim_first else (outputs, inputs)


TORCH = HalfNames(half="torch", package="tiled_torch", backends=("auto", "eager", "triton"), input_dim_first=False)
JAX = HalfNames(half="jax", package="tiled_jax", backends=("auto", "xla", "pallas"), input_dim_first=True)
NAMES: dict[Half, HalfNames] = {"torch": TORCH, "jax": JAX}


@dataclass(frozen=True, kw_only=True)
class ParallelLinearOptions:
    """Options of a linear layer that is split over ranks. Each half refuses the options that it does not use.

    Args:
        sequence_dim: the dim of x that sequence parallelism splits (0 for [tokens, hidden], 1 for [batch, tokens, hidden]).
        stride: the number of equal parts of one fused weight (such as [gate; up]). Each part is split over the ranks.
        disable_grad_reduce: the input gradient stays a partial sum, and the caller reduces it.
        is_expert: the layer belongs to an expert (tiled_torch). It is split over the expert's own tensor-parallel group. Pass
            that group: None, which means all ranks elsewhere, is refused. So an expert never communicates with ranks that
            hold other experts. No registry is consulted. The parameters get `allreduce=False`. Data-parallel engines that
            know this attribute reduce their gradients over the expert-data-parallel group instead.
        explicit_expert_comm: the layer runs no collective; the caller runs those around an expert's layers. A column layer
            uses x as it is and leaves its gradient a partial sum. A row layer returns a partial sum without a bias. Weights
            are split as usual.
        gradient_accumulation_fusion: compute weight gradients in float32 and add them to `weight.main_grad` (tiled_torch).
            This buffer is float32 or 16 bits; a 16-bit buffer is rounded once in each backward.
        async_grad_reduce: reduce the input gradient while the weight gradient is computed (tiled_torch; XLA schedules
            by itself).
        defer_weight_grad: keep x and dy and compute the weight gradient when `deferred_weight_grad()` is called
            (tiled_torch).
        wgrad_deferral_limit: with defer_weight_grad, keep x and dy of at most this many calls. Backward of further calls
            computes the weight gradient at once. 0 means no limit (tiled_torch).
    """

    sequence_dim: int = 0
    stride: int = 1
    disable_grad_reduce: bool = False
    is_expert: bool = False
    explicit_expert_comm: bool = False
    gradient_accumulation_fusion: bool = False
    async_grad_reduce: bool = True
    defer_weight_grad: bool = False
    wgrad_deferral_limit: int = 0


CheckpointingMode = Literal["full", "layers", "products", "op"]
SELECTIVE_MODES = ("products", "op")  # of CheckpointingMode: those that keep what operators return
Reshard = Literal["default", "always", "never"]
LossMean = Literal["ranks", "tokens"]
ContextKind = Literal["ulysses", "ring", "2d"]
CONTEXT_KINDS: tuple[str, ...] = get_args(ContextKind)


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Weights split over the ranks of one mesh axis.

    Args:
        axis: of the mesh.
        sequence_parallel: between the split layers, each rank holds only its part of the tokens.
        loss_parallel: the head stays split by vocabulary through the loss.
        asynchronous: overlap products with their communication by symmetric memory (tiled_torch on CUDA; needs compile).
    """

    axis: str = "tp"
    sequence_parallel: bool = True
    loss_parallel: bool = True
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which activations backward computes again.

    Args:
        mode: "full" keeps only each layer's input. "layers" does so for every `every`-th layer and keeps everything in the
            others. "products" keeps the results of every second matrix product of a layer. "op" also keeps the results of
            attention and of reduce-scatters, so that backward recomputes neither.
        every: k of "layers", >= 1; None in the other modes.
        offload: keep these tensors in host memory. tiled_torch supports it with "full". tiled_jax supports it except with
            "layers", if the backend has host memory. A step whose inputs do not fit there is refused (UnsupportedError).
    """

    mode: CheckpointingMode = "full"
    every: int | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile of each block (tiled_torch; a JAX train step is compiled whole).

    Args:
        ends: also compile embedding, final norm and head, each separately. A tiled model's head is left out, because the loss
            does not call it.
        compiled_autograd: compile the backward as one graph, so that DDP's reductions are part of it.
    """

    ends: bool = False
    compiled_autograd: bool = False


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Options for batches that are split over mesh axes, and for the weights on these axes.

    Args:
        engine: "fsdp" splits parameters, gradients and optimizer state over `shard_axis`; "ddp" replicates them.
        shard_axis: the mesh axis of the shards; with "ddp" the axis of the replicas.
        replicate_axis: a second axis that holds replicas of the sharded weights (hybrid sharding), or None.
        context_axis: the axis of context parallelism, or None. Its ranks get the same batch, and each holds a part of the
            tokens of every sequence. Weights are sharded over it as well. With context="2d" it is a pair of axes: the ring's
            (between nodes), and the one whose ranks exchange tokens for heads (inside a node).
        context: how these ranks compute attention. "ulysses": each rank takes all tokens and some of the heads; the number of
            ranks must divide the query heads. "ring": each rank takes all heads of its own tokens while keys and values
            travel around the ring; the number of heads is no limit. "2d": "ulysses" inside each place of a ring.
        param_dtype: dtype of the computation; None is the dtype of the parameters. Rotary positions have the dtype in which the
            model makes them. reduce_dtype: of gradient reductions.
        cpu_offload: keep sharded parameters in host memory.
        reshard: free gathered weights after forward: "always", "never", or "default" (all blocks but the last; never
            with `pipeline`).
        pipeline: the model is one stage of a pipeline.
        loss_mean: how the loss of a step, and its gradients, average if data ranks have different numbers of valid labels
            (not -100). "tokens" is the mean over the valid labels of all ranks, as in one process with the whole batch. Every
            rank returns this loss. It also covers all micro-batches of a step: in tiled_torch if `num_items_in_batch` gives
            this rank's count in all of them (see `parallelize`), in tiled_jax with `ParallelConfig.micro_batches`. "ranks"
            is the mean of the ranks' own means. None is "ranks" in tiled_torch, as in its engines, and "tokens" in tiled_jax,
            which has no other mode.
    """

    engine: Literal["fsdp", "ddp"] = "fsdp"
    shard_axis: str = "dp_shard"
    replicate_axis: str | None = None
    context_axis: str | tuple[str, str] | None = None
    context: ContextKind = "ulysses"
    param_dtype: str | None = None
    reduce_dtype: str | None = "float32"
    cpu_offload: bool = False
    reshard: Reshard = "default"
    pipeline: bool = False
    loss_mean: LossMean | None = None

    @property
    def context_axes(self) -> tuple[str, ...]:
        """Return all axes that split sequences, in mesh order: none, one, or the ring's axis and the axis inside it."""
        axis = self.context_axis
        return axis if isinstance(axis, tuple) else () if axis is None else (axis,)

    @property
    def ring_axis(self) -> str | None:
        """Return the ring axis, along which keys and values travel, or None."""
        return None if self.context == "ulysses" or not self.context_axes else self.context_axes[0]

    @property
    def heads_axis(self) -> str | None:
        """Return the axis whose ranks exchange tokens for heads, or None."""
        return None if self.context == "ring" or not self.context_axes else self.context_axes[-1]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The steps that `parallelize` applies to a finished model, in this order; None leaves a step out.

    Args:
        float8: compute matrix products of the layers in float8 if their sizes are multiples of 16 (tiled_torch with torchao).
            A tiled model does not support it with `tensor`. torchao computes the scales: one for a whole tensor, and in a
            tiled model one for a shard.
        donate: the train step overwrites its input state (tiled_jax).
        micro_batches: the step splits a batch into this many equal parts, >= 1, and computes them one after the other. It adds
            up their gradients in float32 for one update (tiled_jax; in tiled_torch your loop does this). Ranks communicate
            once, except to gather parameters.
    """

    tensor: TensorParallel | None = None
    checkpointing: Checkpointing | None = None
    compile: Compile | None = None
    data: DataParallel | None = None
    float8: bool = False
    donate: bool = True
    micro_batches: int = 1
