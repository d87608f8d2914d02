"""Activations on NVIDIA GPUs whose result is rounded to bf16 or fp16 at once: forms with few instructions and
an error that this rounding hides.

A gelu of 100 MB is bound by its arithmetic where erf is spelled out: 36 instructions an element on sm_90,
with all that is round it, and 18 so; a silu has 17, and 10 so (by ptxas, Triton 3.6).
"""

from __future__ import annotations

from collections.abc import Callable

from .arithmetic import Arithmetic

#: log2(Q(z) / t) + z**2 * log2(e) / 2, where Q(z) = (1 - erf(z / sqrt(2))) / 2 is the tail of the normal
#: distribution and t = 1 / (1 + 0.35 z), as a polynomial in t, the highest power first: the form that
#: Numerical Recipes (W. H. Press et al., 6.2, "erfcc") gives the complementary error function. Fitted for
#: 0 <= z <= 13.5 by reweighted least squares at 600 Chebyshev nodes in t; Q then has a relative error of at
#: most 6.6e-6. Where it is below fp32's normal numbers it is 0.
_TAIL = (0.33303459, -1.0501089, 0.73751238, 0.3481522, 1.4736222, -2.8422031)
_STEP = 0.35
_HALF_LOG2_E = 0.7213475204444817
_LOG2_E = 1.4426950408889634


def gelu(arithmetic: Arithmetic, x: str, name: str) -> tuple[list[str], str]:
    """Statements, and an expression: x times the normal distribution's integral up to x.

    The tail is taken of |x|, and never as 1 - erf, so that it does not cancel for negative x. (For positive x
    it is less than 1/2.) Infinite x give what 0.5 * x * (1 + erf(x / sqrt(2))) gives: inf, and NaN for -inf.
    """
    power = f"{_TAIL[0]!r}"
    for coefficient in _TAIL[1:]:
        power = f"({power}) * T_{name} + {coefficient!r}"
    return [
        f"Z_{name} = tl.abs({x})",
        f"T_{name} = {arithmetic.reciprocal(f'1.0 + {_STEP} * Z_{name}')}",
        f"P_{name} = {power}",
        f"Q_{name} = T_{name} * {arithmetic.exp2(f'P_{name} - {_HALF_LOG2_E} * Z_{name} * Z_{name}')}",
    ], f"({x}) * tl.where({x} > 0.0, 1.0 - Q_{name}, Q_{name})"


def silu(arithmetic: Arithmetic, x: str, name: str) -> tuple[list[str], str]:
    """No statement, and an expression: x / (1 + exp(-x)), both parts of the quotient times 2**-8: so its
    divisor has a reciprocal among fp32's normal numbers wherever the result is one."""
    power = arithmetic.exp2(f"({x}) * {-_LOG2_E!r} - 8.0")
    return [], f"({x}) * ({arithmetic.reciprocal(f'{2.0**-8!r} + {power}')} * {2.0**-8!r})"


FORMS: dict[str, Callable[[Arithmetic, str, str], tuple[list[str], str]]] = {"gelu": gelu, "silu": silu}
