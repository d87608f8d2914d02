"""A kernel's text and how it becomes a Triton function. Nothing is written to disk."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Block shape and launch options; see `tiling`.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile: at least D, or a part of D (column passes).
        num_warps: CUDA only.
    """

    rows: int
    cols: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.cols} columns"


@dataclass(frozen=True)
class KernelSource:
    """A generated kernel.

    Attributes:
        name: of the function; what profilers show.
        source: text of a module that defines it.
        params: (name, type) in order; types as in a Triton signature ("*bf16", "i64", "i32", "fp32").
        tile: its block shape.
    """

    name: str
    source: str
    params: tuple[tuple[str, str], ...]
    tile: Tile

    @property
    def signature(self) -> dict[str, str]:
        """Parameter name -> Triton type."""
        return dict(self.params)


def load(kernel: KernelSource) -> Callable:
    """The Python function of a kernel, compiled in memory. Its text is registered with linecache,
    where `inspect.getsource`, and so Triton, finds it. Imports triton."""
    filename = f"<ascend_ln_fuse {kernel.name}>"
    lines = kernel.source.splitlines(keepends=True)
    # No modification time: linecache.checkcache leaves the entry alone.
    linecache.cache[filename] = (len(kernel.source), None, lines, filename)
    namespace = {"__name__": f"ascend_ln_fuse.generated.{kernel.name}"}
    exec(compile(kernel.source, filename, "exec"), namespace)  # noqa: S102 - text made above
    return namespace[kernel.name]


def jit(kernel: KernelSource):
    """The Triton JIT function of a kernel. Integer arguments are not specialised: one binary serves
    every size; the alignment of pointers is."""
    from triton.runtime.jit import JITFunction

    scalars = [name for name, type_ in kernel.params if not type_.startswith("*")]
    return JITFunction(load(kernel), do_not_specialize=scalars)
