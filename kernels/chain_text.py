"""A chain from its text: `parse_chain(chain.text) == chain`.

The grammar, a line each:

    chain NAME, ...; SCALAR, ...
    NAME, ... = region(REF, ...; SCALAR, ...)     followed by the region's text, indented by four spaces
    NAME = linear(VALUE, WEIGHT[, BIAS])          or linear_kn, whose weight is [K, N]
    NAME = patch_conv(VALUE, WEIGHT[, BIAS][; HEIGHT, WIDTH])
    NAME = score(REF, REF)                        or score_bmm, whose outer dims are one
    out NAME[ at START of TOTAL along DIM], ...

where REF is a name, or columns NAME[start:end] of one, or NAME[start:end x COUNT by STEP]: heads of a score.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .chain import Chain, RegionStage
from .chain_products import Heads, LinearStage, Part, PatchStage, Product, Ref, ScoreStage
from .placed import Place
from .region import lines, parse

_CALL = re.compile(r"(?P<names>[\w, ]+) = (?P<op>region|linear|linear_kn|patch_conv|score|score_bmm)"
                   r"\((?P<args>[^;()]*)(?:; (?P<scalars>[\w, ]+))?\)\Z")
_REF = re.compile(r"(\w+)(?:\[(\d+):(\d+)(?: x (\d+) by (\d+))?\])?\Z")
_OUTPUT = re.compile(r"(\w+)(?: at (\d+) of (\d+) along (\d+))?\Z")
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
    found = [_OUTPUT.match(word) for word in _names(last.removeprefix("out "))]
    if None in found:
        raise ValueError(f"{last!r}: an output is a name, and perhaps its place")
    places = {output[1]: Place(int(output[4]), int(output[2]), int(output[3]))
              for output in found if output[2] is not None}
    return Chain(_names(inputs), _names(scalars), tuple(stages), tuple(output[1] for output in found),
                 tuple(places.items()))


def _stage(call: str, body: str) -> RegionStage | Product:
    found = _CALL.match(call)
    if not found:
        raise ValueError("not a stage of a chain")
    op, names, args, last = found["op"], _names(found["names"]), _names(found["args"]), \
        _names(found["scalars"] or "")
    if op == "region":
        return RegionStage(names, parse(body), tuple(map(_ref, args)), last)
    if op in ("score", "score_bmm"):
        if len(names) != 1 or len(args) != 2 or body or last:
            raise ValueError("a score has one name, a query and a key")
        return ScoreStage(*names, *map(_operand, args), flat=op == "score_bmm")
    if len(names) != 1 or len(args) not in (2, 3) or body or (last and op != "patch_conv"):
        raise ValueError("a product has one name, and a value, a weight and perhaps a bias")
    bias = args[2] if len(args) == 3 else None
    if op == "patch_conv":
        if len(last) not in (0, 2) or not all(map(str.isdecimal, last)):
            raise ValueError("a grid is a height and a width")
        return PatchStage(*names, *args[:2], bias, tuple(map(int, last)) if last else None)
    return LinearStage(*names, *args[:2], bias, transposed=op == "linear_kn")


def _operand(word: str) -> Ref:
    """What a score reads."""
    found = _REF.match(word)
    if not found or found[4] is None:
        return _ref(word)
    name, start, end, count, step = found[1], *map(int, found.groups()[1:])
    return Heads(name, start, end - start, count, step)


def _ref(word: str) -> str | Part:
    found = _REF.match(word)
    if not found or found[4] is not None:
        raise ValueError(f"{word!r} is no value and no columns of one")
    name, start, end = found.groups()[:3]
    return name if start is None else Part(name, int(start), int(end) - int(start))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()
