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
    """How T tokens are cut into shards: the long form of `num_shards` and `keep`, which it excludes.

    At most one of the first three is given; with none of them the plan chooses (`shards.plan_tokens`). A function that
    has no use for a field refuses any value but its default.

    Args:
        num_shards: at most this many shards, >= 1.
        shard_tokens: tokens per shard, >= 1.
        memory_budget: bytes the call may use above its inputs, outputs and gradients; the longest shard that
            fits is taken (`costs.shard_tokens_within`).
        keep: fraction of the shards, in [0, 1], whose gate and up are kept for backward instead of recomputed (MLP).
        vocab_shards: at most this many runs of the vocabulary, >= 1, whose logits exist one at a time (losses). More
            than one costs a second computation of the logits: 8 THV FLOP instead of 6.
        deterministic: whether results are the same to the last bit at every shard count (MLP). Every product is then made
            by a kernel of the project's own, which adds in one order; UnsupportedError where none can run, and in
            tiled_jax where gradients of weights are asked of shards of two lengths.
        token_axes: mesh axes that cut the tokens of a call (tiled_jax), as in a PartitionSpec: a name, or for each leading
            dim of x a name, a tuple of names, or None. The call is then a `jax.shard_map` over them. None finds out by
            itself how tokens are cut, but for Auto axes that a `jax.shard_map` around the call leaves out: there every
            device computes the tokens of all, unless the axes are named here.
    """

    num_shards: int | None = None
    shard_tokens: int | None = None
    memory_budget: int | None = None
    keep: float = 0.0
    vocab_shards: int | None = None
    deterministic: bool = False
    token_axes: Any = None

    def cut(self) -> dict[str, Any]:
        """Return how long shards are, as the functions that plan (`plan_mlp`, `plan_loss` and their kind) are told it."""
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
    """Options of the cross entropy of a language-model head. Formulas in `shared_specs/README.md`.

    Args:
        ignore_index: a target of this value has no loss, no gradient and does not count.
        label_smoothing: in [0, 1], as in torch.nn.functional.cross_entropy.
        z_loss: >= 0; z_loss * lse^2 is added to each token's loss.
        logit_softcap: > 0 or None; logits become softcap * tanh(logits / softcap), after logit_scale.
        logit_scale: factor on the logits.
        reduction: "mean" over the valid tokens (weighted by class_weight), "sum", or "none" ([*tokens]).
        class_weight: [V] array or None, as `weight` of torch.nn.functional.cross_entropy; gets no gradient.
        num_valid: what "mean" divides by, a number or 0-d array > 0, where the count is not this call's own (gradient
            accumulation, data parallel); None counts (sums the class weights of) the valid targets. An array that holds 0
            gives an infinite loss, or 0 where no target is valid.
        outputs: any of "log_probs" (of the targets, 0 where ignored), "lse", "entropy" (of every token's distribution,
            whatever its target), each [*tokens] and with gradients, and, without gradients, "accuracy" (reduced as the loss
            is, unweighted), "prediction" and "top_logprobs" (of every token, whatever its target). With any the result is a
            `LossResult`. The first three make backward compute the logits again: 8 THV FLOP instead of 6.
        top_k: how many entries of the vocabulary "top_logprobs" has of each token, 1 <= top_k <= V; None without it.

    A prediction is the entry with the largest logit, of equal ones the first, as argmax has it. Top log-probabilities are a
    `TopLogprobs`, largest first, of equal ones the first entry first; where more of them are equal than there are places left,
    tiled_jax takes the first entries and tiled_torch those that torch.topk takes. Logits are compared as they are stored, in
    the dtype of x, before logit_scale and logit_softcap could make different ones equal; of a negative logit_scale the smallest
    is the largest.
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
        """`gradients_in_forward` for logits of this dtype.

        False for float16 with a z_loss, whose part of the gradients of the logits is proportional to the log-sum-exp: how
        large they are, which float16 cannot do without, is known only once every log-sum-exp is.
        """
        return self.gradients_in_forward and not (dtype == "float16" and self.z_loss)


class TopLogprobs(NamedTuple):
    """The likeliest entries of the vocabulary of every token, largest first: of each its log-probability and which it is.

    values: [*tokens, top_k], natural logarithms, float32 (float64 for float64). indices: [*tokens, top_k], int64 in
    tiled_torch, int32 in tiled_jax.
    """

    values: Any
    indices: Any


class LossResult(NamedTuple):
    """The results of a loss for which `LossOptions.outputs` names some; the others are None.

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
    """Options of a linear layer that is split over ranks. A half refuses those that it has no use for.

    Args:
        sequence_dim: the dim of x that sequence parallelism splits (0 for [tokens, hidden], 1 for [batch, tokens, hidden]).
        stride: how many equal parts of one fused weight (such as [gate; up]) are each split over the ranks.
        disable_grad_reduce: leave the input gradient a partial sum; the caller reduces it.
        is_expert: the layer belongs to an expert (tiled_torch). It is split over the expert's own tensor-parallel group,
            which has to be given: None, elsewhere all ranks, is refused, so that an expert never talks to ranks that hold
            other experts. Nothing is looked up from a registry. Its parameters get `allreduce=False`, by which data-parallel
            engines that know the mark reduce their gradients over the expert-data-parallel group instead.
        explicit_expert_comm: no collective in the layer; the caller makes those around an expert's layers. A column layer
            takes x as it is and leaves its gradient a partial sum, a row layer returns a partial sum, to which no bias is
            added. Weights are split as ever.
        gradient_accumulation_fusion: add weight gradients, made in float32, to `weight.main_grad` (tiled_torch): a float32
            buffer, or one of 16 bits, which is rounded once in each backward.
        async_grad_reduce: reduce the input gradient while the weight gradient is computed (tiled_torch; XLA schedules
            by itself).
        defer_weight_grad: keep x and dy and compute the weight gradient when `deferred_weight_grad()` is called
            (tiled_torch).
        wgrad_deferral_limit: with defer_weight_grad, keep x and dy of at most this many calls; backward of further ones
            computes the weight gradient at once. 0: of all (tiled_torch).
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
        sequence_parallel: between the split layers each rank holds its part of the tokens only.
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
        mode: "full" keeps each layer's input only; "layers" does so for every `every`-th layer and keeps all of the
            others; "products" keeps the results of every second matrix product of a layer; "op" keeps beside those what
            attention returns and what a device gets of a sum that is split, so that neither is computed again.
        every: k of "layers", >= 1; left at None otherwise.
        offload: keep what is kept in host memory. tiled_torch: with "full"; tiled_jax: not with "layers", where the backend has
            such a memory.
    """

    mode: CheckpointingMode = "full"
    every: int | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile of each block (tiled_torch; a JAX train step is compiled whole).

    Args:
        ends: compile embedding, final norm and head apart too (of a tiled model not the head, which its loss does not call).
        compiled_autograd: compile the backward as one graph, so that DDP's reductions are part of it.
    """

    ends: bool = False
    compiled_autograd: bool = False


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Batches split over mesh axes, and what is done to the weights there.

    Args:
        engine: "fsdp" splits parameters, gradients and optimizer state over `shard_axis`; "ddp" replicates them.
        shard_axis: of the mesh; with "ddp" the axis of the replicas.
        replicate_axis: a second axis of replicas of the sharded weights (hybrid sharding), or None.
        context_axis: an axis of context parallelism, or None: its ranks are given the same batch and hold a part of the tokens
            of every sequence each. Weights are sharded over it as well. With context="2d" a pair of axes: of the rings (between
            nodes), and of the ranks that exchange tokens for heads (inside one).
        context: how these ranks attend. "ulysses": all tokens with some of the heads each; the ranks divide the query heads.
            "ring": all heads of their own tokens, while keys and values travel round; the number of heads is no limit. "2d":
            "ulysses" inside each rank of a ring.
        param_dtype: dtype of the computation, None for that of the parameters. reduce_dtype: of gradient reductions.
        cpu_offload: keep sharded parameters in host memory.
        reshard: free gathered weights after forward: "always", "never", or "default" (all blocks but the last; never
            with `pipeline`).
        pipeline: the model is one stage of a pipeline.
        loss_mean: what the loss of a step, and its gradients, are the mean of, where data ranks have labels that count (not
            -100) in unequal numbers. "tokens": of all such labels of all of them, as in one process that has the whole batch,
            and the loss is that on every rank; for the micro-batches of a step together where `num_items_in_batch` says how
            many this rank has in all of them (tiled_torch; see `parallelize`), or `ParallelConfig.micro_batches` (tiled_jax).
            "ranks": of each rank's own mean. None: "ranks" in tiled_torch, as its engines have it, and "tokens" in tiled_jax,
            which has no other.
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
        """Return all axes that cut sequences, in the order of the mesh: none, one, or that of the rings and the one inside."""
        axis = self.context_axis
        return axis if isinstance(axis, tuple) else () if axis is None else (axis,)

    @property
    def ring_axis(self) -> str | None:
        """Return the axis round which keys and values travel, or None."""
        return None if self.context == "ulysses" or not self.context_axes else self.context_axes[0]

    @property
    def heads_axis(self) -> str | None:
        """Return the axis whose ranks exchange tokens for heads, or None."""
        return None if self.context == "ring" or not self.context_axes else self.context_axes[-1]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The steps that `parallelize` applies to a finished model, in this order; None leaves a step out.

    Args:
        float8: matrix products of the layers in float8, where their sizes are multiples of 16 (tiled_torch with torchao; a
            tiled model not with `tensor`). Scales are torchao's, of whole tensors; in a tiled model of a shard's.
        donate: the train step writes over its input state (tiled_jax).
        micro_batches: so many equal parts of a batch are computed one after the other, and their gradients added up in float32
            for one update, >= 1 (tiled_jax; in tiled_torch the loop does it). Ranks meet once, but for gathered parameters.
    """

    tensor: TensorParallel | None = None
    checkpointing: Checkpointing | None = None
    compile: Compile | None = None
    data: DataParallel | None = None
    float8: bool = False
    donate: bool = True
    micro_batches: int = 1
