"""`python -m shared_specs.app.plan [torch | jax] [options]`: `plan` where neither framework is installed."""

import sys

from shared_specs.app.command import main, shared_command
from shared_specs.app.plan.show import show_plan
from shared_specs.config import HALVES, Half


def _run(words: list[str]) -> int:
    named: list[Half] = [half for half in HALVES if words[:1] == [half]]
    half = named[0] if named else HALVES[0]
    command = shared_command("plan", "cli", lambda options: show_plan(options, half))
    return main("shared_specs.app.plan", [command], ["plan", *words[len(named) :]])


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
