"""Fuzzes any number of programs: `make fuzz ARGS="--graphs 20000 --seed 1"`.

Prints every failing program, made small, and exits with 1 where there is one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fuzz.check import Mismatch, check
from fuzz.program import Program
from fuzz.reduce import reduced
from fuzz.strategy import PROGRAMS

#: programs that one run of Hypothesis makes; Dynamo's caches are emptied as often
CHUNK = 100


@dataclass
class Tally:
    """What came of some programs. `graphs` counts programs, `fused` those with a fused site in them."""

    graphs: int = 0
    fused: int = 0
    sites: Counter = field(default_factory=Counter)
    features: Counter = field(default_factory=Counter)
    hits: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.graphs += other.graphs
        self.fused += other.fused
        self.sites += other.sites
        self.features += other.features
        self.hits += other.hits
        self.failures += other.failures


def fuzz(count: int, number: int) -> Tally:
    """`count` programs of seed `number`; where one fails, the rest comes from another seed."""
    tally = Tally()
    for attempt in range(3):
        failure = _fuzz(count - tally.graphs, number * 1000 + attempt, tally)
        torch._dynamo.reset()
        if failure is None:
            break
        tally.failures.append(failure)
        if tally.graphs >= count:
            break
    return tally


def _fuzz(count: int, number: int, tally: Tally) -> str | None:
    """Adds to the tally; the first failing program, made small, or None."""
    failing: list[Program] = []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(PROGRAMS)
    def run(program: Program) -> None:
        tally.graphs += 1
        tally.features.update(program.features)
        try:
            outcome = check(program)
        except BaseException:
            failing.append(program)
            raise
        tally.fused += outcome.fused > 0
        tally.hits.update(outcome.hits)
        tally.sites.update({"sites fused": outcome.fused,
                            "of them with their surroundings": outcome.grown,
                            "declined": outcome.declined,
                            "calls that raise as eager does": outcome.errors,
                            "programs in which PyTorch's own tracing differs": outcome.foreign})

    try:
        run()
    except Exception:
        if not failing:
            raise
        small = reduced(failing[0], lambda program: _failure(program) is not None)
        found = f"seed {number} of Hypothesis, program {tally.graphs}"
        return f"{small.source()}\n# {_failure(small)}\n# {found}\n"
    return None


def _failure(program: Program) -> str | None:
    try:
        check(program)
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _chunk(job: tuple[int, int]) -> Tally:
    return fuzz(*job)


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # errors that eager raises too


@click.command(help=__doc__)
@click.option("--graphs", default=2000, show_default=True, help="How many programs.")
@click.option("--seed", "number", default=1, show_default=True)
@click.option("--minutes", type=float, help="Stop after these many, at the end of a hundred programs.")
@click.option("--processes", default=os.cpu_count(), show_default=True)
@click.option("--write", is_flag=True, help="Write the result into docs/reliability.md.")
def main(graphs: int, number: int, minutes: float | None, processes: int, write: bool) -> None:
    started, tally, console = time.perf_counter(), Tally(), Console(width=100)
    jobs = [(min(CHUNK, graphs - first), number * 1_000_000 + first // CHUNK)
            for first in range(0, graphs, CHUNK)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with get_context("spawn").Pool(processes, _start) as pool, Progress(*columns, console=console) as bar:
        task = bar.add_task("programs", total=graphs)
        for part in pool.imap_unordered(_chunk, jobs):
            tally.add(part)
            for failure in part.failures:
                console.rule("failing program")
                console.print(failure, highlight=False, markup=False, soft_wrap=True)
            rate = tally.graphs / (time.perf_counter() - started)
            bar.update(task, completed=tally.graphs,
                       description=f"{rate:.1f} a second, {len(tally.failures)} failed")
            if minutes is not None and time.perf_counter() - started > 60 * minutes:
                break
    seconds = time.perf_counter() - started
    console.print(_summary(tally, seconds, number))
    for title, counts in _tables(tally):
        table = Table(title, "programs", box=None)
        for what, count in counts.most_common():
            table.add_row(what, str(count))
        console.print(table)
    if write:
        limit = "" if minutes is None else f" --minutes {minutes:g}"
        _write(tally, seconds, number,
               f"--graphs {graphs} --seed {number}{limit} --processes {processes} --write")
    sys.exit(bool(tally.failures))


def _summary(tally: Tally, seconds: float, number: int) -> str:
    sites = ", ".join(f"{count} {what}" for what, count in tally.sites.items() if count)
    return (f"{tally.graphs} programs (seed {number}), {len(tally.failures)} failed; "
            f"{100 * tally.fused / max(tally.graphs, 1):.0f}% have a fused site; {sites}; "
            f"{seconds / 60:.1f} min, {tally.graphs / seconds:.1f} programs a second")


def _tables(tally: Tally) -> tuple[tuple[str, Counter], ...]:
    return ("programs in which the pass had to do with", tally.hits), ("programs with", tally.features)


def _write(tally: Tally, seconds: float, number: int, arguments: str) -> None:
    from pages import made_with, write_section

    text = [f"{_summary(tally, seconds, number)}.", "",
            f"Made by `make fuzz ARGS=\"{arguments}\"` with {made_with('torch', 'hypothesis')}; "
            f"{os.cpu_count()} cores."]
    for title, counts in _tables(tally):
        text += ["", f"| {title} | |", "|---|---:|"]
        text += [f"| {what} | {count} |" for what, count in counts.most_common()]
    write_section("reliability.md", "fuzz", "\n".join(text))


if __name__ == "__main__":
    main()
