"""What a profile of an NPU says about the norms: hidden kernels, and whether the fused kernels ran.

Reads `kernel_details.csv` of torch_npu.profiler and `op_summary_*.csv` of msprof. Nothing here knows a
time: it counts launches.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UserError
from .report import FUSED, FusionReport

#: A profile shows this many characters of a Triton kernel's name, the last ones.
NAME_LENGTH = 49

_FILES = ("kernel_details*.csv", "op_summary*.csv")
#: Meaning -> names of the column, in files of torch_npu and of msprof.
_COLUMNS = {
    "name": ("name", "op name", "kernel name"),
    "type": ("type", "op type", "kernel type"),
    "shapes": ("input shapes", "input shape"),
    "start": ("start time(us)", "task start time(us)", "start time", "task start time"),
    "stream": ("stream id", "stream_id"),
}
_API = re.compile(r"(aclnn\w*?)_(\w+?)(?:AiCore|AiCpu|AICORE|AI_CORE)?_(\w+)\Z")
_NORM = re.compile(r"(Layer|Rms|Group|Batch|Instance)Norm", re.IGNORECASE)
#: Under these a copy may be one that the model asked for: `.contiguous()`, `.to()`.
_USERS = ("aclnnInplaceCopy", "aclnnContiguous", "aclnnCast")
OURS = "aln_"


#: End the messages on files that are none.
_WANTED = "CSV is kernel_details.csv of torch_npu.profiler, op_summary_*.csv of msprof, or a folder that " \
          "holds one of them"
_WANTED_REPORT = "wanted is what FusionReport.to_json() or `ascend-ln-fuse explain --json` gives"


class ProfileError(UserError):
    """A file is no profile; the message says what is wrong with it."""


@dataclass(frozen=True)
class Launch:
    """A row of a profile: the kernel's name and type as written there, "" where a column is missing."""

    name: str
    type: str
    shapes: str = ""
    stream: str = ""

    @property
    def api(self) -> str:
        """`aclnnLayerNorm` of `aclnnLayerNorm_SliceAiCore_Slice`; "" for other names."""
        match = _API.match(self.name)
        return match[1] if match else ""

    @property
    def kernel(self) -> str:
        """What the kernel does: `Slice`, `LayerNormV3`."""
        match = _API.match(self.name)
        return self.type or (match[3] if match else self.name)


@dataclass
class NormLaunches:
    """Norm kernels of one API, type and input shapes, and what was launched around them."""

    api: str
    kernel: str
    shapes: str
    launches: int = 0
    hidden: Counter = field(default_factory=Counter)  # kernel type -> launches

    def to_dict(self) -> dict[str, Any]:
        return {"api": self.api, "kernel": self.kernel, "shapes": self.shapes,
                "launches": self.launches, "hidden": dict(self.hidden)}


@dataclass(frozen=True)
class FusedSite:
    """A fused site of a report, and how often a profile has its kernel."""

    where: str
    kernel: str
    launches: int

    def to_dict(self) -> dict[str, Any]:
        return {"where": self.where, "kernel": self.kernel, "launches": self.launches}


@dataclass(frozen=True)
class Profile:
    """rows: launches read.  norms: see NormLaunches.  stray: hidden kernels of a norm's API that
    stand by no norm.  copies: kernels that may be the model's own copies and casts.
    ours: generated kernel -> launches."""

    rows: int
    norms: list[NormLaunches]
    stray: Counter
    copies: Counter
    ours: Counter

    @property
    def hidden(self) -> int:
        return sum(sum(norm.hidden.values()) for norm in self.norms) + self.stray.total()

    def sites(self, reports: Sequence[FusionReport]) -> list[FusedSite]:
        """Each fused site of the reports, in order, with the launches of its kernel, and of those behind its
        linear layers. Sites that share a launch share the count."""
        return [FusedSite(where, name, self.launches(name))
                for report in reports if report.error is None
                for site in report.entries if site.status == FUSED
                for where, name in ((site.where, site.kernel_name()),
                                    *((f"{site.where}, behind its linear layers", name)
                                      for name in site.kernels_behind_names()))]

    def launches(self, kernel: str) -> int:
        """How often a kernel of this name was launched."""
        tail = kernel[-NAME_LENGTH:]
        return sum(n for name, n in self.ours.items() if tail and name.endswith(tail))

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "hidden": self.hidden, "norms": [n.to_dict() for n in self.norms],
                "stray": dict(self.stray), "copies": dict(self.copies), "ours": dict(self.ours)}


# -- counting


def analyse(launches: Iterable[Launch]) -> Profile:
    """Count the norms, and the hidden kernels of each. `launches` in the order of their start.

    A kernel under a norm's API that is no norm is hidden. Casts come behind the norm whose statistics
    they convert; everything else stands in front of the norm that needs it.
    """
    norms: dict[tuple, NormLaunches] = {}
    last: dict[tuple, NormLaunches] = {}  # (API, stream) -> the last norm
    waiting: dict[tuple, Counter] = {}  # (API, stream) -> hidden kernels in front of the next norm
    copies, ours, rows = Counter(), Counter(), 0
    for launch in launches:
        rows += 1
        api, kernel, place = launch.api, launch.kernel, (launch.api, launch.stream)
        if OURS in launch.name:
            ours[launch.name] += 1
        elif _NORM.search(kernel) and not launch.name.startswith(_USERS):
            key = (api, kernel, launch.shapes)
            norm = last[place] = norms.setdefault(key, NormLaunches(*key))
            norm.launches += 1
            norm.hidden += waiting.pop(place, Counter())
        elif _NORM.search(api):
            if kernel == "Cast" and place in last and place not in waiting:
                last[place].hidden[kernel] += 1
            else:
                waiting.setdefault(place, Counter())[kernel] += 1
        elif api in _USERS:
            copies[kernel] += 1
    stray = sum(waiting.values(), Counter())
    ordered = sorted(norms.values(), key=lambda n: (-n.hidden.total(), -n.launches, n.api, n.shapes))
    return Profile(rows, ordered, stray, copies, ours)


# -- reading


def read_profile(path: Path) -> Profile:
    """The profile in a CSV file (or pipe), or in the only one below a folder (as the profilers leave it).

    Raises:
        ProfileError: nothing is there, several are, or the file is no profile.
    """
    return analyse(read_launches(_find(Path(path))))


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(p for pattern in _FILES for p in path.rglob(pattern))
    if not found:
        raise ProfileError(f"no {' or '.join(_FILES)} below {path}")
    if len(found) > 1:
        listed = "\n  ".join(map(str, found))
        raise ProfileError(f"{len(found)} profiles below {path}; name one of them:\n  {listed}")
    return found[0]


def read_launches(path: Path) -> list[Launch]:
    """The rows of a profile in the order of their start, or of the file where that has no start times.

    Raises:
        ProfileError: it is not readable as UTF-8, UTF-16 or GBK, has no column with kernel names, or no row.
    """
    delimiter, text = _table(_text(path, _WANTED))
    try:
        with _long_cells():
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise ProfileError(f"{path} is no CSV: {error}") from None
    places: dict[str, int | None] = {}
    header: list[str] | None = None
    found: list[tuple[float, Launch]] = []
    for row in rows:
        cells = [cell.strip() for cell in row]  # msprof puts tabs behind long numbers
        if not any(cells) or cells == header:  # again: files that were put together
            continue
        if not places:
            places, header = _places(cells, path), cells
            continue
        values = {key: cells[i] if i is not None and i < len(cells) else "" for key, i in places.items()}
        values = {key: "" if text in ("N/A", "NA") else text for key, text in values.items()}
        if values["name"]:
            launch = Launch(values["name"], values["type"], values["shapes"].strip('"'), values["stream"])
            found.append((_number(values["start"]), launch))
    if not places:
        raise ProfileError(f"{path} is empty")
    if not found:
        raise ProfileError(f"{path} has a header and no kernel below it")
    found.sort(key=lambda pair: pair[0])
    return [launch for _, launch in found]


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    """Inside, a cell may be of any length: the shapes of a call with a thousand inputs."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _table(text: str) -> tuple[str, str]:
    """(what stands between cells, the table): commas as the profilers write it, or what a spreadsheet made
    of them, which may say so in a line of its own in front of the header."""
    first, _, rest = text.lstrip().partition("\n")
    if told := re.fullmatch(r"sep=(.)\s*", first, re.IGNORECASE):
        return told[1], rest
    return max(",;\t", key=first.count), text


def _places(header: list[str], path: Path) -> dict[str, int | None]:
    """Meaning -> index of its column, None where there is none."""
    words = [cell.lower() for cell in header]
    places = {key: next((words.index(n) for n in names if n in words), None)
              for key, names in _COLUMNS.items()}
    if places["name"] is None:
        raise ProfileError(f"{path} has no column 'Name' or 'Op Name'; it has "
                           f"{', '.join(header[:12])}{', ...' if len(header) > 12 else ''}; {_WANTED}")
    return places


def _number(text: str) -> float:
    try:
        return float(text if "." in text else text.replace(",", "."))  # spreadsheets may write 12,5
    except ValueError:
        return 0.0


def _text(path: Path, wanted: str) -> str:
    """What a file holds. Raises ProfileError where it is no text, or cannot be read; where there is none,
    with `wanted`, which says what the file should be."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ProfileError(f"no such file: {path}; {wanted}") from None
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encodings = ("utf-16",)
    elif b"\0" in data[:4096]:
        raise ProfileError(f"{path} is not a text file")
    else:
        encodings = ("utf-8-sig", "gb18030")
    for encoding in encodings:
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode(encoding)
    raise ProfileError(f"{path} is not UTF-8, UTF-16 with its mark, or GBK")


def read_reports(path: Path) -> list[FusionReport]:
    """FusionReports from JSON: one (`FusionReport.to_json`), a list of them, or what
    `ascend-ln-fuse explain --json` prints.

    Raises:
        ProfileError: no such file, no JSON, or JSON of something else.
    """
    text = _text(Path(path), _WANTED_REPORT)
    if not text.strip():
        raise ProfileError(f"{path} is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is no JSON: {error}; {_WANTED_REPORT}") from None
    if isinstance(data, dict) and "reports" in data:
        data = data["reports"]
    reports = data if isinstance(data, list) else [data]
    if not reports:
        raise ProfileError(f"{path} holds no report")
    if not all(isinstance(one, dict) and isinstance(one.get("sites"), list) for one in reports):
        raise ProfileError(f"{path} is no report; {_WANTED_REPORT}")
    try:
        found = [FusionReport.from_dict(one) for one in reports]
    except (TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path} is no report: {error}") from None
    for site in (site for report in found for site in report.entries):
        if not (isinstance(site.kernel, str) and isinstance(site.where, str)):
            raise ProfileError(f"{path} is no report: the kernel and the place of a site are words, not "
                               f"{site.kernel!r} and {site.where!r}")
    return found
