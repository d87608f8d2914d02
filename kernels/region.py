"""NormRegion: an iteration space and a few lines of arithmetic over it.

The space is `outer dims x lane`. The lane is the normalised size D, the last dim; outer dims are
whatever the model has. Every operand is a tensor that broadcasts to the space by PyTorch's rule, so a
contiguous input, a `q` inside a packed `qkv`, a `[D]` weight and an adaLN scale `[B, 1, D]` differ in
their strides alone. A region holds structure only: dtypes, D, which dims are broadcast, the body.
Sizes, strides, offsets and eps arrive with the call, so that one region serves every batch and length.

The text form is what a person reads in a report, the argument of the fused op in a graph and the key
of the kernel cache; `parse(region.text) == region`:

    space [*, *, 128]
    in x: bf16[*, *, 128]
    in w: bf16[128]
    scalar eps
    v0: f32 = cast(x)
    v1: f32 = rms_norm(v0, none, eps)
    v2: bf16 = cast(v1)
    v3: bf16 = mul(w, v2)
    out v3: bf16 order(0, 1, 2)

Meaning of a line: operands are widened to the compute type (fp32; fp64 where an operand is fp64), the
op is applied, the result is rounded to the line's dtype. This is PyTorch's rule for its own kernels
(`at::opmath_type`), so where a model rounds, the region rounds. `layer_norm(x, weight, bias, eps)` and
`rms_norm(x, weight, eps)` are torch.nn.functional's functions over the lane (`none` for a missing
operand): statistics and affine in the compute type, one rounding at the end. So is
`normalize(x, weight, eps)`, `x / max(||x||, eps) * weight`; in a line of fp16 an eps that is 0 there (1e-12)
is 0, as in torch, so that a row of zeros gives NaN. `l2_norm(x, weight, eps)` is
`x * rsqrt(sum(x * x) + eps) * weight`. `LANE_OPS` move the elements of a value along the lane and keep its
dtype.

A lane may consist of heads, equal parts of it: `space [*, *, 12 x 128]` is a lane of 1536 elements. Norms
are taken of all of it, `LANE_OPS` move elements within each head, and an operand may have the elements
of one head, `in cos: f32[*, 128]`, which then all heads read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .pointwise import POINTWISE

#: dtype words of region text -> bytes per element.
DTYPES: dict[str, int] = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}

#: norm op -> number of arguments. The first is the value; eps is the last.
NORMS: dict[str, int] = {"layer_norm": 4, "rms_norm": 3, "normalize": 3, "l2_norm": 3}

#: the largest number that fp16 rounds to 0
F16_NOTHING = 2.0**-25

#: op that moves elements along the lane (D even; where the lane has heads: along each head, of D elements)
#: -> what it yields, lane by lane, for a value v of D.
LANE_OPS: dict[str, str] = {
    "rotate_half": "cat(-v[D/2:], v[:D/2])",
    "rotate_pairs": "-v[1], v[0], -v[3], v[2], ...",
    "repeat_even": "v[0], v[0], v[2], v[2], ...",
    "repeat_odd": "v[1], v[1], v[3], v[3], ...",
}

#: An argument of a line: a value's name, a scalar's name, a literal, or None for a missing operand.
Arg = "str | float | None"

#: what stands for a line break in `one_line`
_BREAK = " | "

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class RegionError(ValueError):
    """A region that has no meaning; the message names the line."""


@dataclass(frozen=True)
class Operand:
    """An input. `dims` are right-aligned to the space: "*" (has the space's size), 1 (broadcast), and for
    the last one the lane D, one head of it, or 1. A dim that is missing on the left is broadcast."""

    name: str
    dtype: str
    dims: tuple

    def __str__(self) -> str:
        return f"in {self.name}: {self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Line:
    """`name: dtype = op(args)`; see the module docstring for the meaning."""

    name: str
    dtype: str
    op: str
    args: tuple

    def __str__(self) -> str:
        words = ("none" if a is None else a if isinstance(a, str) else repr(a) for a in self.args)
        return f"{self.name}: {self.dtype} = {self.op}({', '.join(words)})"


@dataclass(frozen=True)
class Output:
    """A value to write: shape of the whole space, dense, dims laid out in memory as `order` says
    (outermost first; (0, 1, ..., n-1) is contiguous)."""

    value: str
    dtype: str
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"out {self.value}: {self.dtype} order({', '.join(map(str, self.order))})"

    @property
    def is_contiguous(self) -> bool:
        return self.order == tuple(range(len(self.order)))


@dataclass(frozen=True)
class NormRegion:
    """See the module docstring.

    Attributes:
        lane: D, the normalised size, >= 0.
        rank: number of dims of the space, lane included, >= 1.
        inputs, scalars, body, outputs: the parts, in the order of the call.
        heads: of how many equal parts the lane consists.

    Raises:
        RegionError: at construction, when a name is undefined or defined twice, an op unknown, an
            arity or dtype wrong, or nothing is written.
    """

    lane: int
    rank: int
    inputs: tuple[Operand, ...]
    scalars: tuple[str, ...]
    body: tuple[Line, ...]
    outputs: tuple[Output, ...]
    heads: int = 1

    def __post_init__(self) -> None:
        _check(self)
        # Regions key caches on the way of every call; hashing the whole tree costs 10 us.
        fields = (self.lane, self.rank, self.inputs, self.scalars, self.body, self.outputs, self.heads)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    @property
    def text(self) -> str:
        """The canonical text; `parse` is its inverse."""
        return _render(self)

    @property
    def outer(self) -> int:
        """Number of outer dims."""
        return self.rank - 1

    @property
    def full(self) -> tuple:
        """The `dims` of an operand that has all elements of the space."""
        return ("*",) * self.outer + (self.lane,)

    @property
    def head(self) -> int:
        """Number of elements of one head of the lane; all of it where it has no heads."""
        return self.lane // self.heads

    def is_shared(self, operand: Operand) -> bool:
        """Whether `operand` has the elements of one head, which all heads read."""
        return self.heads > 1 and operand.dims[-1:] == (self.head,)

    @property
    def dtype_of(self) -> dict[str, str]:
        """Value name -> dtype word."""
        return {x.name: x.dtype for x in self.inputs} | {x.name: x.dtype for x in self.body}

    @property
    def compute(self) -> str:
        """The compute type of the whole region: "f64" if any value is, else "f32"."""
        return "f64" if "f64" in self.dtype_of.values() else "f32"

    @property
    def norms(self) -> tuple[Line, ...]:
        """The normalisation lines, in order."""
        return tuple(line for line in self.body if line.op in NORMS)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def _render(region: NormRegion) -> str:
    lane = str(region.lane) if region.heads == 1 else f"{region.heads} x {region.head}"
    space = ", ".join(["*"] * region.outer + [lane])
    lines = [f"space [{space}]", *map(str, region.inputs)]
    if region.scalars:
        lines.append(f"scalar {', '.join(region.scalars)}")
    lines += [*map(str, region.body), *map(str, region.outputs)]
    return "\n".join(lines)


def _check(region: NormRegion) -> None:
    def fail(what: object, why: str) -> None:
        raise RegionError(f"{what}: {why}")

    if region.rank < 1 or region.lane < 0:
        fail("space", f"rank {region.rank} and lane {region.lane} describe no space")
    if region.heads < 1 or region.lane % region.heads or (region.heads > 1 and region.head < 2):
        fail("space", f"a lane of {region.lane} does not consist of {region.heads} heads")
    seen: dict[str, str | None] = {}
    with_lane: set[str] = set()  # values with an element per lane element
    shared: set[str] = set()  # those of them that are the same in all heads
    last = (region.lane, 1) if region.heads == 1 else (region.lane, region.head, 1)

    def define(what: object, name: str, dtype: str | None) -> None:
        if not _NAME.match(name) or name == "none":
            fail(what, f"{name!r} is not a name")
        if name in seen:
            fail(what, f"{name} is defined twice")
        if dtype is not None and dtype not in DTYPES:
            fail(what, f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
        seen[name] = dtype

    for operand in region.inputs:
        define(operand, operand.name, operand.dtype)
        if len(operand.dims) > region.rank:
            fail(operand, f"has {len(operand.dims)} dims, the space {region.rank}")
        if operand.dims and operand.dims[-1] not in last:
            fail(operand, f"last dim must be the lane {' or '.join(map(str, last))}")
        if any(d not in ("*", 1) for d in operand.dims[:-1]):
            fail(operand, "outer dims are '*' or 1")
        if operand.dims and operand.dims[-1] in last[:-1]:
            with_lane.add(operand.name)
        if region.is_shared(operand):
            shared.add(operand.name)
    for name in region.scalars:
        define(f"scalar {name}", name, None)
    for line in region.body:
        arity = NORMS.get(line.op) or (1 if line.op == "cast" or line.op in LANE_OPS else None)
        if arity is None:
            if line.op not in POINTWISE:
                fail(line, f"unknown op {line.op!r}")
            arity = POINTWISE[line.op].arity
        if len(line.args) != arity:
            fail(line, f"{line.op} takes {arity} arguments")
        for arg in line.args:
            if isinstance(arg, str) and arg not in seen:
                fail(line, f"{arg} is not defined above")
        if (line.op in NORMS or line.op == "cast") and seen.get(line.args[0], None) is None:
            fail(line, "the first argument must be a tensor value")
        if line.op in NORMS and seen[line.args[0]] != line.dtype:
            fail(line, f"{line.op} keeps the dtype of its value, {seen[line.args[0]]}")
        if line.op not in NORMS and None in line.args:
            fail(line, "only a norm may miss an operand")
        if line.op in LANE_OPS:
            _check_lane_op(region, line, seen, with_lane, fail)
        lanes = with_lane.intersection(line.args)
        if line.op in NORMS and region.heads > 1:
            for arg in line.args[:-1]:
                if arg is not None and (arg not in lanes or arg in shared):
                    fail(line, f"{line.op} needs values of the whole lane, which {arg} is not")
        if line.op in NORMS or lanes:
            with_lane.add(line.name)
        if lanes and lanes <= shared:
            shared.add(line.name)
        define(line, line.name, line.dtype)
    if not region.outputs:
        fail("region", "writes nothing")
    for out in region.outputs:
        if seen.get(out.value) != out.dtype:
            fail(out, f"no value {out.value} of dtype {out.dtype}")
        if sorted(out.order) != list(range(region.rank)):
            fail(out, f"order is no permutation of {region.rank} dims")


def _check_lane_op(region: NormRegion, line: Line, seen, with_lane, fail) -> None:
    arg = line.args[0]
    if region.head % 2:
        what = "an even lane" if region.heads == 1 else "heads of even size"
        fail(line, f"{line.op} needs {what}, not {region.head}")
    if arg not in with_lane:
        fail(line, f"{line.op} needs a value with a lane, which {arg} has not")
    if seen[arg] != line.dtype:
        fail(line, f"{line.op} keeps the dtype of its value, {seen[arg]}")


_IN = re.compile(r"in (\w+): (\w+)\[(.*)\]\Z")
_OUT = re.compile(r"out (\w+): (\w+) order\((.*)\)\Z")
_LINE = re.compile(r"(\w+): (\w+) = (\w+)\((.*)\)\Z")
_SPACE = re.compile(r"space \[((?:\*, )*)(?:(\d+) x )?(\d+)\]\Z")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")] if text.strip() else []


def _arg(word: str) -> str | float | None:
    if word == "none":
        return None
    if _NAME.match(word) and word not in ("inf", "nan"):
        return word
    return float(word)


def one_line(text: str) -> str:
    """The text of a region or chain as the argument of an op in a graph, where it must be one line:
    Inductor writes the calls of a graph, arguments and all, into the comments of its code."""
    return text.replace("\n", _BREAK)


def lines(text: str) -> list[str]:
    """The lines of a text, be it as `one_line` wrote it."""
    return text.replace(_BREAK, "\n").split("\n")


@lru_cache(maxsize=4096)
def parse(text: str) -> NormRegion:
    """The region that `text` (also as one line) describes.

    Raises:
        RegionError: naming the line that cannot be read or has no meaning.
    """
    first, *rest = lines(text)
    head = _SPACE.match(first)
    if not head:
        raise RegionError(f"{first!r}: expected 'space [*, ..., D]'")
    heads, rank = int(head[2] or 1), head[1].count("*") + 1
    lane = heads * int(head[3])
    inputs, scalars, body, outputs = [], [], [], []
    for line in rest:
        try:
            if m := _IN.match(line):
                dims = tuple("*" if w == "*" else int(w) for w in _words(m[3]))
                inputs.append(Operand(m[1], m[2], dims))
            elif line.startswith("scalar "):
                scalars += _words(line[len("scalar "):])
            elif m := _OUT.match(line):
                outputs.append(Output(m[1], m[2], tuple(map(int, _words(m[3])))))
            elif m := _LINE.match(line):
                body.append(Line(m[1], m[2], m[3], tuple(map(_arg, _words(m[4])))))
            else:
                raise ValueError("not a line of a region")
        except RegionError:
            raise
        except ValueError as error:
            raise RegionError(f"{line!r}: {error}") from None
    return NormRegion(lane, rank, tuple(inputs), tuple(scalars), tuple(body), tuple(outputs), heads)


def dense_strides(sizes: Sequence, order: Sequence[int]) -> tuple:
    """Strides of a dense tensor of `sizes` whose dims lie in memory as `order` says, outermost first.

    Works on ints and SymInts; a size 0 counts as 1, as in `torch.empty`."""
    strides: list = [1] * len(sizes)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        size = sizes[dim]
        # A SymInt is never compared here (that would guard): Dynamo specialises sizes 0 and 1.
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(strides)


def broadcast_sizes(region: NormRegion, shapes: Sequence[Sequence]) -> tuple:
    """Sizes of the space for inputs of `shapes` (ints or SymInts), in the order of `region.inputs`.

    A dim of the space takes its size from an input whose pattern has "*" there; a dim that no input
    has is of size 1."""
    sizes: list = [1] * region.outer + [region.lane]
    for operand, shape in zip(region.inputs, shapes):
        shift = region.rank - len(operand.dims)
        for i, dim in enumerate(operand.dims[:-1]):
            if dim == "*" and (not isinstance(shape[i], int) or shape[i] != 1):
                sizes[shift + i] = shape[i]
    return tuple(sizes)


def literal(value: float) -> float:
    """A python number as a literal of a region; RegionError for NaN, which has no stable text."""
    value = float(value)
    if math.isnan(value):
        raise RegionError("a NaN literal")
    return value
