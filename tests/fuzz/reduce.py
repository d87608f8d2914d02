"""Makes a failing program small: steps, results, blocks and settings go, as long as it still fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Program, Step

_TARGETS = re.compile(r"(v\d+(?:, v\d+)*) = ")
_NAME = re.compile(r"\b[vwx]\d+\b")


def reduced(program: Program, fails: Callable[[Program], bool], budget: int = 400) -> Program:
    """The smallest program found that still fails, after at most `budget` tries."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            budget -= 1
            if budget < 0:
                return program
            if smaller != program and fails(smaller):
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less, those that lose most first."""
    steps = program.steps
    for i in reversed(range(len(steps))):
        yield _without(program, i)
    for i, step in enumerate(steps):
        targets = _targets(step)
        if len(targets) == 1:  # readers of its value read what it was made of
            for name in dict.fromkeys(_NAME.findall(step.text.partition(" = ")[2])):
                yield _renamed(program, i, targets[0], name)
    for i in range(len(program.results) - 1):
        yield replace(program, results=program.results[:i] + program.results[i + 1:])
    if len(program.results) > 1:
        yield replace(program, results=program.results[:-1])
    for i, step in enumerate(steps):
        if step.context:
            bare = replace(step, context=())
            yield replace(program, steps=(*steps[:i], bare, *steps[i + 1:]))
    yield replace(program, dynamic=False)
    yield replace(program, module=False)
    yield replace(program, autocast=False)
    yield replace(program, grad="no_grad")
    if program.route != "aten":
        yield replace(program, route="dynamo")
    used = set(program.results).union(*(_NAME.findall(step.text) for step in steps)) | \
        {p.memory for p in program.parameters}
    yield replace(program, parameters=tuple(p for p in program.parameters if p.name in used))
    for i, parameter in enumerate(program.parameters):
        single = replace(parameter, dtype="float32")
        yield replace(program, parameters=(*program.parameters[:i], single, *program.parameters[i + 1:]))


def _targets(step: Step) -> list[str]:
    match = _TARGETS.match(step.text)
    return match[1].split(", ") if match else []


def _without(program: Program, dropped: int) -> Program:
    """Without a step and all that needs its values."""
    gone: set[str] = set()
    kept: list[Step] = []
    for i, step in enumerate(program.steps):
        if i == dropped or gone & set(_NAME.findall(step.text)):
            gone.update(_targets(step))
        else:
            kept.append(step)
    results = tuple(name for name in program.results if name not in gone)
    made = [name for step in kept for name in _targets(step)]
    return replace(program, steps=tuple(kept),
                   results=results or tuple(made[-1:]) or (program.parameters[0].name,))


def _renamed(program: Program, dropped: int, old: str, new: str) -> Program:
    """Without a step; `new` stands in the place of its value `old`."""
    def rename(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    steps = (*program.steps[:dropped],
             *(replace(step, text=rename(step.text)) for step in program.steps[dropped + 1:]))
    return replace(program, steps=steps, results=tuple(map(rename, program.results)))
