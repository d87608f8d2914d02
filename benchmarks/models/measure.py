"""Measures one model: every column built, checked and timed in this process, side by side."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bound import share_of_bound
from torch import nn

from . import clock
from .builders import build
from .columns import (
    COLUMNS,
    EAGER,
    OURS,
    OURS_INDUCTOR,
    Call,
    OutOfTime,
    contender,
    empty_caches,
    first,
    first_call,
    separate,
    synchronize,
    temporary_caches,
    time_limit,
)
from .results import Row, Rows, in_order, new_row
from .specs import Spec
from .turns import Turns

#: Rounds of first calls: kernels of ours are compiled in the first, and in memory in the second.
FIRST_CALLS = 2


class DeviceLost(RuntimeError):
    """A column has left the device unusable for this process."""


@dataclass(frozen=True)
class Limits:
    """rounds: of the timing, or of first calls where nothing else is measured. seconds: of the timing. seed:
    of the order of columns in each round. compile_seconds: of the first call of a column, for each form of a
    graph that it compiles; 0 for no limit. timed: whether there is a clock at all (a GPU); without one the
    rounds only run. command: what these come from, for the row. turns: with other runs on this machine."""

    rounds: int = 31
    seconds: float = 20.0
    compile_seconds: float = 240.0
    timed: bool = True
    command: str = ""
    turns: Turns = field(default_factory=lambda: Turns(None))
    seed: int = 0


def measure(spec: Spec, layers: int, tiny: bool, device: torch.device, columns: Sequence[str],
            results: Rows, limits: Limits) -> None:
    """Measure the model and put its row into `results`: once with the quick columns, and again when the slow
    ones are done too. A column that fails has the reason in its cell.

    Raises:
        DeviceLost: the row is kept, but the columns after that one need a new process.
    """
    row = new_row(spec, layers, tiny, device, limits.command)
    known = results.find(row["identity"])
    row["columns"] = {name: cell for name, cell in (known or row)["columns"].items() if cell.get("lost")}
    wanted = [name for name in in_order({EAGER, *columns}) if name not in row["columns"]]
    torch._dynamo.reset()
    with torch.no_grad(), temporary_caches():
        from ascend_ln_fuse.kernels import measure as measuring

        cell = _built(row, spec, layers, tiny, device, results, limits)
        if cell is None:
            return
        with limits.turns.together():
            cell.reference()
        if limits.timed:
            _warm_up(device, limits, inductor={EAGER, OURS} < set(wanted))
            if OURS in wanted:
                cell.compile_times(FIRST_CALLS)
        for slow in (False, True):
            found = [name for name in wanted if COLUMNS[name].slow is slow]
            for name in found:
                with limits.turns.together(), limits.turns.timing_alone(measuring, "by_turns"):
                    cell.add(name)
            if found:
                with limits.turns.alone():
                    cell.time()
                    cell.profile(found)


def measure_first_calls(spec: Spec, layers: int, tiny: bool, device: torch.device, results: Rows,
                        limits: Limits) -> None:
    """Measure nothing of the model but its `compile_times`, and put that row into `results`.

    Raises:
        DeviceLost: the row is kept.
    """
    row = new_row(spec, layers, tiny, device, limits.command)
    torch._dynamo.reset()
    with torch.no_grad(), temporary_caches():
        cell = _built(row, spec, layers, tiny, device, results, limits)
        if cell is None:
            return
        if limits.timed:
            _warm_up(device, limits, inductor=False)
        cell.compile_times(limits.rounds)
        results.put(row)


def _built(row: Row, spec: Spec, layers: int, tiny: bool, device: torch.device, results: Rows,
           limits: Limits) -> _Cells | None:
    """The model, which has run in eager once; None, and the row put, where that fails."""
    try:
        with limits.turns.together():
            model, inputs = build(spec, layers, tiny, device)
            row["parameters"] = sum(p.numel() for p in model.parameters())
            eager = first(model(**inputs)).clone()
    except Exception as error:
        row["failure"] = f"not built, or not run in eager: {words(error)}"
        results.put(row)
        return None
    return _Cells(row, model, inputs, device, results, limits, eager)


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _say(model: str, text: str) -> None:
    print(f"{model}: {text}", file=sys.stderr, flush=True)


class _Cells:
    """The cells of a row as they are measured."""

    def __init__(self, row: Row, model: nn.Module, inputs: Mapping[str, Any], device: torch.device,
                 results: Rows, limits: Limits, eager: torch.Tensor):
        self.row, self.model, self.inputs, self.device = row, model, inputs, device
        self.results, self.limits, self.eager = results, limits, eager
        self.calls: dict[str, Call] = {}
        self.reports: dict[str, list] = {}
        self.exact: torch.Tensor | None = None

    def reference(self) -> None:
        """The model's result in fp32, where that fits. TF32 is off, so it rounds 2**16 times as finely as
        bf16."""
        cudnn, tf32 = torch.backends.cudnn, torch.backends.cuda.matmul.allow_tf32
        try:
            torch.backends.cuda.matmul.allow_tf32 = False
            wide = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                    for k, v in self.inputs.items()}
            with cudnn.flags(enabled=cudnn.enabled, benchmark=cudnn.benchmark,
                             deterministic=cudnn.deterministic, allow_tf32=False):
                self.exact = first(copy.deepcopy(self.model).float()(**wide)).double()
            self.row["reference"] = "fp32"
            self.row["eager_error"] = _relative(self.eager, self.exact)
        except Exception as error:  # too large, most likely
            self.row["reference"] = f"none: {words(error)}"
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32
        self._free()

    def compile_times(self, rounds: int) -> None:
        """Seconds of first calls: backend="eager" and ours, turn by turn. The first of ours compiles its
        kernels, the others find them in memory. What every first compilation pays is paid before."""
        # Alone also because kernels are chosen here, by their times.
        with self._cell("compile_times") as cell, self.limits.turns.alone():
            ways = {"backend_eager_s": {"backend": "eager"}, "ours_s": COLUMNS[OURS].options}
            self._first(torch.compile(separate(self.model), backend="eager"))
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, options in ways.items():
                    torch._dynamo.reset()
                    found[name].append(self._first(torch.compile(separate(self.model), **options))[0])
            cell |= {"rounds": rounds, **(found if self.limits.timed else {})}
            _say(self.row["model"], f"first calls: {cell}")
        torch._dynamo.reset()

    def _first(self, compiled) -> tuple[float, Any]:
        with time_limit(self.limits.compile_seconds):
            return first_call(lambda: compiled(**self.inputs), self.device)

    def add(self, name: str) -> None:
        """Compile and check a column; memory and kernels of a call."""
        from ascend_ln_fuse import clear_reports, last_reports

        column = COLUMNS[name]
        timed = self.limits.timed
        # For whoever finds the row, should this process end here.
        self.results.put({**self.row, "columns": {**self.row["columns"]}, "trying": name})
        with self._cell(name) as cell:
            clear_reports()
            call = contender(column, self.model, self.inputs)
            compiles = timed and column.options is not None
            caches = empty_caches() if compiles else contextlib.nullcontext()
            with caches, time_limit(self.limits.compile_seconds * column.forms):
                seconds, output = first_call(call, self.device)
            self.reports[name] = last_reports()
            cell["error"] = self._error(first(output))
            del output
            if timed:
                # The kernels of ours were compiled in `compile_times`.
                cold = self.row.get("compile_times", {}).get("ours_s") if name == OURS else None
                cell["first_call_s"] = cold[0] if cold else seconds
                call()  # what is measured or recorded on a second call is no memory of a usual one
                cell["peak_mib"] = clock.peak_mib(call)
            self.calls[name] = call
            _say(self.row["model"], f"{name}: {cell}")

    def _error(self, ours: torch.Tensor) -> dict[str, float | None]:
        found = {"from_eager": (ours.double() - self.eager.double()).abs().max().item()}
        if self.exact is not None:
            found["share_of_bound"] = share_of_bound(ours, self.eager, self.exact)
        # JSON has no nan and no inf
        return {key: value if math.isfinite(value) else None for key, value in found.items()}

    def time(self) -> None:
        """Times of all columns so far, side by side; the row is put."""
        rounds = self.limits.rounds
        try:
            if self.limits.timed:
                found = clock.times(self.calls, rounds, self.limits.seconds, self.limits.seed)
            else:
                found = clock.untimed(self.calls, rounds)
        except Exception as error:
            self.row["failure"] = f"not timed: {words(error)}"
        else:
            for name, measured in found.items():
                self.row["columns"][name] |= measured
        for name in (OURS, OURS_INDUCTOR):
            if name in self.reports and name in self.calls:
                self.row["columns"][name]["sites"] = _sites(self.reports[name])
        self.results.put(self.row)

    def profile(self, names: Sequence[str]) -> None:
        """Kernels of those columns, after their times: the profiler may make later launches slower."""
        for name in names:
            if self.limits.timed and name in self.calls:
                try:
                    self.row["columns"][name] |= clock.kernels(self.calls[name])
                except Exception as error:
                    self.row["columns"][name]["profile_failure"] = words(error)
        self.results.put(self.row)

    @contextlib.contextmanager
    def _cell(self, name: str) -> Iterator[dict[str, Any]]:
        """The cell of that column (or the row's entry of that name). A failure is written into it, and the
        run goes on if the device does."""
        place = self.row["columns"] if name in COLUMNS else self.row
        cell = place[name] = {}
        try:
            yield cell
        except (Exception, OutOfTime) as error:
            cell["failure"] = words(error)
            _say(self.row["model"], f"{name}: {cell['failure']}")
        if "failure" in cell:
            try:
                self._free()
            except RuntimeError as error:
                cell["lost"] = True
                self.results.put(self.row)
                raise DeviceLost(f"{self.row['model']}, {name}: {words(error)}") from None

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _relative(low: torch.Tensor, exact: torch.Tensor) -> float:
    return ((low.double() - exact).norm() / exact.norm()).item()


def _warm_up(device: torch.device, limits: Limits, inductor: bool) -> None:
    """A small compilation with each compiler, so that imports and worker processes are no model's time. What
    fails here fails in the model's too, and is told there."""
    with limits.turns.together(), contextlib.suppress(Exception):
        norm, x = nn.LayerNorm(64, device=device), torch.randn(8, 64, device=device)
        for options in ({"backend": "eager"}, COLUMNS[OURS].options, *([{}] if inductor else [])):
            torch.compile(separate(norm), **options)(input=x)
        synchronize(device)
        torch._dynamo.reset()


def _sites(reports: Sequence) -> dict[str, Any]:
    """Norm sites over all graphs of a column, and the rotary embeddings fused besides; to be asked after the
    calls, which may fall back."""
    sites = [site for report in reports for site in report.sites]
    entries = [site for report in reports for site in report.entries]
    return {"found": len(sites), "fused": sum(report.fused for report in reports), "graphs": len(reports),
            "declined": dict(Counter(site.reason for site in sites if site.status == "declined")),
            "choices": [report.choice for report in reports if report.choice],
            "rotary": len(entries) - len(sites),
            "fallbacks": dict(Counter(text for site in entries if (text := site.fallback_words()))),
            "ways": dict(Counter(way for site in sites for way in site.chain_ways())),
            "errors": [report.error for report in reports if report.error]}
