"""Bugs put into the product on purpose: how many programs does the fuzzer need to find each?

`python tests/fuzz/mutants.py --graphs 500` prints a table. A mutant is a change of one function's source,
made in memory.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.check import check
from fuzz.program import Program
from fuzz.run import CHUNK, _start
from fuzz.strategy import PROGRAMS


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `function`, a dotted name in `ascend_ln_fuse.<module>`."""

    module: str
    function: str
    old: str
    new: str

    @contextmanager
    def active(self) -> Iterator[None]:
        """The package with this bug.

        Raises:
            LookupError: `old` does not stand in the source exactly once: the mutant is out of date.
        """
        module = importlib.import_module(f"ascend_ln_fuse.{self.module}")
        function = inspect.unwrap(reduce(getattr, self.function.split("."), module))
        source = textwrap.dedent(inspect.getsource(function))
        count = source.count(self.old)
        if count != 1:
            raise LookupError(f"{self.module}.{self.function} has {self.old!r} {count} times")
        scope = dict(vars(module))
        body = source[source.index("def "):]  # without decorators
        exec(compile("from __future__ import annotations\n" + body.replace(self.old, self.new),
                     "<mutant>", "exec"), scope)
        original, function.__code__ = function.__code__, scope[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = original


MUTANTS = {
    "views keyed without their arguments": Mutant(
        "rewrite", "_operand", "step.key)", "step.target)"),
    "views shared with no_grad": Mutant(
        "rewrite", "rewrite", "lens.segment[unit.anchor]", "0"),
    "operands placed without their views' arguments": Mutant(
        "site", "Assembler._place", "step.key for step in steps", "step.target for step in steps"),
    "scalars that are close taken for one": Mutant(
        "site", "Assembler.scalar", "known == value)", "abs(known - value) < 1e-4)"),
    "no rounding by a cast": Mutant(
        "site", "Assembler._emit", "self.cast(self.emit(node.args[0], steps), dtype)",
        "self.emit(node.args[0], steps)"),
    "rsub's operands not swapped": Mutant(
        "site", "pointwise_args", "(args[1], args[0])", "(args[0], args[1])"),
    "the order of a result's dims lost": Mutant(
        "site", "layout_order", "return order", "return tuple(range(fake.dim()))"),
    "no order of a write after reads": Mutant(
        "graph", "Lens._order", "(*readers.pop(key, ()), *others)", "others"),
    "inputs that may share memory are apart": Mutant(
        "graph", "Lens._order", "inputs if inputs & self.written else frozenset()", "frozenset()"),
    "memory that is written taken in": Mutant(
        "graph", "Lens.is_mutated", "not self.storages(node).isdisjoint(self.written)", "False"),
    "sites across grad modes": Mutant(
        "patterns.grow", "Grower._mine", "self.lens.segment[node] == self.segment", "True"),
    "a stored value without a look at its readers": Mutant(
        "patterns.grow", "Grower._absorbable", "lens.leads_into(reader, self.interior)", "False"),
    "any variance is biased": Mutant(
        "patterns.handwritten_norm", "_Matcher._variance", "correction != 0", "False"),
    "half a rotation lies anywhere": Mutant(
        "patterns.rotary", "lies", "same(fake.storage_offset() - full.storage_offset(), offset)", "True"),
}


def programs_until_found(mutant: Mutant, most: int, number: int = 1) -> int | None:
    """The number of programs until one differs from eager; None if `most` do not."""
    made = 0

    class Found(Exception):
        pass

    def chunk(of: int, start: int) -> None:
        @seed(start)
        @settings(max_examples=of, database=None, deadline=None, phases=(Phase.generate,),
                  suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
        @given(PROGRAMS)
        def run(program: Program) -> None:
            nonlocal made
            made += 1
            try:
                with mutant.active():
                    check(program)
            except Exception as error:
                if _is_right(program):
                    raise Found from error
        run()

    try:
        for first in range(0, most, CHUNK):
            chunk(min(CHUNK, most - first), number * 1_000_000 + first)
            torch._dynamo.reset()
    except Found:
        return made
    finally:
        torch._dynamo.reset()
    return None


def _is_right(program: Program) -> bool:
    """Whether the program agrees with eager where the bug is not: a failure of its own finds no mutant."""
    torch._dynamo.reset()
    try:
        check(program)
    except Exception:
        return False
    return True


def _measure(job: tuple[str, int, int]) -> tuple[str, int | None]:
    name, graphs, number = job
    return name, programs_until_found(MUTANTS[name], graphs, number)


@click.command(help=__doc__)
@click.option("--graphs", default=500, show_default=True, help="Programs at most, for each mutant.")
@click.option("--seed", "number", default=1, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.argument("only", nargs=-1)
def main(graphs: int, number: int, processes: int, only: tuple[str, ...]) -> None:
    jobs = [(name, graphs, number) for name in MUTANTS if not only or any(part in name for part in only)]
    found = 0
    with get_context("spawn").Pool(processes, _start) as pool:
        for name, count in pool.imap_unordered(_measure, jobs):
            found += count is not None
            click.echo(f"{name}: {'not found' if count is None else f'found after {count} programs'}")
    click.echo(f"{found} of {len(jobs)} found in {graphs} programs each")


if __name__ == "__main__":
    main()
