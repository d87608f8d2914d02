"""Huawei Ascend NPUs through triton-ascend.

The table is read from public sources (CANN's platform files, AscendNPU-IR's NPUTargetSpec), not
measured: see shared/facts/ascend.md of the project.
"""

from __future__ import annotations

import re

from .target import Target

#: SoC name pattern -> (vector cores, Unified Buffer bytes of a vector core). First match wins.
SOCS: tuple[tuple[str, int, int], ...] = (
    (r"Ascend910B[12]", 48, 192 * 1024),
    (r"Ascend910B[34]", 40, 192 * 1024),
    (r"Ascend910_93(62|72)", 40, 192 * 1024),
    (r"Ascend910_93(81|82|91|92)", 48, 192 * 1024),
    # The official compiler's own limit for this family is 248 KiB of the 256.
    (r"Ascend(910_95|950)", 64, 248 * 1024),
)

#: For a SoC that is not in the table: the smallest of it.
DEFAULT = (40, 192 * 1024)


def describe(soc: str) -> Target:
    """The target for a SoC name as CANN spells it ("Ascend910B3"). Unknown names get the smallest."""
    cores, budget = DEFAULT
    for pattern, known_cores, known_budget in SOCS:
        if re.match(pattern, soc):
            cores, budget = known_cores, known_budget
            break
    return Target(name=soc, backend="npu", cores=cores, budget=budget, power_of_two=False,
                  persistent=True, double_buffer=True, units=False, precise=False,
                  dtypes=("bf16", "f16", "f32"),
                  eager_buffers=budget > DEFAULT[1],
                  # Ascend's compiler takes a permutation of the lane element by element, and wants its stride
                  # to be the literal 1.
                  permutes=False, lanes_across=False)


def target(index: int) -> Target:
    """The NPU with that index in this process; needs torch_npu."""
    import torch_npu

    return describe(torch_npu.npu.get_device_name(index))
