"""A site: the nodes that one fused op replaces, and the region that gives their meaning.

`Norm` is what a pattern's matcher finds: one normalisation, however spelled. `assemble` turns a norm and
the nodes grown round it into a `Site`; it raises `Decline` where no region says exactly what the nodes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .across import walks, why_not
from .effects import value_of
from .graph import Lens, hint, same, same_shape
from .heads import Heads
from .kernels.pointwise import POINTWISE
from .kernels.reference import DTYPE_WORDS
from .kernels.region import Line, NormRegion, Operand, Output, dense_strides
from .kinds import REGROUPING_VIEWS, STRIDE_FREE_VIEWS
from .remedies import ALSO
from .updates import without_inplace
from .views import Step, replay

#: what a node must yield to be a run-time scalar of a region
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class Decline(Exception):
    """Why a site cannot be fused, and the node that caused it."""

    def __init__(self, reason: str, node: Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node

    def __add__(self, other: Decline) -> Decline:
        """Both reasons, which hold at once, at the node of the first."""
        reasons = dict.fromkeys((*self.reason.split(ALSO), *other.reason.split(ALSO)))
        return Decline(ALSO.join(reasons), self.node)


@dataclass(frozen=True)
class Norm:
    """One normalisation in the graph.

    Attributes:
        op: "layer_norm", "rms_norm", "normalize" or "l2_norm" (kernels/region.py gives their meaning).
        value: what is normalised; weight, bias: tensors of the normalised shape, or None.
        eps: a number, or the node of a run-time scalar.
        shape: the normalised sizes, static; several where several dims are normalised.
        out: the node of the result.
        interior: the nodes that the norm consists of, `out` among them.
        dtype: the dtype in which the norm's line works and yields; operands are cast to it first.
        spelling: "layer_norm", "rms_norm", "normalize", or "handwritten ...", for the report.
        axis: the normalised dim, where it is a single one that is not the last (channels of NCHW).
    """

    op: str
    value: Node
    weight: Node | None
    bias: Node | None
    eps: float | Node
    shape: tuple[int, ...]
    out: Node
    interior: frozenset[Node]
    dtype: torch.dtype
    spelling: str
    axis: int | None = None

    @property
    def lane(self) -> int:
        lane = 1
        for size in self.shape:
            lane *= size
        return lane


@dataclass(frozen=True)
class Term:
    """What an op of a region (kernels/region.py) yields of values of the graph and of other terms. A lane op
    (`dtype` None) keeps the dtype of its argument."""

    op: str
    args: tuple[Node | Term, ...]
    dtype: torch.dtype | None = None

    @property
    def values(self) -> tuple[Node, ...]:
        """The nodes that the term is made of."""
        found = [x for arg in self.args for x in ((arg,) if isinstance(arg, Node) else arg.values)]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Composite:
    """Nodes that together compute `term`, which `out` yields; nobody else reads the others."""

    term: Term
    out: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class Moved:
    """A view that moves the lane, the last dim of what it is a view of, to dim `axis`."""

    view: Node
    axis: int


@dataclass
class Site:
    """What `rewrite` needs: `region(inputs, scalars)`, then `finish` on each result, gives `outputs`."""

    pattern: str
    norms: tuple[Norm, ...]
    interior: frozenset[Node]
    region: NormRegion
    inputs: tuple[tuple[Node, tuple[Step, ...]], ...]
    scalars: tuple[float | Node, ...]
    outputs: tuple[Node, ...]
    finish: tuple[Step, ...] = ()
    #: fakes of the operands after their steps, for byte counts and checks
    fakes: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    #: the sites that this one joins in one launch; the report speaks of each
    parts: tuple[Site, ...] = field(default=(), repr=False)
    #: the normalised dim of the outputs, where it is not the last
    axis: int | None = None
    #: what of `interior` is a term
    composites: tuple[Composite, ...] = field(default=(), repr=False)
    #: for each norm, the heads as which what is below it sees its lane; empty where none does
    heads: tuple[Heads, ...] = field(default=(), repr=False)

    @property
    def anchor(self) -> Node:
        return self.norms[0].out

    @property
    def finishes(self) -> tuple[tuple[Step, ...], ...]:
        """For each output, the views that follow the op."""
        return (self.finish,) * len(self.outputs)

    @property
    def results(self) -> tuple[int, ...]:
        """For each output, which of the op's results it is."""
        return tuple(range(len(self.outputs)))

    @property
    def copied(self) -> tuple[Node, ...]:
        """The operands that are read through a contiguous copy."""
        return tuple(node for node, steps in self.inputs
                     if any(step.target == "contiguous" for step in steps))


def pointwise_word(lens: Lens, node: Node) -> str | None:
    """The word of kernels/pointwise.py that `node` computes exactly, or None."""
    word = lens.kind(node)
    args, kwargs = without_inplace(node) if node in lens.updates else (node.args, dict(node.kwargs))
    if word == "gelu":
        approximate = kwargs.pop("approximate", args[1] if len(args) > 1 else "none")
        return None if kwargs else {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    if word == "pow":
        power = args[1] if len(args) == 2 else None
        return {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(power) \
            if isinstance(power, (int, float)) and not kwargs else None
    if word == "rsub":
        return "sub" if not kwargs and len(args) == 2 else None
    if word not in POINTWISE:
        return None
    if kwargs.pop("alpha", 1) != 1 or kwargs.pop("inplace", False) or kwargs:
        return None
    return word if len(args) == POINTWISE[word].arity else None


def pointwise_args(lens: Lens, node: Node) -> tuple:
    """The operands of a pointwise node in the order of its word."""
    args = without_inplace(node)[0] if node in lens.updates else node.args
    if lens.kind(node) == "rsub":
        return (args[1], args[0])
    return tuple(args[:1]) if lens.kind(node) in ("pow", "gelu") else tuple(args)


class Assembler:
    """Writes the region of a set of nodes (see `assemble`)."""

    def __init__(self, lens: Lens, norms: Sequence[Norm], interior: frozenset[Node],
                 result: Node, regroup: Node | None, composites: Sequence[Composite], expands: bool,
                 heads: Sequence[Heads], moved: Moved | None):
        self.expands = expands
        self.heads = heads[0] if heads else None
        self.whole = {each.view: each.source for each in heads}
        self.lens, self.interior, self.regroup, self.moved = lens, interior, regroup, moved
        self.composites = {composite.out: composite for composite in composites}
        self.norms = {norm.out: norm for norm in norms if norm.op}
        first = norms[0]
        self.normal_shape = first.shape
        value = lens.tensor(heads[0].source if heads else result if regroup is None else regroup.args[0])
        self.device = value.device
        self.segment = lens.segment[result]
        self.flat = len(first.shape)
        self.rank = value.dim()
        self.axis = first.axis if moved is None else moved.axis
        #: the normalised dim is moved to the end of every operand (but above `moved`, where it is there)
        self.to_end = () if self.axis is None else (Step.method("movedim", self.axis, -1),)
        value = replay(value, self.to_end)
        #: sizes of the space: outer dims of the value, then the lane
        self.space = (*value.shape[:value.dim() - self.flat], first.lane)
        self.inputs: list[tuple[Node, tuple[Step, ...]]] = []
        self.fakes: list[torch.Tensor] = []
        self.operands: list[Operand] = []
        self.scalars: list[float | Node] = []
        self.scalar_names: list[str] = []
        self.lines: list[Line] = []
        self.memo: dict = {}
        self.steps: dict = {}
        self.dtypes: dict[str, str] = {}

    def output(self, node: Node) -> tuple[str, torch.Tensor]:
        """The name of the output `node`, and its fake in the shape of the space."""
        heads, fake = self.heads, self.lens.tensor(node)
        if heads is None:
            return self.emit(node), replay(fake, self.to_end)
        if not same_shape(fake.shape, self.lens.tensor(heads.view).shape):
            raise Decline("outputs of different shapes", node)
        if not heads.is_run(replay(fake, heads.apart)):
            raise Decline(f"the result's strides {tuple(fake.stride())} are not dense", node)
        return self.emit(node, heads.joined), replay(fake, heads.joined)

    def emit(self, node: Node, steps: tuple[Step, ...] = ()) -> str:
        """The name of the value of `node` after `steps`."""
        key = (node, steps, self.to_end)
        if key not in self.memo:
            self.memo[key] = self._emit(node, steps)
        return self.memo[key]

    def _emit(self, node: Node, steps) -> str:
        if node in self.norms:
            return self._norm(self.norms[node], steps)
        if node not in self.interior:
            return self._operand(node, steps)
        lens = self.lens
        if node in self.whole and steps == self.heads.joined:
            return self.emit(self.whole[node])
        if node in self.composites:
            return self._term(self.composites[node].term, steps, node)
        if node is self.regroup:
            return self.emit(node.args[0], steps)
        if self.moved is not None and node is self.moved.view:
            below, self.to_end = self.to_end, ()
            name = self.emit(node.args[0], steps)
            self.to_end = below
            return name
        word = lens.kind(node)
        if word == "copy" or lens.is_identity(node) or \
                (word in REGROUPING_VIEWS and not lens.is_view(node)):
            return self.emit(node.args[0], steps)
        if lens.is_view(node):
            step = self.steps.setdefault(node, Step.of(node))
            return self.emit(node.args[0], (step, *steps))
        dtype = self._word(lens.tensor(node).dtype, node)
        if word == "to":
            return self.cast(self.emit(node.args[0], steps), dtype)
        op = pointwise_word(lens, node)
        if op is None:
            raise Decline(f"{word or node.target} has no place in a region", node)
        args = tuple(self._argument(arg, steps, node) for arg in pointwise_args(lens, node))
        return self.line(dtype, op, args)

    def _term(self, term: Term, steps, node: Node) -> str:
        args = tuple((self._term if isinstance(arg, Term) else self._argument)(arg, steps, node)
                     for arg in term.args)
        dtype = self.dtypes[args[0]] if term.dtype is None else self._word(term.dtype, node)
        if term.op == "cast":
            return self.cast(*args, dtype)
        key = (term.op, dtype, args)  # q and k repeat the elements of one table
        if key not in self.memo:
            self.memo[key] = self.line(dtype, term.op, args)
        return self.memo[key]

    def _argument(self, arg, steps, node: Node):
        if isinstance(arg, Node):
            fake = self.lens.tensor(arg)
            if fake is not None:
                if not steps or same_shape(fake.shape, self.lens.tensor(node).shape):
                    return self.emit(arg, steps)
                if self.heads is not None and steps == self.heads.joined:
                    return self.emit(arg, self._steps_above(fake))
                shape = self.lens.tensor(node).shape
                if self.expands and fake.dim() > 1 and all(isinstance(n, int) for n in shape):
                    step = self.steps.setdefault((arg, tuple(shape)), Step.method("expand", *shape))
                    return self.emit(arg, (step, *steps))
                # A view below the norm leaves the lane alone, and so all that has only a lane.
                if fake.dim() > 1 or not self._below(node):
                    raise Decline("a view is taken of a broadcast operand", arg)
                return self.emit(arg)
            if not isinstance(value_of(arg), NUMBERS):
                raise Decline("an operand is no tensor", arg)
            return self.scalar(arg)
        if isinstance(arg, bool) or not isinstance(arg, (int, float)):
            raise Decline(f"argument {arg!r} is no number", node)
        return float(arg)

    def _steps_above(self, fake: torch.Tensor) -> tuple[Step, ...]:
        """The views by which an operand that broadcasts over heads becomes one of the region."""
        if fake.dim() < 2:
            return ()
        steps = self.heads.shared if self.heads.has_one(fake) else self.heads.joined
        widen = len(self.heads.order) - fake.dim()
        return (*self.steps.setdefault(widen, (Step.method("unsqueeze", 0),) * widen), *steps)

    def _below(self, node: Node) -> bool:
        """Whether a pointwise node computes with a norm's result."""
        return any(arg in self.norms or (arg in self.interior and self._below(arg))
                   for arg in node.all_input_nodes)

    def _norm(self, norm: Norm, steps: tuple[Step, ...]) -> str:
        # Views below the norm (`steps`) permute or select rows, so they may be taken above it.
        dtype = self._word(norm.dtype, norm.out)
        value = self.cast(self.emit(norm.value, steps), dtype)
        vectors = [None if v is None else self.emit(v) for v in (norm.weight, norm.bias)]
        if self.lens.tensor(norm.value).dtype != norm.dtype:  # autocast casts all operands
            vectors = [None if v is None else self.cast(v, dtype) for v in vectors]
        vectors = vectors if norm.op == "layer_norm" else vectors[:1]
        eps = norm.eps if isinstance(norm.eps, Node) else None
        eps = self.emit(eps) if self.lens.tensor(eps) is not None else self.scalar(norm.eps)
        return self.line(dtype, norm.op, (value, *vectors, eps))

    def line(self, dtype: str, op: str, args: tuple) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(Line(name, dtype, op, args))
        self.dtypes[name] = dtype
        return name

    def cast(self, name: str, dtype: str) -> str:
        if self.dtypes[name] == dtype:
            return name
        key = (name, dtype)
        if key not in self.memo:
            self.memo[key] = self.line(dtype, "cast", (name,))
        return self.memo[key]

    def scalar(self, value: float | Node) -> str:
        for name, known in zip(self.scalar_names, self.scalars):
            if known is value or (isinstance(known, float) and known == value):
                return name
        self.scalar_names.append(f"s{len(self.scalars)}")
        self.scalars.append(value if isinstance(value, Node) else float(value))
        return self.scalar_names[-1]

    def _word(self, dtype: torch.dtype, node: Node) -> str:
        if dtype not in DTYPE_WORDS:
            raise Decline(f"dtype {str(dtype).removeprefix('torch.')} is not supported", node)
        return DTYPE_WORDS[dtype]

    def _operand(self, node: Node, steps) -> str:
        fake = self.lens.tensor(node)
        if fake is None:
            raise Decline("an operand is no tensor", node)
        if steps and fake.requires_grad and _foreign_to_autocast(fake):
            # Eager takes the view of the cast result. The backward of a split is a `cat`, which autocast
            # refuses for a half-precision dtype that is not its own.
            raise Decline("a view above a cast, of a dtype that autocast does not know", node)
        if self.heads is not None and steps[-1:] == self.heads.joined[-1:] and \
                not self.heads.is_run(replay(fake, steps[:-1])):
            raise Decline("an operand does not have the normalised dims", node)
        fake = replay(fake, steps)
        if self.to_end and fake.dim():
            widen = tuple(Step.method("unsqueeze", 0) for _ in range(self.rank - fake.dim()))
            fake = replay(fake, (*widen, *self.to_end))
            steps = (*steps, *widen, *self.to_end)
        # Several normalised dims are one lane: operands are flattened by a view, which must exist.
        if self.flat > 1 and fake.dim() > 1:
            fake, steps = self._flatten(node, fake, steps)
        if fake.device != self.device:
            raise Decline(f"operands on {fake.device} and {self.device}", node)
        dims = self._dims(node, fake)
        if dims and dims[-1] != 1 and not walks(fake):
            if steps or not self._is_copied(node):
                raise Decline(why_not(fake), node)
            steps = (Step.method("contiguous"),)
            fake = replay(fake, steps)
        key = self._place(node, steps)
        if key in self.memo:
            return self.memo[key]
        name = self.memo[key] = f"x{len(self.inputs)}"
        dtype = self._word(fake.dtype, node)
        self.inputs.append((node, steps))
        self.fakes.append(fake)
        self.operands.append(Operand(name, dtype, dims))
        self.dtypes[name] = dtype
        return name

    def _is_copied(self, node: Node) -> bool:
        """Whether `node` is what a library norm reads, of which PyTorch too makes a contiguous copy. Copies
        are shared by all who read one, so that nobody may write what they are made of."""
        return not self.lens.is_mutated(node) and \
            any(norm.value is node and norm.spelling == "layer_norm" for norm in self.norms.values())

    def _place(self, node: Node, steps) -> tuple:
        """What an operand reads, in words that are the same for equal views of one tensor (cos[None] of
        q's embedding, and of k's). A view of another segment is itself: under no_grad it has no gradient."""
        lens = self.lens
        while lens.segment[node] == self.segment and lens.is_view(node) and not lens.is_mutated(node) and \
                (lens.is_identity(node) or lens.kind(node) in STRIDE_FREE_VIEWS):
            if not lens.is_identity(node):
                steps = (Step.of(node), *steps)
            node = node.args[0]
        return (node, *(step.key for step in steps))

    def _flatten(self, node: Node, fake: torch.Tensor, steps):
        k = self.flat
        if fake.dim() < k or not same_shape(fake.shape[-k:], self.normal_shape):
            raise Decline("an operand does not have the normalised dims", node)
        strides = dense_strides(tuple(fake.shape[-k:]), range(k))
        if not all(same(a, b) or same(n, 1)
                   for a, b, n in zip(fake.stride()[-k:], strides, self.normal_shape)):
            raise Decline("the normalised dims are not one run of memory", node)
        step = Step.method("flatten", -k)
        return replay(fake, (step,)), (*steps, step)

    def _dims(self, node: Node, fake: torch.Tensor) -> tuple:
        rank = len(self.space)
        if fake.dim() > rank:
            raise Decline(f"an operand of {fake.dim()} dims in a space of {rank}", node)
        lane = self.space[-1]
        if self.heads is not None and fake.dim() and same(fake.shape[-1], self.heads.size):
            lane = self.heads.size
        dims: list = []
        for size, space in zip(fake.shape, (*self.space[:-1], lane)[rank - fake.dim():]):
            if same(size, space):
                dims.append("*")
            elif same(size, 1):
                dims.append(1)
            else:
                raise Decline(f"an operand of shape {tuple(fake.shape)} does not broadcast to "
                              f"{tuple(self.space)}", node)
        if dims:
            dims[-1] = lane if same(fake.shape[-1], lane) else 1
        return tuple(dims)


def _foreign_to_autocast(fake: torch.Tensor) -> bool:
    """Whether autocast is on, and `fake` of a half-precision dtype that is not autocast's."""
    kind = fake.device.type
    return fake.dtype in (torch.bfloat16, torch.float16) and kind != "meta" and \
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != fake.dtype


def layout_order(node: Node, fake: torch.Tensor) -> tuple[int, ...]:
    """The order of dims in memory, outermost first, of a dense fake; Decline when it is not dense."""
    def key(dim):
        # Ties come from dims of size 1: the larger dim is the outer one.
        return -hint(fake.stride(dim)), -hint(fake.shape[dim])

    order = tuple(sorted(range(fake.dim()), key=key))
    if not same_shape(dense_strides(tuple(fake.shape), order), fake.stride()):
        order = tuple(range(fake.dim()))
        if not same_shape(dense_strides(tuple(fake.shape), order), fake.stride()):
            raise Decline(f"the result's strides {tuple(fake.stride())} are not dense", node)
    return order


def assemble(lens: Lens, pattern: str, norms: Sequence[Norm], interior: frozenset[Node],
             outputs: Sequence[Node], regroup: Node | None = None,
             composites: Sequence[Composite] = (), expands: bool = False,
             heads: Sequence[Heads] = (), moved: Moved | None = None) -> Site:
    """The site that replaces `interior` and yields `outputs` (nodes of it).

    `regroup` is a reshape inside, above the norm: the region works on the shape before it, and the
    reshape is done on the (contiguous) results instead. `composites` are the terms inside. `expands`:
    where a view is taken of a broadcast operand, it is taken of the operand expanded, if sizes are static.
    `heads`: of each norm, where `outputs` are in the shape of their views.
    `moved` is a view inside, below the norm, that moves the lane; the outputs are below it.

    Raises:
        Decline: where the nodes have no exact region, with the node that is in the way.
    """
    builder = Assembler(lens, norms, interior, outputs[0], regroup, composites, expands, heads, moved)
    written = []
    finish: tuple[Step, ...] = ()
    if regroup is not None:
        finish = (Step.of(regroup),)
    elif heads:
        finish = heads[0].finish
    elif builder.to_end:
        finish = (Step.method("movedim", -1, builder.axis),)
    elif builder.flat > 1:
        finish = (Step.method("unflatten", -1, tuple(norms[0].shape)),)
    for node in outputs:
        name, fake = builder.output(node)
        order = layout_order(node, fake)
        if finish and not builder.to_end and not heads:
            if order != tuple(range(fake.dim())):
                raise Decline("the result is not contiguous after a reshape", node)
            order = tuple(range(len(builder.space)))
        elif not same_shape(fake.shape, builder.space):
            raise Decline("outputs of different shapes", node)
        if name in {operand.name for operand in builder.operands}:
            raise Decline("the site yields one of its inputs", node)
        written.append(Output(name, builder.dtypes[name], order))
    if norms[0].lane == 0:
        raise Decline("the normalised size is 0", norms[0].out)
    region = NormRegion(norms[0].lane, len(builder.space), tuple(builder.operands),
                        tuple(builder.scalar_names), tuple(builder.lines), tuple(written),
                        heads[0].count if heads else 1)
    return Site(pattern, tuple(norms), interior, region, tuple(builder.inputs),
                tuple(builder.scalars), tuple(outputs), finish, tuple(builder.fakes), axis=builder.axis,
                composites=tuple(composites), heads=tuple(heads))
