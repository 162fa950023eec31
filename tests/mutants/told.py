"""Whether the test that noticed a mutant is of `make test` or a deep one, for run.py, whose pytest loads this as a plugin."""

from collections.abc import Iterator

import pytest

DEEP = "noticed by a deep test"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and item.get_closest_marker("deep"):
        report.sections.append((DEEP, ""))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if failed and all(DEEP in dict(report.sections) for report in failed):
        terminalreporter.write_line(DEEP)
