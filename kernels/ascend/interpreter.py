"""Runs a final HIVM module on the CPU: what the compiler made of a kernel, with real tensors.

The module is the one printed before convert-hivm-to-std: every buffer has its planned address, the
flags between pipes and cores are set, double buffering is done. So a lost load, a wrong memory
plan, an access outside of a tensor, or a deadlock of cube and vector cores shows here and not on an
NPU. It does not model races inside a core, the hardware's rounding, or what the closed hivmc adds.
A2 and A3 only.

On-chip memory is poisoned (NaN) at the start, global memory ends where the tensors' storage ends.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import core_ops, cube_ops, hivm_ops, memref_ops  # noqa: F401  (they fill the op table)
from .counters import Counters
from .memory import ELEMENTS, ITEM_BYTES, POISON, InterpreterError, MemRef, Storage
from .mlir import Func, MemRefType, Module, is_memref, memref_type, read_module
from .op_table import Step, prepare_block
from .scheduler import run_together
from .toolchain import Planned, generation

MAX_PROGRAMS = 65535  # the runtime refuses a larger grid
UNBOUNDED = 1 << 40  # size of a memref<?x...> argument; the storage's size is what counts

_MEMORIES = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "cc": "L0C_SIZE"}


def interpret(
    planned: Planned | str,
    kernel_name: str | None = None,
    args: Sequence[Any] = (),
    grid: Sequence[int] = (1,),
    programs: Sequence[int] | None = None,
) -> Counters:
    """Run the programs of a grid, one after the other; the tensors in `args` are written.

    planned: of `compile_planned` for A2 or A3, or the text of a final HIVM module.
    kernel_name: the kernel's function; may be None for a `Planned`.
    args: CPU tensors and numbers in the kernel's order. A tensor's memory is its whole storage.
    grid: one to three sizes.
    programs: flat indices of those to run; all where it is None.

    Returns the bytes moved and the instructions executed. Raises InterpreterError: OutOfBounds,
    UnknownOp, a deadlock, arguments that do not fit; ToolchainError if the kernel did not compile.
    """
    if isinstance(planned, Planned):
        planned.require()
        if generation(planned.soc) == "A5":
            raise InterpreterError(f"{planned.soc}: the interpreter knows A2 and A3 only")
        kernel_name, text = kernel_name or planned.name, planned.text
    else:
        text = planned
    if kernel_name is None:
        raise ValueError("kernel_name is needed with a module text")
    sizes = [int(size) for size in grid] + [1] * (3 - len(grid))
    if len(sizes) != 3 or not 0 < math.prod(sizes) <= MAX_PROGRAMS:
        raise InterpreterError(f"grid {tuple(grid)}: one to three sizes, 1 to {MAX_PROGRAMS} programs")
    return _Launch(_load(text), kernel_name, args, sizes).run(programs)


# ------------------------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class _Program:
    """A device function, ready to run."""

    func: Func
    body: Step


class _Executable:
    """A module with the programs of its functions, prepared when first asked for."""

    def __init__(self, module: Module):
        self.module = module
        self._programs: dict[str, _Program] = {}
        self.memory_bytes = {space: module.device_spec(entry) // 8 for space, entry in _MEMORIES.items()}

    def programs(self, kernel: str) -> list[_Program]:
        """The kernel's function, or its cube and vector functions."""
        names = [n for n in (kernel, f"{kernel}_mix_aic", f"{kernel}_mix_aiv") if n in self.module.funcs]
        if not names:
            known = ", ".join(func.name for func in self.module.device_funcs)
            raise InterpreterError(f"the module has no kernel {kernel}; it has {known}")
        for name in names:
            if name not in self._programs:
                func = self.module.funcs[name]
                self._programs[name] = _Program(func, prepare_block(func.entry)[0])
        return [self._programs[name] for name in names]

    def workspace_bytes(self, kernel: str) -> int:
        """Bytes of global scratch memory per block."""
        func = self.module.funcs.get(f"{kernel}_infer_workspace_shape_function")
        if func is None:
            return 0
        return next(core_ops.parse_constant(op) for op in func.entry.ops if op.name == "arith.constant")


@functools.lru_cache(maxsize=64)
def _load(text: str) -> _Executable:
    return _Executable(read_module(text))


# ----------------------------------------------------------------------------------- execution


class Core:
    """One cube or vector core, working on one program of the grid.

    registers: the SSA values.  block: the program's flat index.  sub_block: which of the cube
    core's two vector cores this is.  wait_until(condition): let other cores run meanwhile.
    """

    def __init__(
        self,
        launch: _Launch,
        func: Func,
        block: int,
        sub_block: int,
        sub_blocks: int,
        signals: Counter,
    ):
        self.registers: list[Any] = [None] * func.slots
        self.counters = launch.counters
        self.func = func
        self.is_cube = func.core == "AIC"
        self.block = block
        self.sub_block = sub_block
        self.sub_blocks = sub_blocks
        self.signals = signals  # between cores of this block: flag -> times set and not waited for
        self.wait_until: Callable[[Callable[[], bool], str], None] = self._alone
        self._memory_bytes = launch.executable.memory_bytes
        self._memories: dict[str, Storage] = {}
        self._buffers: dict[tuple, MemRef] = {}
        self._flags: Counter = Counter()

    def planned_buffer(self, type_: MemRefType, address: int, sizes: tuple[int, ...]) -> MemRef:
        """The view of a buffer at a byte address; made once per core."""
        key = (type_, address, sizes)
        view = self._buffers.get(key)
        if view is None:
            space = type_.space
            storage = self._memories.get(space)
            if storage is None:
                storage = Storage.poisoned(self._memory_bytes[space], space, space)
                self._memories[space] = storage
            view = self._buffers[key] = hivm_ops.planned_view(storage, type_, address, sizes)
            peak = self.counters.peak_bytes
            peak[space] = max(peak.get(space, 0), address + view.bytes)
        return view

    def count_bytes(self, path: str, amount: int) -> None:
        self.counters.bytes[path] += amount

    def change_flag(self, event: tuple, change: int) -> None:
        """Set (+1) or wait for (-1) a flag between two pipes of this core.

        Not followed on cube cores, where mmadL1 sets and awaits flags inside its library call.
        """
        if self.is_cube:
            return
        self._flags[event] += change
        if self._flags[event] < 0:
            raise InterpreterError(f"wait for flag {event} that nobody set")

    def check_flags(self) -> None:
        """A flag that stays set would let the next kernel's first wait pass."""
        left = [event for event, count in self._flags.items() if count]
        if left:
            raise InterpreterError(f"flags still set at the end: {left}")

    def _alone(self, condition: Callable[[], bool], what: str) -> None:
        if not condition():
            raise InterpreterError(f"deadlock: waits for {what}, and no other core runs")


class _Launch:
    """One launch: the arguments in memory, and the loop over the programs."""

    def __init__(self, executable: _Executable, kernel: str, args: Sequence[Any], grid: list[int]):
        self.executable = executable
        self.counters = Counters()
        self.kernel = kernel
        self.grid = grid
        self.programs = executable.programs(kernel)
        self.args = list(args)
        blocks = math.prod(grid)
        size = max(executable.workspace_bytes(kernel) * blocks, 1)
        self.workspace = torch.full((size,), POISON, dtype=torch.uint8)
        self.lock = torch.zeros(1024, dtype=torch.uint8)
        self.inputs = {program.func.name: self._bind(program.func) for program in self.programs}

    def run(self, programs: Sequence[int] | None = None) -> Counters:
        for block in range(math.prod(self.grid)) if programs is None else programs:
            try:
                self._run_block(block)
            except InterpreterError as error:
                error.add_note(f"in {self.kernel}, program {block} of grid {self.grid}")
                raise
        return self.counters

    def _run_block(self, block: int) -> None:
        if len(self.programs) == 1:
            (program,) = self.programs
            core = Core(self, program.func, block, 0, 1, Counter())
            self._run_core(core, program)
            return
        signals: Counter = Counter()
        cores = []
        for program in self.programs:
            for sub_block in range(1 if program.func.core == "AIC" else 2):
                core = Core(self, program.func, block, sub_block, 2, signals)
                cores.append((core, functools.partial(self._run_core, core, program)))
        run_together(cores)

    def _run_core(self, core: Core, program: _Program) -> None:
        slots = [argument.slot for argument in program.func.entry.arguments]
        core_ops.assign(core.registers, slots, self.inputs[program.func.name])
        program.body(core)
        core.check_flags()

    def _bind(self, func: Func) -> list[Any]:
        """All parameters: [ffts address,] lock, workspace, the kernel's own, the grid's sizes."""
        parameters = func.entry.arguments
        hidden = 2 if is_memref(parameters[0].type) else 3
        expected = len(parameters) - hidden - 3
        if len(self.args) != expected:
            raise InterpreterError(f"{self.kernel} takes {expected} arguments, got {len(self.args)}")
        own = parameters[hidden:-3]
        scratch = [
            self._memref(data, name, parameter.type)
            for data, name, parameter in (
                (self.lock, "lock", parameters[hidden - 2]),
                (self.workspace, "workspace", parameters[hidden - 1]),
            )
        ]
        values = [
            self._argument(i, arg, parameter.type)
            for i, (arg, parameter) in enumerate(zip(self.args, own, strict=True))
        ]
        return [0] * (hidden - 2) + scratch + values + self.grid

    def _argument(self, index: int, arg: Any, type_: str) -> Any:
        """An argument as the function's type wants it. InterpreterError names a misfit."""
        if is_memref(type_) != isinstance(arg, torch.Tensor):
            raise InterpreterError(f"argument {index}: {type(arg).__name__} for {type_}")
        if isinstance(arg, torch.Tensor):
            if arg.device.type != "cpu":
                raise InterpreterError(f"argument {index}: a tensor on {arg.device}, not on the CPU")
            element = memref_type(type_).element
            # Triton passes a bool pointer as i8.
            if ELEMENTS.get(arg.dtype) != element and (arg.dtype, element) != (torch.bool, "i8"):
                raise InterpreterError(f"argument {index}: a tensor of {arg.dtype} for {type_}")
            return self._memref(arg, f"argument {index}", type_)
        if re.fullmatch(r"i\d+", type_):
            width = int(type_[1:])
            if core_ops.wrap(int(arg), width) != int(arg):
                raise InterpreterError(f"argument {index}: {arg} does not fit {type_}")
            return int(arg)
        return core_ops.round_float(float(arg), type_)

    @staticmethod
    def _memref(tensor: torch.Tensor, name: str, type_: str) -> MemRef:
        element = memref_type(type_).element
        offset = tensor.storage_offset() * tensor.element_size() // ITEM_BYTES[element]
        return MemRef(Storage.of_tensor(tensor, name), element, offset, (UNBOUNDED,), (1,))
