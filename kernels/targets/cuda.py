"""NVIDIA GPUs through upstream Triton."""

from __future__ import annotations

from dataclasses import replace

from .target import Target

#: Bytes of fp32 tiles that one program may keep in registers: 32 warps x 32 lanes x 64 registers.
REGISTER_BYTES = 32 * 32 * 64 * 4


def describe(name: str, cores: int) -> Target:
    """A GPU of `cores` multiprocessors."""
    return Target(name=name, backend="cuda", cores=cores, budget=REGISTER_BYTES, power_of_two=True,
                  persistent=False, double_buffer=False, units=True, precise=True, cache_hints=True,
                  ptx=True)


def target(index: int) -> Target:
    """The GPU with that index in this process."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    described = describe(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
    return described if torch.version.hip is None else replace(described, ptx=False)  # AMD's answer to "cuda"
