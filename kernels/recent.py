"""How a warm call finds what an earlier one with tensors laid out alike has made.

`layouts` is what a compiled launch depends on, as a key. Making one costs more than some launches take, so
`Recent` comes first: a few of the latest, each compared by Dynamo's own check, one call for all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: How many layouts one Recent holds: a model that alternates between a few sizes finds them all.
MOST = 4

# Private to PyTorch: where a version lacks it, keys are all there is.
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """What of tensors a compiled launch depends on."""
    return tuple([(x.shape, x.stride(), x.data_ptr() & 15, x.dtype, x.get_device()) for x in tensors])


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """`check(*others)`: whether as many other tensors, none of them twice, have the class, shapes, strides,
    dtypes, device, `requires_grad` and dispatch keys of these (so none is fake or a subclass, or belongs to
    inference mode, where these do not). False may be said too often. Keeps no tensor alive. None where this
    PyTorch cannot tell.

    Another number of tensors is a TypeError.
    """
    if _Guards is None:
        return None
    return _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


class Recent:
    """What the latest calls used, by how their tensors were laid out: found again is only what was made for
    tensors that are `alike`, at the same addresses modulo 16.

    Threads may share it: what is found is right, and an addition at the same time as another may get lost.
    """

    __slots__ = ("_entries",)

    def __init__(self):
        self._entries: tuple[tuple[Callable[..., bool], list[int], object], ...] = ()

    def find(self, tensors: Sequence[torch.Tensor], pointers: Sequence[int]):
        """What was added for tensors like these, with addresses `pointers`; None where there is nothing."""
        try:
            for check, low, found in self._entries:
                if check(*tensors) and [p & 15 for p in pointers] == low:
                    return found
        except TypeError:  # another number of tensors: the caller says what is wrong with them
            pass
        return None

    def add(self, tensors: Sequence[torch.Tensor], pointers: Sequence[int], found: object) -> None:
        """Keep `found` for calls like this one; the oldest goes."""
        check = alike(tensors)
        if check is not None:
            self._entries = ((check, [p & 15 for p in pointers], found), *self._entries[:MOST - 1])

    def clear(self) -> None:
        self._entries = ()
