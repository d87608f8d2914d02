"""What the pass did to a graph, site by site: as Python objects, JSON and a table.

A `FusionReport` lists every norm site of one graph with what was done, or why nothing was. `emit`
prints it to stderr, `record` keeps it for `last_reports()`. Everything that comes from the user's
model (module names, reasons that quote them) is shown literally: never as rich markup, and with
control characters spelled out. rich is imported only to render.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels.call import Call
    from .kernels.chain_ways import ChainRunner
    from .kernels.record import Record

MODES = ("off", "table", "full")
FUSED, DECLINED = "fused", "declined"


@dataclass(frozen=True)
class SiteReport:
    """One norm site, or a rotary embedding that is in none: what was done there, or why nothing was."""

    status: str  # "fused" | "declined"
    pattern: str
    where: str  # "blocks.3.attn.norm_q, model.py:41"
    reason: str = ""  # why it was declined; "" when fused
    node: str = ""  # graph node that anchors the site, or that caused the decline
    region: str = ""
    device: str = ""
    kernels_removed: tuple[str, ...] = ()  # eager ops that disappear
    hidden_kernels: tuple[str, ...] = ()  # predicted for Ascend, in launch order (hidden.py)
    bytes_before: int | None = None  # traffic of one call, forward alone; hints for symbolic sizes
    bytes_after: int | None = None
    symbolic: bool = False  # the byte counts are for the sizes seen at compile time
    note: str = ""
    remedy: str = ""  # what the user can do about `reason`; "" where nothing is known to help
    chain: str = ""  # "linear -> gelu -> linear": what follows the norm in the same op
    # What the methods of such names tell (kernel_name, ...), some of it while the model runs; as fields they
    # are set in reports read from JSON.
    kernel: str = field(default="", compare=False)
    self_check: str = field(default="", compare=False)
    fallback: str = field(default="", compare=False)
    ways: tuple[str, ...] = field(default=(), compare=False)
    kernels_behind: tuple[str, ...] = field(default=(), compare=False)
    # Asked for names and sources only where those are shown: generating a kernel costs milliseconds.
    call: Call | None = field(default=None, compare=False, repr=False)
    calls_behind: tuple[Call, ...] = field(default=(), compare=False, repr=False)
    record: Record | None = field(default=None, compare=False, repr=False)
    chain_runner: ChainRunner | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.status not in (FUSED, DECLINED):
            raise ValueError(f"status must be {FUSED!r} or {DECLINED!r}, not {self.status!r}")
        for name in ("kernels_removed", "hidden_kernels", "ways", "kernels_behind"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def kernel_name(self) -> str:
        """Name of the kernel that the site launches, for the sizes seen when it was compiled; "" where
        it launches none. Profilers show the last 49 characters of such names."""
        if self.kernel or self.call is None or self.status != FUSED:
            return self.kernel
        kernel = self.call.kernel()
        return kernel.name if kernel else ""

    def kernels_behind_names(self) -> tuple[str, ...]:
        """Names of the kernels for what is pointwise behind the products of the site's chain, where PyTorch
        runs the products (always so on Ascend); as `kernel_name`, which is the norm's."""
        if self.kernels_behind or self.status != FUSED:
            return self.kernels_behind
        kernels = (call.kernel() for call in self.calls_behind)
        return tuple(kernel.name for kernel in kernels if kernel)

    def self_check_words(self) -> str:
        """What the comparisons of the site's kernel with plain PyTorch have found so far; "" before the
        first. Sites with equal regions share a kernel, and this."""
        return self.record.self_check() if self.record is not None else self.self_check

    def fallback_words(self) -> str:
        """Why plain PyTorch has run instead of the site's kernel, for some shapes or all; "" where it has
        not."""
        return self.record.fallback() if self.record is not None else self.fallback

    def chain_ways(self) -> tuple[str, ...]:
        """How the site's chain has run so far, and the measured times that decided: one line for each of
        its segments and each number of rows; empty before the first call, and without a choice."""
        return self.chain_runner.ways() if self.chain_runner is not None else self.ways

    def to_dict(self) -> dict[str, Any]:
        """Every field but those that reach into the process, as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _LIVE}
        values |= {"kernel": self.kernel_name(), "kernels_behind": self.kernels_behind_names(),
                   "self_check": self.self_check_words(),
                   "fallback": self.fallback_words(), "ways": self.chain_ways()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteReport:
        """The inverse of `to_dict`; keys that this version does not know are passed over."""
        known = {f.name for f in fields(cls)} - _LIVE
        return cls(**{k: v for k, v in data.items() if k in known})


#: Fields of a SiteReport that reach into the process; JSON has what they tell instead.
_LIVE = {"call", "calls_behind", "record", "chain_runner"}


@dataclass(frozen=True, repr=False)
class FusionReport:
    """All norm sites of one graph, in graph order, and the rotary embeddings that are in none of them."""

    name: str = ""  # the model's class, where known
    graph_index: int = 0
    sites: tuple[SiteReport, ...] = ()
    error: str | None = None  # why the pass failed; the original graph runs then
    seconds: float = 0.0  # time spent in the pass; not told where it is nan
    notes: tuple[str, ...] = ()  # what else was done to the graph, or why not
    choice: str = ""  # in front of a compiler that fuses on its own: which form of the graph runs, and why
    rotary: tuple[SiteReport, ...] = ()  # rotary embeddings, fused by themselves or declined

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "rotary", tuple(self.rotary))
        object.__setattr__(self, "notes", tuple(self.notes))

    @property
    def entries(self) -> tuple[SiteReport, ...]:
        """The norm sites, then the rotary embeddings: all that may launch a kernel."""
        return (*self.sites, *self.rotary)

    @property
    def found(self) -> int:
        return len(self.sites)

    @property
    def fused(self) -> int:
        """Sites fused in the graph that runs: none when the pass failed."""
        return 0 if self.error is not None else sum(s.status == FUSED for s in self.sites)

    @property
    def declined(self) -> int:
        return sum(site.status == DECLINED for site in self.sites)

    def chosen(self, choice: str, reason: str, kept: Collection[str], remedy: str = "") -> FusionReport:
        """This report where the graph runs with some of its fused sites, those at the nodes `kept`. The
        others count as declined for `reason`."""
        sites = (site if site.status != FUSED or site.node in kept else SiteReport(
                    DECLINED, site.pattern, site.where, reason, site.node, device=site.device,
                    hidden_kernels=site.hidden_kernels, remedy=remedy) for site in self.sites)
        return replace(self, sites=tuple(sites), choice=choice)

    def title(self) -> str:
        """What a line about the graph begins with."""
        graph = f"graph {self.graph_index}"
        if self.name and self.name != graph:
            graph += f" of {visible(self.name)}"
        return f"ascend_ln_fuse: {graph}"

    def headline(self) -> str:
        """The report in one line."""
        start = f"{self.title()}: "
        took = f" ({self.seconds * 1e3:.1f} ms)" if math.isfinite(self.seconds) else ""
        if self.error is not None:
            return f"{start}the pass failed, the original graph runs{took}"
        found = [f"{_number(self.found, 'norm site')}, {self.fused} fused, {self.declined} declined"
                 if self.sites else "no LayerNorm, RMSNorm or l2 norm was found"]
        if self.rotary:
            left = sum(site.status == DECLINED for site in self.rotary)
            made = f", {len(self.rotary) - left} fused, {left} declined" if left else " fused"
            found.append(_number(len(self.rotary), "rotary embedding") + made)
        return f"{start}{'; '.join(found)}{took}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "graph": self.graph_index,
            "found": self.found,
            "fused": self.fused,
            "declined": self.declined,
            "error": self.error,
            "seconds": self.seconds if math.isfinite(self.seconds) else None,
            "notes": list(self.notes),
            "choice": self.choice,
            "sites": [site.to_dict() for site in self.sites],
            "rotary": [site.to_dict() for site in self.rotary],
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FusionReport:
        """The inverse of `to_dict`, but for the sites' `call`."""
        return cls(
            name=data.get("name", ""),
            graph_index=data.get("graph", 0),
            sites=tuple(SiteReport.from_dict(site) for site in data.get("sites", ())),
            error=data.get("error"),
            seconds=data.get("seconds") or 0.0,
            notes=data.get("notes", ()),
            choice=data.get("choice", ""),
            rotary=tuple(SiteReport.from_dict(site) for site in data.get("rotary", ())),
        )

    def __str__(self) -> str:
        return render(self).rstrip("\n")

    def __repr__(self) -> str:
        return f"<FusionReport: {self.headline()}>"


# -- grouping: 28 equal layers are one row

# A number that is a whole part of a module path (blocks.3.attn, blocks[3]), so no line number.
_INDEX = re.compile(r"(?<![^.\[])\d+(?![^.\],])")

# A row of the table: where, with layer indices as ranges, and the sites that it stands for.
_Row = tuple[str, list[SiteReport]]


def grouped(sites: Sequence[SiteReport]) -> list[_Row]:
    """Sites that read the same but for layer indices are one row. Fused first, then graph order."""
    shown = [f.name for f in fields(SiteReport) if f.compare and f.name not in ("where", "node")]
    groups: dict[tuple, list[SiteReport]] = {}
    for site in sites:
        key = (_INDEX.sub("{}", site.where), *(getattr(site, name) for name in shown))
        groups.setdefault(key, []).append(site)
    rows = [row for group in groups.values() for row in _merge(group)]
    return sorted(rows, key=lambda row: row[1][0].status != FUSED)


def _merge(group: list[SiteReport]) -> list[_Row]:
    """One row if the indices form a full grid (layers 0..3 x blocks 0..1), else one a layer."""
    indices = [_INDEX.findall(site.where) for site in group]
    columns = [sorted(set(column), key=int) for column in zip(*indices, strict=True)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if len(varying) > 1 and math.prod(map(len, columns)) != len(set(map(tuple, indices))):
        layers: dict[str, list[SiteReport]] = {}
        for site, index in zip(group, indices, strict=True):
            layers.setdefault(index[varying[0]], []).append(site)
        return [row for layer in layers.values() for row in _merge(layer)]
    spans = map(_span, columns)
    return [(_INDEX.sub(lambda _: next(spans), group[0].where), group)]


def _span(numbers: list[str]) -> str:
    """["3"] is 3, ["0", "1", "2"] is {0..2}, ["0", "2", "3", "4"] is {0,2..4}."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = ",".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(r) for r in runs)
    return f"{{{spans}}}"


# -- words and numbers


def _number(count: int, noun: str) -> str:
    """"1 norm site", "2 norm sites"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def visible(text: str, keep: str = "") -> str:
    r"""`text` with whatever would move the cursor or hide itself spelled out: ESC is \x1b."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def _block(text: str) -> str:
    """A text of several lines (region, kernel source, error), made visible line by line."""
    return visible(text.expandtabs(4).strip("\n"), keep="\n")


def _names(kernels: Sequence[str], mark: str = "") -> list[str]:
    """("mul", "mul", "add") is ["mul x2", "add"]."""
    counts = Counter(kernels).items()
    return [visible(name) + mark + (f"{_GLUE}x{n}" if n > 1 else "") for name, n in counts]


_GLUE = "\ue000"  # becomes a blank after wrapping: rich breaks lines even at a no-break space


def traffic(before: int | None, after: int | None) -> str:
    """Before and after in one unit, that of the larger: "40.0 -> 20.0 MiB"."""
    known = [n for n in (before, after) if n is not None]
    if not known:
        return ""
    power = min(max(*known, 1).bit_length() - 1, 49) // 10
    values = [n / 1024**power for n in known]
    numbers = [f"{v:.{0 if not power or v >= 100 else 1 if v >= 10 else 2}f}" for v in values]
    return " -> ".join(numbers) + " " + ("B", "KiB", "MiB", "GiB", "TiB")[power]


def _ratio(before: int | None, after: int | None) -> str:
    if not before or not after:
        return ""
    if before == after:
        return "the same"
    if 0.95 < before / after < 1.05:
        return "about the same"
    return f"{before / after:.1f}x less" if before > after else f"{after / before:.1f}x more"


# -- rendering


def render(
    report: FusionReport, mode: str = "table", *, width: int | None = None, color: bool = False
) -> str:
    """The report as text that ends in a newline. `width`: COLUMNS if that is set, else 80."""
    _check_mode(mode)
    if mode == "off":
        return ""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    columns = os.environ.get("COLUMNS", "")
    width = width or (int(columns) if columns.isdecimal() else 0) or 80
    out = io.StringIO()
    console = Console(file=out, width=max(width, 40), force_terminal=color, force_jupyter=False)
    # Text objects throughout: they are taken literally, where a str would be read as markup.
    console.print(Text(report.headline(), style="bold", overflow="fold"))
    if report.choice:
        console.print(Text(visible(report.choice), overflow="fold"))
    if report.error is not None:
        console.print(Padding(Text(_block(report.error), "red", overflow="fold"), (0, 0, 0, 2)))
    elif report.entries:
        rows = grouped(report.entries)
        console.print(_table(rows))
        for line in _footnotes(report):
            console.print(Text(line, "dim", overflow="fold"))
        for line in _listing(rows) if mode == "full" else ():
            console.print(Text(line), soft_wrap=True)
    for note in report.notes:
        console.print(Text(visible(note), "dim", overflow="fold"))
    lines = out.getvalue().replace(_GLUE, " ").split("\n")
    return "\n".join(line.rstrip() for line in lines)


def _table(rows: list[_Row]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, header_style="dim")
    table.border_style = "dim"
    table.add_column("")
    table.add_column("site, pattern and what it replaces", overflow="fold", max_width=90)
    table.add_column("bytes a site", justify="right", no_wrap=True)
    for where, sites in rows:
        site = sites[0]
        mark = Text("✓", "green") if site.status == FUSED else Text("✗", "yellow")
        title = Text(visible(where or site.node), overflow="fold")
        if len(sites) > 1:
            title.append(f"  x{len(sites)}", style="bold")
        lines = [Text(line, "dim", overflow="fold") for line in _details(site)]
        moved = traffic(site.bytes_before, site.bytes_after)
        if moved:
            about = "~" if site.symbolic else ""
            moved = f"{about}{moved}\n{_ratio(site.bytes_before, site.bytes_after)}"
        details = [Padding(line, (0, 0, 0, 2)) for line in lines]
        table.add_row(mark, Group(title, *details), Text(moved))
    return table


def _details(site: SiteReport) -> list[str]:
    """The lines under a site's name."""
    pattern = visible(site.pattern)
    hidden = _names(site.hidden_kernels, "*")
    if site.status == FUSED:
        gone = ", ".join(_names(site.kernels_removed) + hidden)
        lines = [f"{pattern} replaces {gone}" if gone else pattern]
        if fallback := site.fallback_words():
            lines.append(f"runs as plain PyTorch: {visible(fallback)}")
    else:
        at = f" (node {visible(site.node)})" if site.node else ""
        lines = [f"{pattern}: {visible(site.reason) or 'no reason given'}{at}"]
        if site.remedy:
            lines.append(f"what helps: {visible(site.remedy)}")
        if hidden:
            lines.append(f"still launches {', '.join(hidden)}")
    if site.chain:
        lines.append(f"and in the same op: {visible(site.chain)}")
    return [*lines, visible(site.note)] if site.note else lines


def _footnotes(report: FusionReport) -> list[str]:
    lines = []
    pairs = [(s.bytes_before, s.bytes_after) for s in report.entries if s.status == FUSED]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) > 1:
        before, after = (sum(column) for column in zip(*pairs, strict=True))
        total = filter(None, (traffic(before, after), _ratio(before, after)))
        lines.append(f"all fused sites: {', '.join(total)}")
    if any(site.hidden_kernels for site in report.sites):
        lines.append("* launched unseen on Ascend: predicted from CANN's sources, not measured")
    if any(site.symbolic for site in report.entries):
        lines.append("~ for the sizes seen at compile time")
    return lines


def _listing(rows: list[_Row]) -> list[str]:
    """Region and kernel source of each distinct fused site, unwrapped: to be read and copied."""
    lines: list[str] = []
    seen = set()
    for where, (site, *_) in rows:
        key = (site.pattern, site.region, site.device, site.chain)
        if site.status != FUSED or key in seen:
            continue
        seen.add(key)
        device = f" on {visible(site.device)}" if site.device else ""
        lines += ["", f"{visible(where)}: {visible(site.pattern)}{device}"]
        behind = [_source(call) for call in site.calls_behind]
        texts = {"region": site.region, "kernel": _source(site.call),
                 "kernels behind the products": "\n\n".join(filter(None, behind)),
                 "self-check": site.self_check_words(), "chain": "\n".join(site.chain_ways())}
        for title, text in texts.items():
            if text:
                lines += [f"  {title}:", *(f"    {line}" for line in _block(text).split("\n"))]
    return lines


def _source(call: Call | None) -> str | None:
    """The text of a call's kernel, or why there is none: the rest of the report is still worth reading."""
    try:
        return call.source() if call is not None else None
    except Exception as error:
        return f"not available: {type(error).__name__}: {error}"


# -- printing and history


def emit(report: FusionReport, mode: str = "table") -> None:
    """Print to stderr. Raises for an unknown mode and for nothing else: the model must run."""
    _check_mode(mode)
    stream = sys.stderr
    if mode == "off" or stream is None:
        return
    try:
        tty = hasattr(stream, "isatty") and stream.isatty()
        width = shutil.get_terminal_size().columns if tty else None
        text = render(report, mode, width=width, color=tty)
    except Exception as error:
        text = f"{report.headline()}\n  (no table: {type(error).__name__}: {error})\n"
    _write(stream, text)


def progress(report: FusionReport, words: str, mode: str = "table") -> None:
    """A line about the graph while it is compiled, printed where `emit` prints."""
    if mode != "off" and sys.stderr is not None:
        _write(sys.stderr, f"{report.title()}: {words}\n")


def _write(stream: Any, text: str) -> None:
    try:
        # One write, so that the tables of two threads do not mix.
        stream.write(_encodable(text, getattr(stream, "encoding", None) or "utf-8"))
        stream.flush()
    except Exception:  # closed, full or no stream at all: there is nobody to tell
        pass


def _encodable(text: str, encoding: str) -> str:
    """`text`, in ASCII if the stream cannot take it (stderr would not fail but print u2713)."""
    try:
        text.encode(encoding)
        return text
    except (UnicodeError, LookupError):
        plain = text.translate(str.maketrans("✓✗─", "+x-"))
        return plain.encode("ascii", "backslashreplace").decode("ascii")


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")


_history: deque[FusionReport] = deque(maxlen=256)
_lock = threading.Lock()


def record(report: FusionReport) -> None:
    """Keep the report for `last_reports()`; of more than 256 the oldest goes."""
    with _lock:
        _history.append(report)


def last_reports() -> list[FusionReport]:
    """The reports of this process, newest last, in a list of the caller's own."""
    with _lock:
        return list(_history)


def clear_reports() -> None:
    with _lock:
        _history.clear()
