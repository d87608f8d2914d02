"""Runs this folder's tests and writes what each fault ends with into docs/reliability.md.

    python tests/faults/run.py [pytest's arguments]

The rows are the tests' `fault` marks: a row is written only if all of its tests passed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from pages import made_with, write_section  # noqa: E402


class Rows:
    """A pytest plugin: (fault, how it ends) -> outcomes of its tests, in the order of the files."""

    def __init__(self):
        self.outcomes: dict[tuple[str, str], list[str]] = {}
        self.passed = self.failed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self.passed += report.passed
            self.failed += report.failed
            for mark in item.iter_markers("fault"):
                self.outcomes.setdefault(mark.args, []).append(report.outcome)
        return report


def main(arguments: list[str]) -> int:
    rows, started = Rows(), time.monotonic()
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(HERE), *arguments]
    status = pytest.main(options, plugins=[rows])
    if status or rows.failed:
        print("not written: not all tests passed")
        return 1
    seconds = time.monotonic() - started
    lines = ["`python tests/faults/run.py` makes each fault on purpose, with the net on; kernels run on the",
             "CPU, by Triton's interpreter. Results are held to the bound above.", "",
             "| fault | how it ends | tests |", "|---|---|---:|"]
    lines += [f"| {what} | {end} | {len(outcomes)} |" for (what, end), outcomes in rows.outcomes.items()]
    lines += ["", f"{rows.passed} tests passed in {seconds:.0f} s, those of what the faults rest on included "
                  f"({made_with('torch', 'triton-ascend')})."]
    write_section("reliability.md", "faults", "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
