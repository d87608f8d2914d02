"""Triton's interpreter: runs a kernel's Python on CPU tensors. For tests and for machines without
an accelerator; slow.

Triton turns its interpreter on for a whole process (TRITON_INTERPRET=1 before the import), by
overwriting functions of `triton.language`. `run` does the same for the length of one launch and puts
everything back, so that a process can interpret and compile.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from . import cuda
from .target import Target

_LOCK = threading.RLock()


def target() -> Target:
    """CUDA's rules, interpreted. Without fp64, which triton-ascend's Triton refuses."""
    return replace(cuda.describe("cuda", 8).interpreted(), dtypes=("bf16", "f16", "f32"))


def run(fn: Callable, grid: tuple[int, ...], arguments: Sequence) -> None:
    """Run the Python function of a kernel (see `codegen.load`) over `grid` on CPU tensors, ints and
    floats. One launch at a time in a process."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction

    # The interpreter wants tensors only for their address and dtype, but copies them back to
    # themselves, which fails for expanded ones: one element is enough.
    single = [x.as_strided((1,), (1,), x.storage_offset()) if isinstance(x, torch.Tensor) else x
              for x in arguments]
    with _LOCK, _patched(), warnings.catch_warnings():
        # Triton 3.2 turns arrays of one element into numbers, which numpy 2 discourages.
        warnings.simplefilter("ignore", DeprecationWarning)
        InterpretedFunction(fn)[grid](*single)


@contextmanager
def _patched() -> Iterator[None]:
    """`triton.language` as the interpreter needs it; restored on exit."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    places = [tl, tl.core, tl.math, tl.tensor, tl.dtype, builder]
    before = [dict(vars(place)) for place in places]
    try:
        # Library functions such as tl.sum are compiled functions in a process that did not ask for
        # the interpreter.
        tl.sum = lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine)
        builder.cast_impl = _cast(builder.cast_impl)
        builder.create_erf = _erf
        builder.create_dot = _dot
        yield
    finally:
        for place, old in zip(places, before):
            for name in [n for n in vars(place) if n not in old]:
                delattr(place, name)
            for name, value in old.items():
                if vars(place).get(name) is not value:
                    setattr(place, name, value)


def _cast(original: Callable) -> Callable:
    """The interpreter of Triton 3.2 cuts fp32 to bf16 off; hardware rounds to nearest even."""
    import numpy as np
    import torch
    import triton.language as tl

    def cast(self, source, dtype):
        from triton.runtime.interpreter import TensorHandle

        have, want = source.dtype.scalar, dtype.scalar
        if want == tl.bfloat16 and have in (tl.float32, tl.float64, tl.float16):
            data = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return TensorHandle(data.view(torch.int16).numpy().view(np.uint16), want)
        if have == tl.bfloat16 and want in (tl.float32, tl.float64):
            wide = np.left_shift(source.data.astype(np.uint32), 16).view(np.float32)
            return TensorHandle(wide.astype(np.float64) if want == tl.float64 else wide, want)
        return original(self, source, dtype)

    return cast


def _erf(self, arg):
    """torch's erf: the interpreter's own is a Python loop."""
    import torch
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(torch.erf(torch.from_numpy(arg.data.copy())).numpy(), arg.dtype.scalar)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product of matrices with fp32 sums; the interpreter's own multiplies the bits of bf16."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    a, b = (self.cast_impl(x, tl.float32).data if x.dtype.scalar != tl.float32 else x.data for x in (a, b))
    return TensorHandle(np.matmul(a, b, dtype=np.float32) + d.data, d.dtype.scalar)
