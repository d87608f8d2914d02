"""The command `ascend-ln-fuse`: explain and check a model without an NPU, read a profile of one; measure a
model's kernels ahead on an accelerator.

Results go to stdout, as tables or with --json; progress and whatever the user's code prints go to
stderr. Exit codes: 0; 1 when a check fails; 2 when what was asked cannot be done.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import UserError

if TYPE_CHECKING:
    from .options import Options

TARGET_HELP = """FILE:FUNCTION names a function in a Python file. It takes no arguments and returns
(model, inputs): a torch.nn.Module (or a function), and a tensor, a tuple of positional arguments or a
dict of keyword arguments for one call. It runs on the CPU as it is written, but no parameter keeps its
memory: a model of any size will do. Do not load weights in it. For example:

\b
    def build():
        config = transformers.Qwen3Config()
        model = transformers.Qwen3Model(config).bfloat16().eval()
        return model, {"input_ids": torch.zeros(1, 4096, dtype=torch.int64)}
"""


class Failure(click.ClickException):
    """What was asked cannot be done."""

    exit_code = 2


class _Commands(click.Group):
    """A group whose errors are one line, or a traceback with --traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, SystemExit):
            raise
        except Exception as error:
            # Its module is not worth importing to find out that it was never needed.
            tools = sys.modules.get(f"{__package__}.kernels.ascend.tools")
            missing = tools is not None and isinstance(error, tools.MissingTool)
            if ctx.params.get("traceback") or not (missing or isinstance(error, (UserError, OSError))):
                raise
            raise Failure(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@click.version_option(__version__, prog_name="ascend-ln-fuse")
def main(traceback: bool) -> None:
    """What ascend_ln_fuse does to a model on an Ascend NPU, seen without one.

    Nothing but `tune`, which runs on the accelerator that is there, measures a time.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # not a test's
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal or a pipe in ASCII has no check mark


def _soc(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from .kernels.ascend.toolchain import resolve_soc

    try:
        return resolve_soc(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_soc_option = click.option(
    "--soc", default="Ascend910B3", show_default=True, callback=_soc, metavar="NAME",
    help="The NPU: its name, such as Ascend910B3, Ascend910_9382 or Ascend950PR_9589, or A2, A3 or A5 for "
         "one of that generation. Another word lists all names.")


def _options(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Options:
    """The backend's options of words like `streams=keep`."""
    from .backend import inner_compiler
    from .options import RUN_AS_WRITTEN, parse_options

    pairs = [word.partition("=") for word in given]
    if ctx.command.name in ("explain", "check"):
        _tell_of_options_without_effect([name for name, _, _ in pairs])
    for word, (name, sign, _) in zip(given, pairs, strict=True):
        if not name or not sign:
            raise click.BadParameter(f"{word!r} is not NAME=VALUE, as in streams=keep")
    try:
        options = parse_options({name: value for name, _, value in pairs})
        if options.inner not in RUN_AS_WRITTEN:  # of these, npugraphs is there where torch_npu is
            inner_compiler(options.inner)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return options


#: Options of the backend that decide nothing where no model runs -> what there is instead.
_WITHOUT_EFFECT = {
    "report": "--full and --json choose what is printed",
    "self_check": "no kernel runs in a model; `check --verify` runs each",
    "inner_choice": "nothing is measured, so all that could be fused counts as fused",
    "masks": "masks have no values here, and are kept",
}


def _tell_of_options_without_effect(names: list[str]) -> None:
    if "dynamic" in names:
        raise click.BadParameter("dynamic is no option here: kernels are for the sizes of the inputs that "
                                 "FUNCTION returns. For other sizes return other inputs.")
    for name in dict.fromkeys(names):
        if name in _WITHOUT_EFFECT:
            click.echo(f"-o {name} does nothing here: {_WITHOUT_EFFECT[name]}.", err=True)


_options_option = click.option(
    "-o", "--option", "options", multiple=True, callback=_options, metavar="NAME=VALUE",
    help="An option of the backend that decides what is fused, as in streams=keep. Can be given again for "
         "another one.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
_grad_option = click.option("--grad", is_flag=True, help="Trace with gradients on, as in training.")


@main.command(epilog=TARGET_HELP)
@click.argument("target", metavar="FILE:FUNCTION")
@_soc_option
@click.option("--full", is_flag=True, help="Add the region and the kernel source of each site.")
@_options_option
@_grad_option
@_json_option
def explain(target: str, soc: str, full: bool, options: Options, grad: bool, as_json: bool) -> None:
    """Say what the backend would fuse in a model, and why not the rest.

    Traces the model with fake tensors on a fake device "npu": no NPU, no weights, no compilers.
    The hidden kernels in the report are predictions from the sources of one CANN release.
    """
    from .screens import show_reports

    reports = _reports(target, soc, options, grad)
    if as_json:
        _print_json({"target": target, "soc": soc, "reports": [*map(_plain, reports)]})
    else:
        show_reports(reports, full)


@main.command(epilog=TARGET_HELP)
@click.argument("target", metavar="FILE:FUNCTION")
@_soc_option
@click.option("--verify", is_flag=True,
              help="Run each compiled kernel in an interpreter on small ragged inputs, and compare with "
                   "PyTorch in float64 (A2 and A3).")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True,
              help="Compilations at a time.")
@_options_option
@_grad_option
@_json_option
def check(target: str, soc: str, verify: bool, jobs: int, options: Options, grad: bool,
          as_json: bool) -> None:
    """Compile every kernel that a model would launch, with the official compilers.

    Needs triton-ascend and ascendnpu-ir from PyPI (pip install '.[ascend-check]' in the repository);
    no NPU and no CANN. Exit code 1 if a kernel does not compile, is known to be miscompiled, or
    computes something else than PyTorch; also if it is "not verified": the interpreter cannot run it, or
    PyTorch's own result is nowhere finite.
    """
    from .kernels.ascend.evidence import can_run, check_calls
    from .screens import show_evidence

    if verify and not can_run(soc):
        raise Failure(f"--verify: the interpreter knows A2 and A3, not {soc}; leave --verify out")
    _require_temporary_directory()
    reports = _reports(target, soc, options, grad)
    # Norms that share a launch share the call.
    calls = {id(call): call for r in reports if r.error is None
             for site in r.entries for call in (site.call, *site.calls_behind) if call is not None}
    with _progress("compiling") as step:
        found = check_calls(list(calls.values()), soc, verify, jobs, step)
    failed = any(evidence.failed for evidence in found) or any(r.error for r in reports)
    if as_json:
        _print_json({"target": target, "soc": soc, "tools": _tools(), "failed": failed,
                     "kernels": [evidence.to_dict() for evidence in found],
                     "reports": [*map(_plain, reports)]})
    else:
        show_evidence(found, reports, soc, _tools())
    sys.exit(int(failed))


@main.command()
@click.argument("target", metavar="FILE:FUNCTION")
@click.option("--device", metavar="NAME", help="Where to run, such as cuda:1; by default the accelerator.")
@_options_option
@_grad_option
@_json_option
def tune(target: str, device: str | None, options: Options, grad: bool, as_json: bool) -> None:
    """Compile and measure a model's kernels ahead, on this machine's accelerator.

    Runs the model that FILE:FUNCTION returns, with its weights, on its inputs, and keeps what was measured
    where later processes of the same user find it (ASCEND_LN_FUSE_CACHE_DIR). For other numbers of rows, run
    it with other inputs.
    """
    from .loading import load_example
    from .screens import show_tuned
    from .tuning import device_for_tuning
    from .tuning import tune as run

    chosen = device_for_tuning(device)
    with contextlib.redirect_stdout(sys.stderr), _progress("graphs") as step:
        tuned = run(load_example(target, empty=False), chosen, grad=grad, options=options,
                    progress=_counted(step))
    if as_json:
        _print_json({"target": target, **tuned.to_dict()})
    else:
        show_tuned(tuned)


@main.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CSV")
@click.option("--report", "report_path", type=click.Path(path_type=Path), metavar="JSON",
              help="Also say whether each fused kernel of this report was launched.")
@_json_option
def profile(path: Path, report_path: Path | None, as_json: bool) -> None:
    """Count the hidden kernels of a profile of an NPU, norm by norm.

    CSV is kernel_details.csv of torch_npu.profiler, op_summary_*.csv of msprof, or a folder that holds one of
    them. JSON is a FusionReport: write ascend_ln_fuse.last_reports()[-1].to_json() to a file in the run that
    you profile, or take the output of `ascend-ln-fuse explain --json` for the same inputs and SoC.
    Exit code 1 if a fused kernel of the report was not launched, or the report has none.
    """
    from .profile import read_profile, read_reports
    from .screens import show_profile

    found = read_profile(path)
    sites = found.sites(read_reports(report_path)) if report_path else None
    if as_json:
        _print_json({**found.to_dict(),
                     "sites": None if sites is None else [site.to_dict() for site in sites]})
    else:
        show_profile(found, sites)
    sys.exit(int(sites is not None and (not sites or any(not site.launches for site in sites))))


# -- shared


def _require_temporary_directory() -> None:
    """The compilers write where TMPDIR says; Python's own modules would look elsewhere."""
    asked = os.environ.get("TMPDIR") or None
    try:
        with tempfile.TemporaryFile(dir=asked):
            pass
    except OSError as error:
        raise Failure(f"no temporary file can be written{f' in TMPDIR={asked}' if asked else ''}: "
                      f"{error.strerror}; set TMPDIR to a directory that can be written in") from None


def _reports(target: str, soc: str, options: Options, grad: bool) -> list:
    """The reports of the model that `target` names, for kernels of `soc`."""
    from .loading import load_example
    from .trace import ensure_npu, trace

    with contextlib.redirect_stdout(sys.stderr), _progress("tracing") as step:
        ensure_npu()
        reports = trace(load_example(target), options, grad=grad, progress=_counted(step))
    return [_for_soc(report, soc) for report in reports]


def _counted(step: Callable[[int, int | None], None]) -> Callable[[Any], None]:
    """A function that tells `step` how often it was called: once a graph, of nobody knows how many."""
    numbers = itertools.count(1)
    return lambda report: step(next(numbers), None)


#: Of a fused site whose kernel moves more bytes than what it replaces is counted to move (cost.py).
_LOSS = "by this count a loss: PyTorch's own norm is taken to read each tensor once. What CANN's kernels " \
    "read is not known, so it is fused all the same; torch.compiler.disable on a norm leaves it out, at " \
    "the price of a graph break"


def _for_soc(report, soc: str):
    """The report with the kernels of `soc`, and with the bytes that these move: a row that no tile holds is
    read in several passes. Sites that share a launch share the call."""
    calls: dict[int, tuple] = {}  # id of a call -> (it with the SoC, what _extra_reads says)

    def for_soc(site):
        if site.call is None:
            return site
        if id(site.call) not in calls:
            call = replace(site.call, soc=soc)
            calls[id(site.call)] = call, *_extra_reads(call, soc)
        call, share, note = calls[id(site.call)]
        moved = None if site.bytes_after is None else round(site.bytes_after * share)
        more = None not in (moved, site.bytes_before) and moved > site.bytes_before
        notes = "; ".join(filter(None, (site.note, note, _LOSS if more else "")))
        behind = tuple(replace(call, soc=soc) for call in site.calls_behind)
        return replace(site, call=call, calls_behind=behind, bytes_after=moved, note=notes)

    return replace(report, sites=tuple(map(for_soc, report.sites)), rotary=tuple(map(for_soc, report.rotary)))


def _extra_reads(call, soc: str) -> tuple[float, str]:
    """(bytes that the kernel moves as a share of the least that must be moved, a word on why it is more)."""
    from .kernels.ascend.traffic import ideal_bytes, passes, source_bytes
    from .kernels.layout import Unsupported

    try:
        launch = next(call.candidates(soc), None)
    except Unsupported:
        launch = None
    if launch is None:
        return 1.0, ""
    columns, lane = launch.kernel.tile.cols, launch.region.lane
    note = f"rows of {lane} in pieces of {columns}, read {passes(launch)} times" if columns < lane else ""
    return source_bytes(launch) / sum(ideal_bytes(launch, launch.grid)), note


def _plain(report) -> dict[str, Any]:
    """The report for JSON. It has no time, which beside an NPU's name would read as the NPU's."""
    return {key: value for key, value in report.to_dict().items() if key != "seconds"}


@contextlib.contextmanager
def _progress(word: str) -> Iterator[Callable[[int, int | None], None]]:
    """A line on stderr while the body runs, where that is a terminal; the body calls what it is given
    with (done, of how many)."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    with Progress(SpinnerColumn(), TextColumn(word), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console, transient=True, disable=not console.is_terminal,
                  redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(word, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tools() -> dict[str, str]:
    """Package -> version, of the compilers."""
    found = {}
    for name in ("triton-ascend", "ascendnpu-ir"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
