"""The steps of a chain that is written down by hand, and the Chain (kernels/chain.py) that they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

from .kernels.chain import Chain, RegionStage
from .kernels.chain_products import LinearStage
from .kernels.pointwise import gelu_tanh
from .kernels.region import Line, NormRegion, Operand, Output

NORM_OPS = ("layer_norm", "rms_norm")
RESIDUALS = ("input", "norm")


@dataclass(frozen=True)
class Activation:
    """A pointwise function between two layers.

    Attributes:
        function: in plain torch.
        lines: the same as lines of a region: (op, numbers behind the value, whether the activation's
            input is the last operand too).
        module: how torch.nn spells it, if it does.
    """

    function: Callable
    lines: tuple[tuple[str, tuple[float, ...], bool], ...]
    module: Callable[[nn.Module], bool] = lambda module: False


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _one(op: str) -> tuple:
    return ((op, (), False),)


def _is(kind: type) -> Callable[[nn.Module], bool]:
    return lambda module: type(module) is kind


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu, _one("relu"), _is(nn.ReLU)),
    "gelu": Activation(F.gelu, _one("gelu"), lambda m: type(m) is nn.GELU and m.approximate == "none"),
    "gelu_tanh": Activation(gelu_tanh, _one("gelu_tanh"),
                            lambda m: type(m) is nn.GELU and m.approximate == "tanh"),
    "silu": Activation(F.silu, _one("silu"), _is(nn.SiLU)),
    "quick_gelu": Activation(_quick_gelu, (("mul", (1.702,), False), ("sigmoid", (), False),
                                           ("mul", (), True))),
    "tanh": Activation(torch.tanh, _one("tanh"), _is(nn.Tanh)),
    "sigmoid": Activation(torch.sigmoid, _one("sigmoid"), _is(nn.Sigmoid)),
    "mish": Activation(F.mish, _one("mish"), _is(nn.Mish)),
    "hardswish": Activation(F.hardswish, _one("hardswish"), _is(nn.Hardswish)),
}


def activation_name(activation: str | nn.Module | None, argument: str = "activation") -> str | None:
    """The name in `ACTIVATIONS` of an activation given by name or as a module; None for none.

    Raises:
        TypeError: neither a name nor a module.
        ValueError: one that is not in the table; the message lists what is.
    """
    if activation is None or type(activation) is nn.Identity:
        return None
    if isinstance(activation, nn.Module):
        found = [name for name, entry in ACTIVATIONS.items() if entry.module(activation)]
        if found:
            return found[0]
    elif not isinstance(activation, str):
        raise TypeError(f"{argument} must be a name or a module of torch.nn, not {activation!r}")
    elif activation in ACTIVATIONS:
        return activation
    raise ValueError(f"{argument}: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}, None")


# -- steps


@dataclass(frozen=True)
class NormStep:
    """A norm over the last dim, of `size` elements; `weight`, `bias`: it has one."""

    op: str
    size: int
    weight: bool = True
    bias: bool = True


@dataclass(frozen=True)
class MatmulStep:
    """A linear layer; its input features are what comes before."""

    features: int
    bias: bool = True


@dataclass(frozen=True)
class ActivationStep:
    name: str


@dataclass(frozen=True)
class ResidualStep:
    """Adds the chain's "input", or the result of the last "norm"."""

    source: str = "input"


Step = NormStep | MatmulStep | ActivationStep | ResidualStep


def foldable_pairs(steps: Sequence[Step]) -> tuple[int, ...]:
    """The positions of norms that only the linear layer behind them reads."""
    read = {last_norm(steps, i) for i, step in enumerate(steps)
            if isinstance(step, ResidualStep) and step.source == "norm"}
    return tuple(i for i, (step, after) in enumerate(zip(steps, steps[1:]))
                 if isinstance(step, NormStep) and isinstance(after, MatmulStep) and i not in read)


def last_norm(steps: Sequence[Step], position: int) -> int:
    """The position of the norm in front of `position`."""
    return max(i for i, step in enumerate(steps[:position]) if isinstance(step, NormStep))


def folded_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with every norm folded that can be."""
    result = list(steps)
    for i in foldable_pairs(steps):
        norm, matmul = steps[i], steps[i + 1]
        result[i] = replace(norm, weight=False, bias=False)
        result[i + 1] = replace(matmul, bias=matmul.bias or norm.bias)
    return tuple(result)


@lru_cache(maxsize=1024)
def chain_of(steps: tuple[Step, ...], rank: int, dtype: str) -> Chain:
    """The Chain of `steps` for inputs of `rank` dims of a dtype (a word of region text), parameters of the
    same. Its inputs are the chain's input, then for each step its weight and its bias, where it has them;
    its scalars the norms' eps. The first step is a norm."""
    return _Builder(steps, rank, dtype).build()


class _Builder:
    """Steps between two products make one region, which is open until the next product."""

    def __init__(self, steps: tuple[Step, ...], rank: int, dtype: str):
        self.steps, self.rank, self.dtype = steps, rank, dtype
        self.inputs, self.scalars, self.stages = ["x"], [], []
        self.value, self.size = "x", steps[0].size  # the chain's value that comes last, and its features
        self.norm_value = ""  # of the last norm that a residual reads, once its region is closed
        self.made = 0  # values that have a name
        self._open()

    def build(self) -> Chain:
        kept = {last_norm(self.steps, i) for i, step in enumerate(self.steps)
                if isinstance(step, ResidualStep) and step.source == "norm"}
        for position, step in enumerate(self.steps):
            if isinstance(step, NormStep):
                self._norm(step, position in kept)
            elif isinstance(step, MatmulStep):
                self._matmul(step)
            elif isinstance(step, ActivationStep):
                self._activation(ACTIVATIONS[step.name])
            elif step.source == "input":
                self._line("add", (self._last(), self._read("x", self._full)))
            else:
                self._line("add", (self._last(), self.norm_line or self._read(self.norm_value, self._full)))
        self._close()
        return Chain(tuple(self.inputs), tuple(self.scalars), tuple(self.stages), (self.value,))

    # -- stages

    def _norm(self, step: NormStep, kept: bool) -> None:
        args: list = [self._last()]
        args.append(self._read(self._input("w"), (step.size,)) if step.weight else None)
        if step.op == "layer_norm":
            args.append(self._read(self._input("b"), (step.size,)) if step.bias else None)
        self.scalars.append(f"s{len(self.scalars)}")
        self.eps.append(self.scalars[-1])
        self._line(step.op, (*args, f"eps{len(self.eps) - 1}"))
        self.norm_line, self.norm_kept = self.lines[-1].name, kept

    def _matmul(self, step: MatmulStep) -> None:
        self._close()
        weight = self._input("w")
        bias = self._input("b") if step.bias else None
        name = self._name()
        self.stages.append(LinearStage(name, self.value, weight, bias))
        self.value, self.size = name, step.features

    def _activation(self, activation: Activation) -> None:
        first = self._last()
        for op, numbers, again in activation.lines:
            self._line(op, (self._last(), *numbers, *[first] * again))

    # -- the open region

    def _open(self) -> None:
        self.args: list[str] = []
        self.operands: list[Operand] = []
        self.lines: list[Line] = []
        self.eps: list[str] = []
        self.norm_line, self.norm_kept = "", False

    def _close(self) -> None:
        if not self.lines:
            return
        order = tuple(range(self.rank))
        results = [self.lines[-1].name]
        if self.norm_kept and self.norm_line not in results:
            results.append(self.norm_line)
        region = NormRegion(self.size, self.rank, tuple(self.operands),
                            tuple(f"eps{i}" for i in range(len(self.eps))), tuple(self.lines),
                            tuple(Output(name, self.dtype, order) for name in results))
        names = tuple(self._name() for _ in results)
        self.stages.append(RegionStage(names, region, tuple(self.args), tuple(self.eps)))
        self.value = names[0]
        if self.norm_kept:
            self.norm_value = names[-1]
        self._open()

    @property
    def _full(self) -> tuple:
        return ("*",) * (self.rank - 1) + (self.size,)

    def _last(self) -> str:
        """The region's name of the value that comes last."""
        return self.lines[-1].name if self.lines else self._read(self.value, self._full)

    def _read(self, name: str, dims: tuple) -> str:
        """The region's name of the chain's value `name`."""
        if name not in self.args:
            self.args.append(name)
            self.operands.append(Operand(f"x{len(self.operands)}", self.dtype, dims))
        return self.operands[self.args.index(name)].name

    def _line(self, op: str, args: tuple) -> None:
        self.lines.append(Line(f"v{len(self.lines)}", self.dtype, op, args))

    # -- names of the chain

    def _input(self, letter: str) -> str:
        self.inputs.append(f"{letter}{len(self.inputs)}")
        return self.inputs[-1]

    def _name(self) -> str:
        self.made += 1
        return f"v{self.made - 1}"
