"""Builds a program a step at a time, running each in eager so that the next is made for real shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.nn import functional as F

from .program import BATCH, CONTEXTS, Parameter, Program, Step

#: values beyond this are not used: squares of them would overflow in fp16
LARGEST = 200.0


class NoFit(Exception):
    """There is no value that the step could work on, or eager refuses it; the step is left out."""


class Builder:
    """The program so far, and its values in eager.

    Attributes:
        scope: name -> value.
        names: the values that later steps work on, oldest first; `inner` those in the middle of a
            handwritten norm, which they seldom do.
        dtype: of most parameters; `other` of the rest.
        context: the blocks that the next step stands in.
    """

    def __init__(self, dtype: str, other: str, grad: str, autocast: bool):
        self.dtype, self.other, self.grad, self.autocast = dtype, other, grad, autocast
        self.scope: dict = {"torch": torch, "F": F}
        self.names: list[str] = []
        self.inner: list[str] = []
        self.parameters: list[Parameter] = []
        self.steps: list[Step] = []
        self.context: tuple[str, ...] = ()
        self._count = 0
        self._waiting: list[tuple[str, str]] = []

    # Values

    def tensor(self, name: str) -> torch.Tensor:
        return self.scope[name]

    def pick(self, gene: int, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """A value that fits: gene 0 the newest, 255 the oldest; of ten, the newest every other time."""
        names = self.inner if gene >= 240 and self.inner else self.names
        found = [name for name in reversed(names) if fits(self.scope[name])]
        if not found:
            raise NoFit
        return found[int(len(found) * (gene / 256) ** 4)]

    def operand(self, like: str, gene: int, which: int) -> str:
        """Something that broadcasts to `like`: a value, a new parameter or a number."""
        value = self.tensor(like)
        shape = tuple(value.shape)
        choice = gene % 10
        if choice in (0, 1, 2):
            try:
                return self.pick(which, lambda t: t.shape == value.shape and t is not value)
            except NoFit:
                choice = 3
        if choice == 9:
            return self.pick(which, lambda t: t.dim() < len(shape) and _broadcasts(t.shape, shape))
        if choice == 8:
            return ("0.5", "1.0", "-0.75", "2")[which % 4]
        if choice == 4 and shape:
            shape = shape[-1:]
        elif choice == 5 and len(shape) > 2:
            shape = (*shape[:-2], 1, shape[-1])
        elif choice == 6 and shape:
            shape = (*shape[:-1], 1)
        elif choice == 7 and len(shape) > 1:
            shape = shape[1:]
        weight = len(shape) == 1
        for parameter in self.parameters:  # weights are shared now and then
            if weight and which % 3 == 0 and self.scope[parameter.name].shape == shape:
                return parameter.name
        return self.parameter(shape, self.other if which % 5 == 4 else self.dtype, weight=weight)

    def vector(self, size: int, gene: int, dtype: str) -> str:
        """A weight of `size`: one that is there, or a new one."""
        known = [p.name for p in self.parameters
                 if p.weight and p.dtype == dtype and self.scope[p.name].shape == (size,)]
        return known[0] if known and gene % 2 else self.parameter((size,), dtype, weight=True)

    def parameter(self, shape, dtype: str, layout: int = 0, weight: bool = False) -> str:
        """A new argument of `shape`, laid out as `layout` says."""
        name = f"{'w' if weight else 'x'}{len(self.parameters)}"
        memory, view = _layout(tuple(shape), layout)
        made = Parameter(name, tuple(map(_size, memory)), dtype, view, weight=weight)
        self._add(made, torch.randn(memory).to(getattr(torch, dtype)))
        return name

    def alias(self, of: str, view: str) -> str:
        """A new argument that is a view of the memory of the argument `of`."""
        owner = next((p for p in self.parameters if p.name == of and not p.weight), None)
        if owner is None:
            raise NoFit
        name = f"x{len(self.parameters)}"
        made = Parameter(name, owner.shape, owner.dtype, view, memory=owner.memory or owner.name)
        self._add(made, self.scope[owner.base])
        return name

    def _add(self, parameter: Parameter, memory: torch.Tensor) -> None:
        if self.grad == "training" and not parameter.memory:
            memory = memory.requires_grad_() if parameter.weight else memory.requires_grad_() * 1
        self.scope[parameter.base] = memory
        with torch.set_grad_enabled(self.grad != "no_grad"):
            try:
                self.scope[parameter.name] = eval(parameter.view.format(parameter.base), self.scope)
            except (RuntimeError, IndexError) as error:
                raise NoFit from error
        self.parameters.append(parameter)
        self.names.insert(0, parameter.name)

    # Steps

    def let(self, text: str, feature: str, count: int = 1, inner: bool = False) -> list[str]:
        """`v1, v2 = text`; the names. Raises NoFit where eager refuses it or the values grow too large."""
        names = [self._fresh() for _ in range(count)]
        self._run(f"{', '.join(names)} = {text}", feature)
        for name in names:
            if not _usable(self.scope[name]):
                self.steps.pop()
                raise NoFit
        (self.inner if inner else self.names).extend(names)
        return names

    def aside(self, text: str, feature: str) -> str:
        """`v = text`, a value of any kind that only the step which makes it knows; its name."""
        name = self._fresh()
        self._run(f"{name} = {text}", feature)
        return name

    def do(self, text: str, feature: str) -> None:
        """A statement that makes no new value. Raises NoFit where eager refuses it."""
        self._run(text, feature)

    def later(self, steps: list[str], feature: str) -> None:
        """Steps that follow in turn after others: one after each `turn`. `{0}`, `{1}`, ... in them are the
        values of the steps before, the last of which others may read."""
        names = [self._fresh() for _ in steps]
        self._waiting += [(name, text.format(*names)) for name, text in zip(names, steps)]
        self._feature = feature

    def turn(self) -> None:
        """Run one step that was put off."""
        if self._waiting:
            self._finish_one()

    def finish(self) -> None:
        """Run all steps that were put off."""
        while self._waiting:
            self._finish_one()

    def _finish_one(self) -> None:
        name, text = self._waiting.pop(0)
        last = not self._waiting
        try:
            self._run(f"{name} = {text}", self._feature)
            if not _usable(self.scope[name]):
                self.steps.pop()
                raise NoFit
        except NoFit:
            self._waiting.clear()
            return
        (self.names if last else self.inner).append(name)

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _run(self, text: str, feature: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad != "no_grad"))
            for name in (("autocast",) if self.autocast else ()) + self.context:
                stack.enter_context(eval(CONTEXTS[name], self.scope))
            try:
                exec(text, self.scope)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                raise NoFit from error
        self.steps.append(Step(text, feature, self.context))

    def program(self, results: list[int], **settings) -> Program:
        """The program that returns the newest value and those that the genes `results` pick."""
        names = [self.names[-1], *(self.pick(gene) for gene in results)]
        return Program(tuple(self.parameters), tuple(self.steps), tuple(names), grad=self.grad,
                       autocast=self.autocast, **settings)


def _usable(value) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return isinstance(value, torch.Tensor)
    if not value.is_floating_point():
        return False
    largest = value.detach().abs().max().item()
    return largest <= LARGEST  # False for NaN


def _broadcasts(shape, to) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def _size(size: int) -> int | str:
    """A size as source: no other than the batch is a multiple of it, but for lanes."""
    if size % BATCH or size in (8, 16):
        return size
    return "n" if size == BATCH else f"n * {size // BATCH}"


def _layout(shape: tuple[int, ...], layout: int) -> tuple[tuple[int, ...], str]:
    """(shape of the memory, view of it) of an argument."""
    rank = len(shape)
    if layout == 1 and rank > 1:
        return (*shape[:-2], shape[-1], shape[-2]), "{}.transpose(-1, -2)"
    if layout == 2 and rank > 1:
        return (shape[1], shape[0], *shape[2:]), "{}.transpose(0, 1)"
    if layout == 3 and rank:
        return (*shape[:-1], shape[-1] + 3), "{}[..., 1:-2]"
    if layout == 4 and rank:
        return (*shape[:-1], shape[-1] * 2), "{}[..., ::2]"
    if layout == 5 and rank > 1:
        return (shape[0], shape[1] + 1, *shape[2:]), "{}[:, 1:]"
    if layout == 6 and rank > 2:
        return (shape[0], 1, *shape[2:]), f"{{}}.expand(-1, {shape[1]}{', -1' * (rank - 2)})"
    if layout == 7 and rank > 2:
        return (*shape[1:-1], shape[0], shape[-1]), f"{{}}.movedim({rank - 2}, 0)"
    return shape, "{}"
