"""`finetune --plan`: the options of a run chosen so that a step fits, before anything is loaded."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError, flag
from shared_specs.app.plan.decoder import Decoder, check_planned, check_tensor, decoder_of
from shared_specs.app.plan.search import contexts, levers_of, memory_of, parts_of_sequence, splits
from shared_specs.app.plan.step import Parts, Setting, parts_of
from shared_specs.app.progress import show_bytes
from shared_specs.config import Half

# What the plan chooses; a user who names one of them has chosen.
CHOSEN = ("plain", "context", "scope", "offload", "checkpointing", "keep", "num_shards", "memory_budget")
_GPU = Path("/dev/nvidiactl")


def planned_run(options: FinetuneOptions, half: Half) -> tuple[FinetuneOptions, tuple[str, ...]]:
    """Return the options with what `plan` says set in them, and lines that say so; as they are without --plan.

    The ranks are those of --dp, --fsdp, --cp and --tp together; which of them share a sequence, or split layers where nothing
    else fits, is chosen. A --tp of more than one stays.

    Raises:
        InputError: nothing fits, an option names what is chosen, or the model is of a kind that the formulas do not know.
    """
    if options.plan is None:
        return options, ()
    _check(options)
    memory, _ = memory_of(options.plan, "finetune: --plan")
    decoder = decoder_of(read_model(options.model).config, options.model or "of the run", "finetune")
    check_planned(decoder, half, options.ranks, "finetune")
    check_tensor(decoder, options.tp, options.ranks, half, "finetune")
    found = next(
        ((setting, parts) for setting, parts in _candidates(decoder, options, half) if parts.total <= memory), None
    )
    if found is None:
        hint = "Fewer tokens, a smaller batch or more ranks may."
        raise InputError(f"finetune: --plan finds no way to fit a step into {options.plan}. {hint}")
    setting, parts = found
    changes: dict[str, Any] = {
        "dp": 1,
        "fsdp": setting.data,
        "cp": setting.context,
        "context": setting.context_kind,
        "tp": setting.tensor,
        "plain": setting.scope == "none",
        "scope": "block" if setting.scope == "block" else "mlp",
        "checkpointing": setting.scope != "block",
        "offload": setting.offload,
    }
    names = ("fsdp", "cp", "scope", "checkpointing", "offload", "plain")
    words = " ".join(f"{flag(name)} {changes[name]}" for name in names[:3])
    words += f" --tp {setting.tensor}" if setting.tensor > 1 else ""
    words += f" --context {setting.context_kind}" if setting.ring > 1 else ""
    words += "".join(f" {flag(name)}" for name in names[3:] if changes[name])
    sizes = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.by_name.items() if size)
    lines = (f"plan: {words}", f"plan: {show_bytes(parts.total)} of {options.plan} on each of {setting.gpus}: {sizes}")
    return replace(options, plan=None, **changes), lines


def _check(options: FinetuneOptions) -> None:
    plain = FinetuneOptions()
    given = [name for name in CHOSEN if getattr(options, name) != getattr(plain, name)]
    if given:
        raise InputError(f"finetune: --plan chooses {flag(given[0])} itself. Drop one of the two.")


def _candidates(decoder: Decoder, options: FinetuneOptions, half: Half) -> Iterator[tuple[Setting, Parts]]:
    """Return every setting that the command can run, what costs least first."""
    device = "cpu" if options.device == "cpu" or (options.device == "auto" and not _GPU.exists()) else "gpu"
    base = Setting(
        tokens=options.tokens, gpus=options.ranks, shard_tokens=options.shard_tokens, dtype=options.dtype, half=half,
        device=device,
    )  # fmt: skip
    tensors = splits(decoder, base, options.tp if options.tp > 1 else None)
    for shared in chain.from_iterable(contexts(decoder, replace(base, tensor=tensor)) for tensor in tensors):
        if options.batch % shared.data:
            continue
        sized = replace(shared, sequences=options.batch // shared.data)
        if options.tokens % parts_of_sequence(sized):
            continue
        for lever in levers_of(decoder, sized):
            setting = replace(sized, **lever.changes)
            if not (setting.offload and device == "cpu"):  # whose memory the host's is
                yield setting, parts_of(decoder, setting)
