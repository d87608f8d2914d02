"""Tables of the command line; see cli.py. Words from a user's model are shown literally."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .kernels.directories import cache_directory
from .profile import FusedSite, Profile
from .report import FUSED, FusionReport, grouped, render, traffic, visible

if TYPE_CHECKING:
    from .kernels.ascend.evidence import Evidence
    from .tuning import Tuned

#: What `check` counts as bytes moved.
_IDEAL = "ideal: every tensor once, and weights, which all rows share, once a program. Bytes moved count " \
    "a last tile that rows do not fill as a full one. `explain` does neither: it counts weights once, and " \
    "the rows that there are."

#: Lines of sites under a kernel.
MAX_SITES = 4


def _console() -> Console:
    tty = sys.stdout.isatty()
    columns = os.environ.get("COLUMNS", "")
    width = shutil.get_terminal_size().columns if tty else int(columns) if columns.isdecimal() else 80
    return Console(file=sys.stdout, width=max(width, 60), force_terminal=tty, force_jupyter=False,
                   highlight=False, markup=False, emoji=False)


def _table(*columns: tuple[str, str], folds: int = 0) -> Table:
    """Columns as (title, "left" or "right"); the one numbered `folds` folds, the others do not."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.border_style = "dim"
    for i, (title, side) in enumerate(columns):
        table.add_column(title, justify=side, no_wrap=i != folds, overflow="fold")
    return table


def _print(console: Console, table: Table) -> None:
    """The table, without the blanks that fill its last column."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)


def show_reports(reports: Sequence[FusionReport], full: bool) -> None:
    """A table a graph."""
    console = _console()
    if not reports:
        console.print("No graph was compiled: Dynamo found no tensor operation, or left the function alone "
                      "(after a graph break in a loop, say). TORCH_LOGS=graph_breaks tells which.")
    for report in reports:
        text = render(report, "full" if full else "table", width=console.width, color=console.is_terminal)
        sys.stdout.write(text)


def show_evidence(found: Sequence[Evidence], reports: Sequence[FusionReport], soc: str,
                  tools: Mapping[str, str]) -> None:
    """A row a kernel, with the sites that launch it; then what is not well, in words."""
    console = _console()
    for report in reports:
        console.print(Text(report.headline(), style="bold"))
        if report.error:
            console.print(Text(visible(report.error, keep="\n"), style="red"))
    if not found:
        console.print("No kernel would be launched.")
        return
    # A name cut in two can neither be read nor searched for in a profile: the verdict gives way.
    table = _table(("kernel", "left"), ("calls", "right"), ("tile", "right"), ("UB KiB", "right"),
                   ("bytes moved", "right"), ("verdict", "left"), folds=5)
    table.columns[0].min_width = max(len(one.kernel) for one in found)
    for one in found:
        moved = one.bytes_moved or one.bytes_ideal
        ratio = f"{one.bytes_moved / one.bytes_ideal:.2f}x ideal" if one.bytes_moved else "at the least"
        style = "red" if one.failed else "green" if one.verdict == "ok" else "yellow"
        right = "\nrun, right" if one.verified and one.verified.right else ""
        tile = one.tile.replace(" rows x ", " x ").replace(" columns", "")
        table.add_row(
            one.kernel or "(none)", str(one.calls), tile,
            f"{one.ub_bytes / 1024:.0f}/{one.ub_limit // 1024}" if one.ub_bytes else "",
            f"{traffic(moved, None)}\n{ratio}" if moved else "", Text(one.verdict + right, style))
    _print(console, table)
    if any(one.bytes_moved or one.bytes_ideal for one in found):
        console.print(Text(_IDEAL, "dim"))
    where = _sites_of(reports)
    for one in found:
        for line in (*one.refused, *([one.reason] if one.reason else ())):
            console.print(Text(f"{one.kernel or '(none)'}: {visible(line)}", overflow="fold"))
        if sites := where.get(one.kernel, []):
            shown = [visible(place) for place in sites[:MAX_SITES]]
            more = [f"and {len(sites) - MAX_SITES} more"] if len(sites) > MAX_SITES else []
            console.print(Text("\n  ".join([f"{one.kernel} is launched at", *shown, *more]), "dim"))
    versions = " and ".join(f"{name} {version}" for name, version in tools.items())
    console.print(Text(f"Compiled for {soc} by {versions}, up to the closed last step. "
                       "Nothing ran on an NPU.", style="dim"))


def show_tuned(tuned: Tuned) -> None:
    """For each site, or equal sites, how it runs now, and the times that decided."""
    console = _console()
    for report in tuned.reports:
        console.print(Text(report.headline(), style="bold"))
        for place, sites in grouped(report.entries):
            if sites[0].status != FUSED:
                continue
            console.print(Text(place + (f"  x{len(sites)}" if len(sites) > 1 else "")))
            lines = dict.fromkeys(line for site in sites
                                  for line in (*site.chain_ways(), site.fallback_words()) if line)
            for line in lines or ["one kernel; there was nothing to choose"]:
                console.print(Text("  " + visible(line), "dim"))
    console.print(Text(f"Ran on {tuned.device} in {tuned.seconds:.1f} s. Later processes find what was "
                       f"measured in {cache_directory()}.", "dim"))


def _sites_of(reports: Sequence[FusionReport]) -> dict[str, list[str]]:
    """Kernel name -> the sites that launch it, equal layers as one."""
    found: dict[str, list[str]] = {}
    for report in reports:
        for place, sites in grouped(report.entries):
            if sites[0].status == FUSED:
                times = f"  x{len(sites)}" if len(sites) > 1 else ""
                for name in dict.fromkeys(site.kernel_name() for site in sites):
                    found.setdefault(name, []).append(place + times)
                for name in dict.fromkeys(name for site in sites for name in site.kernels_behind_names()):
                    found.setdefault(name, []).append(f"{place}, behind its linear layers{times}")
    return found


def show_profile(profile: Profile, sites: Sequence[FusedSite] | None) -> None:
    """Hidden kernels per norm; then the fused kernels of a report."""
    console = _console()
    if profile.norms:
        table = _table(("norm kernel, input shapes", "left"), ("launches", "right"),
                       ("hidden kernels a launch", "left"))
        for norm in profile.norms:
            hidden = "\n".join(f"{kernel} x{_share(count, norm.launches)}"
                               for kernel, count in norm.hidden.items())
            name = Text(visible(norm.kernel))
            if norm.api:
                name.append(f" of {visible(norm.api)}", style="dim")
            table.add_row(Group(name, Text("  " + visible(norm.shapes), style="dim")) if norm.shapes
                          else name, str(norm.launches), Text(visible(hidden, keep="\n") or "none"))
        _print(console, table)
    launches = sum(norm.launches for norm in profile.norms)
    console.print(f"{profile.rows} kernels: {launches} norms, {profile.hidden} hidden kernels around them, "
                  f"{profile.ours.total()} fused kernels of ascend_ln_fuse.")
    if profile.stray:
        console.print("Hidden kernels that stand by no norm: " + _counts(profile.stray))
    if profile.copies:
        console.print("Copies and casts that the model may have asked for itself: " + _counts(profile.copies))
    if sites is None:
        return
    if not sites:
        console.print("The report has no fused site, so there is no kernel to look for.")
        return
    table = _table(("fused site, its kernel", "left"), ("launches", "right"))
    for site in sites:
        lines = [Text(visible(site.where)), Text("  " + visible(site.kernel or "no kernel"), style="dim")]
        table.add_row(Group(*lines), str(site.launches) if site.launches else Text("none", "red"))
    _print(console, table)
    missing = sum(not site.launches for site in sites)
    if missing:
        console.print(f"{missing} of {len(sites)} fused sites have no launch in this profile. Kernels are "
                      "named for the sizes and the SoC that the report was made with.")


def _share(count: int, launches: int) -> str:
    return f"{count // launches}" if count % launches == 0 else f"{count / launches:.2f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{visible(name)} x{n}" for name, n in counts.items())
