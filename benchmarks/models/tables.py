"""What the rows say: tables for the terminal and the page, the goals, a plot."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .columns import AUTOTUNE, COLUMNS, COMPILE, EAGER, OURS, OURS_INDUCTOR
from .results import SMALL, SMOKE, Row, in_order
from .specs import DIT

Table = tuple[list[str], list[list[str]]]  # header, rows


def median(row: Row, name: str, what: str = "device_ms") -> float | None:
    values = row["columns"].get(name, {}).get(what)
    return statistics.median(values) if values else None


def ratio(row: Row, other: str, name: str, what: str = "device_ms") -> float | None:
    """How many times as fast as `other` the column is; None where one was not timed.

    The median of what each round says, where rows have rounds in which the columns took turns at random;
    of older rows the ratio of the medians.
    """
    paired = by_round(row, other, name, what)
    if paired:
        return statistics.median(paired)
    a, b = median(row, other, what), median(row, name, what)
    return a / b if a and b else None


def by_round(row: Row, other: str, name: str, what: str = "device_ms") -> list[float]:
    """`ratio`, round by round; empty for rows of which it is not known that their rounds can be paired."""
    cells = [row["columns"].get(column, {}) for column in (other, name)]
    if not all("places" in cell and what in cell for cell in cells):
        return []
    return [a / b for a, b in zip(*(cell[what] for cell in cells), strict=True)]


def speed(row: Row, other: str, name: str, what: str = "device_ms") -> str:
    """`ratio` with its quartiles over the rounds, where there are such: "1.07 (1.05-1.10)"."""
    words, paired = _number(ratio(row, other, name, what)), by_round(row, other, name, what)
    if len(paired) < 2:
        return words
    low, _, high = statistics.quantiles(paired, n=4, method="inclusive")
    return f"{words} ({low:.2f}-{high:.2f})"


def used(rows: Iterable[Row]) -> list[str]:
    return in_order({name for row in rows for name in row["columns"]})


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _time(row: Row, name: str) -> str:
    cell = row["columns"].get(name)
    if cell is None:
        return "not run"
    if "failure" in cell:
        return "failed"
    if not cell.get("device_ms"):
        return "ran"
    low, high = min(cell["device_ms"]), max(cell["device_ms"])
    return f"{median(row, name):.2f} ({low:.2f}-{high:.2f})"


def times(rows: Sequence[Row]) -> Table:
    """ms a forward on the device: median (least - most)."""
    names = used(rows)
    return (["model", "layers", "inputs", *(COLUMNS[n].title for n in names)],
            [[row["model"], row["layers"], row["inputs"], *(_time(row, n) for n in names)] for row in rows])


def ratios(rows: Sequence[Row]) -> Table:
    """Speed against eager and torch.compile, on the device and (second) by the wall clock (with quartiles
    over the rounds, where they can be paired)."""
    def pair(row: Row, other: str, name: str) -> str:
        return " / ".join(filter(None, (speed(row, other, name, what) for what in ("device_ms", "wall_ms"))))

    pairs = [*((EAGER, name) for name in (COMPILE, AUTOTUNE, OURS, OURS_INDUCTOR)), (COMPILE, OURS_INDUCTOR)]
    return (["model", *(f"{COLUMNS[n].title} vs {COLUMNS[o].title}" for o, n in pairs)],
            [[row["model"], *(pair(row, o, n) for o, n in pairs)] for row in rows])


def details(rows: Sequence[Row]) -> Table:
    """Sites, kernels launched a forward, memory, compile time, error."""
    shown = (EAGER, COMPILE, OURS, OURS_INDUCTOR)

    def each(row: Row, key: str, form: str, names: Sequence[str] = shown) -> str:
        return " / ".join(_number(row["columns"].get(n, {}).get(key), form) or "-" for n in names)

    def error(row: Row) -> str:
        return " / ".join(_number(row["columns"].get(n, {}).get("error", {}).get("share_of_bound")) or "-"
                          for n in shown[1:])

    def sites(row: Row) -> str:
        """With Inductor, those of the form of each graph that was fastest."""
        both = (row["columns"].get(n, {}).get("sites") for n in (OURS, OURS_INDUCTOR))
        return " / ".join(f"{found['fused']} of {found['found']}" if found else "-" for found in both)

    first = " / ".join(COLUMNS[n].title for n in shown)
    return (["model", f"sites fused: {COLUMNS[OURS].title} / {COLUMNS[OURS_INDUCTOR].title}",
             f"kernels: {first}", f"peak MiB: {first}",
             f"first call s: {' / '.join(COLUMNS[n].title for n in shown[1:])}",
             "compile time, ours / backend=eager", "error in units of the bound"],
            [[row["model"], sites(row), each(row, "kernels", "d"), each(row, "peak_mib", ".0f"),
              each(row, "first_call_s", ".1f", shown[1:]), " / ".join(map(_number, compile_ratios(row))),
              error(row)]
             for row in rows])


def compile_seconds(row: Row) -> tuple[float, float, float] | None:
    """Of first calls: backend="eager"; ours with inner eager: kernels compiled, and kernels in memory."""
    found = row.get("compile_times", {})
    if "ours_s" not in found:
        return None
    compiled, *known = found["ours_s"]
    return min(found["backend_eager_s"]), compiled, min(known)


def compile_ratios(row: Row) -> list[float]:
    """Seconds of ours with inner eager over those of backend="eager": kernels compiled, kernels in memory."""
    eager, *ours = compile_seconds(row) or (1.0,)
    return [seconds / eager for seconds in ours]


def first_calls(rows: Sequence[Row]) -> Table:
    """First calls at the published depth, seconds."""
    def cells(row: Row) -> list[str]:
        seconds = compile_seconds(row)
        if seconds is None:
            failed = "failure" in row or "failure" in row.get("compile_times", {})
            return ["failed" if failed else "ran"] * 3 + [""] * 2
        return [_number(value) for value in (*seconds, *compile_ratios(row))]

    return (["model", "layers", 'backend="eager"', "ours, kernels compiled", "ours, kernels in memory",
             'kernels compiled / backend="eager"', 'kernels in memory / backend="eager"'],
            [[row["model"], row["layers"], *cells(row)] for row in rows])


def small_first_calls(rows: Sequence[Row]) -> Table:
    """First calls of small models, seconds."""
    return first_calls(rows)


def notes(rows: Sequence[Row], where: str = "") -> list[str]:
    """What failed, was declined, fell back or was left to Inductor, a line each."""
    lines = []
    for row in rows:
        if "failure" in row:
            lines.append(f"{row['model']}{where}: {row['failure']}")
        if "failure" in row.get("compile_times", {}):
            lines.append(f"{row['model']}{where}, compile times: {row['compile_times']['failure']}")
        for name, cell in row["columns"].items():
            sites = cell.get("sites", {})
            texts = [cell[key] for key in ("failure", "profile_failure") if key in cell]
            texts += [f"{count} x {what}: {words}" for what in ("declined", "fallbacks")
                      for words, count in sites.get(what, {}).items()]
            texts += [f"{count} x {words}" if count > 1 else words
                      for words, count in Counter(sites.get("choices", ())).items()]
            texts += [f"the pass failed: {error}" for error in sites.get("errors", ())]
            lines += [f"{row['model']}, {COLUMNS[name].title}: {text}" for text in texts]
    return lines


def goal(title: str, values: Sequence[tuple], least: float, sign: int = 1) -> str:
    """A goal, and of (model, value) or (model, value, how to write the value) those that miss it."""
    known = [(name, value, *words) for name, value, *words in values if value is not None]
    missed = [f"{name} {words[0] if words else _number(value)}" for name, value, *words in known
              if sign * value < sign * least]
    return f"{title}: {len(known) - len(missed)} of {len(known)} rows" + (
        f"; not {', '.join(missed)}" if missed else "")


def compile_goal(rows: Sequence[Row], where: str = "") -> str:
    return goal(f"compile time of ours at most 1.3x backend=eager{where}, kernels compiled",
                [(row["model"], (compile_ratios(row) or [None])[0]) for row in rows], 1.3, -1)


def goals(rows: Sequence[Row]) -> list[str]:
    """The goals for whole models, and which rows miss them."""
    def against(other: str, name: str, among=rows) -> list[tuple[str, float | None, str]]:
        return [(row["model"], ratio(row, other, name), speed(row, other, name)) for row in among]

    def share(row: Row, key: str) -> float | None:
        ours, eager = (row["columns"].get(n, {}).get(key) for n in (OURS, EAGER))
        return ours / eager if ours is not None and eager else None

    dit = [row for row in rows if row["kind"] == DIT]
    other = [row for row in rows if row["kind"] != DIT]
    found = [goal("ours with inner inductor at least 1.0x torch.compile",
                  against(COMPILE, OURS_INDUCTOR), 1.0),
             goal("ours at least 1.3x eager on video and image transformers", against(EAGER, OURS, dit), 1.3),
             goal("ours at least 1.1x eager on the others", against(EAGER, OURS, other), 1.1),
             goal("ours never below 1.0x eager", against(EAGER, OURS), 1.0),
             goal("kernels of ours at most 0.7 of eager's on video and image transformers",
                  [(row["model"], share(row, "kernels")) for row in dit], 0.7, -1),
             goal("peak memory of ours at most eager's",
                  [(row["model"], share(row, "peak_mib")) for row in rows], 1.0, -1),
             compile_goal(rows),
             goal("error within the bound (1), ours",
                  [(row["model"], row["columns"].get(OURS, {}).get("error", {}).get("share_of_bound"))
                   for row in rows], 1.0, -1)]
    known = [value for _, value, _ in against(COMPILE, OURS_INDUCTOR) if value]
    if known:
        mean = math.exp(statistics.fmean(map(math.log, known)))
        found.insert(1, f"geometric mean of that: {mean:.3f} (goal 1.05)")
    return found


def titles(rows: Sequence[Row]) -> list[str]:
    """Machine, versions and date of the rows; the smoke run's warning."""
    made = {f"{row['identity']['machine']}, " + ", ".join(f"{k} {v}" for k, v in sorted(
        {k: v for row in rows for k, v in row["identity"]["versions"].items()}.items())) + f", {row['date']}"
        for row in rows}
    return [SMOKE.upper()] * any(row["smoke"] for row in rows) + sorted(made)


def _title(make: Callable) -> str:
    return " ".join(make.__doc__.split())


class Section(NamedTuple):
    """Rows of one kind, and what is said about them."""

    rows: Sequence[Row]
    tables: Sequence[Callable[[Sequence[Row]], Table]]
    goals: Sequence[str]
    notes: Sequence[str]


def sections(rows: Sequence[Row], deep: Sequence[Row]) -> list[Section]:
    """Of the rows of a few layers and of those at the published depth (or of --tiny, which are not), where
    there are any. A smoke run has no times to compare."""
    found, deep_calls, where = [], first_calls, " at the published depth"
    if any(row["inputs"] == SMALL for row in deep):
        deep_calls, where = small_first_calls, ", small"
    if rows:
        timed = any(not row["smoke"] for row in rows)
        found.append(Section(rows, (times, ratios, details) if timed else (times, details),
                             goals(rows) if timed else (), notes(rows)))
    if deep:
        timed = any(not row["smoke"] for row in deep)
        found.append(Section(deep, (deep_calls,), (compile_goal(deep, where),) if timed else (),
                             notes(deep, where)))
    return found


def show(rows: Sequence[Row], deep: Sequence[Row] = ()) -> None:
    """`deep`: the rows of first calls at the published depth."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Grid

    console = Console(width=200, highlight=False, markup=False)
    shown = sections(rows, deep)
    for section in shown:
        for title in titles(section.rows):
            console.print(title)
        for make in section.tables:
            header, lines = make(section.rows)
            grid = Grid(*map(escape, header), title=_title(make))
            for line in lines:
                grid.add_row(*map(escape, line))
            console.print(grid)
    for section in shown:
        for text in (*section.notes, *section.goals):
            console.print(text)


def markdown(rows: Sequence[Row], deep: Sequence[Row] = ()) -> str:
    """The section of docs/performance.md; `deep`: the rows of first calls at the published depth.

    Raises:
        ValueError: rows of a smoke run.
    """
    if any(row["smoke"] for row in (*rows, *deep)) or not rows:
        raise ValueError("only what was measured on a GPU is written")
    parts, written = [], sections(rows, deep)
    for section in written:
        commands = ", ".join(sorted({f"`{row['command']}`" for row in section.rows}))
        parts.append(f"{'; '.join(titles(section.rows))}. bf16, no gradients, random weights; {commands}.")
        for make in section.tables:
            header, lines = make(section.rows)
            table = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
            parts.append(_title(make))
            parts.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                                   for line in table))
    texts = [text for part in ("goals", "notes") for section in written for text in getattr(section, part)]
    parts.append("\n".join(f"- {text}" for text in texts))
    return "\n\n".join(parts)


def plot(rows: Sequence[Row], path: Path) -> str:
    """Draw each column's speed against eager (SVG); returns what was done, or why nothing was."""
    rows = [row for row in rows if median(row, EAGER)]
    if not rows:
        return "no plot: nothing was timed"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    names = [name for name in used(rows) if name != EAGER]
    figure, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
    for i, name in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(rows))]
        axes.bar(at, [ratio(row, EAGER, name) or 0 for row in rows], 0.8 / len(names),
                 label=COLUMNS[name].title)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows], rotation=20, ha="right")
    axes.set_ylabel("speed against eager, device time")
    axes.set_title("; ".join(titles(rows)), fontsize=8)
    axes.legend()
    figure.savefig(path, format="svg")
    pyplot.close(figure)
    return f"plot: {path}"
