"""Memref views, and the scalar unit's accesses to memory."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core_ops import assign, binary, unary
from .memory import ITEM_BYTES, MemRef, Storage
from .mlir import DYNAMIC, Op, int_array, memref_type, row_major
from .op_table import Step, ignored, register, require


def _layout(op: Op) -> Callable[[list], tuple[list[int], list[int], list[int]]]:
    """Reads offsets, sizes and strides, each partly in the op and partly in registers."""
    _, *dynamic = op.segments()
    static = [int_array(op.properties[f"static_{name}"]) for name in ("offsets", "sizes", "strides")]
    plan = []
    for numbers, values in zip(static, dynamic, strict=True):
        slots = iter(values)
        plan.append([(next(slots).slot, None) if number == DYNAMIC else (None, number) for number in numbers])

    def read(registers: list) -> tuple:
        return tuple([number if slot is None else registers[slot] for slot, number in part] for part in plan)

    return read


def _view(op: Op, make: Callable[[MemRef, list], MemRef]) -> Step:
    """A step that makes a view; one without run-time numbers is made once per source."""
    source, out = op.operands[0].slot, op.result.slot
    if len(op.operands) > 1:

        def run(core: Any) -> None:
            core.registers[out] = make(core.registers[source], core.registers)

        return run

    def run_static(core: Any) -> None:
        memref = core.registers[source]
        core.registers[out] = memref.derived(op, lambda: make(memref, core.registers))

    return run_static


@register("memref.reinterpret_cast")
def _reinterpret_cast(op: Op) -> Step:
    layout = _layout(op)

    def make(memref: MemRef, registers: list) -> MemRef:
        offsets, sizes, strides = layout(registers)
        return memref.with_layout(memref.base + offsets[0], sizes, strides)

    return _view(op, make)


@register("memref.subview")
def _subview(op: Op) -> Step:
    layout = _layout(op)
    kept = kept_dims(op)

    def make(memref: MemRef, registers: list) -> MemRef:
        offsets, sizes, steps = layout(registers)
        start = memref.offset + sum(map(operator.mul, offsets, memref.strides))
        # A size below zero is a tile past the end, as far as the compiler's arithmetic lets it be.
        sizes = [max(0, sizes[dim]) for dim in kept]
        return memref.with_layout(start, sizes, [memref.strides[dim] * steps[dim] for dim in kept])

    return _view(op, make)


def kept_dims(op: Op) -> list[int]:
    """The source dims that a subview's result keeps: unit dims may be dropped.

    Several unit dims are told apart by their strides, as in MLIR.
    """
    result, source = memref_type(op.result.type), memref_type(op.operands[0].type)
    sizes = [None if n == DYNAMIC else n for n in int_array(op.properties["static_sizes"])]
    steps = [None if n == DYNAMIC else n for n in int_array(op.properties["static_strides"])]
    kept: list[int] = []
    for dim, size in enumerate(sizes):
        droppable = len(sizes) - dim > len(result.shape) - len(kept)
        if droppable and size == 1:
            at = len(kept)
            stride = None
            if source.strides[dim] is not None and steps[dim] is not None:
                stride = source.strides[dim] * steps[dim]
            fits = at < len(result.shape) and result.shape[at] == 1
            if not fits or (None not in (stride, result.strides[at]) and stride != result.strides[at]):
                continue
        kept.append(dim)
    require(len(kept) == len(result.shape), op, f"rank reduction to {op.result.type}")
    return kept


def _groups(op: Op) -> list[list[int]]:
    """`[[0, 1], [2]]` as lists."""
    return [
        [int(i) for i in group.split(",")]
        for group in re.findall(r"\[([\d, ]+)\]", op.properties["reassociation"])
    ]


@register("memref.collapse_shape")
def _collapse_shape(op: Op) -> Step:
    groups = _groups(op)

    def make(memref: MemRef, registers: list) -> MemRef:
        sizes = [math.prod(memref.sizes[dim] for dim in group) for group in groups]
        strides = []
        for group in groups:  # the stride of a group is that of its last dim of more than one element
            wide = [dim for dim in group if memref.sizes[dim] != 1]
            strides.append(memref.strides[wide[-1] if wide else group[-1]])
        return memref.with_layout(memref.offset, sizes, strides)

    return _view(op, make)


@register("memref.expand_shape")
def _expand_shape(op: Op) -> Step:
    groups = _groups(op)
    static = int_array(op.properties["static_output_shape"])
    dynamic = [operand.slot for operand in op.operands[1:]]

    def make(memref: MemRef, registers: list) -> MemRef:
        given = iter(dynamic)
        sizes = [registers[next(given)] if size == DYNAMIC else size for size in static]
        strides = [1] * len(sizes)
        for dim, group in enumerate(groups):
            step = memref.strides[dim]
            for inner in reversed(group):
                strides[inner] = step
                step *= sizes[inner]
        return memref.with_layout(memref.offset, sizes, strides)

    return _view(op, make)


@register("memref.cast", "memref.memory_space_cast")
def _cast(op: Op) -> Step:
    return unary(op, lambda memref: memref)


@register("memref.view")
def _byte_view(op: Op) -> Step:
    """A typed view at a byte offset of an i8 memref."""
    source, shift, *dynamic = [operand.slot for operand in op.operands]
    type_, out = memref_type(op.result.type), op.result.slot

    def run(core: Any) -> None:
        registers = core.registers
        memref, given = registers[source], iter(dynamic)
        start = (memref.offset * ITEM_BYTES[memref.element] + registers[shift]) // ITEM_BYTES[type_.element]
        sizes = [registers[next(given)] if size is None else size for size in type_.shape]
        registers[out] = MemRef(memref.storage, type_.element, start, sizes, row_major(tuple(sizes)))

    return run


@register("memref.alloc", "memref.alloca")
def _alloc(op: Op) -> Step:
    """Scratch of the scalar unit; poisoned."""
    type_, out = memref_type(op.result.type), op.result.slot
    dynamic = [operand.slot for operand in op.operands]

    def run(core: Any) -> None:
        given = iter(dynamic)
        sizes = [core.registers[next(given)] if size is None else size for size in type_.shape]
        storage = Storage.poisoned(math.prod(sizes) * ITEM_BYTES[type_.element], "alloc", type_.space)
        core.registers[out] = MemRef(storage, type_.element, 0, sizes, row_major(tuple(sizes)))

    return run


@register("memref.dim")
def _dim(op: Op) -> Step:
    return binary(op, lambda memref, dim: memref.sizes[dim])


@register("memref.extract_strided_metadata")
def _metadata(op: Op) -> Step:
    source, results = op.operands[0].slot, [result.slot for result in op.results]

    def run(core: Any) -> None:
        memref = core.registers[source]
        base = memref.with_layout(memref.base, (), ())
        assign(
            core.registers,
            results,
            [base, memref.offset - memref.base, *memref.sizes, *memref.strides],
        )

    return run


def _element(memref: MemRef, indices: Sequence[int]) -> MemRef:
    return memref.with_layout(memref.offset + sum(map(operator.mul, indices, memref.strides)), (), ())


@register("memref.load")
def _scalar_load(op: Op) -> Step:
    source, *indices = [operand.slot for operand in op.operands]
    out, is_float = op.result.slot, op.result.type[0] != "i"

    def run(core: Any) -> None:
        registers = core.registers
        element = _element(registers[source], [registers[slot] for slot in indices])
        value = element.tensor().item()
        registers[out] = value if is_float else int(value)
        if element.space == "gm":
            core.count_bytes("GM->scalar", element.bytes)

    return run


@register("memref.store")
def _scalar_store(op: Op) -> Step:
    value, target, *indices = [operand.slot for operand in op.operands]

    def run(core: Any) -> None:
        registers = core.registers
        element = _element(registers[target], [registers[slot] for slot in indices])
        element.write(torch.tensor(registers[value]))
        if element.space == "gm":
            core.count_bytes("scalar->GM", element.bytes)

    return run


for _name in ("annotation.mark", "memref.assume_alignment", "memref.dealloc"):
    register(_name)(ignored)
