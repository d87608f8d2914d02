"""A chain from its text: `parse_chain(chain.text) == chain`.

The grammar, a line each:

    chain NAME, ...; SCALAR, ...
    NAME, ... = region(REF, ...; SCALAR, ...)     followed by the region's text, indented by four spaces
    NAME = linear(VALUE, WEIGHT[, BIAS])          or linear_kn, whose weight is [K, N]
    out NAME, ...

where REF is a name, or columns NAME[start:end] of one.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .chain import Chain, LinearStage, Part, RegionStage
from .region import lines, parse

_CALL = re.compile(r"(?P<names>[\w, ]+) = (?P<op>region|linear|linear_kn)"
                   r"\((?P<args>[^;()]*)(?:; (?P<scalars>[\w, ]+))?\)\Z")
_REF = re.compile(r"(\w+)(?:\[(\d+):(\d+)\])?\Z")
_INDENT = "    "


@lru_cache(maxsize=4096)
def parse_chain(text: str) -> Chain:
    """The chain that `text` (also as one line) describes.

    Raises:
        ValueError: naming the line that cannot be read or has no meaning.
    """
    first, *rest = lines(text)
    last = rest.pop() if rest else ""
    if not first.startswith("chain ") or not last.startswith("out "):
        raise ValueError("the text of a chain begins with 'chain ' and ends with 'out '")
    inputs, _, scalars = first.removeprefix("chain ").partition("; ")
    stages = []
    while rest:
        call = rest.pop(0)
        body = []
        while rest and rest[0].startswith(_INDENT):
            body.append(rest.pop(0).removeprefix(_INDENT))
        try:
            stages.append(_stage(call, "\n".join(body)))
        except ValueError as error:
            raise ValueError(f"{call!r}: {error}") from None
    return Chain(_names(inputs), _names(scalars), tuple(stages), _names(last.removeprefix("out ")))


def _stage(call: str, body: str) -> RegionStage | LinearStage:
    found = _CALL.match(call)
    if not found:
        raise ValueError("not a stage of a chain")
    names, args = _names(found["names"]), _names(found["args"])
    if found["op"] == "region":
        return RegionStage(names, parse(body), tuple(map(_ref, args)), _names(found["scalars"] or ""))
    if len(names) != 1 or len(args) not in (2, 3) or body or found["scalars"]:
        raise ValueError("a product has one name, and a value, a weight and perhaps a bias")
    return LinearStage(*names, *args, **({} if len(args) == 3 else {"bias": None}),
                       transposed=found["op"] == "linear_kn")


def _ref(word: str) -> str | Part:
    found = _REF.match(word)
    if not found:
        raise ValueError(f"{word!r} is no value and no columns of one")
    name, start, end = found.groups()
    return name if start is None else Part(name, int(start), int(end) - int(start))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()
