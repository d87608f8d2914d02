"""Rows of results on disk: one JSON file, rewritten whole after each row, from which a later run goes on."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .columns import COLUMNS
from .specs import SPECS, Spec

ROOT = Path(__file__).parents[2]
SMOKE = "smoke run on a CPU: it shows that everything runs; no time was taken"

#: Of rows of --tiny: their inputs, and a word behind their layers.
SMALL = "small"

Row = dict[str, Any]


def identity(spec: Spec, layers: int, tiny: bool, device: torch.device) -> dict[str, Any]:
    """What a row depends on: rows that differ in it are not the same measurement."""
    return {"model": spec.name, "layers": layers, "config": repr(sorted(spec.config(layers, tiny).items())),
            "inputs": repr(sorted(spec.inputs(tiny).items())), "machine": machine(device),
            "versions": versions(spec.library), "source": source_digest()}


def machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def versions(library: str) -> dict[str, str]:
    # Of Triton and triton-ascend, which exclude each other, the one that is there.
    other = _is_installed("triton-ascend") and not _is_installed("triton")
    names = ["torch", "triton-ascend" if other else "triton"] + ([library] if library else [])
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the build, which the metadata may lack
    return found


def _is_installed(distribution: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=distribution))


@functools.cache
def source_digest() -> str:
    """Of the package in this checkout: a row measured before a change is not one of after it."""
    digest = hashlib.sha256()
    files = [p for folder in ("fusion_pass", "patterns", "kernels") for p in (ROOT / folder).rglob("*.py")]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def new_row(spec: Spec, layers: int, tiny: bool, device: torch.device, command: str = "") -> Row:
    """A row without columns; `command` is what it is measured with."""
    return {"model": spec.name, "kind": spec.kind, "identity": identity(spec, layers, tiny, device),
            "layers": spec.depth_words(layers) if not tiny else f"{layers}, {SMALL}",
            "inputs": spec.words if not tiny else SMALL, "smoke": device.type != "cuda",
            "date": datetime.date.today().isoformat(), "command": command, "columns": {}}


def settled(cell: dict[str, Any]) -> bool:
    """Whether a cell has been measured to its end, or has failed."""
    return not {"rounds", "failure"}.isdisjoint(cell)


def missing(row: Row | None, columns: Iterable[str]) -> list[str]:
    """The columns that have neither been timed, side by side with the row's others, nor failed."""
    cells = row["columns"] if row else {}
    return [name for name in columns if not settled(cells.get(name, {}))]


class Rows:
    """Rows of one kind of measurement, found by what they depend on."""

    def __init__(self, save: Callable[[], None]):
        """`save` is called after each `put`."""
        self._rows: list[Row] = []
        self._save = save

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def find(self, wanted: dict[str, Any]) -> Row | None:
        return next((row for row in self._rows if row["identity"] == wanted), None)

    def put(self, row: Row) -> None:
        """Add or replace the row, and save."""
        self._put(row)
        self._save()

    def take(self, rows: Iterable[Row]) -> None:
        """Rows of a file. Of two of the same measurement the one with more columns stays; else the later."""
        for row in rows:
            known = self.find(row["identity"])
            if known is None or len(known["columns"]) <= len(row["columns"]):
                self._put(row)

    def _put(self, row: Row) -> None:
        for i, known in enumerate(self._rows):
            if known["identity"] == row["identity"]:
                self._rows[i] = row
                return
        self._rows.append(row)

    def latest(self) -> list[Row]:
        """A row a model, in the order of the table: the last put."""
        return _by_model({row["model"]: row for row in self._rows}.values())

    def every(self) -> list[Row]:
        """All rows, in the order of the table."""
        return _by_model(self._rows)


def _by_model(rows: Iterable[Row]) -> list[Row]:
    order = {spec.name: i for i, spec in enumerate(SPECS)}
    return sorted(rows, key=lambda row: order.get(row["model"], len(order)))


class Results:
    """What a file holds, of this program and machine or of others.

    Attributes:
        rows: of a few layers, with all columns.
        first_calls: of the published depth, with nothing but `compile_times`.
    """

    def __init__(self, path: Path | None, others: Iterable[Path] = ()):
        """Raises OSError for one of `others` that cannot be read, ValueError for a file that is no JSON."""
        self.path = path
        self.rows, self.first_calls = Rows(self.save), Rows(self.save)
        for other in others:
            self._take(other)
        if path is not None and path.exists():
            self._take(path)

    def _take(self, path: Path) -> None:
        held = json.loads(path.read_text(encoding="utf-8"))
        self.rows.take(held["rows"])
        self.first_calls.take(held.get("first_calls", ()))  # files of before have none

    def save(self) -> None:
        if self.path is None:
            return
        smoke = any(row["smoke"] for row in (*self.rows, *self.first_calls))
        text = json.dumps({"smoke": SMOKE if smoke else False, "rows": self.rows.every(),
                           "first_calls": self.first_calls.every()}, indent=1, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)  # a run that is cut off leaves a whole file


def in_order(names: Iterable[str]) -> list[str]:
    """The columns in the order of the tables."""
    wanted = set(names)
    return [name for name in COLUMNS if name in wanted]
