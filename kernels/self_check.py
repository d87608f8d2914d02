"""The self-check: a kernel's results against the region's reference, on the tensors of a live call.

The bound is the project's own: the error against float64 is at most twice that of the reference, run in
the model's own dtypes, plus one unit in the last place of the output's dtype; NaN and infinities stand
where the reference has them. Of a large call a sample of whole rows is compared, so that the memory and
the time of a check do not grow with the tensors.

Not all rows tell right from wrong. Where a row is constant but for rounding, the normalised values are
rounding errors divided by their own size, in the reference too, and whatever a kernel gives is within twice
its error; a row of zeros, or a weight of zeros, hides what the norm is. A row tells something where a norm
that is off by `OFF` would be outside the bound there. Rows that tell nothing are not let decide over the
others' bound, and a finding says whether enough rows told something (`Finding.tells`).

What every check computes on the CPU it takes in pieces so small that PyTorch stays in the calling thread (but
for exp, tanh and sqrt, which take others from few elements on). Larger tensors wake a thread for each core,
op by op, and wait for all of them: where the cores are busy, as they are while kernels compile, every op then
lasts until the scheduler has let the last thread run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, product
from math import prod

import torch

from .reference import program
from .region import NORMS, Line, NormRegion

#: Bytes that the values of the sampled rows take together in float64; two rows are compared in any case.
BUDGET = 4 * 2**20

#: The most rows that one check compares.
MAX_ROWS = 512

#: Elements of a piece (a longer row is a piece of its own). ATen takes other threads from 2**15 on, and for
#: gelu beyond this.
PIECE = 2**14

#: The fewest copies of the rows on which the reference's own error is measured again (`_own_error`).
MIN_COPIES = 4

#: Copies of what has no rows (`_own_error`).
MOST_ROUNDS = 64

FEW_PERCENT = 2.0**-6

#: The factor of a wrong norm that a row has to show.
OFF = 1.125

#: The fewest of the rows that have to show it, in each output behind a norm.
TELLING = 0.25

#: Float64 results have no better reference; their error in units of the largest value.
F64_ERROR = 1e-13


@dataclass(frozen=True)
class Finding:
    """What a comparison found: the element that is worst against its bound.

    Attributes:
        output: index of the output that it is in.
        error: its distance from float64 (inf for NaN or infinity where the reference has none).
        allowed: what the bound allows there.
        reference_error: the largest distance of the reference's own results from float64 in that output.
        rows, of: rows compared, and rows of the call.
        tells: whether a wrong norm would have been seen; False where the values of the call hide one.
    """

    output: int
    error: float
    allowed: float
    reference_error: float
    rows: int
    of: int
    tells: bool = True

    @property
    def within(self) -> bool:
        """Whether the kernel is right, as far as this comparison saw."""
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """error / allowed."""
        return self.error / self.allowed

    def __str__(self) -> str:
        if math.isinf(self.error):
            return "NaN or infinity where PyTorch has none, or none where it has"
        return (f"error {self.error:.2g} against float64 where {self.allowed:.2g} is allowed "
                f"(PyTorch's own: {self.reference_error:.2g})")


def compare(region: NormRegion, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
            outputs: Sequence[torch.Tensor], tile_rows: int = 1) -> Finding:
    """Compare `outputs`, which a kernel made of `inputs` and `scalars`, with the reference.

    Waits for the device. Draws nothing from torch's or Python's global random state.

    Args:
        inputs, outputs: tensors of one call, on one device, with at least one element each.
        tile_rows: rows of the kernel's tiles; rows at their edges are part of a sample.

    Raises:
        torch.OutOfMemoryError, or what the device raises for a kernel that broke it.
    """
    space = tuple(outputs[0].shape)
    rows = sample_rows(space[:-1], row_limit(region), tile_rows)
    by_row, spread = _by_row(region)
    with torch.no_grad():
        index = _index(space[:-1], rows, outputs[0].device)
        taken = [x.expand(*space[:-1], x.shape[-1])[index] if s else x.reshape(x.shape[-1:])
                 for x, s in zip(inputs, spread)]
        low = program(by_row)(*taken, *scalars)
        # On the CPU: not every accelerator computes in float64.
        taken, ours, low = ([x.cpu() for x in xs] for xs in (taken, [x[index] for x in outputs], low))
        exact = float64_reference(by_row, taken, scalars)
        found = _look(by_row, spread, scalars, taken, ours, low, exact)
        tells, clear = _telling(by_row, scalars, taken, low, exact, found)
        if clear is not None and any(spread) and all(error <= allowed for error, allowed, _ in found):
            # What the others' errors have excused is held to the bound of the rows that tell something.
            taken = [x[clear] if s else x for x, s in zip(taken, spread)]
            ours, low, exact = ([x[clear] for x in xs] for xs in (ours, low, exact))
            found = _look(by_row, spread, scalars, taken, ours, low, exact)
            tells, _ = _telling(by_row, scalars, taken, low, exact, found, len(rows))
    worst = max(range(len(found)), key=lambda i: found[i][0] / found[i][1])
    return Finding(worst, *found[worst], len(rows), prod(space[:-1]), tells)


def _look(by_row: NormRegion, spread: Sequence[bool], scalars: Sequence[float], inputs, ours, low,
          exact) -> list[tuple[float, float, float]]:
    """`_worst` of each output; where one is outside, with the reference's error measured again."""
    found = [_worst(*three) for three in zip(ours, low, exact)]
    if any(error > allowed for error, allowed, _ in found):
        own = _own_error(by_row, inputs, spread, scalars)
        found = [_worst(*four) for four in zip(ours, low, exact, own)]
    return found


def _telling(by_row: NormRegion, scalars: Sequence[float], inputs, low, exact,
             found: Sequence[tuple[float, float, float]], of: int = 0) -> tuple[bool, torch.Tensor | None]:
    """(whether enough rows would show a wrong norm under the bound that `found` has, the rows that would
    show one under the bound of their own error alone; None: all do, or none).

    of: the number of rows that "enough" is a part of, where it is not that of `exact`.
    """
    behind = _behind_norms(by_row)
    if not behind:
        return True, None
    wrong = float64_reference(_off(by_row), inputs, scalars)
    tells, clear = True, None
    for i in behind:
        info = torch.finfo(low[i].dtype)
        shift, noise, size = _in_pieces(_row_maxima, [wrong[i], low[i], exact[i]])[0].unbind(-1)
        unit = _ulp(size, info)
        # A comparison with NaN is False: rows without numbers tell nothing.
        showing = (shift > 2 * found[i][2] + unit).sum().item()
        tells = tells and showing >= TELLING * (of or len(shift))
        shown = shift > 2 * noise + unit
        clear = shown if clear is None else clear & shown
    return tells, clear if clear.any() and not clear.all() else None


def _row_maxima(wrong: torch.Tensor, low: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor]:
    """Of each row the largest change by a wrong norm, error of the reference, and value."""
    return (torch.stack([x.abs().amax(-1) for x in (wrong - exact, low.double() - exact, exact)], -1),)


def float64_reference(by_row: NormRegion, inputs: Sequence[torch.Tensor],
                      scalars: Sequence[float]) -> Sequence[torch.Tensor]:
    """The reference in float64 of a region over a list of rows; CPU tensors of any dtypes."""
    run = program(_wide(by_row), written_out=True)
    return _in_pieces(lambda *rows: run(*[x.double() for x in rows], *scalars), inputs)


def in_float64(x: torch.Tensor) -> torch.Tensor:
    """A CPU matrix or vector in float64."""
    return _in_pieces(lambda rows: [rows.double()], [x])[0]


def _in_pieces(run: Callable[..., Sequence[torch.Tensor]],
              inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`run(*inputs)`, a few rows at a time: of matrices, which have all the same number of rows, and of other
    tensors, which are the same for each row. It gives matrices with these rows."""
    rows = max((len(x) for x in inputs if x.dim() == 2), default=1)
    step = max(1, PIECE // max(x.shape[-1] if x.dim() else 1 for x in inputs))
    if rows <= step:
        return run(*inputs)
    whole: list[torch.Tensor] = []
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        results = run(*[x[piece] if x.dim() == 2 else x for x in inputs])
        whole = whole or [x.new_empty(rows, x.shape[-1]) for x in results]
        for x, result in zip(whole, results):
            x[piece].copy_(result)
    return whole


def _worst(ours: torch.Tensor, low: torch.Tensor, exact: torch.Tensor,
           own: float = 0.0) -> tuple[float, float, float]:
    """(error, allowed error, the reference's error) at the worst element of one output.

    own: what is known of the reference's error from elsewhere.
    """
    info = torch.finfo(low.dtype)
    pieces = []
    for piece in zip(*(x.flatten().split(PIECE) for x in (ours, low, exact))):
        measured = _measured(*piece, info)
        if measured is None:
            return math.inf, 1.0, own
        if measured[0].any():
            pieces.append(measured)
    if not pieces:
        return 0.0, 1.0, own
    own = max(own, *((low - exact).abs().max().item() for _, _, low, exact in pieces))
    more = 0.0
    if info.bits == 64:
        more = F64_ERROR * max(exact.abs().max().item() for *_, exact in pieces)
    found = []
    for number, ours, _, exact in pieces:
        allowed = 2 * own + _ulp(exact, info) + more
        errors = (ours - exact).abs()
        at = torch.where(number, errors / allowed, -1.0).argmax()
        found.append(torch.stack((errors[at], allowed[at])))
    errors, allowed = torch.stack(found, 1)
    at = (errors / allowed).argmax()
    return errors[at].item(), allowed[at].item(), own


def _measured(ours: torch.Tensor, low: torch.Tensor, exact: torch.Tensor,
              info: torch.finfo) -> tuple[torch.Tensor, ...] | None:
    """(where there are numbers to compare, then the three in float64, 0 elsewhere). None: NaN or infinity
    where the reference has none, or none where it has."""
    number = ~low.isnan()
    strange = not torch.equal(~ours.isnan(), number)
    if info.bits == 64:  # the reference overflows where float64 does: infinities are compared, not measured
        number &= low.isfinite()
        strange = strange or not torch.equal(ours.isfinite(), low.isfinite())
    if strange:
        return None
    number &= ~exact.isnan()
    ours, low, exact = (torch.where(number, x.double(), 0.0) for x in (ours, low, exact))
    if info.bits < 64:
        # An infinity counts as the first number that the dtype does not reach: one that rounding alone
        # decides is then within the bound, any other far outside.
        top = 2.0 ** math.frexp(info.max)[1]
        ours, low, exact = (x.clamp(-top, top) for x in (ours, low, exact))
    return number, ours, low, exact


def _ulp(x: torch.Tensor, info: torch.finfo) -> torch.Tensor:
    """One unit in the last place of a dtype at each |x|."""
    size = x.abs().clamp(info.smallest_normal, torch.finfo(x.dtype).max)
    # Not by log2, which takes other threads from few elements on.
    return size / (2 * torch.frexp(size).mantissa) * info.eps


def _own_error(by_row: NormRegion, inputs: Sequence[torch.Tensor], spread: Sequence[bool],
               scalars) -> list[float]:
    """The reference's error, output by output, on copies of the rows that differ a little: half of them in
    the last bits, half by a few percent.

    On few elements the reference may be right by luck, and twice its error then says nothing: of right
    fp32 kernels, 1 in 300 is outside the bound on tensors of one or two short rows. float64's error is what
    moving the inputs in the last bits does, as there is nothing more exact to compare it with.
    """
    rows = max(x.shape[0] if s else 1 for x, s in zip(inputs, spread))
    copies = max(MIN_COPIES, min(MAX_ROWS, row_limit(by_row)) // rows)
    draw = torch.Generator().manual_seed(0)  # of its own: nobody's random numbers change

    def moved(x: torch.Tensor, count: int) -> torch.Tensor:
        many = x.expand(count, *x.shape).double()
        by = torch.randint(-2, 3, many.shape, generator=draw).double() * torch.finfo(x.dtype).eps
        if by_row.compute != "f64":
            by[::2] *= FEW_PERCENT / torch.finfo(x.dtype).eps
        return (many * (1 + by)).to(x.dtype).flatten(0, 1)

    worst = [0.0] * len(by_row.outputs)
    # What is the same for all rows may be what is normalised: but in the first round it is moved as well, in
    # the last bits and by a few percent by turns.
    for number in range(MIN_COPIES if any(spread) else MOST_ROUNDS):
        here = [x if s or not number else moved(x[None], 2)[number % 2] for x, s in zip(inputs, spread)]
        near = [moved(x, copies) if s else x for x, s in zip(here, spread)]
        low = program(by_row)(*near, *scalars)
        if by_row.compute == "f64":
            exact = [x.repeat(copies if any(spread) else 1, 1) for x in program(by_row)(*here, *scalars)]
        else:
            exact = float64_reference(by_row, near, scalars)
        errors = [(a.double() - b).abs() for a, b in zip(low, exact)]
        worst = [max(w, e[e.isfinite()].max().item() if e.isfinite().any() else 0.0)
                 for w, e in zip(worst, errors)]
    return worst


# -- the sample --------------------------------------------------------------------------------------


def row_limit(region: NormRegion) -> int:
    """How many rows one check of `region` compares at most."""
    values = len(region.inputs) + len(region.body) + 2 * len(region.outputs)
    return max(2, min(MAX_ROWS, BUDGET // (8 * values * max(region.lane, 1))))


def sample_rows(outer: Sequence[int], limit: int, tile_rows: int = 1) -> list[tuple[int, ...]]:
    """Coordinates of at most `limit` rows of a space with outer dims `outer`: the first and the last, those
    at the edges of tiles and dims, and as many others as fit, always the same ones."""
    total = prod(outer)
    if total <= limit:
        return list(product(*map(range, outer)))
    last = [n - 1 for n in outer]
    wanted = [tuple(0 for _ in outer), tuple(last)]
    edges = (tile_rows - 1, tile_rows, 2 * tile_rows)
    for dim, size in enumerate(outer):
        for at in {*edges, (size - 1) // tile_rows * tile_rows, size - 1} & set(range(size)):
            wanted += [(*first[:dim], at, *first[dim + 1:]) for first in (wanted[0], wanted[1])]
    wanted += [_unravel(at, outer) for at in edges if at < total]
    chosen = dict.fromkeys(wanted[:limit])
    draw = random.Random(total)  # of its own: nobody's random numbers change
    while len(chosen) < limit:
        chosen[_unravel(draw.randrange(total), outer)] = None
    return sorted(chosen)


def _unravel(at: int, outer: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(outer):
        at, rest = divmod(at, size)
        found.append(rest)
    return tuple(reversed(found))


def _index(outer: Sequence[int], rows: Sequence[tuple[int, ...]], device) -> tuple[torch.Tensor, ...]:
    """An index that takes `rows` of a tensor over the space; of one without outer dims, the whole."""
    if not outer:
        return (None,)
    return tuple(torch.tensor(rows, dtype=torch.int64).to(device).unbind(1))


# -- the region of a sample --------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _by_row(region: NormRegion) -> tuple[NormRegion, tuple[bool, ...]]:
    """(the same arithmetic over a list of rows, per input whether it has rows: the others are left as
    they are)."""
    spread = tuple(any(dim == "*" for dim in x.dims[:-1]) for x in region.inputs)
    inputs = tuple(replace(x, dims=("*", *x.dims[-1:]) if s else x.dims[-1:])
                   for x, s in zip(region.inputs, spread))
    outputs = tuple(replace(out, order=(0, 1)) for out in region.outputs)
    return replace(region, rank=2, inputs=inputs, outputs=outputs), spread


@lru_cache(maxsize=1024)
def _off(region: NormRegion) -> NormRegion:
    """`region` with all its norms off by `OFF`, in front of their weights and biases."""
    taken = {*region.dtype_of, *region.scalars}
    names = (name for n in count() if (name := f"off{n}") not in taken)
    body: list[Line] = []
    for line in region.body:
        if line.op not in NORMS:
            body.append(line)
            continue
        value, *parameters, eps = line.args
        steps = [(line.op, (value, *[None] * len(parameters), eps)), ("mul", (OFF,))]
        steps += [(op, (x,)) for op, x in zip(("mul", "add"), parameters) if x is not None]
        last = None
        for at, (op, args) in enumerate(steps):
            name = line.name if at == len(steps) - 1 else next(names)
            body.append(Line(name, line.dtype, op, args if last is None else (last, *args)))
            last = name
    return replace(region, body=tuple(body))


@lru_cache(maxsize=1024)
def _behind_norms(region: NormRegion) -> tuple[int, ...]:
    """The outputs that a norm goes into."""
    reached: set[str] = set()
    for line in region.body:
        if line.op in NORMS or reached.intersection(a for a in line.args if isinstance(a, str)):
            reached.add(line.name)
    return tuple(i for i, out in enumerate(region.outputs) if out.value in reached)


@lru_cache(maxsize=1024)
def _wide(region: NormRegion) -> NormRegion:
    """`region` in float64 throughout."""
    return replace(region, **{name: tuple(replace(x, dtype="f64") for x in getattr(region, name))
                              for name in ("inputs", "body", "outputs")})
