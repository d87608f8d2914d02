"""How a target spells the roots and quotients of a kernel, and which of them need correct rounding."""

from __future__ import annotations

from dataclasses import dataclass

from .targets import Target


@dataclass(frozen=True)
class Arithmetic:
    """Source of statistics.

    Attributes:
        target: whom the kernel is for.
        compute: the region's compute type, "f32" or "f64".
        half: every result is rounded to half precision.
        lane: D, over which means are taken.
    """

    target: Target
    compute: str
    half: bool
    lane: int

    @property
    def share(self) -> str:
        """1 / D."""
        return f"{1.0 / self.lane!r}"

    def rsqrt(self, text: str) -> str:
        if self.precise and self.half:
            # An ulp or so of fp32 is lost where half precision rounds it away; the correctly rounded forms
            # take 5% of a kernel of 1 MB, with all rows of a tile waiting.
            return self._instruction("tl.rsqrt", "rsqrt.approx.ftz.f32", text)
        return self.quotient("1.0", self.sqrt(text))

    def sqrt(self, text: str) -> str:
        if self.precise and not self.half:
            return self._instruction("tl.sqrt_rn", "sqrt.rn.f32", text)
        return f"tl.sqrt({text})"

    def quotient(self, text: str, divisor: str) -> str:
        return self._true_quotient(text, divisor) if not self.half else f"{text} / {divisor}"

    def mean(self, total: str) -> str:
        """A true division, once a row: D times one value gives that value back, and a row of equal
        values is centred to 0. Times a rounded 1/D it would keep a rest that rsqrt(eps) blows up.
        (1/D is exact for a power of two, and a division costs 7% at D 128 on an H200.)"""
        if self.lane & (self.lane - 1) == 0:
            return f"{total} * {self.share}"
        return self._true_quotient(total, repr(float(self.lane)))

    def reciprocal(self, text: str) -> str:
        """1 / `text` to an ulp or so, for what is rounded to half precision; 0 where that is below fp32's
        normal numbers."""
        return self._instruction("1.0 / ", "rcp.approx.ftz.f32", text)

    def exp2(self, text: str) -> str:
        """2 ** `text`, likewise."""
        return self._instruction("tl.exp2", "ex2.approx.ftz.f32", text)

    @property
    def precise(self) -> bool:
        """Whether the target has roots and quotients that are rounded correctly, in fp32, beside others that
        are not: results that are rounded to half precision come from those then (half_precision.py)."""
        return self.target.precise and self.compute == "f32"

    def _true_quotient(self, text: str, divisor: str) -> str:
        if self.precise:
            return self._instruction("tl.div_rn", "div.rn.f32", text, divisor)
        return f"{text} / {divisor}"

    def _instruction(self, function: str, ptx: str, *operands: str) -> str:
        """Triton's `function` of fp32 operands as the PTX instruction that it becomes, where that may be
        written. Triton takes the function from libdevice; to link that is a fifth of what a norm's kernel
        costs to compile, ptxas apart, and holds the GIL."""
        if not self.target.ptx:
            return f"{function}({', '.join(operands)})"
        places = ", ".join(f"${i}" for i in range(len(operands) + 1))
        return (f'tl.inline_asm_elementwise("{ptx} {places};", "={",".join("f" * (len(operands) + 1))}", '
                f"[{', '.join(operands)}], tl.float32, is_pure=True, pack=1)")
