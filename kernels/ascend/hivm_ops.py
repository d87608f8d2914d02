"""HIVM instructions of a vector core: DMA between global memory and the Unified Buffer, vector ops.

Values are computed with torch in the element type of the operands; the hardware's own rounding of
division, roots and exponentials is not modelled.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .memory import DTYPES, InterpreterError, MemRef, grid
from .mlir import Op, Value, enum_word, int_array, is_memref, memref_type, row_major
from .op_table import Step, ignored, register, require

IGNORED = (
    "set_mask_norm",
    "set_ffts_base_addr",
    "set_ctrl",
    "init_debug",
    "finish_debug",
    "free_lock_var",
)
for _name in IGNORED:
    register(f"hivm.hir.{_name}")(ignored)


# ------------------------------------------------------------------------------------- places


@register("hivm.hir.pointer_cast")
def _pointer_cast(op: Op) -> Step:
    """A planned buffer: an address in bytes in an on-chip memory, and a type."""
    type_ = memref_type(op.result.type)
    addresses, dynamic = op.segments()
    require(len(addresses) == 1, op, "more than one address")
    address, out = addresses[0].slot, op.result.slot
    sizes_from = [value.slot for value in dynamic]

    def run(core: Any) -> None:
        registers = core.registers
        given = iter(sizes_from)
        sizes = tuple(registers[next(given)] if size is None else size for size in type_.shape)
        registers[out] = core.planned_buffer(type_, registers[address], sizes)

    return run


@register("hivm.hir.get_block_idx")
def _block_index(op: Op) -> Step:
    out = op.result.slot

    def run(core: Any) -> None:
        core.registers[out] = core.block

    return run


@register("hivm.hir.get_sub_block_idx")
def _sub_block_index(op: Op) -> Step:
    out = op.result.slot

    def run(core: Any) -> None:
        core.registers[out] = core.sub_block

    return run


@register("hivm.hir.get_sub_block_num")
def _sub_block_count(op: Op) -> Step:
    out = op.result.slot

    def run(core: Any) -> None:
        core.registers[out] = core.sub_blocks

    return run


# ------------------------------------------------------------------- flags between the pipes


@register("hivm.hir.pipe_barrier")
def _pipe_barrier(op: Op) -> Step:
    is_vector = enum_word(op.properties["pipe"]) == "PIPE_V"

    def run(core: Any) -> None:
        core.counters.ops["pipe_barrier"] += 1
        core.counters.vector_barriers += is_vector

    return run


@register("hivm.hir.set_flag", "hivm.hir.wait_flag")
def _flag(op: Op) -> Step:
    """Pipes run in program order here, so a wait must find its flag set."""
    pipes = tuple(enum_word(op.properties[name]) for name in ("set_pipe", "wait_pipe"))
    static, change = op.properties.get("static_event_id"), 1 if op.short_name == "set_flag" else -1
    # A static event is an enum case, a run-time one its number.
    number = int(enum_word(static).removeprefix("EVENT_ID")) if static else None
    slot = op.operands[0].slot if number is None else 0
    name = op.short_name

    def run(core: Any) -> None:
        event = (*pipes, core.registers[slot] if number is None else number)
        core.counters.ops[name] += 1
        core.change_flag(event, change)

    return run


# ----------------------------------------------------------------------------------------- DMA

ATOMIC: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_SHORT_SPACE = {"gm": "GM", "ub": "UB", "cbuf": "L1", "cc": "L0C"}


@register("hivm.hir.load", "hivm.hir.store", "hivm.hir.copy")
def _dma(op: Op) -> Step:
    """Copy a view to a view of the same shape. What pads the rest of a tile is an op of its own."""
    require(op.properties.get("init_out_buffer", "false") == "false", op, "init_out_buffer")
    source, target = op.operands[0].slot, op.operands[1].slot
    spaces = [memref_type(operand.type).space for operand in op.operands[:2]]
    path, name = "->".join(_SHORT_SPACE[space] for space in spaces), op.short_name
    padding = (
        [value.slot for value in op.segments()[3]]
        if op.name == "hivm.hir.load" and len(op.segments()) > 3
        else []
    )
    kind = enum_word(op.properties["atomic_kind"]) if "atomic_kind" in op.properties else "none"
    require(kind == "none" or kind in ATOMIC, op, f"atomic {kind}")
    combine = ATOMIC.get(kind)

    def run(core: Any) -> None:
        registers = core.registers
        view, place = registers[source], registers[target]
        if view.sizes != place.sizes:
            raise InterpreterError(f"{name} of sizes {list(view.sizes)} to sizes {list(place.sizes)}")
        if any(registers[slot] for slot in padding):
            raise InterpreterError(f"{name} with padding on the left is not modelled")
        value = view.tensor()
        place.write(combine(place.tensor(), value) if combine else value)
        counters = core.counters
        counters.bytes[path] += view.bytes
        counters.ops[name] += 1
        if path == "UB->UB":  # done by the vector pipe
            counters.vector_ops += 1
            counters.vector_elements += view.count

    return run


# ---------------------------------------------------------------------------------- vector ops


@functools.lru_cache(maxsize=1024)
def _scalar(value: int | float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _operands(op: Op) -> tuple[list[Value], list[Value], list[Value]]:
    """Inputs, outputs and temporary buffers; some ops have no groups."""
    if "operandSegmentSizes" in op.properties:
        inputs, outputs, *temporaries = op.segments()
        return inputs, outputs, temporaries[0] if temporaries else []
    return op.operands[:1], op.operands[1:2], op.operands[2:]


def vector_step(
    op: Op,
    compute: Callable[..., torch.Tensor],
    operands: tuple[list[Value], list[Value], list[Value]] | None = None,
    counts_input: bool = False,
) -> Step:
    """The common form: out = compute(*inputs), count, poison the temporary buffers.

    Inputs are tensors; a scalar becomes one of the type of the first memref among the inputs, or
    else of the output. counts_input: the elements read are the work, not those written.
    """
    require(not int_array(op.properties.get("transpose", "")), op, "transpose")
    inputs, outputs, temporaries = operands or _operands(op)
    require(len(outputs) == 1, op, f"{len(outputs)} outputs")
    typed = next((v for v in reversed(inputs) if is_memref(v.type)), outputs[0])
    dtype = DTYPES[memref_type(typed.type).element]
    reads = [(value.slot, is_memref(value.type)) for value in inputs]
    out, scratch, name = outputs[0].slot, [value.slot for value in temporaries], op.short_name
    worked = inputs[0].slot if counts_input else out

    def run(core: Any) -> None:
        registers, counters = core.registers, core.counters
        tensors = [
            registers[slot].tensor() if is_view else _scalar(registers[slot], dtype)
            for slot, is_view in reads
        ]
        registers[out].write(compute(*tensors))
        for slot in scratch:
            registers[slot].poison()
        counters.ops[name] += 1
        counters.vector_ops += 1
        counters.vector_elements += registers[worked].count

    return run


def _not(a: torch.Tensor) -> torch.Tensor:
    return torch.logical_not(a) if a.dtype == torch.bool else torch.bitwise_not(a)


ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "vadd": torch.add,
    "vsub": torch.sub,
    "vmul": torch.mul,
    "vdiv": torch.div,
    "vmax": torch.maximum,
    "vmin": torch.minimum,
    "vand": torch.bitwise_and,
    "vor": torch.bitwise_or,
    "vxor": torch.bitwise_xor,
    "vpow": torch.pow,
    "vexp": torch.exp,
    "vln": torch.log,
    "vsqrt": torch.sqrt,
    "vrsqrt": torch.rsqrt,
    "vrec": torch.reciprocal,
    "vabs": torch.abs,
    "vrelu": torch.relu,
    "vnot": _not,
    "vsin": torch.sin,
    "vcos": torch.cos,
    "verf": torch.erf,
    "vtanh": torch.tanh,
}


@register(*(f"hivm.hir.{name}" for name in ELEMENTWISE))
def _elementwise(op: Op) -> Step:
    inputs = [memref_type(value.type).element for value in _operands(op)[0] if is_memref(value.type)]
    if op.short_name == "vdiv":  # how it would round integers is not known to us
        require(all("f" in element for element in inputs), op, "division of integers")
    return vector_step(op, ELEMENTWISE[op.short_name])


COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@register("hivm.hir.vcmp")
def _compare(op: Op) -> Step:
    mode = enum_word(op.properties.get("compare_mode", "<eq>"))
    require(mode in COMPARE, op, f"mode {mode}")
    return vector_step(op, COMPARE[mode])


@register("hivm.hir.vsel")
def _select(op: Op) -> Step:
    return vector_step(op, lambda condition, a, b: torch.where(condition.bool(), a, b))


def _round_away(a: torch.Tensor) -> torch.Tensor:
    return torch.sign(a) * torch.floor(a.abs() + 0.5)


ROUND = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "rint": torch.round,
    "round": _round_away,
}


@register("hivm.hir.vcast")
def _cast(op: Op) -> Step:
    """Conversion. To integers, and within one float type, the mode rounds to whole numbers."""
    inputs, outputs, _ = _operands(op)
    source, target = (DTYPES[memref_type(value.type).element] for value in (inputs[0], outputs[0]))
    mode = enum_word(op.properties["round_mode"])
    unsigned = "unsigned" in op.properties.get("cast", "")
    require(not unsigned or source == torch.bool or source.is_floating_point, op, "an unsigned source")
    if source.is_floating_point and (not target.is_floating_point or (source == target and mode != "rint")):
        require(mode in ROUND, op, f"round mode {mode}")
        to_whole = ROUND[mode]
        return vector_step(op, lambda a: to_whole(a.float()).to(target))
    if source.is_floating_point and target.itemsize < source.itemsize:
        require(mode == "rint", op, f"round mode {mode} between float types")
    return vector_step(op, lambda a: a.to(target))


@register("hivm.hir.vbrc")
def _broadcast(op: Op) -> Step:
    """Fill with a scalar, or repeat along the dims of size 1."""
    return vector_step(op, lambda a: a, (op.operands[:1], op.operands[1:2], op.operands[2:]))


REDUCE: dict[str, Callable[[torch.Tensor, Sequence[int]], torch.Tensor]] = {
    "sum": lambda a, dims: a.sum(dims, keepdim=True, dtype=a.dtype),
    "max": lambda a, dims: a.amax(dims, keepdim=True),
    "min": lambda a, dims: a.amin(dims, keepdim=True),
}


@register("hivm.hir.vreduce")
def _reduce(op: Op) -> Step:
    kind, dims = enum_word(op.properties["arith"]), int_array(op.properties["reduce_dims"])
    require(kind in REDUCE, op, f"reduction {kind}")
    groups = op.segments()
    require(len(groups) < 4 or not groups[3], op, "a reduction with indices")
    reduce = REDUCE[kind]
    return vector_step(op, lambda a: reduce(a, dims), counts_input=True)


@register("hivm.hir.vtranspose")
def _transpose(op: Op) -> Step:
    dims = int_array(op.properties["permutation"])
    operands = (op.operands[:1], op.operands[1:2], op.operands[2:])
    return vector_step(op, lambda a: a.permute(dims).clone(), operands)


@register("hivm.hir.vinterleave")
def _interleave(op: Op) -> Step:
    return vector_step(op, lambda *parts: torch.stack(parts, -1).flatten(-2))


@register("hivm.hir.vdeinterleave")
def _deinterleave(op: Op) -> Step:
    """Even lanes to the first output, odd lanes to the second; or one of them."""
    mode = enum_word(op.properties["index_mode"]) if "index_mode" in op.properties else "ALL_CHANNELS"
    source, outputs = op.operands[0].slot, [value.slot for value in op.operands[1:]]
    channels = [int(mode[-1])] if mode.startswith("CHANNEL_") else [0, 1]
    require(len(outputs) == len(channels), op, f"{mode} with {len(outputs)} outputs")

    def run(core: Any) -> None:
        registers, counters = core.registers, core.counters
        lanes = registers[source].tensor().clone()
        for slot, channel in zip(outputs, channels, strict=True):
            registers[slot].write(lanes[..., channel::2])
            counters.vector_ops += 1
            counters.vector_elements += registers[slot].count
        counters.ops["vdeinterleave"] += 1

    return run


@register("hivm.hir.varange")
def _arange(op: Op) -> Step:
    """offset + sum of index * stride."""
    memrefs = [value for value in op.operands if is_memref(value.type)]
    scalars = [value.slot for value in op.operands if not is_memref(value.type)]
    rank = len(memref_type(memrefs[0].type).shape)
    require(len(scalars) in (rank, rank + 1), op, f"{len(scalars)} numbers for rank {rank}")
    out = memrefs[0].slot

    def run(core: Any) -> None:
        registers, counters = core.registers, core.counters
        numbers = [registers[slot] for slot in scalars]
        offset = numbers[0] if len(numbers) > rank else 0
        place: MemRef = registers[out]
        place.write(grid(place.sizes, numbers[-rank:] if rank else [], offset))
        counters.ops["varange"] += 1
        counters.vector_ops += 1
        counters.vector_elements += place.count

    return run


def planned_view(storage: Any, type_: Any, address: int, sizes: tuple[int, ...]) -> MemRef:
    """The view of a planned buffer. Raises InterpreterError when it leaves its memory."""
    strides = type_.strides if None not in type_.strides else row_major(sizes)
    bits = 1 if type_.element == "i1" else DTYPES[type_.element].itemsize * 8
    if address * 8 % bits:
        raise InterpreterError(f"address {address} is not aligned for {type_.element}")
    last = -1
    if math.prod(sizes):
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    end = address + ((last + 1) * bits + 7) // 8
    if end > storage.bytes.numel():
        raise InterpreterError(f"{storage.name}: planned up to byte {end} of {storage.bytes.numel()}")
    return MemRef(storage, type_.element, address * 8 // bits, sizes, strides)
