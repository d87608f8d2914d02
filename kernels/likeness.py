"""What a compiler and a launch look at in a tensor, without the tensor: no memory stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from .region import dense_strides


@dataclass(frozen=True)
class Likeness:
    """Answers as a tensor of this layout does, and has no elements.

    Attributes:
        shape, strides: in elements.
        dtype, device: the tensor's.
        address: modulo 16, in bytes. Memory of its own begins at a multiple.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int = 0

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
              order: Sequence[int] | None = None) -> Likeness:
        """Of a new tensor, whose dims lie in memory in that order: by default it is contiguous."""
        shape = tuple(shape)
        return cls(shape, dense_strides(shape, order or range(len(shape))), dtype, device)

    def stride(self, dim: int | None = None):
        return self.strides if dim is None else self.strides[dim]

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        wanted = dense_strides(self.shape, range(len(self.shape)))
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, wanted)) or 0 in self.shape

    def narrow(self, dim: int, start: int, length: int) -> Likeness:
        shape = list(self.shape)
        shape[dim] = length
        skipped = start * self.strides[dim] * self.dtype.itemsize
        return replace(self, shape=tuple(shape), address=(self.address + skipped) & 15)

    def unfold(self, dim: int, size: int, step: int) -> Likeness:
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = (shape[dim] - size) // step + 1, strides[dim] * step
        return replace(self, shape=(*shape, size), strides=(*strides, self.strides[dim]))

    def transpose(self, one: int, other: int) -> Likeness:
        shape, strides = list(self.shape), list(self.strides)
        for of in (shape, strides):
            of[one], of[other] = of[other], of[one]
        return replace(self, shape=tuple(shape), strides=tuple(strides))
