"""The official Ascend compilers, offline: no NPU, no CANN, and no time is ever measured.

    toolchain.py    lower (Triton -> TTIR, Linalg), compile_planned (-> final HIVM, memory)
    lint.py         lint: lost loads, scalar loops, masks that became read-modify-writes
    interpreter.py  interpret: runs the final HIVM module with real tensors, counts bytes
    cost.py         loop_costs: bytes and instructions per loop, without running
    native.py       build: runs the Linalg form natively through LLVM 19
    verify.py       verify: a final module on small ragged calls, against PyTorch
    samples.py      those calls, with rows that show what ordinary data hides
    traffic.py      bytes of a launch: at the least, by its source, by its module
    evidence.py     check_calls: all of that for every kernel that a model would launch

below them:

    tools.py        where the compilers are, outcomes and errors
    mlir.py         reader of generic MLIR     effects.py   what an op reads and writes
    op_table.py     the interpreter's ops, filled by core_ops, memref_ops, hivm_ops and cube_ops
    memory.py, scheduler.py, counters.py       the interpreter's machine

Nothing here imports Triton before a kernel is lowered.
"""

from .interpreter import interpret
from .toolchain import Lowered, Outcome, Planned, compile_planned, lower, plan
from .tools import MissingTool, ToolchainError

__all__ = [
    "Lowered",
    "MissingTool",
    "Outcome",
    "Planned",
    "ToolchainError",
    "compile_planned",
    "interpret",
    "lower",
    "plan",
]
