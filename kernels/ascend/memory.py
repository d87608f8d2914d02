"""Memory of the interpreter: byte arrays, and strided views on them.

A `Storage` is one flat byte array: a kernel argument's tensor, or one of a core's on-chip memories.
A `MemRef` is a typed, strided view on it, as in the IR. Every access is checked against the
storage's exact bounds, so that a kernel that leaves its tensor by one element is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

DTYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "ui8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}
ELEMENTS = {dtype: element for element, dtype in DTYPES.items()}
ITEM_BYTES = {element: dtype.itemsize for element, dtype in DTYPES.items()}

POISON = 0xFF  # read as NaN in every float format, as -1 in the integers


class InterpreterError(RuntimeError):
    """The module cannot be run, or did something that it must not do."""


class OutOfBounds(InterpreterError):
    """An access outside of a tensor, or outside of an on-chip memory."""


class Storage:
    """A flat array of bytes. name is for messages; space is "gm", "ub", "cbuf" or "cc"."""

    __slots__ = ("bytes", "name", "space", "_views")

    def __init__(self, data: torch.Tensor, name: str, space: str):
        self.bytes = data
        self.name = name
        self.space = space
        self._views: dict[str, torch.Tensor] = {}

    @classmethod
    def poisoned(cls, size: int, name: str, space: str) -> Storage:
        return cls(torch.full((size,), POISON, dtype=torch.uint8), name, space)

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, name: str) -> Storage:
        """All bytes of the tensor's storage, shared with it."""
        return cls(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()), name, "gm")

    def elements(self, element: str) -> torch.Tensor:
        """The whole array as elements; a rest that fills none is left out."""
        view = self._views.get(element)
        if view is None:
            whole = self.bytes.numel() // ITEM_BYTES[element] * ITEM_BYTES[element]
            view = self._views[element] = self.bytes[:whole].view(DTYPES[element])
        return view


class MemRef:
    """A view: element type, offset of its first element, sizes, and strides; all in elements.

    base is the offset that `memref.reinterpret_cast` counts from: the pointer that the view came
    from. An i1 view of an on-chip memory counts in bits. Views are immutable, and remember the
    views derived from them, so that a loop makes each only once.
    """

    __slots__ = ("storage", "element", "offset", "sizes", "strides", "base", "_tensor", "_derived")

    def __init__(
        self,
        storage: Storage,
        element: str,
        offset: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        base: int | None = None,
    ):
        self.storage = storage
        self.element = element
        self.offset = offset
        self.sizes = tuple(sizes)
        self.strides = tuple(strides)
        self.base = offset if base is None else base
        self._tensor: torch.Tensor | None = None
        self._derived: dict[Hashable, MemRef] = {}

    @property
    def space(self) -> str:
        return self.storage.space

    @property
    def is_packed(self) -> bool:
        """Booleans are one bit each on the chip, and one byte each in global memory."""
        return self.element == "i1" and self.space != "gm"

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Size of the elements, without gaps."""
        return (self.count + 7) // 8 if self.is_packed else self.count * ITEM_BYTES[self.element]

    def derived(self, key: Hashable, make: Callable[[], MemRef]) -> MemRef:
        """The view under this key, made at the first call."""
        view = self._derived.get(key)
        if view is None:
            view = self._derived[key] = make()
        return view

    def with_layout(self, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> MemRef:
        return MemRef(self.storage, self.element, offset, sizes, strides, self.base)

    # -- data

    def tensor(self) -> torch.Tensor:
        """The elements: a live view, or a copy for packed booleans. Raises OutOfBounds."""
        if self._tensor is None:
            if self.is_packed:
                return self._unpack()
            data = self.storage.elements(self.element)
            self._check(data.numel())
            self._tensor = torch.as_strided(data, self.sizes, self.strides, self.offset)
        return self._tensor

    def write(self, value: torch.Tensor) -> None:
        """Store, with broadcasting and conversion to the element type. Raises OutOfBounds.

        The caller has computed `value` already, so that in-place ops may share memory.
        """
        if self.is_packed:
            self._pack(value)
        else:
            self.tensor().copy_(value)

    def poison(self) -> None:
        """Overwrite: what a temporary buffer holds after its instruction is nobody's business."""
        if not self.count:
            return
        start = self.offset // 8 if self.is_packed else self.offset * ITEM_BYTES[self.element]
        self.storage.bytes[start : start + self.bytes] = POISON

    def _span(self) -> tuple[int, int]:
        """First and last position that the view touches."""
        low = high = self.offset
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if stride >= 0:
                high += (size - 1) * stride
            else:
                low += (size - 1) * stride
        return low, high

    def _check(self, available: int) -> None:
        if not self.count:
            return
        low, high = self._span()
        if low < 0 or high >= available:
            raise OutOfBounds(
                f"{self.storage.name}: elements {low} to {high} of a memory of {available} "
                f"{self.element} (view of sizes {list(self.sizes)}, strides {list(self.strides)}, "
                f"offset {self.offset})"
            )

    def _bit_positions(self) -> torch.Tensor:
        self._check(self.storage.bytes.numel() * 8)
        return grid(self.sizes, self.strides, self.offset)

    def _unpack(self) -> torch.Tensor:
        position = self._bit_positions()
        return (self.storage.bytes[position // 8] >> (position % 8).to(torch.uint8)).bitwise_and(1).bool()

    def _pack(self, value: torch.Tensor) -> None:
        position = self._bit_positions().flatten()
        if not position.numel():
            return
        bits = value.bool().expand(self.sizes).flatten().to(torch.uint8)
        first = int(position.min()) // 8
        touched = self.storage.bytes[first : int(position.max()) // 8 + 1]
        shifts = torch.arange(8, dtype=torch.uint8)
        unpacked = ((touched[:, None] >> shifts) & 1).flatten()
        unpacked[position - first * 8] = bits
        touched.copy_((unpacked.view(-1, 8) << shifts).sum(1).to(torch.uint8))


def grid(sizes: Sequence[int], strides: Sequence[Any], offset: Any = 0) -> torch.Tensor:
    """offset + sum of index * stride, for every index: int64, of shape `sizes`."""
    total = torch.full(tuple(sizes), offset, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        shape = [1] * len(sizes)
        shape[dim] = size
        total = total + (torch.arange(size) * stride).view(shape)
    return total
