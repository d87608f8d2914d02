"""Bugs put into the product on purpose: how many programs does the fuzzer need to find each?

`python tests/fuzz/mutants.py --graphs 500` prints a table. A mutant is a change of one function's source,
made in memory.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from types import CodeType, FunctionType
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from ascend_ln_fuse import backend
from ascend_ln_fuse.backend import Fused
from ascend_ln_fuse.simplify import Simplified
from fuzz.check import check
from fuzz.program import Program
from fuzz.run import CHUNK, _start
from fuzz.strategy import PROGRAMS

PASS, KERNELS = "pass", "kernels"


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `function`, a dotted name in `ascend_ln_fuse.<module>`, which has
    a part in what the pass makes of a graph or, where `where` is KERNELS, in how kernels run."""

    module: str
    function: str
    old: str
    new: str
    where: str = PASS

    @contextmanager
    def active(self) -> Iterator[None]:
        """The package with this bug.

        Raises:
            LookupError: `old` does not stand in the source exactly once: the mutant is out of date.
        """
        function, code = self._changed
        original, function.__code__ = function.__code__, code
        try:
            yield
        finally:
            function.__code__ = original

    @property
    def code(self) -> CodeType:
        """Of the function as it is."""
        return self._changed[0].__code__

    @cached_property
    def _changed(self) -> tuple[FunctionType, CodeType]:
        """(the function, its code with the bug)."""
        module = importlib.import_module(f"ascend_ln_fuse.{self.module}")
        function = inspect.unwrap(reduce(getattr, self.function.split("."), module))
        source = textwrap.dedent(inspect.getsource(function))
        count = source.count(self.old)
        if count != 1:
            raise LookupError(f"{self.module}.{self.function} has {self.old!r} {count} times")
        scope = dict(vars(module))
        body = source[source.index("def "):]  # without decorators
        exec(compile("from __future__ import annotations\n" + body.replace(self.old, self.new),
                     "<mutant>", "exec"), scope)
        return function, scope[function.__name__].__code__


MUTANTS = {
    "views keyed without their arguments": Mutant(
        "rewrite", "_operand", "step.key)", "step.target)"),
    "views shared with no_grad": Mutant(
        "rewrite", "rewrite", "lens.segment[unit.anchor]", "0"),
    "operands placed without their views' arguments": Mutant(
        "site", "Assembler._place", "step.key for step in steps", "step.target for step in steps"),
    "scalars that are close taken for one": Mutant(
        "site", "Assembler.scalar", "known == value)", "abs(known - value) < 1e-4)"),
    "no rounding by a cast": Mutant(
        "site", "Assembler._emit", "self.cast(self.emit(node.args[0], steps), dtype)",
        "self.emit(node.args[0], steps)"),
    "rsub's operands not swapped": Mutant(
        "site", "pointwise_args", "(args[1], args[0])", "(args[0], args[1])"),
    "the order of a result's dims lost": Mutant(
        "site", "layout_order", "return order", "return tuple(range(fake.dim()))"),
    "no order of a write after reads": Mutant(
        "graph", "Lens._order", "(*readers.pop(key, ()), *others)", "others"),
    "inputs that may share memory are apart": Mutant(
        "graph", "Lens._order", "inputs if inputs & self.written else frozenset()", "frozenset()"),
    "memory that is written taken in": Mutant(
        "graph", "Lens.is_mutated", "not self.storages(node).isdisjoint(self.written)", "False"),
    "sites across grad modes": Mutant(
        "patterns.grow", "Grower._mine", "self.lens.segment[node] == self.segment", "True"),
    "a stored value without a look at its readers": Mutant(
        "patterns.grow", "Grower._absorbable", "lens.leads_into(reader, self.interior)", "False"),
    "any variance is biased": Mutant(
        "patterns.handwritten_norm", "_Matcher._variance", "correction != 0", "False"),
    "half a rotation lies anywhere": Mutant(
        "patterns.rotary", "lies", "same(fake.storage_offset() - full.storage_offset(), offset)", "True"),
    "pairs rotated as halves": Mutant(
        "patterns.rotary", "_rotation", '"rotate_pairs", 2, 1', '"rotate_half", 2, 1'),
    "a rotation without a look at its sign": Mutant(
        "patterns.rotary", "_rotation", 'len(parts) != 2 or lens.kind(parts[0]) != "neg" or', "not parts or"),
    "a rotation whose halves others read": Mutant(
        "patterns.rotary", "_rotation", "for user in node.users):", "for user in ()):"),
    "a written rotation of any signs": Mutant(
        "patterns.written_rotary", "written_rotation", 'not _is(lens, "add", odd)', "False"),
    "a buffer that is read before it is whole": Mutant(
        "patterns.written_rotary", "_writes", "lens.position[reader] < written or", ""),
    "either table of a written rotation": Mutant(
        "patterns.written_rotary", "_embedding", "dict(factors[2:]) != {0: sin, 1: cos}", "False"),
    "a mask that is somewhere True is all True": Mutant(
        "masks", "_meaning", "bool(mask.all())", "bool(mask.any())"),
    "a mask within the causal one is causal": Mutant(
        "masks", "_meaning", "(mask == causal).all()", "(mask <= causal).all()"),
    "a mask that is written is constant": Mutant(
        "masks", "_constants", "or lens.is_mutated(node)", ""),
    "an attention's strides without its mask": Mutant(
        "masks", "_fits", "_settles(lens, node, bare)", "True"),
    "a copy of a stream stays a copy": Mutant(
        "streams", "Stream.flow", "if is_view or", "if"),
    "an update private though read later as it was": Mutant(
        "updates", "_are_private", "last_read > position or not", "not"),
    "an update private though others write there": Mutant(
        "updates", "private_updates", "if key not in spoiled", ""),
    "an update with what it writes as operand": Mutant(
        "updates", "_is_update_of", "not lens.storages(arg).isdisjoint(lens.storages(target))", "False"),
    "what a cat's part is read by": Mutant(
        "patterns.cats", "_into_cats", "set(node.users) != {cat}", "False"),
    "lengths of a cat's parts in another order": Mutant(
        "cat_site", "build", "shape[cat.dim] for part in cat.parts",
        "shape[cat.dim] for part in cat.parts[::-1]"),
    "no order among what a site spans": Mutant(
        "select", "Taken.add", "if between is not None", "if False"),
    "a chain's columns begin at 0": Mutant(
        "patterns.chain_products", "_columns", "offset - whole.storage_offset(), shape[-1]", "0, shape[-1]"),
    "a convolution of any stride is one of patches": Mutant(
        "patterns.chain_products", "_convolution", "not same_shape(_pair(stride, 1), kernel)", "False"),
    "chains take in what is written": Mutant(
        "patterns.chain_products", "is_free", "not lens.is_mutated(node)", "True"),
    "a product that others read is pointwise all the same": Mutant(
        "patterns.chain", "_leaf", "any(user not in members for source in sources for user in source.users)",
        "False"),
    "places in a cat overlap": Mutant(
        "kernels.joined", "_places", "start += length", "start += length - 1", KERNELS),
    "a cat's memory used again": Mutant(
        "kernels.joined", "_in_place", "torch.empty(cat.sizes, dtype=cat.dtype, device=tensors[0].device)",
        "vars(_places).setdefault((cat.sizes, cat.dtype), torch.empty(cat.sizes, dtype=cat.dtype))", KERNELS),
    "recent calls found whatever their layout": Mutant(
        "kernels.recent", "Recent.find", "check(*tensors) and", "", KERNELS),
    "plans kept without strides": Mutant(
        "kernels.recent", "layouts", "x.stride(), ", "", KERNELS),
    "a region over a product that is read again": Mutant(
        "kernels.chain_segments", "reusable", "arg in spent and", "", KERNELS),
    "columns of a chain's value begin at 0": Mutant(
        "kernels.chain_program", "_Writer.text", "{ref.start}, ", "0, ", KERNELS),
}


def programs_until_found(mutants: Mapping[str, Mutant], most: int, number: int = 1,
                         say: Callable[[str], None] = lambda words: None) -> dict[str, int]:
    """For each of `mutants` that is found, the number of programs until one differs from eager; tried are
    `most`, the same for all.

    A program is checked without a bug first: a failure of its own finds no mutant. Then with each bug that
    can be seen in it: of the pass, where it makes another graph of what the program was traced to; of
    kernels, where they run.
    """
    found: dict[str, int] = {}
    waiting, made = dict(mutants), 0

    class AllFound(Exception):
        pass

    def try_all(program: Program) -> None:
        nonlocal made
        made += 1
        with _changed_graphs(waiting) as changed:
            if not _is_right(program):
                return
        for name, mutant in list(waiting.items()):
            if name in changed or (mutant.where == KERNELS and program.route == "kernel"):
                with mutant.active():
                    right = _is_right(program)
                if not right:
                    found[name] = made
                    del waiting[name]
                    say(f"{name}: found after {made} programs")
        if not waiting:
            raise AllFound

    try:
        for first in range(0, most, CHUNK):
            options = settings(max_examples=min(CHUNK, most - first), database=None, deadline=None,
                               phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
                               report_multiple_bugs=False)
            seed(number * 1_000_000 + first)(options(given(PROGRAMS)(try_all)))()
            torch._dynamo.reset()
    except AllFound:
        pass
    finally:
        torch._dynamo.reset()
    return found


@contextmanager
def _changed_graphs(mutants: Mapping[str, Mutant]) -> Iterator[set[str]]:
    """A set that fills, inside, with the names of those mutants of the pass under which it makes another
    graph than without."""
    changed: set[str] = set()

    def compared(function: Callable) -> Callable:
        def run(*args):
            with _called() as codes:
                result = function(*args)
            plain = _text(result)
            for name, mutant in mutants.items():
                if name in changed or mutant.where != PASS or mutant.code not in codes:
                    continue
                try:
                    with mutant.active():
                        differs = _text(function(*args)) != plain
                except Exception:
                    differs = True
                if differs:
                    changed.add(name)
            return result

        return run

    fuse = backend._fuse

    def with_new_lens(graph, options, wanted, begin, lens):
        return fuse(graph, options, wanted, begin, None)

    with mock.patch.object(backend, "_fuse", compared(with_new_lens)), \
            mock.patch.object(backend, "simplified", compared(backend.simplified)):
        yield changed


@contextmanager
def _called() -> Iterator[set[CodeType]]:
    """A set that fills, inside, with the code of what is called."""
    codes: set[CodeType] = set()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        yield codes
    finally:
        sys.setprofile(None)


def _text(made: Fused | Simplified) -> list[str]:
    """All that tells one result of the pass from another."""
    graph = made.graph
    return [f"{node.op} {node.name} {node.target} {getattr(node.target, 'joined', node.target.__doc__)} "
            f"{node.args} {node.kwargs}" for node in (() if graph is None else graph.nodes)]


def _is_right(program: Program) -> bool:
    try:
        check(program)
    except Exception:
        return False
    return True


@click.command(help=__doc__)
@click.option("--graphs", default=500, show_default=True, help="Programs at most, for each mutant.")
@click.option("--seed", "number", default=1, show_default=True)
@click.argument("only", nargs=-1)
def main(graphs: int, number: int, only: tuple[str, ...]) -> None:
    chosen = {name: mutant for name, mutant in MUTANTS.items()
              if not only or any(part in name for part in only)}
    _start()
    found = programs_until_found(chosen, graphs, number, click.echo)
    for name in chosen.keys() - found.keys():
        click.echo(f"{name}: not found")
    click.echo(f"{len(found)} of {len(chosen)} found in {graphs} programs")


if __name__ == "__main__":
    main()
