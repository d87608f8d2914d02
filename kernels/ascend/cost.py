"""Static cost of a final HIVM module: bytes and instructions per iteration of each loop.

Nothing is run, so a loop's trip count is not known, and a ragged tile counts as a full one. For the
exact sums over a launch run it: `interpreter.interpret` returns them as `Counters`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .effects import Dataflow, Place, constant, reads_and_writes
from .mlir import ELEMENT_BITS, Func, Op, Value, enum_word, is_memref, memref_type, read_module
from .toolchain import Planned

_SHORT_SPACE = {"gm": "GM", "ub": "UB", "cbuf": "L1", "cc": "L0C"}
_TRANSFERS = ("load", "store", "copy", "nd2nz", "fixpipe")


@dataclass
class LoopCost:
    """One iteration of a loop, without its inner loops; loop () is the code outside of all loops.

    function: of the module. loop: where the loop is, e.g. (0, 1) for the second loop inside the
    first one. bytes: moved per path, "GM->UB" and so on. ops: HIVM ops per short name.
    vector_ops, vector_elements: vector instructions, and elements written (read, for a reduction).
    vector_barriers: PIPE_V waits. double_buffered: buffers that exist twice.
    """

    function: str
    loop: tuple[int, ...]
    bytes: Counter = field(default_factory=Counter)
    ops: Counter = field(default_factory=Counter)
    vector_ops: int = 0
    vector_elements: int = 0
    vector_barriers: int = 0
    double_buffered: int = 0

    @property
    def gm_to_ub(self) -> int:
        return self.bytes["GM->UB"]

    @property
    def ub_to_gm(self) -> int:
        return self.bytes["UB->GM"]

    def __str__(self) -> str:
        moved = ", ".join(f"{path} {amount} B" for path, amount in self.bytes.items()) or "no bytes"
        place = "loop " + ".".join(map(str, self.loop)) if self.loop else "outside of loops"
        return (
            f"{self.function}, {place}: {moved}; {self.vector_ops} vector ops on "
            f"{self.vector_elements} elements, {self.vector_barriers} barriers, "
            f"{self.double_buffered} double-buffered buffers"
        )


def loop_costs(planned: Planned | str) -> list[LoopCost]:
    """The cost of every loop that does anything, in program order, the code outside of loops first.

    planned: of `compile_planned` (A2 or A3), or the text of a final HIVM module. Raises
    ToolchainError if the kernel did not compile, ValueError if there is no module text (A5).
    """
    text = planned.require().text if isinstance(planned, Planned) else planned
    if not text:
        raise ValueError("no final HIVM module: A5 is compiled for its memory figures only")
    costs = [cost for func in read_module(text).device_funcs for cost in _function_costs(func)]
    return [cost for cost in costs if cost.ops or cost.double_buffered]


def _function_costs(func: Func) -> list[LoopCost]:
    costs: dict[tuple[Op, ...], LoopCost] = {(): LoopCost(func.name, ())}
    children: Counter = Counter()  # loops found so far, per enclosing loop
    pairs: dict[tuple[Op, ...], set[frozenset]] = {}  # double-buffered address pairs per loop
    flow = Dataflow(func)
    for place in flow.places:
        if place.op.name in ("scf.for", "scf.while"):
            outer = costs[place.loops]
            costs[(*place.loops, place.op)] = LoopCost(func.name, (*outer.loop, children[place.loops]))
            children[place.loops] += 1
        elif place.op.name == "arith.select" and is_memref(place.op.result.type):
            pairs.setdefault(place.loops, set()).add(_addresses(flow, place.op.result))
        elif place.op.name.startswith("hivm.hir.") and place.is_live and not place.is_unlikely:
            _add(costs[place.loops], place)
    for loops, found in pairs.items():
        costs[loops].double_buffered = len(found)
    return list(costs.values())


def _addresses(flow: Dataflow, value: Value) -> frozenset:
    """The planned addresses behind a memref: views of one buffer with several types count once."""
    return frozenset(
        (memref_type(root.type).space, constant(root.producer.operands[0]))
        for root in flow.roots(value)
        if root.producer is not None and root.producer.name == "hivm.hir.pointer_cast"
    )


def _add(cost: LoopCost, place: Place) -> None:
    """Count one HIVM op."""
    op, name = place.op, place.op.short_name
    if name in (
        "pointer_cast",
        "get_block_idx",
        "get_sub_block_idx",
        "get_sub_block_num",
        "set_mask_norm",
    ):
        return
    cost.ops[name] += 1
    if name == "pipe_barrier":
        cost.vector_barriers += enum_word(op.properties["pipe"]) == "PIPE_V"
    elif name in _TRANSFERS:
        source, target = op.operands[:2]
        spaces = [memref_type(value.type).space for value in (source, target)]
        # The side in global memory has the matrix's own shape; fractals are padded.
        measured = target if name == "fixpipe" else source
        elements = full_elements(measured)
        bits = ELEMENT_BITS[memref_type(measured.type).element]
        cost.bytes["->".join(_SHORT_SPACE[space] for space in spaces)] += elements * bits // 8
        if spaces == ["ub", "ub"]:
            cost.vector_ops += 1
            cost.vector_elements += elements
    elif name.startswith("v"):
        inputs, outputs = reads_and_writes(op)
        cost.vector_ops += len(outputs)
        cost.vector_elements += sum(full_elements(v) for v in (inputs if name == "vreduce" else outputs))


def full_elements(value: Value) -> int:
    """Elements of a memref; of the full tile that it is a part of, if its size is not known."""
    while not memref_type(value.type).is_static and value.producer is not None and value.producer.operands:
        if not is_memref(value.producer.operands[0].type):
            break
        value = value.producer.operands[0]
    return memref_type(value.type).elements
