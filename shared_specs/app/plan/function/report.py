"""What `plan` of a model returns: whether a context fits, what to set for it, bytes by part, the longest context; as text."""

from dataclasses import dataclass

from shared_specs.app.plan.search import Plan
from shared_specs.app.plan.setting import what_to_set

_NOTE = "The reserve is for CUDA, the communication library and the allocator."


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The findings of `plan` for a model; as text, a summary.

    Attributes:
        plan: shared_specs.app.plan.search.Plan: sizes, setting, parts and the reach of every lever, for programs.
    """

    plan: Plan

    @property
    def fits(self) -> bool:
        """Return whether the tokens fit with some setting."""
        return self.plan.setting is not None

    @property
    def what_to_set(self) -> dict[str, str]:
        """Return each call that makes the setting, and what it is set to; empty where nothing fits."""
        if self.plan.setting is None:
            return {}
        found = dict(what_to_set(self.plan.setting, self.bytes["host"]))
        if self.plan.decoder.whole is None:
            return found
        names = ("mesh", "Checkpointing") if self.plan.decoder.recomputed else ("mesh",)
        return {name: found[name] for name in names}

    @property
    def bytes(self) -> dict[str, int]:
        """Return bytes of each device at the peak of a step, by part; "total" of them, and "host" memory; empty where nothing
        fits."""
        parts = self.plan.parts
        return {} if parts is None else parts.by_name | {"total": parts.total, "host": parts.host}

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that all devices together can hold, with every lever; 0 where none fits."""
        return max((reach.tokens for reach in self.plan.reach), default=0)

    @property
    def seconds(self) -> float | None:
        """Return a lower bound of the time of a step; None where only the memory of a device is known, or nothing fits."""
        return self.plan.seconds

    def __str__(self) -> str:
        plan = self.plan
        answer = "fits" if self.fits else "does not fit with any setting"
        lines = [f"{plan.tokens} tokens on {plan.gpus} x {_gib(plan.memory)}: {answer}", _parameters(plan)]
        if self.fits:
            lines += ["set", *_rows(self.what_to_set)]
            sizes = {name: _gib(size) for name, size in self.bytes.items() if size}
            lines += ["bytes of each device at the peak", *_rows(sizes)]
        if self.seconds is not None:
            lines.append(f"a step takes {self.seconds:.3g} s at least")
        shared = all(reach.setting.data == 1 for reach in plan.reach)
        lines += [
            f"longest context, {'all devices in one' if shared else 'of each device its own'}",
            *_rows({r.lever: f"{r.tokens} tokens" for r in plan.reach}),
        ]
        return "\n".join([*lines, f"{plan.note} {_NOTE}"])


def _parameters(plan: Plan) -> str:
    held = plan.decoder.held
    if held is None:
        return f"{plan.decoder.parameters} parameters"
    return f"{held.count} parameters, of which {held.trained} are trained"


def _rows(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name.ljust(width)}  {value}" for name, value in rows.items()]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
