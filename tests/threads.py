"""Which operations PyTorch would compute in more than one thread of the CPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: ATen computes from so many elements on in several threads.
GRAIN = 2**15

#: Operations that take more threads for fewer elements: any two rows, and gelu.
_FEWER = {"native_layer_norm": 2, "gelu": 2**14 + 1, "log2": 1}

#: Views, and memory without values: of any size.
_FREE = {"slice", "split", "view", "_unsafe_view", "t", "expand", "unsqueeze", "select", "new_empty"}


class InThreads(TorchDispatchMode):
    """Inside, notes in `found` the operations that make or take float64 or bool, which are those of a
    comparison with float64, and would be computed in several threads: "name elements"."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        results = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [x for x in (*args, *results) if isinstance(x, torch.Tensor)]
        if name not in _FREE and any(x.dtype in (torch.float64, torch.bool) for x in tensors):
            self.seen += 1
            elements = max(x.numel() for x in tensors)
            if elements >= _FEWER.get(name, GRAIN):
                self.found.add(f"{name} {elements}")
        return result
