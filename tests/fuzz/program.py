"""A fuzzed program as data: parameters and steps, from which its source is written and run.

What runs is what is printed: `Program.source()` is a stand-alone script, and the function that is
tested is the one that this script defines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

#: the batch size of the first call; a program with symbolic sizes is called with the second one too
BATCH, SECOND_BATCH = 4, 7

#: a context's name -> the `with` block that it opens
CONTEXTS = {
    "no_grad": "torch.no_grad()",
    "enable_grad": "torch.enable_grad()",
    "autocast": 'torch.autocast("cpu", torch.bfloat16)',
    "no_autocast": 'torch.autocast("cpu", enabled=False)',
}

#: A further call of what was compiled, by name -> the memory that it gets, as source, of fresh `memory`.
#: ("elsewhere" is another place modulo 16 bytes; "one memory": arguments of one shape and dtype are one.
#: `kinds` are their dtypes, also where all are float64 for once.)
CALLS = {
    "again": "memory",
    "elsewhere": "[torch.cat((b.new_zeros(1), b.reshape(-1)))[1:].view(b.shape) for b in memory]",
    "other strides": "[b.transpose(0, -1).contiguous().transpose(0, -1) for b in memory]",
    "one memory": "[next(a.view_as(a) for a, kind in zip(memory, kinds)"
                  " if (a.shape, kind) == (b.shape, wanted)) for b, wanted in zip(memory, kinds)]",
    "written between": "memory",
    "requires grad": "[b.requires_grad_() * 1 for b in memory]",
    "other grad mode": "memory",
    "inference mode": "memory",
    "other size": "memory",
}

#: a further call's name -> the grad mode that it runs in, as source
CALL_MODES = {"other grad mode": "torch.set_grad_enabled(not torch.is_grad_enabled())",
              "inference mode": "torch.inference_mode()"}

#: How many calls with the same tensors come before those of that name. (A kernel that is called for the third
#: time with one layout is found by kernels/recent.py.)
CALLS_BEFORE = {"again": 2, "written between": 1}

#: Between the two calls of "written between", whose arguments are the same tensors.
WRITE_BETWEEN = "[b.mul_(0.75) for b in memory]"


@dataclass(frozen=True)
class Parameter:
    """An argument of the program.

    Attributes:
        name: of the argument.
        shape: of its memory; "n" is the batch size.
        dtype: a name in torch.
        view: the view of that memory which is passed, as source with `{}` for the memory; or of
            another parameter's memory where `memory` names it.
        memory: the parameter whose memory it shares, or "".
        weight: whether it is an nn.Parameter of the module (where the program is one).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    view: str = "{}"
    memory: str = ""
    weight: bool = False

    @property
    def base(self) -> str:
        return f"b_{self.memory or self.name}"


@dataclass(frozen=True)
class Step:
    """One statement.

    Attributes:
        text: its source.
        feature: what kind of step it is, for the statistics.
        context: names in CONTEXTS of the blocks that it stands in, outermost first.
    """

    text: str
    feature: str
    context: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A function of tensors, and how it is compiled and called.

    Attributes:
        parameters, steps, results: results are names of values.
        module: an nn.Module with the weights as its parameters, instead of a function.
        grad: "no_grad", "grad" (grad mode is on, but nothing requires it), "training" (backward too).
        dynamic: `torch.compile(dynamic=True)`, and a second call with another batch size.
        autocast: called under ambient bf16 autocast.
        route: "dynamo"; "aot_eager" (with that inner compiler); "kernel" (through the generated kernel in
            Triton's interpreter); "aten" (the pass on the ATen graph of make_fx).
        calls: names in CALLS of the calls of what was compiled that follow the first.
    """

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    module: bool = False
    grad: str = "no_grad"
    dynamic: bool = False
    autocast: bool = False
    route: str = "dynamo"
    calls: tuple[str, ...] = ()

    def __repr__(self) -> str:  # what Hypothesis prints
        return "\n" + self.source()

    @property
    def features(self) -> frozenset[str]:
        """What it has in it, for the statistics."""
        words = {step.feature for step in self.steps} | {c for step in self.steps for c in step.context}
        words |= {f"{p.dtype} input" for p in self.parameters}
        words |= {"inputs that share memory"} if any(p.memory for p in self.parameters) else set()
        words |= {f"route {self.route}", f"mode {self.grad}"}
        words |= {f"call {name}" for name in self.calls}
        words |= {word for word, on in (("module", self.module), ("symbolic sizes", self.dynamic),
                                        ("ambient autocast", self.autocast)) if on}
        return frozenset(words)

    @property
    def inner(self) -> str:
        """The option `inner` of the backend."""
        return "aot_eager" if self.route == "aot_eager" else "eager"

    @property
    def step(self) -> float:
        """The coarsest relative rounding step inside it, as far as its source tells; 0 where it is that of
        the arguments."""
        text = " ".join(step.text for step in self.steps)
        blocks = {name for step in self.steps for name in step.context}
        coarse = "bfloat16" in text or "autocast" in blocks or self.autocast
        single = "float" in text or any(p.dtype == "float32" for p in self.parameters)
        return 2.0 ** -7 if coarse else 2.0 ** -10 if "half()" in text else 2.0 ** -23 if single else 0.0

    def definition(self) -> str:
        """Source of `bases` (fresh memory), `arguments` (views of it) and `make` (the callable)."""
        inputs = [p for p in self.parameters if not (p.weight and self.module)]
        weights = [p for p in self.parameters if p.weight and self.module]
        owners = [p for p in self.parameters if not p.memory]
        shapes = [f"torch.randn({_tuple(p.shape)}).to(torch.{p.dtype})" for p in owners]
        names = _tuple([p.base for p in owners])
        body = "\n".join(self._body()) + f"\nreturn {_tuple(self.results)}"
        head = f"({', '.join(p.name for p in inputs)})"
        lines = ["import torch", "from torch.nn import functional as F", "", "",
                 f"def bases(n={BATCH}):"]
        lines += _indented("return [" + ",\n        ".join(shapes) + "]")
        lines += ["", "", f"def arguments{names if owners else '()'}:".replace(",)", ")")]
        lines += _indented("return [" + ", ".join(p.view.format(p.base) for p in inputs) + "]")
        lines += ["", ""]
        if not self.module:
            return "\n".join([*lines, f"def f{head}:", *_indented(body), "", "",
                              f"def make{names}:".replace(",)", ")"), "    return f"])
        init = ["super().__init__()",
                *(f"self.{p.name} = torch.nn.Parameter({p.base}, requires_grad={self.grad == 'training'})"
                  for p in weights)]
        loads = "\n".join(f"{p.name} = self.{p.name}" for p in weights)
        lines += ["class Model(torch.nn.Module):",
                  f"    def __init__(self, {', '.join(p.base for p in weights)}):",
                  *_indented("\n".join(init), 2), "",
                  f"    def forward(self{''.join(', ' + p.name for p in inputs)}):",
                  *_indented(loads + "\n" + body, 2), "", "",
                  f"def make{names}:".replace(",)", ")"),
                  f"    return Model({', '.join(p.base for p in weights)})"]
        return "\n".join(lines)

    def source(self) -> str:
        """A script that shows the program in eager and compiled."""
        options = {"inner": self.inner} if self.inner != "eager" else {}
        lines = [f"# {', '.join(sorted(self.features))}"]
        if self.route == "kernel":
            lines.append("# run with ASCEND_LN_FUSE_INTERPRET=1")
        if self.route == "aten":
            lines.append("# found on the ATen graph: fuse_graph(make_fx(f)(*arguments).graph)")
        lines += [self.definition(), "", ""]
        modes = [CONTEXTS["no_grad"]] * (self.grad == "no_grad") + [CONTEXTS["autocast"]] * self.autocast
        call = ["    f = make(*memory)",
                "    if backend is not None:",
                f"        f = torch.compile(f, dynamic={self.dynamic}, backend=backend, options={options})",
                "    print(f(*arguments(*memory)))"]
        for name in self.calls:
            call += self._further_call(name)
        if modes:
            call = [f"    with {', '.join(modes)}:", *("    " + line for line in call)]
        lines += ['for backend in (None, "ascend_ln_fuse"):', "    torch.manual_seed(0)",
                  "    memory = bases()"]
        if self.grad == "training":
            lines.append("    memory = [b.requires_grad_() * 1 for b in memory]")
        return "\n".join([*lines, *call]) + "\n"

    def _further_call(self, name: str) -> list[str]:
        size = str(SECOND_BATCH) if name == "other size" else ""
        lines = [f"# {name}", "torch.manual_seed(1)", f"memory = bases({size})"]
        if self.grad == "training":
            lines.append("memory = [b.requires_grad_() * 1 for b in memory]")
        lines += ["kinds = [b.dtype for b in memory]"] * ("kinds" in CALLS[name])
        lines.append(f"memory = {CALLS[name]}")
        if self.module:
            lines += ["for old, new in zip(f.parameters(), make(*memory).parameters()):",
                      "    old.data = new.data"]
        call = "f(*given)"
        lines.append("given = arguments(*memory)")
        lines += [call] * CALLS_BEFORE.get(name, 0)
        if name == "written between":
            lines += ["with torch.no_grad():", f"    {WRITE_BETWEEN}"]
        if name in CALL_MODES:
            lines.append(f"with {CALL_MODES[name]}:")
        lines.append(f"{'    ' * (name in CALL_MODES)}print({call})")
        return ["    " + line for line in lines]

    def load(self) -> dict:
        """The names that `definition` defines."""
        scope: dict = {}
        exec(compile(self.definition(), "<fuzzed program>", "exec"), scope)
        return scope

    def _body(self) -> list[str]:
        lines: list[str] = []
        for context, steps in groupby(self.steps, key=lambda step: step.context):
            for depth, name in enumerate(context):
                lines.append("    " * depth + f"with {CONTEXTS[name]}:")
            lines += ["    " * len(context) + step.text for step in steps]
        return lines or ["pass"]


def _tuple(items: Sequence) -> str:
    return "(" + "".join(f"{item}, " for item in items).removesuffix(" ").removesuffix(
        "," if len(items) != 1 else "") + ")"


def _indented(text: str, depth: int = 1) -> list[str]:
    return textwrap.indent(text, "    " * depth).split("\n")
