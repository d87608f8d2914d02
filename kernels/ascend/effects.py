"""Which memory an op reads and writes: what lint and cost know without running it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .mlir import Block, Func, Op, Value, is_memref

VIEWS = {
    "memref.subview",
    "memref.cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.view",
    "memref.reinterpret_cast",
    "memref.extract_strided_metadata",
    "memref.memory_space_cast",
}
# Ops without groups of operands, or whose first group is not all of the input: (inputs, outputs).
_POSITIONS = {
    "load": ([0], [1]),
    "store": ([0], [1]),
    "copy": ([0], [1]),
    "nd2nz": ([0], [1]),
    "fixpipe": ([0], [1]),
    "vbrc": ([0], [1]),
    "vtranspose": ([0], [1]),
    "varange": ([], [0]),
}


def reads_and_writes(op: Op) -> tuple[list[Value], list[Value]] | None:
    """Memrefs that a HIVM or memref op reads and writes; None if it touches none, or is a view.

    Temporary buffers are neither: they hold nothing before and after.
    """
    name = op.short_name
    if op.name == "memref.load":
        return [op.operands[0]], []
    if op.name == "memref.store":
        return [], [op.operands[1]]
    if not op.name.startswith("hivm.hir.") or name == "pointer_cast":
        return None
    if name == "mmadL1":
        groups = op.segments()
        bias = groups[9] if len(groups) > 9 else []
        return [*groups[0], *groups[1], *bias], groups[6]
    if name == "vdeinterleave":
        inputs, outputs = op.operands[:1], op.operands[1:]
    elif name in _POSITIONS:
        inputs, outputs = ([op.operands[i] for i in positions] for positions in _POSITIONS[name])
    elif name.startswith("v"):
        groups = op.segments()
        inputs, outputs = groups[0], groups[1] if len(groups) > 1 else []
    elif any(is_memref(operand.type) for operand in op.operands):
        inputs, outputs = op.operands, op.operands  # not known: assume the most
    else:
        return None
    return [v for v in inputs if is_memref(v.type)], [v for v in outputs if is_memref(v.type)]


@dataclass(frozen=True)
class Place:
    """Where an op stands: the ops around it, outermost first."""

    op: Op
    parents: tuple[Op, ...]

    @property
    def loops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.parents if op.name in ("scf.for", "scf.while"))

    @property
    def is_live(self) -> bool:
        """In no loop that never runs."""
        return not any(never_runs(op) for op in self.parents)

    @property
    def is_unlikely(self) -> bool:
        """In a branch for the ragged tail: it fills what a load will leave."""
        return any("hivm.unlikely_condition" in op.attributes for op in self.parents)


def constant(value: Value) -> int | None:
    """The value of an integer constant, else None."""
    op = value.producer
    if op is None or op.name != "arith.constant":
        return None
    text = op.properties["value"].split()[0]
    return (
        {"true": 1, "false": 0}[text]
        if text in ("true", "false")
        else int(text)
        if text.lstrip("-").isdigit()
        else None
    )


def never_runs(op: Op) -> bool:
    """A loop from n to n."""
    if op.name != "scf.for":
        return False
    lower, upper = op.operands[:2]
    low, high = constant(lower), constant(upper)
    return lower is upper or (low is not None and high is not None and low >= high)


class Dataflow:
    """All places of a function, and the buffers that a memref value may denote."""

    def __init__(self, func: Func):
        self.func = func
        self.places: list[Place] = list(self._walk(func.entry, ()))
        self._sources: dict[Value, list[Value]] = {}  # what a loop's or a branch's value comes from
        for place in self.places:
            self._connect(place.op)
        self._roots: dict[Value, frozenset[Value]] = {}
        self._made_from: dict[Value, list[tuple[str, Value]]] = {}  # root <- (op, root of an input)
        for place in self.places:
            inputs, outputs = reads_and_writes(place.op) or ([], [])
            for output in outputs:
                for root in self.roots(output):
                    made_from = self._made_from.setdefault(root, [])
                    made_from += [(place.op.short_name, r) for v in inputs for r in self.roots(v)]

    def _walk(self, block: Block, parents: tuple[Op, ...]) -> Iterator[Place]:
        for op in block.ops:
            yield Place(op, parents)
            for region in op.regions:
                for inner in region:
                    yield from self._walk(inner, (*parents, op))

    def _connect(self, op: Op) -> None:
        """Values that a structured op passes: loop-carried ones, and results of branches."""
        yields = [region[0].ops[-1].operands for region in op.regions if region]
        if op.name == "scf.for":
            init, carried = op.operands[3:], op.regions[0][0].arguments[1:]
            for i, value in enumerate(init):
                self._sources[carried[i]] = self._sources[op.results[i]] = [value, yields[0][i]]
        elif op.name == "scf.if":
            for i, result in enumerate(op.results):
                self._sources[result] = [values[i] for values in yields]
        elif op.name == "scf.while":
            before, after = op.regions[0][0].arguments, op.regions[1][0].arguments
            for i, argument in enumerate(before):
                self._sources[argument] = [op.operands[i], yields[1][i]]
            for i, argument in enumerate(after):
                self._sources[argument] = self._sources[op.results[i]] = [yields[0][i + 1]]

    def roots(self, value: Value) -> frozenset[Value]:
        """The pointer_casts, allocs or arguments that a memref may be a view of."""
        if value not in self._roots:
            self._roots[value] = frozenset(self._find_roots(value, set()))
        return self._roots[value]

    def _find_roots(self, value: Value, seen: set[Value]) -> Iterator[Value]:
        if value in seen:
            return
        seen.add(value)
        op = value.producer
        if value in self._sources:
            sources = self._sources[value]
        elif op is not None and op.name in VIEWS:
            sources = op.operands[:1]
        elif op is not None and op.name == "arith.select":
            sources = op.operands[1:]
        else:
            yield value
            return
        for source in sources:
            yield from self._find_roots(source, seen)

    def origins(self, value: Value, through: Collection[str] | None = None) -> set[Value]:
        """The roots of a memref, and those that its data came from.

        through: follow these instructions only; None for all.
        """
        found: set[Value] = set()
        pending = list(self.roots(value))
        while pending:
            root = pending.pop()
            if root not in found:
                found.add(root)
                sources = self._made_from.get(root, [])
                pending += [r for name, r in sources if through is None or name in through]
        return found

    def view_key(self, value: Value) -> object:
        """Equal for two views of the same memory with the same offsets, sizes and strides."""
        op = value.producer
        if op is None or op.name not in VIEWS:
            return value
        layout = tuple(
            sorted(item for item in op.properties.items() if item[0].startswith(("static", "reassoc")))
        )
        return (op.name, self.view_key(op.operands[0]), tuple(op.operands[1:]), layout)
