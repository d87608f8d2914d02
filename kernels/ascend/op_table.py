"""The table of ops that the interpreter knows: name -> a function that prepares the op.

Preparing happens once per op of the module: it reads the attributes and returns a *step*, a small
function of the core that runs it. Steps read and write `core.registers`, one slot per SSA value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .memory import InterpreterError
from .mlir import Block, Op

Step = Callable[[Any], None]  # Any: interpreter.Core
Prepare = Callable[[Op], "Step | None"]

OPS: dict[str, Prepare] = {}

TERMINATORS = {"scf.yield", "scf.condition", "func.return"}


class UnknownOp(InterpreterError):
    """The table has no such op, or not with such attributes."""


def register(*names: str) -> Callable[[Prepare], Prepare]:
    """Enter the function into the table, under each name. It may return None: nothing to run."""

    def enter(prepare: Prepare) -> Prepare:
        for name in names:
            if name in OPS:
                raise ValueError(f"{name} is in the table already")
            OPS[name] = prepare
        return prepare

    return enter


def ignored(op: Op) -> None:
    """For ops that mean nothing to an interpreter."""


def require(condition: bool, op: Op, what: str) -> None:
    """UnknownOp unless the condition holds: an attribute is not modelled."""
    if not condition:
        raise UnknownOp(f"{op.name}: {what} is not modelled by the interpreter")


def prepare_block(block: Block) -> tuple[Step, list[int]]:
    """A step that runs the block, and the slots of its terminator's operands."""
    pairs: list[tuple[Op, Step]] = []
    for op in block.ops[:-1]:
        if op.name not in OPS:
            raise UnknownOp(f"the interpreter does not know the op {op.name}")
        step = OPS[op.name](op)
        if step is not None:
            pairs.append((op, step))
    last = block.ops[-1]
    if last.name not in TERMINATORS:
        raise UnknownOp(f"the interpreter does not know the terminator {last.name}")

    def run(core: Any) -> None:
        running = last
        try:
            for op, step in pairs:
                running = op
                step(core)
        except InterpreterError as error:
            if not getattr(error, "__notes__", None):  # the innermost block knows best
                types = ", ".join(operand.type for operand in running.operands)
                error.add_note(f"at {running.name} ({types})")
            raise

    return run, [operand.slot for operand in last.operands]


def prepare_region(region: list[Block], owner: Op) -> tuple[Block, Step, list[int]]:
    """The only block of a structured op's region, its step, and what it yields."""
    require(len(region) == 1, owner, "a region of several blocks")
    run, yielded = prepare_block(region[0])
    return region[0], run, yielded
