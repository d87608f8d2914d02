"""The Hypothesis strategy of programs.

A program is decoded from a string of bytes, its genes: a header, then five genes a step. Which values a
gene picks is counted from the newest, so that a step means the same whatever came long before it.
One string rather than a list of choices, because Hypothesis would spend two thirds of its examples on
copies in which one choice stands in the place of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hypothesis import strategies as st

from . import layer_steps  # noqa: F401 - its steps are among STEPS
from .builder import Builder, NoFit
from .program import CALLS, Program
from .steps import STEPS, first

#: each as often as it stands here; Dynamo takes twice as long as make_fx, and aot_eager three times as long
ROUTES = ("dynamo",) * 26 + ("aten",) * 20 + ("kernel",) * 2 + ("aot_eager",) * 1
GRADS = ("no_grad", "no_grad", "training", "grad")
NORMS = ("library_norm", "handwritten_norm", "l2_norm", "packed", "conditioned")
DTYPES = ("float32", "bfloat16", "float32", "bfloat16", "float16", "float64")
#: features of which kernels are what matters: a third of such programs run in Triton's interpreter
IN_KERNELS = frozenset({"joined", "layers", "convolution", "rotary"})

#: steps before the norm that every program has, and after it, at most
BEFORE, AFTER = 6, 10
_HEADER, _STEP = 16, 5
_DRAWN = tuple(name for name, (_, weight) in STEPS.items() for _ in range(weight))


def decode(genes: bytes) -> Program:
    """The program of `genes`, a string of `SIZE` bytes."""
    header, rest = genes[:_HEADER], iter(genes[_HEADER:])
    main, other, route, grad, module, autocast, dynamic, before, after, norm, count = header[:11]
    route, grad, autocast, module = _of(ROUTES, route), _of(GRADS, grad), autocast > 240, module % 2 == 1
    if route == "aten":  # make_fx looks below autograd and autocast, and wants all tensors as arguments
        module, grad, autocast = False, "no_grad", False
    builder = Builder(_of(DTYPES, main), _of(DTYPES, other), grad, autocast)
    start, *steps = _steps(rest, before % (BEFORE + 1), _of(NORMS, norm), after % (AFTER + 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first(builder, start[1])
        for name, choices in steps:
            try:
                builder.turn()
                STEPS[name][0](builder, choices)
            except NoFit:
                continue
        builder.finish()
    if route == "dynamo" and header[2] % 3 == 0 and any(step.feature in IN_KERNELS for step in builder.steps):
        route = "kernel"
    results = header[11:11 + max(0, count % 5 - 1)]
    return builder.program(results, module=module, dynamic=dynamic > 235, route=route,
                           calls=_calls(route, grad, *header[14:]))


def _calls(route: str, grad: str, one: int, other: int) -> tuple[str, ...]:
    """The further calls: none to two of them, none for two thirds of the programs; behind kernels, whose
    plans are kept, always the same call again and another."""
    names = [name for name in CALLS if name != "requires grad" or grad == "grad"]
    if route == "kernel":
        return "again", names[1 + one * (len(names) - 1) // 256]
    if route == "aten":  # what was traced holds for its sizes, strides and grad mode
        names = ["again", "elsewhere", "one memory", "written between"]
    return tuple(names[gene * len(names) // 100] for gene in (one, other) if gene < 100 and one < 100)


def _steps(genes: Iterator[int], before: int, norm: str, after: int) -> Iterator[tuple[str, tuple]]:
    """Names of steps and their genes; the first is where the program starts from."""
    for i in range(1 + before + 1 + after):
        name, *choices = (next(genes) for _ in range(_STEP))
        yield norm if i == before + 1 else _of(_DRAWN, name), tuple(choices)


def _of(choices: Sequence, gene: int):
    return choices[gene * len(choices) // 256]


SIZE = _HEADER + _STEP * (2 + BEFORE + AFTER)

#: Programs of one to some thirty statements, with a norm where there is a value to normalise.
PROGRAMS = st.binary(min_size=SIZE, max_size=SIZE).map(decode)
