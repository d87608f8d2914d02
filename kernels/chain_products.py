"""The products of a chain: stages that torch's library runs, and what they read.

    LinearStage   value @ weight^T + bias
    PatchStage    a convolution over patches that do not overlap: its stride is its kernel
    ScoreStage    query @ key^T, for each head

Each knows its operands (`refs`), what it computes (`run`), its result's sizes without computing it
(`shape`), and the gradients of its operands (`gradients`), all in plain torch and differentiable. Values of
a chain have their features last: `[N, H, W, C]` behind a channel norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Columns `start` to `start + length` of a value: one of the two halves of a packed gate_up."""

    name: str
    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.start + self.length}]"

    def of(self, value: torch.Tensor) -> torch.Tensor:
        return value.narrow(-1, self.start, self.length)


@dataclass(frozen=True)
class Heads:
    """`count` runs of `length` columns of a value `[..., T, F]`, the first at `start`, each `step` columns
    further, as `[..., count, T, length]`: the heads of q in a packed qkv.

    Raises:
        ValueError: at construction, when the runs overlap.
    """

    name: str
    start: int
    length: int
    count: int
    step: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.length < 1 or self.step < self.length:
            raise ValueError(f"{self}: heads that overlap, or none")

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.start + self.length} x {self.count} by {self.step}]"

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.start + (self.count - 1) * self.step + self.length

    @property
    def columns(self) -> int:
        """Their number, where they follow one another without a gap."""
        return self.count * self.length if self.step == self.length else -1

    def of(self, value: torch.Tensor) -> torch.Tensor:
        columns = value.narrow(-1, self.start, self.end - self.start)
        return columns.unfold(-1, self.length, self.step).transpose(-3, -2)


#: What a stage reads: a value or an input by its name, or a part of one.
Ref = str | Part | Heads


def name_of(ref: Ref) -> str:
    """The name of the value that `ref` is, or is a part of."""
    return ref if isinstance(ref, str) else ref.name


class Product:
    """What the stages of this file have in common. `refs` are the operands of `run`, `shape` and
    `gradients`, in their order; None stands for a bias that there is not."""

    name: str
    refs: tuple[Ref | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name_of(ref) for ref in self.refs if ref is not None)

    def _call(self, word: str, more: str = "") -> str:
        return f"{self.name} = {word}({', '.join(str(ref) for ref in self.refs if ref is not None)}{more})"


@dataclass(frozen=True)
class LinearStage(Product):
    """`name = value @ weight^T + bias`; `transposed`: the weight is `[K, N]`, as GPT-2's Conv1D has it,
    instead of `[N, K]`."""

    name: str
    value: str
    weight: str
    bias: str | None = None
    transposed: bool = False

    word = "linear"

    @property
    def refs(self) -> tuple[str | None, ...]:
        return self.value, self.weight, self.bias

    def __str__(self) -> str:
        return self._call("linear_kn" if self.transposed else "linear")

    def run(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`[..., K]` -> `[..., N]`."""
        if not self.transposed:
            return F.linear(value, weight, bias)
        rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
        product = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        return product if rows is value else product.view(self.shape(value, weight, bias))

    def shape(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple:
        return (*value.shape[:-1], weight.shape[1 if self.transposed else 0])

    def gradients(self, grad: torch.Tensor, operands: Sequence[torch.Tensor | None],
                  needs: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
        """The value's is made of the weight alone, the weight's of the value; who needs one of them may
        leave the other operand out."""
        value, weight, _ = operands
        rows = grad.reshape(-1, grad.shape[-1]) if needs[1] or needs[2] else None
        found: list[torch.Tensor | None] = [None, None, None]
        if needs[0]:
            found[0] = F.linear(grad, weight if self.transposed else weight.t())
        if needs[1]:
            flat = value.reshape(-1, value.shape[-1])
            found[1] = flat.t() @ rows if self.transposed else rows.t() @ flat
        if needs[2]:
            found[2] = rows.sum(0)
        return tuple(found)


@dataclass(frozen=True)
class PatchStage(Product):
    """`name = conv2d(value, weight, bias)` whose stride is its kernel, so that patches do not overlap: a
    downsampling. The value is `[N, H, W, C]`, or `[N, H * W, C]` with `grid = (H, W)`; the result is
    `[N, H', W', C']`. It runs as the convolution that the model has; on a value that a norm of this package
    wrote, which is channels_last memory, nothing is copied."""

    name: str
    value: str
    weight: str
    bias: str | None = None
    grid: tuple[int, int] | None = None

    word = "patch conv"

    @property
    def refs(self) -> tuple[str | None, ...]:
        return self.value, self.weight, self.bias

    def __str__(self) -> str:
        return self._call("patch_conv", "" if self.grid is None else f"; {self.grid[0]}, {self.grid[1]}")

    def run(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`[N, H, W, C]` -> `[N, H', W', C']`."""
        return F.conv2d(self._image(value), weight, bias, stride=weight.shape[2:]).movedim(1, -1)

    def shape(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple:
        height, width = value.shape[1:3] if self.grid is None else self.grid
        high, wide = weight.shape[2:]
        # (written as torch writes it, so that symbolic sizes compare equal)
        return value.shape[0], (height - high) // high + 1, (width - wide) // wide + 1, weight.shape[0]

    def gradients(self, grad: torch.Tensor, operands: Sequence[torch.Tensor | None],
                  needs: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
        value, weight, _ = operands
        found = list(aten.convolution_backward(
            grad.movedim(-1, 1), self._image(value), weight, [weight.shape[0]], list(weight.shape[2:]),
            [0, 0], [1, 1], False, [0, 0], 1, list(needs)))
        if needs[0]:
            found[0] = found[0].movedim(1, -1)
            if self.grid is not None:
                found[0] = found[0].flatten(1, 2)
        return tuple(g if need else None for g, need in zip(found, needs))

    def _image(self, value: torch.Tensor) -> torch.Tensor:
        """`[N, C, H, W]`, a view."""
        return (value if self.grid is None else value.unflatten(1, self.grid)).movedim(-1, 1)


@dataclass(frozen=True)
class ScoreStage(Product):
    """`name = query @ key^T`: `[..., T, D]`, `[..., S, D]` -> `[..., T, S]`. `flat`: of the operands as
    `[B, H, T, D]`, the first two dims are one, as models that call `bmm` have them."""

    name: str
    query: Ref
    key: Ref
    flat: bool = False

    word = "score"

    @property
    def refs(self) -> tuple[Ref, Ref]:
        return self.query, self.key

    def __str__(self) -> str:
        return self._call("score_bmm" if self.flat else "score")

    def run(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if self.flat:
            return torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
        return torch.matmul(query, key.transpose(-1, -2))

    def shape(self, query: torch.Tensor, key: torch.Tensor) -> tuple:
        outer = (query.shape[0] * query.shape[1],) if self.flat else query.shape[:-2]
        return *outer, query.shape[-2], key.shape[-2]

    def gradients(self, grad: torch.Tensor, operands: Sequence[torch.Tensor | None],
                  needs: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
        query, key = operands
        if self.flat:
            grad = grad.reshape(*query.shape[:-1], key.shape[-2])
        return (torch.matmul(grad, key) if needs[0] else None,
                torch.matmul(grad.transpose(-1, -2), query) if needs[1] else None)
