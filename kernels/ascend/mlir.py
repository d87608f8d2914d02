"""A reader for MLIR text in its generic form.

`read_module` has bishengir-opt print a module with one uniform syntax, whatever the dialect,

    %1 = "dialect.name"(%0) <{property = ...}> ({ region }) {attribute = ...} : (types) -> type

and reads it into `Module`, `Func`, `Block`, `Op` and `Value`. Properties, attributes and types stay
text; the functions at the end take apart those that we need. Names are resolved while reading, for
MLIR uses a name again in sibling regions: two loops may both have a %5.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from .tools import find_tool


class MlirError(ValueError):
    """The text is not MLIR that we, or bishengir-opt, can read."""


@dataclass(eq=False, slots=True)
class Value:
    """An SSA value. `slot` numbers the values of one function from 0."""

    name: str
    type: str
    slot: int
    producer: Op | None = None  # None for a block argument


@dataclass(eq=False, slots=True)
class Block:
    arguments: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Op:
    """One operation. A region is a list of blocks."""

    name: str
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)

    @property
    def short_name(self) -> str:
        """The name without its dialect: "vadd" for "hivm.hir.vadd"."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def result(self) -> Value:
        return self.results[0]

    def segments(self) -> list[list[Value]]:
        """The operands in their groups: inputs, outputs, temporaries, ... One if none are given."""
        if "operandSegmentSizes" not in self.properties:
            return [self.operands]
        groups, start = [], 0
        for size in int_array(self.properties["operandSegmentSizes"]):
            groups.append(self.operands[start : start + size])
            start += size
        return groups

    def walk(self) -> Iterator[Op]:
        """This op and all ops inside, in program order."""
        yield self
        for region in self.regions:
            for block in region:
                for op in block.ops:
                    yield from op.walk()


@dataclass(eq=False, slots=True)
class Func:
    name: str
    op: Op
    slots: int  # number of values

    @property
    def entry(self) -> Block:
        return self.op.regions[0][0]

    @property
    def is_device(self) -> bool:
        return "DEVICE" in self.op.attributes.get("hacc.function_kind", "DEVICE")

    @property
    def core(self) -> str:
        """ "AIC" (cube) or "AIV" (vector)."""
        found = re.search(r"<(\w+)>", self.op.attributes.get("hivm.func_core_type", ""))
        return found.group(1) if found else "AIV"


@dataclass(eq=False, slots=True)
class Module:
    funcs: dict[str, Func]
    attributes: dict[str, str]

    @property
    def device_funcs(self) -> list[Func]:
        return [func for func in self.funcs.values() if func.is_device]

    def device_spec(self, entry: str) -> int:
        """An entry of the target's description: "UB_SIZE" in bits, "VECTOR_CORE_COUNT", ..."""
        for text in self.attributes.values():
            if found := re.search(rf'"{entry}"(?:,| =) (\d+)', text):
                return int(found.group(1))
        raise MlirError(f"the module's target description has no {entry}")


@functools.lru_cache(maxsize=64)
def read_module(text: str) -> Module:
    """Read a module in any MLIR syntax (cached). Raises MlirError or MissingTool."""
    command = [
        find_tool("bishengir-opt"),
        "-",
        "--mlir-print-op-generic",
        "--mlir-print-local-scope",
    ]
    run = subprocess.run(command, input=text, capture_output=True, text=True)
    if run.returncode != 0:
        raise MlirError(f"bishengir-opt cannot read the module: {run.stderr.strip()[:500]}")
    return parse_generic(run.stdout)


def parse_generic(text: str) -> Module:
    """Read a module that is in generic form already. Raises MlirError."""
    return _Reader(text).module()


# ----------------------------------------------------------------------------------- the reader

_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
# What matters when matching brackets: strings and arrows are skipped whole.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|->|[()\[\]{}<>,]')
_SPACE = re.compile(r"\s*")
_SSA = re.compile(r"%[\w$.-]+(?:#\d+)?")
_COUNT = re.compile(r":(\d+)")
_TYPE = re.compile(r"[!\w.]+")
_LABEL = re.compile(r"\^\w+")
_ENTRY = re.compile(r'"?([\w.$-]+)"?\s*=\s*(.*)', re.S)


class _Reader:
    """Recursive descent over the text, one cursor."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.scopes: list[dict[str, Value]] = [{}]
        self.slots = 0

    # -- characters

    def skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()

    def peek(self, token: str) -> bool:
        self.skip()
        return self.text.startswith(token, self.at)

    def accept(self, token: str) -> bool:
        if not self.peek(token):
            return False
        self.at += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            line = self.text.count("\n", 0, self.at) + 1
            raise MlirError(f"line {line}: expected {token!r} at {self.text[self.at : self.at + 60]!r}")

    def match(self, pattern: re.Pattern) -> str:
        self.skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise MlirError(f"expected {pattern.pattern} at {self.text[self.at : self.at + 60]!r}")
        self.at = found.end()
        return found.group()

    def bracketed(self) -> str:
        """The text of the bracketed group that starts here, with its brackets."""
        self.skip()
        start, depth = self.at, 0
        for token in _BRACKETS.finditer(self.text, start):
            if token.group() in _CLOSING:
                depth += 1
            elif token.group() in ")]}>":
                depth -= 1
                if depth == 0:
                    self.at = token.end()
                    return self.text[start : self.at]
        raise MlirError(f"unclosed bracket at {self.text[start : start + 60]!r}")

    # -- values

    def define(self, name: str, type_: str, producer: Op | None = None) -> Value:
        value = Value(name, type_, self.slots, producer)
        self.slots += 1
        self.scopes[-1][name] = value
        return value

    def use(self) -> Value:
        name = self.match(_SSA)
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise MlirError(f"{name} is used before it is defined")

    # -- grammar

    def module(self) -> Module:
        top = self.op()
        if top.name != "builtin.module":
            raise MlirError(f"expected a builtin.module, got {top.name}")
        funcs = {}
        for op in top.regions[0][0].ops:
            if op.name == "func.func" and op.regions[0]:
                name = op.properties["sym_name"].strip('"')
                funcs[name] = Func(name, op, int(op.attributes.pop("slots")))
        return Module(funcs, {**top.properties, **top.attributes})

    def op(self) -> Op:
        results = self.result_names()
        name = self.match(_BRACKETS).strip('"')
        op = Op(name)
        is_func = name == "func.func"
        if is_func:
            self.scopes, self.slots = [{}], 0
        self.expect("(")
        while not self.accept(")"):
            op.operands.append(self.use())
            self.accept(",")
        if self.peek("["):
            raise MlirError(f"{name} has successor blocks; only structured control flow is read")
        if self.peek("<{"):
            op.properties = attribute_dict(self.bracketed()[1:-1])
        if self.accept("({"):
            op.regions.append(self.region())
            while self.accept(", {"):
                op.regions.append(self.region())
            self.expect(")")
        if self.peek("{"):
            op.attributes = attribute_dict(self.bracketed())
        self.expect(":")
        self.bracketed()  # the operands' types are known
        self.expect("->")
        types = split_top_level(self.bracketed()[1:-1]) if self.peek("(") else [self.type()]
        if len(types) != len(results):
            raise MlirError(f"{name}: {len(results)} results, {len(types)} types")
        op.results = [self.define(*pair, op) for pair in zip(results, types, strict=True)]
        if is_func:
            op.attributes["slots"] = str(self.slots)
        return op

    def result_names(self) -> list[str]:
        """`%0, %1:2 =` gives %0, %1#0, %1#1."""
        names: list[str] = []
        while self.peek("%"):
            name = self.match(_SSA)
            if count := _COUNT.match(self.text, self.at):
                self.at = count.end()
                names += [f"{name}#{i}" for i in range(int(count.group(1)))]
            else:
                names.append(name)
            self.accept(",")
        if names:
            self.expect("=")
        return names

    def type(self) -> str:
        self.skip()
        start = self.at
        self.match(_TYPE)
        if self.text.startswith("<", self.at):
            self.bracketed()
        return self.text[start : self.at]

    def region(self) -> list[Block]:
        """Blocks up to the closing brace. The opening one is read."""
        self.scopes.append({})
        blocks = [Block()]
        while not self.accept("}"):
            if self.peek("^"):
                self.match(_LABEL)
                if blocks[-1].ops:
                    blocks.append(Block())
                if self.accept("("):
                    while not self.accept(")"):
                        name = self.match(_SSA)
                        self.expect(":")
                        blocks[-1].arguments.append(self.define(name, self.type()))
                        self.accept(",")
                self.expect(":")
            else:
                blocks[-1].ops.append(self.op())
        self.scopes.pop()
        return [block for block in blocks if block.ops]


def split_top_level(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no string."""
    parts, depth, start = [], 0, 0
    for token in _BRACKETS.finditer(text):
        symbol = token.group()
        if symbol in _CLOSING:
            depth += 1
        elif symbol == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
        elif symbol in ")]}>":
            depth -= 1
    if rest := text[start:].strip():
        parts.append(rest)
    return parts


def attribute_dict(text: str) -> dict[str, str]:
    """`{a = 1 : i32, b}` gives {"a": "1 : i32", "b": ""}."""
    entries = {}
    for entry in split_top_level(text.strip()[1:-1]):
        found = _ENTRY.fullmatch(entry)
        if found:
            entries[found.group(1)] = found.group(2)
        else:
            entries[entry.strip('"')] = ""
    return entries


# ------------------------------------------------------------------------ attributes and types


@functools.lru_cache(maxsize=4096)
def int_array(text: str) -> tuple[int, ...]:
    """`array<i64: 1, 2>` gives (1, 2)."""
    body = text.partition(":")[2].rstrip(">").strip()
    return tuple(int(item) for item in body.split(",")) if body else ()


def enum_word(text: str) -> str:
    """`#hivm.round_mode<rint>` gives "rint"."""
    return text[text.index("<") + 1 : text.rindex(">")]


# Bits of each element type. An i1 is a bit in the Unified Buffer.
ELEMENT_BITS = {
    "i1": 1,
    "i8": 8,
    "ui8": 8,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "i16": 16,
    "f16": 16,
    "bf16": 16,
    "i32": 32,
    "f32": 32,
    "i64": 64,
    "f64": 64,
    "index": 64,
}

DYNAMIC = -(2**63)  # how MLIR writes "only known at run time" in an array of sizes


@dataclass(frozen=True, slots=True)
class MemRefType:
    """`memref<64x?xf32, strided<[?, 1]>, #hivm.address_space<ub>>`. None: known at run time.

    space: "gm" (global memory), "ub" (Unified Buffer), "cbuf" (L1) or "cc" (L0C).
    strides: in elements, row-major ones when the type gives none.
    """

    shape: tuple[int | None, ...]
    element: str
    strides: tuple[int | None, ...]
    space: str

    @property
    def is_static(self) -> bool:
        return None not in self.shape

    @property
    def elements(self) -> int:
        """Number of elements; a dimension that is not known counts as 1."""
        return math.prod(1 if size is None else size for size in self.shape)

    @property
    def bytes(self) -> int:
        """Size of the elements, without gaps, in bytes."""
        return (self.elements * ELEMENT_BITS[self.element] + 7) // 8


def row_major(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Strides of a dense array, in elements."""
    strides: list[int | None] = []
    step: int | None = 1
    for size in reversed(shape):
        strides.append(step)
        step = None if step is None or size is None else step * max(size, 1)
    return tuple(reversed(strides))


def _optional_ints(items: list[str]) -> tuple[int | None, ...]:
    return tuple(None if item.strip() == "?" else int(item) for item in items)


@functools.lru_cache(maxsize=4096)
def memref_type(text: str) -> MemRefType:
    """Read a memref type. Raises MlirError for another type."""
    if not text.startswith("memref<"):
        raise MlirError(f"not a memref type: {text}")
    dims, *layout = split_top_level(text[len("memref<") : -1])
    *sizes, element = dims.split("x")
    shape = _optional_ints(sizes)
    strides, space = row_major(shape), "gm"
    for part in layout:
        if "address_space" in part:
            space = enum_word(part)
        elif part.startswith("strided"):
            listed = part[part.index("[") + 1 : part.index("]")]
            strides = _optional_ints(listed.split(",")) if listed.strip() else ()
    return MemRefType(shape, element, strides, space)


def is_memref(type_: str) -> bool:
    return type_.startswith("memref<")
