"""The pointwise ops that may appear in a region's body, one line each.

An entry gives the op's meaning (a torch function) and its spelling in a Triton kernel. To add one,
add a line here and, when graphs spell it in a new way, a line to `fusion_pass/kinds.py`.

Triton templates see operands already widened to the compute type (fp32, or fp64 for fp64 regions);
the result is rounded to the line's dtype afterwards, which is what PyTorch's own pointwise kernels
do (`at::opmath_type`). The spellings avoid what the Ascend compiler lowers badly: no libdevice
calls, `tl.maximum` with NaN propagation, tanh through exp (docs of triton-ascend; each was counted
in vector instructions with the official compiler).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pointwise:
    """One elementwise op.

    Attributes:
        name: the word used in region text and returned by the graph lens.
        arity: number of operands (tensors, runtime scalars or literals).
        torch: dotted name of the defining torch function, resolved on first use so that importing
            this table does not need torch.
        triton: expression template over `{0}`, `{1}`, ... in the compute type.
        commutative: operands may be swapped.
    """

    name: str
    arity: int
    torch: str
    triton: str
    commutative: bool = False


_SIGMOID = "1.0 / (1.0 + tl.exp(-({0})))"
# tanh(|u|) = 1 - 2/(exp(2|u|)+1), which needs no libdevice (of -|u| the difference would cancel); up to
# 0.625, where it cancels too, the polynomial of Cephes's tanhf. A factor `where(u < 0, -1, 1)` instead of two
# differences comes out wrong from Ascend's compiler, or from our interpreter of its code.
_REST = "2.0 / (tl.exp(2.0 * tl.abs({0})) + 1.0)"
_SQUARED = "({0}) * ({0})"
_TANH = (f"tl.where(tl.abs({{0}}) < 0.625, ({{0}}) + ({{0}}) * {_SQUARED} * (-0.333332819422 + {_SQUARED} * "
         f"(0.133314422036 + {_SQUARED} * (-0.0537397155531 + {_SQUARED} * (0.0206390887954 - {_SQUARED} * "
         "0.00570498872745)))), "
         f"tl.where(({{0}}) < 0, {_REST} - 1.0, 1.0 - {_REST}))")

_MISH = "(tl.exp(tl.minimum({0}, 20.0)) * (tl.exp(tl.minimum({0}, 20.0)) + 2.0))"

_TABLE = (
    Pointwise("add", 2, "torch.add", "{0} + {1}", commutative=True),
    Pointwise("sub", 2, "torch.sub", "{0} - {1}"),
    Pointwise("mul", 2, "torch.mul", "{0} * {1}", commutative=True),
    Pointwise("div", 2, "torch.true_divide", "{0} / {1}"),
    Pointwise("maximum", 2, "torch.maximum",
              "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", commutative=True),
    Pointwise("minimum", 2, "torch.minimum",
              "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", commutative=True),
    # Triton's -x is 0 - x, which loses the sign of -0.
    Pointwise("neg", 1, "torch.neg", "({0}) * -1.0"),
    Pointwise("abs", 1, "torch.abs", "tl.abs({0})"),
    Pointwise("exp", 1, "torch.exp", "tl.exp({0})"),
    Pointwise("sqrt", 1, "torch.sqrt", "tl.sqrt({0})"),
    Pointwise("rsqrt", 1, "torch.rsqrt", "1.0 / tl.sqrt({0})"),
    Pointwise("reciprocal", 1, "torch.reciprocal", "1.0 / ({0})"),
    Pointwise("square", 1, "torch.square", "({0}) * ({0})"),
    Pointwise("sigmoid", 1, "torch.sigmoid", _SIGMOID),
    Pointwise("silu", 1, "torch.nn.functional.silu", "({0}) / (1.0 + tl.exp(-({0})))"),
    Pointwise("tanh", 1, "torch.tanh", _TANH),
    # A comparison and a select would lose NaN, which torch.relu keeps.
    Pointwise("relu", 1, "torch.relu",
              "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)"),
    Pointwise("gelu", 1, "torch.nn.functional.gelu",
              "0.5 * ({0}) * (1.0 + tl.erf(({0}) * 0.7071067811865476))"),
    # tanh(log(1+e)) = n / (n + 2) with n = e*(e+2), e = exp(x): no difference that cancels where e is small.
    Pointwise("mish", 1, "torch.nn.functional.mish", f"({{0}}) * ({_MISH} / ({_MISH} + 2.0))"),
    Pointwise("hardswish", 1, "torch.nn.functional.hardswish",
              "({0}) * tl.minimum(tl.maximum(({0}) + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, "
              "propagate_nan=tl.PropagateNan.ALL) / 6.0"),
    Pointwise("cube", 1, "ascend_ln_fuse.kernels.pointwise.cube", "({0}) * ({0}) * ({0})"),
    # tanh form: x/2*(1+tanh(u)) = x/(1+exp(-2u)), u = sqrt(2/pi)*(x+0.044715x^3).
    Pointwise("gelu_tanh", 1, "ascend_ln_fuse.kernels.pointwise.gelu_tanh",
              "({0}) / (1.0 + tl.exp(-1.5957691216057308 * "
              "(({0}) + 0.044715 * ({0}) * ({0}) * ({0}))))"),
)

POINTWISE: dict[str, Pointwise] = {op.name: op for op in _TABLE}


def gelu_tanh(x):
    """`torch.nn.functional.gelu(x, approximate="tanh")`."""
    from torch.nn.functional import gelu

    return gelu(x, approximate="tanh")


def cube(x):
    """`torch.pow(x, 3)`."""
    return x.pow(3)


def torch_function(name: str) -> Callable:
    """The torch function that defines `name`; KeyError for a word that is not in the table."""
    import importlib

    module, _, attribute = POINTWISE[name].torch.rpartition(".")
    # The package may be installed under its public name only; our own entry is found relatively.
    if module.endswith("kernels.pointwise"):
        return globals()[attribute]
    return getattr(importlib.import_module(module), attribute)
