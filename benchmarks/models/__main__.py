"""Whole models at published sizes side by side: eager, torch.compile, ours (`make bench-models`).

    python -m benchmarks.models --json models.json                    all models; goes on where it was stopped
    python -m benchmarks.models --json models.json --first-calls      compile times, at the published depth
    python -m benchmarks.models --json models.json --show --write     no run: tables, and docs/performance.md
    python -m benchmarks.models --device cpu --tiny                   smoke run: no time is taken

Random weights, bf16, no gradients, sizes in `specs.py`, a few layers of each (`--layers`). A model is
measured in a process of its own, all its columns together and turn by turn; its row is in the file before
the next begins. What was measured with the same sources, versions, machine and sizes is not measured again,
unless a column is missing: then the whole row is, so that its columns stay comparable.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import tables
from .columns import COLUMNS, DEFAULT, ON_CPU
from .measure import FIRST_CALLS, DeviceLost, Limits, measure, measure_first_calls
from .results import ROOT, Results, Row, Rows, identity, in_order, missing, new_row, settled
from .specs import Spec, chosen
from .turns import Turns

#: With less left of `--seconds` no model is begun.
LEAST_SECONDS = 60


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models",
                                     description=__doc__.split("\n", 1)[0])
    limits = Limits()
    parser.add_argument("--models", nargs="+", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--layers", type=int, help="layers of each model; default: what its spec says")
    parser.add_argument("--first-calls", action="store_true",
                        help="nothing but first calls of backend=\"eager\" and ours, at the published depth")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, 1 layer")
    parser.add_argument("--rounds", type=int,
                        help=f"default: {limits.rounds}; of --first-calls: {FIRST_CALLS}")
    parser.add_argument("--round-seconds", type=float, default=limits.seconds,
                        help="begin no round after that")
    parser.add_argument("--seed", type=int, default=limits.seed,
                        help="of the order in which the columns of a round take turns")
    parser.add_argument("--compile-seconds", type=float, default=limits.compile_seconds,
                        help="a column whose first call takes longer has failed; 0: no limit")
    parser.add_argument("--seconds", type=float, default=1e6,
                        help="time for all: a model not done by then is left")
    parser.add_argument("--turn", type=Path, metavar="FILE",
                        help="lock this file for what is timed, so that several runs at once take turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are kept, and read from")
    parser.add_argument("--from", dest="others", type=Path, nargs="+", default=[], metavar="FILE",
                        help="files of earlier runs, whose rows are taken over")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what the files hold")
    parser.add_argument("--write", action="store_true", help="write section `models` of docs/performance.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of the speeds, where matplotlib is")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None,
                        help="a process a model; default: on a GPU")
    parser.add_argument("--worker", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def command_of(args: argparse.Namespace) -> str:
    """What somebody else has to type to measure the same: no files, no limits of time."""
    words = ["python -m benchmarks.models"]
    words += ["--columns", *args.columns] if args.columns else []
    words += ["--layers", str(args.layers)] if args.layers else []
    words += ["--first-calls"] if args.first_calls else []
    words += ["--device", args.device, *["--tiny"] * args.tiny] if args.device != "cuda" or args.tiny else []
    words += ["--seed", str(args.seed)] if args.seed else []
    return " ".join([*words, "--rounds", str(args.rounds)])


class Run:
    """One run of the command, of the columns of a few layers."""

    def __init__(self, args: argparse.Namespace, specs: Sequence[Spec], results: Results):
        self.args, self.specs, self.results = args, specs, results
        self.device = torch.device(args.device)
        self.columns = in_order(args.columns or (DEFAULT if args.device == "cuda" else ON_CPU))
        self.limits = Limits(args.rounds, args.round_seconds, args.compile_seconds, args.device == "cuda",
                             args.worker or command_of(args), Turns(args.turn), args.seed)
        self.end = time.monotonic() + args.seconds
        self.isolate = args.isolate if args.isolate is not None else args.device == "cuda"

    @property
    def rows(self) -> Rows:
        return self.results.rows

    def layers(self, spec: Spec) -> int:
        return self.args.layers or (1 if self.args.tiny else spec.layers)

    def row(self, spec: Spec) -> Row | None:
        return self.rows.find(identity(spec, self.layers(spec), self.args.tiny, self.device))

    def done(self, spec: Spec) -> bool:
        return not missing(self.row(spec), self.columns)

    def all(self) -> list[str]:
        """Measure what is missing, models without a row first; the names of those that were not reached."""
        todo = [spec for spec in self.specs if self.args.again or not self.done(spec)]
        left = []
        for spec in sorted(todo, key=lambda spec: self.row(spec) is not None):
            if self.end - time.monotonic() < LEAST_SECONDS:
                left.append(spec.name)
            elif not self.isolate:
                self.here(spec)
            elif not self.apart(spec):
                left.append(spec.name)
        return left

    def here(self, spec: Spec) -> None:
        columns = {*self.columns, *(self.row(spec) or {"columns": ()})["columns"]}
        measure(spec, self.layers(spec), self.args.tiny, self.device, sorted(columns), self.rows,
                self.limits)

    def worker_arguments(self, spec: Spec) -> list[str]:
        """What tells a worker what to measure."""
        return ["--columns", *self.columns, "--layers", str(self.layers(spec))]

    def apart(self, spec: Spec) -> bool:
        """In a process of its own; a column that ends it is left out of the next try. False: no time left."""
        while True:
            lost = self._lost(spec)
            command = [sys.executable, "-m", "benchmarks.models", "--worker", self.limits.command,
                       "--models", spec.name, *self.worker_arguments(spec), "--json", str(self.args.json),
                       "--device", self.args.device,
                       "--rounds", str(self.limits.rounds), "--round-seconds", str(self.limits.seconds),
                       "--compile-seconds", str(self.limits.compile_seconds),
                       "--seed", str(self.limits.seed),
                       *["--tiny"] * self.args.tiny]
            command += ["--turn", str(self.args.turn)] if self.args.turn else []
            self.results.save()
            try:
                code = subprocess.run(command, cwd=ROOT, timeout=self.end - time.monotonic()).returncode
            except subprocess.TimeoutExpired:
                code = None
            self.results = Results(self.args.json)
            row = self.row(spec)
            trying = row.pop("trying", None) if row else None
            if code:
                failure = f"the process ended with {code}"
                row = row or new_row(spec, self.layers(spec), self.args.tiny, self.device,
                                     self.limits.command)
                if trying:
                    row["columns"][trying] = {"failure": failure, "lost": True}
                else:
                    row["failure"] = failure
            if row:
                self.rows.put(row)
            if code is None:
                return False
            if code == 0 or self._lost(spec) == lost or self.done(spec):
                return True

    def _lost(self, spec: Spec) -> int:
        row = self.row(spec)
        return sum(bool(cell.get("lost")) for cell in row["columns"].values()) if row else 0


class FirstCalls(Run):
    """A run of `--first-calls`. It has no columns: what a model has is the row's `compile_times`."""

    @property
    def rows(self) -> Rows:
        return self.results.first_calls

    def layers(self, spec: Spec) -> int:
        return 1 if self.args.tiny else spec.published

    def done(self, spec: Spec) -> bool:
        return settled((self.row(spec) or {}).get("compile_times", {}))

    def here(self, spec: Spec) -> None:
        measure_first_calls(spec, self.layers(spec), self.args.tiny, self.device, self.rows, self.limits)

    def worker_arguments(self, spec: Spec) -> list[str]:
        return ["--first-calls"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    if args.first_calls and (args.columns or args.layers):
        parser.error("--first-calls has its own columns and layers")
    args.rounds = args.rounds or (FIRST_CALLS if args.first_calls else Limits().rounds)
    if args.first_calls and args.rounds < FIRST_CALLS:
        parser.error(f"--first-calls needs {FIRST_CALLS} rounds or more: kernels compiled, kernels in memory")
    try:
        specs = chosen(args.models)
        args.json = args.json.absolute() if args.json else None
        results = Results(args.json, args.others)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    left: list[str] = []
    if not args.show:
        if args.device == "cuda" and (not torch.cuda.is_available() or torch.version.cuda is None):
            print("benchmarks.models: needs an NVIDIA GPU; none was found (--device cpu --tiny: a smoke run)",
                  file=sys.stderr)
            return 1
        run = (FirstCalls if args.first_calls else Run)(args, specs, results)
        if run.isolate and not args.worker and args.json is None:
            parser.error("--json is needed: processes hand their rows over in it")
        if args.worker:
            try:
                run.here(specs[0])
            except DeviceLost as error:
                print(error, file=sys.stderr)
                return 3
            return 0
        left = run.all()
        results = run.results
        results.save()
    names = {spec.name for spec in specs}
    rows, first_calls = ([row for row in kind.latest() if row["model"] in names]
                         for kind in (results.rows, results.first_calls))
    if rows or first_calls:
        tables.show(rows, first_calls)
    if left:
        print(f"not done in {args.seconds:.0f} s: {', '.join(left)}")
    if args.plot:
        print(tables.plot(rows, args.plot))
    if args.write:
        sys.path.append(str(ROOT / "tests"))
        from pages import write_section

        try:
            write_section("performance.md", "models", tables.markdown(rows, first_calls))
        except ValueError as error:  # a smoke run; a page without that section
            print(f"not written: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
