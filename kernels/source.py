"""A kernel's text and how it becomes a Triton function. Nothing is written to disk."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Block shape and launch options; see `tiling`.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile: at least D, or a part of D (column passes).
        num_warps: CUDA only.
        loads_first: CUDA: what all rows share is loaded before the statistics too, not when it is needed.
        reads_again: CUDA: rows do not wait in registers for their statistics, but are read once more.
    """

    rows: int
    cols: int
    num_warps: int = 4
    loads_first: bool = False
    reads_again: bool = False

    def __str__(self) -> str:
        return (f"{self.rows} rows x {self.cols} columns" + ", all loads first" * self.loads_first
                + ", read again" * self.reads_again)


@dataclass(frozen=True)
class KernelSource:
    """A generated kernel.

    Attributes:
        name: of the function; what profilers show.
        source: text of a module that defines it.
        params: (name, type) in order; types as in a Triton signature ("*bf16", "i64", "i32", "fp32").
        tile: its block shape: a Tile, or a GemmTile (fused_linear_tiles.py).
    """

    name: str
    source: str
    params: tuple[tuple[str, str], ...]
    tile: Tile

    @property
    def signature(self) -> dict[str, str]:
        """Parameter name -> Triton type."""
        return dict(self.params)


def module_text(name: str, doc: str, params: Sequence[tuple[str, str]], body: str, imports: str = "") -> str:
    """The text of a module that defines a kernel. `params` as in KernelSource; `imports` are further lines.

    Raises:
        ValueError: the docstring would end early.
    """
    if '"""' in doc or "\\" in doc:
        raise ValueError("a kernel's docstring cannot hold quotes or backslashes")
    types = {"i64": ": tl.int64", "i32": ": tl.int32"}
    head, line = [], "       "
    for parameter, type_ in params:
        word = f"{parameter}{types.get(type_, '')}"
        if len(line) + len(word) > 96:
            head.append(line)
            line = "       "
        line += f" {word},"
    head.append(line)
    return (f'"""{doc}\n"""\n\nimport triton\nimport triton.language as tl\n{imports}\n\n'
            f"def {name}(\n" + "\n".join(head) + f"\n):\n{body}\n")


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
