"""HIVM instructions of a cube core, and the flags between cube and vector cores.

L1 and L0C hold matrices in fractals: a [rows, columns] matrix is stored as
[column blocks, row blocks, 16 rows, c0 columns], c0 being 32 bytes of elements.
"""

from __future__ import annotations

from typing import Any

import torch

from .memory import InterpreterError, MemRef
from .mlir import Op, enum_word
from .op_table import Step, register, require


def from_fractal(blocks: torch.Tensor) -> torch.Tensor:
    """[column blocks, row blocks, r, c] -> [rows, columns]."""
    column_blocks, row_blocks, r, c = blocks.shape
    return blocks.permute(1, 2, 0, 3).reshape(row_blocks * r, column_blocks * c)


def to_fractal(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[rows, columns], filled up with zeros -> [column blocks, row blocks, r, c]."""
    column_blocks, row_blocks, r, c = shape
    rows, columns = matrix.shape
    if rows > row_blocks * r or columns > column_blocks * c:
        raise InterpreterError(f"a {rows}x{columns} matrix does not fit fractals of shape {list(shape)}")
    padded = torch.zeros(row_blocks * r, column_blocks * c, dtype=matrix.dtype)
    padded[:rows, :columns] = matrix
    return padded.view(row_blocks, r, column_blocks, c).permute(2, 0, 1, 3)


@register("hivm.hir.nd2nz")
def _nd2nz(op: Op) -> Step:
    """Load a matrix from global memory into L1, as fractals."""
    require(op.properties.get("init_out_buffer", "false") == "false", op, "init_out_buffer")
    source, target = op.operands[0].slot, op.operands[1].slot

    def run(core: Any) -> None:
        view: MemRef = core.registers[source]
        place: MemRef = core.registers[target]
        matrix = view.tensor()
        place.write(to_fractal(matrix.reshape(matrix.shape[-2:]), place.sizes))
        core.count_bytes("GM->L1", view.bytes)
        core.counters.ops["nd2nz"] += 1

    return run


@register("hivm.hir.mmadL1")
def _mmad(op: Op) -> Step:
    """c = a @ b, or c += a @ b; sums in fp32."""
    groups = op.segments()
    a, b, fresh, m, k, n, c = (group[0].slot for group in groups[:7])
    bias = groups[9][0].slot if len(groups) > 9 and groups[9] else None
    a_transposed, b_transposed = ("a_transpose" in op.properties, "b_transpose" in op.properties)

    def run(core: Any) -> None:
        registers = core.registers
        left, right = (from_fractal(registers[slot].tensor()).float() for slot in (a, b))
        left, right = left.T if a_transposed else left, right.T if b_transposed else right
        rows, depth, columns = registers[m], registers[k], registers[n]
        product = left[:rows, :depth] @ right[:depth, :columns]
        if bias is not None:
            product += registers[bias].tensor().flatten()[:columns].float()
        place: MemRef = registers[c]
        blocks = to_fractal(product, place.sizes)
        place.write(blocks if registers[fresh] else place.tensor() + blocks)
        core.counters.macs += rows * depth * columns
        core.counters.ops["mmadL1"] += 1

    return run


@register("hivm.hir.fixpipe")
def _fixpipe(op: Op) -> Step:
    """Store from L0C to global memory: fractals to rows, with conversion."""
    known = {"dma_mode": {"nz2nd"}, "pre_relu": {"NO_RELU", "NORMAL_RELU"}}
    for name, words in known.items():
        if name in op.properties:
            require(enum_word(op.properties[name]) in words, op, f"{name} {op.properties[name]}")
    relu = "NORMAL_RELU" in op.properties.get("pre_relu", "")
    source, target = op.operands[0].slot, op.operands[1].slot

    def run(core: Any) -> None:
        matrix = from_fractal(core.registers[source].tensor())
        place: MemRef = core.registers[target]
        rows, columns = place.sizes[-2:]
        matrix = matrix[:rows, :columns]
        place.write(torch.relu(matrix) if relu else matrix)
        core.count_bytes("L0C->GM", place.bytes)
        core.counters.ops["fixpipe"] += 1

    return run


# ----------------------------------------------------------------- flags between the two kinds


@register("hivm.hir.sync_block_set", "hivm.hir.sync_block_wait")
def _sync_block(op: Op) -> Step:
    """The cube core sets a flag for both of its vector cores, and waits for both."""
    static = op.properties.get("static_flag_id")
    number = int(static.split()[0]) if static else None
    slot = op.segments()[0][0].slot if number is None else 0
    sets, name = op.name.endswith("_set"), op.short_name

    def run(core: Any) -> None:
        flag = core.registers[slot] if number is None else number
        to_vector, peers = (
            core.is_cube == sets,
            range(core.sub_blocks) if core.is_cube else [core.sub_block],
        )
        keys = [("to vector" if to_vector else "to cube", peer, flag) for peer in peers]
        signals = core.signals
        core.counters.ops[name] += 1
        if sets:
            for key in keys:
                signals[key] += 1
            return
        core.wait_until(lambda: all(signals[key] > 0 for key in keys), f"flag {flag}")
        for key in keys:
            signals[key] -= 1

    return run
