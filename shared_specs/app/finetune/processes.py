"""The processes of one run as the loop sees them: who writes, what all agree on, and what it means when one is lost."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from shared_specs.app.finetune.context import context_axes, context_of
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.app.signals import exit_code
from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError, UnsupportedError

# What the user can mend, told in one line; any other error is a fault, told by its traceback.
USER_ERRORS = (InputError, SpecError, UnsupportedError)
_T = TypeVar("_T")
_PATIENCE_SECONDS = 30.0


class Team(Protocol):
    """The processes of a run. Every method but `lost` is called by all of them, in the same order."""

    rank: int  # of this process; 0 writes log, plot and model
    count: int

    def gather(self, value: Any) -> list[Any]:
        """`value` (JSON) of every process, in rank order; returns once all have come to it."""
        ...

    def lost(self, error: BaseException) -> str | None:
        """Return what an error outside USER_ERRORS says of another process that ended or no longer answers; None for a fault
        of this one's own.
        """
        ...


class Alone:
    """The team of a run in one process."""

    rank, count = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def lost(self, error: BaseException) -> str | None:
        return None


ALONE = Alone()


class OutputError(InputError):
    """A run could not write, because the disk is full for example. Whatever it wrote before is there."""


class SaidElsewhere(InputError):
    """Ends this process with the exit code of bad input, quietly: another process says what is wrong."""


def let_first_speak() -> None:
    """Wait, in every process but the first, before this one reports bad input.

    All processes that torchrun started were given the same words. Process 0 reports and ends, and torchrun then ends the
    others. A process that still runs after the wait has an error of its own to report.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_PATIENCE_SECONDS)


def end_alone(lost: bool) -> None:
    """End this process here and now where it lost another one (`lost`), or fails by itself, its traceback shown first.

    To leave in order would be to wait for what is under way with the others, up to the timeout; a launcher that meanwhile
    sees one of them fail ends this one, and nobody learns why.
    """
    error = sys.exception()
    interrupted = isinstance(error, KeyboardInterrupt)
    fault = error is not None and not interrupted and not isinstance(error, USER_ERRORS)
    if fault:
        traceback.print_exception(error)
    if lost or fault or interrupted:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code(signal.SIGINT) if interrupted else 1)


def succeed_everywhere(team: Team, work: Callable[[], _T]) -> _T:
    """Return the result of `work`, once it succeeded in every process.

    Raises:
        InputError: it did in any of them; process 0 gets the text, the others SaidElsewhere.
    """
    result, wrong = None, None
    try:
        result = work()
    except InputError as error:
        if team.count == 1:
            raise
        wrong = (str(error), isinstance(error, OutputError))
    told = team.gather(wrong)
    failed = [rank for rank, found in enumerate(told) if found is not None]
    if failed:
        if team.rank != 0:
            raise SaidElsewhere
        where = "" if failed[0] == 0 else f" (process {failed[0]} of {team.count})"
        text, of_output = told[failed[0]]
        raise (OutputError if of_output else InputError)(text + where)
    return result  # type: ignore[return-value]


def check_layout(options: FinetuneOptions, count: int, unit: str, advice: str) -> None:
    """Refuse a `--dp`, `--fsdp`, `--cp` and `--tp` that do not make up the ranks there are.

    Args:
        count: how many there are. unit: what they are, such as "processes". advice: how to get as many as were asked for.
    Raises:
        InputError: their product is another number.
    """
    if options.ranks != count:
        got = f"{options.dp} x {options.fsdp} x {options.cp} x {options.tp} = {options.ranks}"
        rule = f"--dp x --fsdp x --cp x --tp must be {count}, the {unit} of this run"
        raise InputError(f"finetune: {rule}, got {got}. {advice}")


def layout(options: FinetuneOptions, heads: int, *, compiled: bool) -> tuple[dict[str, int], ParallelConfig]:
    """Return the axes of the mesh, name to size and outermost first, and what `parallelize` does along them.

    Axes of one rank are left out, but for that of the shards where there are others beside it: its engine also makes
    replicas and splits sequences. Replicas alone are DDP's.

    Args:
        heads: query heads of the model, by which `--context 2d` splits `--cp`.
        compiled: whether the step is compiled whole (JAX). Tokens between split layers can then only be cut into equal parts,
            and those that tp does not divide stay whole; the step has its micro-batches in it.
    """
    tensor = None
    if options.tp > 1:
        rows = options.batch // (options.dp * options.fsdp) * (options.tokens // options.cp)
        tensor = TensorParallel(sequence_parallel=not compiled or rows % options.tp == 0)
    if options.fsdp == options.cp == options.tp == 1:
        axes, data = {"dp_shard": options.dp}, DataParallel(engine="ddp", loss_mean="tokens")
    else:
        replicas = {"dp_replicate": options.dp} if options.dp > 1 else {}
        context = context_axes(options, heads)
        shards = {"dp_shard": options.fsdp} if options.dp * options.fsdp * options.cp > 1 else {}
        axes = replicas | shards | context | ({"tp": options.tp} if tensor else {})
        replicate, attends = next(iter(replicas), None), context_of(context, options)
        data = DataParallel(replicate_axis=replicate, **attends, loss_mean="tokens") if shards else None
    checkpointing = Checkpointing(offload=options.offload) if options.checkpointing or options.offload else None
    micro_batches = options.grad_accumulation if compiled else 1  # PyTorch's trainer has a loop over them
    return axes, ParallelConfig(tensor=tensor, checkpointing=checkpointing, data=data, micro_batches=micro_batches)
