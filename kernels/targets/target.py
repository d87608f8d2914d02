"""The description of a target and the choice of one for a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..layout import Unsupported

FLOATS = ("bf16", "f16", "f32", "f64")


@dataclass(frozen=True)
class Target:
    """The rules that a generated kernel follows.

    Attributes:
        name: what a person calls it ("sm_90", "Ascend910B3").
        backend: "cuda", "npu" or "interpreter"; says who runs the kernel.
        cores: processors that run programs at the same time (multiprocessors, vector cores).
        budget: bytes that the tiles of one program may take: the Unified Buffer of a vector core;
            on CUDA the registers that a program of the largest size may use for tiles.
        power_of_two: block sizes must be powers of two (upstream Triton's tl.arange).
        persistent: at most `cores` programs, each with a contiguous range of tiles; else a program
            a tile.
        double_buffer: the compiler keeps two copies of every loaded and stored tile.
        units: strides are worth passing in vector units (CUDA's access width is decided by
            provable alignment).
        precise: tl.sqrt and division are approximate; the correctly rounded forms exist.
        cache_hints: loads may say what they leave in the caches (GPUs).
        ptx: instructions of NVIDIA's PTX may be written in a kernel.
        dtypes: dtype words that it can load, store and compute in.
        eager_buffers: the compiler holds every loaded and stored tile twice before it saves memory
            elsewhere (Ascend 950); else it reuses buffers first.
        permutes: tiles may be permuted along the lane (region.LANE_OPS).
        lanes_across: lane elements may be a stride apart in memory, where neighbouring rows are neighbours.
    """

    name: str
    backend: str
    cores: int
    budget: int
    power_of_two: bool
    persistent: bool
    double_buffer: bool
    units: bool
    precise: bool
    dtypes: tuple[str, ...] = FLOATS
    permutes: bool = True
    lanes_across: bool = True
    eager_buffers: bool = False
    cache_hints: bool = False
    ptx: bool = False

    def interpreted(self) -> Target:
        """The same rules, run by Triton's interpreter on CPU tensors."""
        return replace(self, name=f"{self.name} (interpreter)", backend="interpreter",
                       ptx=False)


@lru_cache(maxsize=64)
def _of(kind: str, index: int) -> Target:
    if kind == "cuda":
        from . import cuda

        return cuda.target(index)
    if kind == "npu":
        from . import npu

        return npu.target(index)
    if kind == "cpu":
        from . import interpreter

        return interpreter.target()
    raise Unsupported(f"no kernels for devices of type {kind!r}")


def target_for(device) -> Target:
    """The target of a torch.device; Unsupported where there is none. A CPU device gives the
    interpreter's, which the launcher uses only when asked to."""
    return _of(device.type, device.index or 0)
