"""What is known of a region's values before a kernel is written."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .layout import Structure, Unsupported
from .region import LANE_OPS, NORMS, Line, NormRegion

#: Ops whose result is representable wherever all their operands are.
_EXACT_OPS = {"neg", "abs", "relu", "maximum", "minimum", "cast", *LANE_OPS}

#: Ops that give 0 where all their operands are 0.
_ZERO_OPS = {"cast", "neg", "abs", "relu", "add", "sub"}

#: Dtypes that hold every value of a dtype.
_WIDER = {"bf16": {"bf16", "f32", "f64"}, "f16": {"f16", "f32", "f64"},
          "f32": {"f32", "f64"}, "f64": {"f64"}}


@dataclass(frozen=True)
class Value:
    """One value of a region inside a tile.

    Attributes:
        var: the variable that holds it, in the compute type.
        rows: it differs from row to row.
        lane: it has one value per lane element.
        program: it is the same for every tile of a program.
        exact: the narrowest dtype known to represent all of it.
        zero: it is 0 in padded lanes.
    """

    var: str
    rows: bool
    lane: bool
    program: bool
    exact: str
    zero: bool


def variable(name: str) -> str:
    """A region's name as a variable: Python's words and those that the source uses get a suffix that
    no region name can have."""
    taken = keyword.iskeyword(name) or name in ("tl", "triton", "range", "float", "int")
    return f"{name}_V" if taken else name


def ancestors(region: NormRegion, names: Iterable[str]) -> set[str]:
    """The names that `names` depend on, themselves included."""
    wanted = set(names)
    for line in reversed(region.body):
        if line.name in wanted:
            wanted.update(a for a in line.args if isinstance(a, str))
    return wanted


@lru_cache(maxsize=4096)
def sources(region: NormRegion) -> tuple[tuple[int, ...], ...]:
    """For each output, the numbers of the inputs that it depends on."""
    above = (ancestors(region, [out.value]) for out in region.outputs)
    return tuple(tuple(i for i, x in enumerate(region.inputs) if x.name in names) for names in above)


def rounds(line: Line, values: dict[str, Value]) -> bool:
    """Whether rounding to the line's dtype can change the result of its op."""
    if line.op not in _EXACT_OPS or any(isinstance(a, float) for a in line.args):
        return True
    return any(line.dtype not in _WIDER[values[a].exact] for a in line.args if isinstance(a, str))


def analyse(region: NormRegion, structure: Structure, rows: int,
            spread: bool = False) -> dict[str, Value]:
    """Every input, scalar and line of `region`, for tiles of `rows` rows.

    `spread`: lanes that all rows share (weights) count, and are loaded, as if each row had its own.

    Raises:
        Unsupported: a norm of a value without a lane, or an eps that is no single number.
    """
    values: dict[str, Value] = {}
    for operand, shape in zip(region.inputs, structure.operands):
        moves = rows > 1 and (shape.moving[structure.blocked] or (spread and shape.lane))
        values[operand.name] = Value(variable(operand.name), moves, shape.lane,
                                     not any(shape.moving), operand.dtype, shape.lane)
    for name in region.scalars:
        values[name] = Value(variable(name), False, False, True, region.compute, False)
    for line in region.body:
        if line.op in NORMS:
            if not values[line.args[0]].lane:
                raise Unsupported(f"{line.op} of a value without a lane, {line.args[0]}")
            eps = values.get(line.args[-1])
            if eps is not None and (eps.rows or eps.lane):
                raise Unsupported(f"eps of {line.name} differs within a tile, {line.args[-1]}")
        args = [values[a] for a in line.args if isinstance(a, str)]
        kept = {a.exact for a in args}
        exact = kept.pop() if len(kept) == 1 and not rounds(line, values) else line.dtype
        values[line.name] = Value(
            variable(line.name), any(a.rows for a in args),
            line.op in LANE_OPS or any(a.lane for a in args),
            all(a.program for a in args), exact,
            zero=line.op in _ZERO_OPS and all(a.zero for a in args)
            and not any(isinstance(a, float) for a in line.args))
    return values
