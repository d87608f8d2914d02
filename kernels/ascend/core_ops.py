"""Control flow and scalar arithmetic: the ops around the instructions proper.

Scalars are Python ints and floats, rounded and wrapped to the width of their type.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..parsing import parsing
from .memory import DTYPES, ITEM_BYTES, InterpreterError
from .mlir import Op
from .op_table import Step, prepare_region, register, require

# ------------------------------------------------------------------------------- control flow


def assign(registers: list, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, value in zip(slots, values, strict=True):
        registers[slot] = value


@register("scf.for")
def _for(op: Op) -> Step:
    lower, upper, step, *init = [operand.slot for operand in op.operands]
    block, body, yielded = prepare_region(op.regions[0], op)
    index, *carried = [argument.slot for argument in block.arguments]
    results = [result.slot for result in op.results]

    def run(core: Any) -> None:
        registers = core.registers
        values = [registers[slot] for slot in init]
        if registers[step] <= 0:
            raise InterpreterError(f"loop with step {registers[step]}")
        for i in range(registers[lower], registers[upper], registers[step]):
            registers[index] = i
            assign(registers, carried, values)
            body(core)
            values = [registers[slot] for slot in yielded]
        assign(registers, results, values)

    return run


@register("scf.while")
def _while(op: Op) -> Step:
    before, check, (go_on, *passed) = prepare_region(op.regions[0], op)
    after, body, yielded = prepare_region(op.regions[1], op)
    init = [operand.slot for operand in op.operands]
    results = [result.slot for result in op.results]

    def run(core: Any) -> None:
        registers = core.registers
        values = [registers[slot] for slot in init]
        while True:
            assign(registers, [a.slot for a in before.arguments], values)
            check(core)
            values = [registers[slot] for slot in passed]
            if not registers[go_on]:
                assign(registers, results, values)
                return
            assign(registers, [a.slot for a in after.arguments], values)
            body(core)
            values = [registers[slot] for slot in yielded]

    return run


@register("scf.if")
def _if(op: Op) -> Step:
    condition = op.operands[0].slot
    results = [result.slot for result in op.results]
    arms = [prepare_region(region, op)[1:] if region else None for region in op.regions]
    taken, other = arms[0], arms[1] if len(arms) > 1 else None

    def run(core: Any) -> None:
        arm = taken if core.registers[condition] else other
        if arm is not None:
            arm[0](core)
            assign(core.registers, results, [core.registers[slot] for slot in arm[1]])

    return run


# --------------------------------------------------------------------------- scalar arithmetic


def _width(type_: str) -> int:
    """Bits of an integer type; index counts as 64."""
    return 64 if type_ == "index" else int(type_[1:])


def wrap(value: int, width: int) -> int:
    """Two's complement; a single bit is 0 or 1."""
    value &= (1 << width) - 1
    return value - (1 << width) if width > 1 and value >> (width - 1) else value


def round_float(value: float, type_: str) -> float:
    if type_ == "f32":
        return ctypes.c_float(value).value
    return torch.tensor(value, dtype=DTYPES[type_]).item()


def _signed(value: int, type_: str) -> int:
    """A set i1 is -1 when it is read as a signed number."""
    return -int(value) if type_ == "i1" else int(value)


def _divide(a: int, b: int) -> int:
    """Towards zero, as C does."""
    if b == 0:
        raise InterpreterError("integer division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _unsigned(function: Callable[[int, int], Any]) -> Callable[[int, int, int], Any]:
    return lambda a, b, width: function(a & ((1 << width) - 1), b & ((1 << width) - 1))


def _with_nan(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else function(a, b)


def _without_nan(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: b if math.isnan(a) else a if math.isnan(b) else function(a, b)


def _float_divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


# (a, b) -> result, before wrapping
INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
    "shli": operator.lshift,
    "shrsi": operator.rshift,
    "divsi": _divide,
    "remsi": lambda a, b: a - _divide(a, b) * b,
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b),
    "maxsi": max,
    "minsi": min,
}
UNSIGNED = {
    "divui": operator.floordiv,
    "remui": operator.mod,
    "shrui": operator.rshift,
    "maxui": max,
    "minui": min,
    "ceildivui": lambda a, b: -(-a // b),
}
FLOAT: dict[str, Callable[[float, float], float]] = {
    "addf": operator.add,
    "subf": operator.sub,
    "mulf": operator.mul,
    "divf": _float_divide,
    "maximumf": _with_nan(max),
    "minimumf": _with_nan(min),
    "maxnumf": _without_nan(max),
    "minnumf": _without_nan(min),
}
# In the order of MLIR's predicate numbers.
INTEGER_COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
ORDERED_COMPARE = {1: operator.eq, 2: operator.gt, 3: operator.ge, 4: operator.lt, 5: operator.le}


def binary(op: Op, function: Callable[[Any, Any], Any]) -> Step:
    a, b = (operand.slot for operand in op.operands)
    out = op.result.slot

    def run(core: Any) -> None:
        registers = core.registers
        registers[out] = function(registers[a], registers[b])

    return run


def unary(op: Op, function: Callable[[Any], Any]) -> Step:
    a, out = op.operands[0].slot, op.result.slot

    def run(core: Any) -> None:
        core.registers[out] = function(core.registers[a])

    return run


@register(*(f"arith.{name}" for name in INTEGER))
def _integer(op: Op) -> Step:
    function, width = INTEGER[op.short_name], _width(op.result.type)
    return binary(op, lambda a, b: wrap(function(a, b), width))


@register(*(f"arith.{name}" for name in UNSIGNED))
def _unsigned_integer(op: Op) -> Step:
    function, width = _unsigned(UNSIGNED[op.short_name]), _width(op.result.type)
    return binary(op, lambda a, b: wrap(function(a, b, width), width))


@register(*(f"arith.{name}" for name in FLOAT))
def _float(op: Op) -> Step:
    function, type_ = FLOAT[op.short_name], op.result.type
    return binary(op, lambda a, b: round_float(function(a, b), type_))


@register("arith.cmpi")
def _compare_integers(op: Op) -> Step:
    predicate, width = int(op.properties["predicate"].split()[0]), _width(op.operands[0].type)
    if predicate < 6:
        return binary(op, INTEGER_COMPARE[predicate])
    compare = _unsigned(INTEGER_COMPARE[predicate - 4])
    return binary(op, lambda a, b: compare(a, b, width))


@register("arith.cmpf")
def _compare_floats(op: Op) -> Step:
    predicate = int(op.properties["predicate"].split()[0])
    if predicate in ORDERED_COMPARE:
        return binary(op, ORDERED_COMPARE[predicate])
    require(predicate in (6, 13), op, f"predicate {predicate}")
    if predicate == 13:  # unordered or not equal
        return binary(op, operator.ne)
    return binary(op, lambda a, b: a != b and not math.isnan(a) and not math.isnan(b))


@register("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui")
def _resize(op: Op) -> Step:
    source, width = op.operands[0].type, _width(op.result.type)
    if op.short_name in ("extui", "index_castui"):
        mask = (1 << _width(source)) - 1
        return unary(op, lambda a: wrap(int(a) & mask, width))
    return unary(op, lambda a: wrap(_signed(a, source), width))


@register("arith.sitofp", "arith.uitofp")
def _to_float(op: Op) -> Step:
    source, type_ = op.operands[0].type, op.result.type
    if op.short_name == "uitofp":
        mask = (1 << _width(source)) - 1
        return unary(op, lambda a: round_float(float(a & mask), type_))
    return unary(op, lambda a: round_float(float(_signed(a, source)), type_))


@register("arith.fptosi")
def _to_integer(op: Op) -> Step:
    width = _width(op.result.type)
    return unary(op, lambda a: wrap(int(a), width))


@register("arith.extf", "arith.truncf")
def _refloat(op: Op) -> Step:
    type_ = op.result.type
    return unary(op, lambda a: round_float(a, type_))


@register("arith.negf")
def _negate(op: Op) -> Step:
    return unary(op, operator.neg)


@register("math.sqrt", "math.rsqrt", "math.exp", "math.absf")
def _math(op: Op) -> Step:
    function = {
        "sqrt": math.sqrt,
        "rsqrt": lambda a: 1 / math.sqrt(a),
        "exp": math.exp,
        "absf": abs,
    }[op.short_name]
    type_ = op.result.type
    return unary(op, lambda a: round_float(function(a), type_))


@register("arith.select")
def _select(op: Op) -> Step:
    condition, a, b = (operand.slot for operand in op.operands)
    out = op.result.slot

    def run(core: Any) -> None:
        registers = core.registers
        registers[out] = registers[a] if registers[condition] else registers[b]

    return run


@register("arith.constant")
def _constant(op: Op) -> Step:
    value, out = parse_constant(op), op.result.slot

    def run(core: Any) -> None:
        core.registers[out] = value

    return run


def parse_constant(op: Op) -> int | float:
    """The value of an arith.constant: `true`, `5 : i32`, `1.0e+00 : f32` or `0x7F800000 : f32`."""
    text = op.properties["value"].split(" : ")[0]
    type_ = op.result.type
    if text in ("true", "false"):
        return int(text == "true")
    if type_[0] != "i":  # a float; its bits when the printer found no decimal form
        if not text.startswith("0x"):
            return float(text)
        size = ITEM_BYTES[type_]
        raw = torch.tensor(list(int(text, 16).to_bytes(size, "little")), dtype=torch.uint8)
        return raw.view(DTYPES[type_]).item()
    return int(text)


# ------------------------------------------------------------------------------- affine maps


class _CeilDiv(ast.NodeTransformer):
    """`a ceildiv b` was written a @ b, which binds as tightly; make it -(-a // b)."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        negated = ast.UnaryOp(ast.USub(), node.left)
        return ast.UnaryOp(ast.USub(), ast.BinOp(negated, ast.FloorDiv(), node.right))


@functools.lru_cache(maxsize=1024)
def affine_function(text: str) -> Callable[..., tuple[int, ...]]:
    """`affine_map<(d0)[s0] -> (d0 floordiv s0, s0)>` as a function of d0, s0."""
    found = re.fullmatch(r"affine_map<\((.*?)\)(?:\[(.*?)\])? -> \((.*)\)>", text.strip(), re.S)
    names = ", ".join(part for part in found.group(1, 2) if part)
    results = found.group(3)
    for word, symbol in (("floordiv", "//"), ("ceildiv", "@"), ("mod", "%")):
        results = re.sub(rf"\b{word}\b", symbol, results)
    tree = _CeilDiv().visit(parsing(lambda: ast.parse(f"lambda {names}: ({results},)", mode="eval")))
    return eval(compile(ast.fix_missing_locations(tree), "<affine_map>", "eval"))


@register("affine.apply", "affine.min", "affine.max")
def _affine(op: Op) -> Step:
    function = affine_function(op.properties["map"])
    choose = {"apply": operator.itemgetter(0), "min": min, "max": max}[op.short_name]
    slots, out = [operand.slot for operand in op.operands], op.result.slot

    def run(core: Any) -> None:
        registers = core.registers
        registers[out] = choose(function(*[registers[slot] for slot in slots]))

    return run
