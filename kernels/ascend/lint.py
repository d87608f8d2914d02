"""Checks on the final HIVM module that the compiler does not make.

`bishengir-compile` may end well and leave a module that computes nonsense (it lost a load), reads
and writes past a tensor (a mask that it could not turn into bounds), or crawls (a loop over single
elements). These rules find such modules without running them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .effects import Dataflow, Place, reads_and_writes
from .mlir import Func, Op, Value, is_memref, memref_type, read_module
from .toolchain import Planned


class Severity(enum.Enum):
    ERROR = "error"  # wrong results, or 10 to 100 times too slow
    WARNING = "warning"  # may be meant


@dataclass(frozen=True)
class Finding:
    """rule: short name of the check. function: of the module, e.g. "k_mix_aiv"."""

    severity: Severity
    rule: str
    function: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.function}: {self.message} [{self.rule}]"


def lint(planned: Planned | str) -> list[Finding]:
    """All findings, each once, in the module's order. [] for a clean module.

    planned: of `compile_planned` (A2 or A3), or the text of a final HIVM module. Raises
    ToolchainError if the kernel did not compile, ValueError if there is no module text (A5).
    """
    text = planned.require().text if isinstance(planned, Planned) else planned
    if not text:
        raise ValueError("no final HIVM module to check: A5 is compiled for its memory figures only")
    findings: dict[Finding, None] = {}
    for func in read_module(text).device_funcs:
        flow = Dataflow(func)
        for rule in RULES:
            findings.update(dict.fromkeys(rule(func, flow)))
    return list(findings)


def errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.ERROR]


# --------------------------------------------------------------------------------------- rules


def _live(flow: Dataflow) -> Iterator[Place]:
    return (place for place in flow.places if place.is_live)


def _is_fill(op: Op) -> bool:
    return op.name == "hivm.hir.vbrc" and not is_memref(op.operands[0].type)


def never_written(func: Func, flow: Dataflow) -> Iterator[Finding]:
    """Every on-chip buffer that an instruction reads has a live writer.

    Filling the ragged tail of a tile with zeros, in front of its load, is not writing it.
    """
    written: set[Value] = set()
    for place in _live(flow):
        effects = reads_and_writes(place.op)
        if effects is None or place.is_unlikely:
            continue
        for value in effects[1]:
            if not (_is_fill(place.op) and memref_type(value.type).space == "cbuf"):
                written |= flow.roots(value)
    for place in _live(flow):
        for value in (reads_and_writes(place.op) or ([], []))[0]:
            missing = [root for root in flow.roots(value) if root not in written and _is_buffer(root)]
            if missing:
                space = memref_type(value.type).space
                reader = place.op.short_name
                message = f"{reader} reads a {space} buffer that nothing writes: {value.type}"
                yield Finding(Severity.ERROR, "never-written", func.name, message)


def _is_buffer(root: Value) -> bool:
    return root.producer is not None and root.producer.name == "hivm.hir.pointer_cast"


_SCALAR_LOOP = (
    "a loop handles one element at a time: 64-bit or // and % arithmetic on a tile, "
    "or addresses that are not made of strides"
)


def scalar_loop(func: Func, flow: Dataflow) -> Iterator[Finding]:
    """No loop over the elements of a tile: vector work that became scalar work."""
    for place in _live(flow):
        op = place.op
        if op.name in ("memref.load", "memref.store"):
            indices = op.operands[1:] if op.name == "memref.load" else op.operands[2:]
            counters = {loop.regions[0][0].arguments[0] for loop in place.loops if loop.name == "scf.for"}
            if any(_depends_on(index, counters) for index in indices):
                yield Finding(Severity.ERROR, "scalar-loop", func.name, _SCALAR_LOOP)
        elif "ExtractedLoadOrStore" in op.attributes:
            if any(inner.name == "memref.load" for inner in op.walk()):
                yield Finding(Severity.ERROR, "scalar-loop", func.name, _SCALAR_LOOP)
            else:
                message = "a loop loads single rows, and no mask applies to it: clamp the row index"
                yield Finding(Severity.WARNING, "row-loop", func.name, message)


def _depends_on(value: Value, targets: set[Value]) -> bool:
    if value in targets:
        return True
    op = value.producer
    return op is not None and not op.regions and any(_depends_on(operand, targets) for operand in op.operands)


# Between a load and its select, or a select and its store: int8 is selected as fp16.
_CONVERSIONS = ("vcast", "copy")


def read_modify_write(func: Func, flow: Dataflow) -> Iterator[Finding]:
    """No masked store that became: load the whole tile, select, store the whole tile.

    It has no lock, so it races with other programs, and it reaches past the tensor's end.
    """
    loaded: dict[object, set[Value]] = {}  # view of global memory -> the buffers it was loaded into
    selected: list[Op] = []
    for place in _live(flow):
        if place.op.name == "hivm.hir.load":
            key = flow.view_key(place.op.operands[0])
            loaded.setdefault(key, set()).update(flow.roots(place.op.operands[1]))
        elif place.op.name == "hivm.hir.vsel":
            selected.append(place.op)
    for place in _live(flow):
        if place.op.name != "hivm.hir.store":
            continue
        source, target = place.op.operands[:2]
        old = loaded.get(flow.view_key(target), set())
        for select in selected:
            (_, _, kept), outputs = select.segments()[:2]
            if (
                flow.roots(outputs[0]) & flow.origins(source, _CONVERSIONS)
                and is_memref(kept.type)
                and flow.origins(kept, _CONVERSIONS) & old
            ):
                message = (
                    "a masked store became a read-modify-write of the whole tile; "
                    "write the mask as index < bound"
                )
                yield Finding(Severity.ERROR, "read-modify-write", func.name, message)


def late_mask(func: Func, flow: Dataflow) -> Iterator[Finding]:
    """A whole tile is loaded and its lanes are selected afterwards: it may read past the tensor."""
    full: set[Value] = set()
    for place in _live(flow):
        if place.op.name == "hivm.hir.load" and memref_type(place.op.operands[0].type).is_static:
            full |= flow.roots(place.op.operands[1])
    for place in _live(flow):
        if place.op.name == "hivm.hir.vsel":
            condition, value, other = place.op.segments()[0]
            if not is_memref(value.type) or is_memref(other.type):
                continue
            loaded = flow.origins(value, _CONVERSIONS) & full
            # A mask cannot depend on what it masks: that is a choice by value, such as a relu.
            if loaded - flow.origins(condition):
                message = "a whole tile is loaded and masked afterwards; it may read past the tensor"
                yield Finding(Severity.WARNING, "late-mask", func.name, message)


def idle_sub_block(func: Func, flow: Dataflow) -> Iterator[Finding]:
    """Both vector cores of a cube core do all of the work, and one of them stores it."""
    if any("limit_sub_block_id0" in place.op.attributes for place in flow.places):
        message = "only one of the two vector cores stores: both do the same work"
        yield Finding(Severity.WARNING, "idle-sub-block", func.name, message)


Rule = Callable[[Func, Dataflow], Iterator[Finding]]
RULES: tuple[Rule, ...] = (never_written, scalar_loop, read_modify_write, late_mask, idle_sub_block)
