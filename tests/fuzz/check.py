"""Runs a fuzzed program in eager and compiled, and compares all that a caller can see."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock
from zlib import crc32

import torch
from checks import NoRounding, assert_within_bound, tensors
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ascend_ln_fuse import clear_reports, last_reports
from ascend_ln_fuse.backend import fuse_graph
from ascend_ln_fuse.kernels import chain_choice
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice
from ascend_ln_fuse.kernels.chain_ops import chain_runner
from ascend_ln_fuse.kernels.ops import runner
from ascend_ln_fuse.options import Options
from ascend_ln_fuse.patterns import cats

from .hits import watched
from .program import (
    BATCH,
    CALL_MODES,
    CALLS,
    CALLS_BEFORE,
    CONTEXTS,
    SECOND_BATCH,
    WRITE_BETWEEN,
    Program,
)

#: Draws of arguments over which errors are compared, as if all were one tensor, where those of one draw
#: are out of bound: on a tensor of a few numbers eager is now and then right by luck.
DRAWS = 16
#: and calls on arguments a rounding step off, of each of them (see `_Session._trio`)
NOISE = 4

OFF = Options(report="off")


class Mismatch(AssertionError):
    """The compiled program differs from eager."""


class Call(NamedTuple):
    """A call of a program: with this batch size, and as a further call of that name (in CALLS) or none."""

    batch: int = BATCH
    name: str = ""

    def memory(self, memory: list[torch.Tensor], kinds: list[torch.dtype]) -> list[torch.Tensor]:
        """What the call gets in the place of fresh memory, of these dtypes in the program."""
        given = {"torch": torch, "memory": memory, "kinds": kinds}
        return eval(CALLS[self.name], given) if self.name else memory


@dataclass(frozen=True)
class Run:
    """What a caller sees of one call.

    Attributes:
        values: the outputs, the arguments' memory after the call and, in training, the gradients.
        gradients: how many of the values are gradients.
        aliases: how outputs share memory, with each other and with arguments, and which require grad.
        error: what was raised instead.
    """

    values: tuple[torch.Tensor | None, ...] = ()
    aliases: tuple = ()
    gradients: int = 0
    error: Exception | None = None


@dataclass(frozen=True)
class Outcome:
    """The sites of all graphs of a program, how many of them took something along, how many of its calls
    raised as in eager, and whether PyTorch's own tracing alone (Dynamo, make_fx) differs from eager, and this
    backend only as that does. `hits`: which parts of the pass had something to do (hits.py)."""

    fused: int
    declined: int
    grown: int = 0
    errors: int = 0
    foreign: bool = False
    hits: frozenset[str] = field(default_factory=frozenset)


def check(program: Program) -> Outcome:
    """Compare `program` compiled with eager.

    Raises:
        Mismatch: they differ in values (by the design's bound), shapes, dtypes, strides, shared memory,
            what is written into arguments, gradients, the error raised, or the number of graphs.
    """
    clear_reports()
    with _environment(program), watched() as hits:
        session, foreign = _Session(program), False
        try:
            errors = session.compare()
        except Mismatch:
            traced = _Session(program, "aot_eager" if program.route == "aot_eager" else "eager")
            try:
                errors, foreign = session.compare(traced), True
            except Mismatch:
                foreign = False
            if not foreign:
                raise
        sites = session.sites or [site for report in last_reports() for site in report.sites]
        fused = sum(site.status == "fused" for site in sites)
        grown = sum(site.status == "fused" and " -> " in site.pattern for site in sites)
        return Outcome(fused, len(sites) - fused, grown, errors, foreign, frozenset(hits))


@contextmanager
def _environment(program: Program) -> Iterator[None]:
    """Where kernels run: in Triton's interpreter for the route "kernel", else as plain torch. However small a
    cat is, it is taken."""
    interpreted = program.route == "kernel"
    with mock.patch.dict(os.environ, {"ASCEND_LN_FUSE_INTERPRET": str(int(interpreted)),
                                      "ASCEND_LN_FUSE_STRICT": "1"}), \
            mock.patch.object(cats, "LEAST_BYTES", 1), \
            mock.patch.object(chain_choice, "_stored", _measured_before):
        if not interpreted:
            yield
            return
        try:
            _forget_plans()
            yield
        finally:
            _forget_plans()


def _forget_plans() -> None:
    """They remember where they run."""
    runner.cache_clear()
    chain_runner.cache_clear()


def _measured_before(key: str, configs: Sequence, words: Sequence[str]) -> Choice:
    """In the place of what was measured on an accelerator: one kernel for every other segment."""
    number = crc32(key.encode())
    if number % 2 or not configs:
        return Choice(LIBRARY)
    return Choice(ONE_KERNEL, configs[number // 2 % len(configs)])


class _Exact(NoRounding):
    """NoRounding that copies where eager's cast made a copy, so that writes reach no further.

    `copied`: whether it did, for each cast in turn; filled by a run with `record`, in eager's dtypes."""

    def __init__(self, copied: list[bool], record: bool = False):
        super().__init__()
        self.copied, self.record, self._turn = copied, record, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.record:
            result = func(*args, **(kwargs or {}))
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in self._CASTS and isinstance(args[0], torch.Tensor):
            shared = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            if self.record:
                self.copied.append(not shared)
            elif self._turn < len(self.copied):
                self._turn += 1
                if self.copied[self._turn - 1] and shared:
                    return result.clone()
        return result


class _Session:
    """A program and its compiled form. `backend`: of torch.compile, ours or Dynamo's own. (On the route
    "aten" any other than ours leaves the graph as it was traced.)"""

    def __init__(self, program: Program, backend: str = "ascend_ln_fuse"):
        self.program, self.scope = program, program.load()
        self.sites: list = []
        self._copied: dict[Call, list[bool]] = {}
        # The self-check judges by one call of a few numbers; `_compare` looks at more where it must.
        options = {"options": {"report": "off", "inner": program.inner, "self_check": "off"}} \
            if backend == "ascend_ln_fuse" else {}
        self._given = {"backend": backend, "dynamic": program.dynamic, **options}
        self._callable: Callable | None = None
        self._compiled: Callable | None = None

    def compare(self, reference: _Session | None = None) -> int:
        """Compare the calls with eager, or with another compiled form; how many of them raised."""
        batches = (BATCH, SECOND_BATCH) if self.program.dynamic else (BATCH,)
        graphs, raised = [], 0
        for batch in batches:
            raised += self._compare(Call(batch), reference)
            graphs.append(len(last_reports()))
        if reference is None and self.program.route != "aten" and graphs[-1] > graphs[0] and not raised:
            self._compare_graphs(graphs[-1])
        for name in self.program.calls if not raised else ():
            raised += self._compare(Call(SECOND_BATCH if name == "other size" else BATCH, name), reference)
        return raised

    def _compare_graphs(self, count: int) -> None:
        counter = CompileCounterWithBackend("eager")
        other = _Session(self.program)
        other._given = {"backend": counter, "dynamic": True}
        for batch in (BATCH, SECOND_BATCH):
            other.run(0, Call(batch), compiled=True)
        if count > counter.frame_count:
            raise Mismatch(f"{count} graphs are compiled, {counter.frame_count} with backend='eager'")

    def _compare(self, call: Call, reference: _Session | None) -> bool:
        def run(seed):
            return (reference or self).run(seed, call, compiled=reference is not None), \
                self.run(seed, call, compiled=True)

        eager, ours = run(0)
        if eager.error is not None:
            if "shape in place" in self.program.features and ours.error is None and \
                    "modified by an inplace operation" in str(eager.error):
                return True  # x.squeeze_() behind the graph: Dynamo does it itself, and no pass sees it
            if type(ours.error) is not type(eager.error):
                raise Mismatch(f"raises {ours.error!r}, eager {eager.error!r}") from ours.error
            return True
        if ours.error is not None:
            raise Mismatch(f"raises {ours.error!r}") from ours.error
        if eager.aliases != ours.aliases:
            raise Mismatch(f"memory is shared or gradients required otherwise: {ours.aliases}, "
                           f"in eager {eager.aliases}")
        for i, (a, b) in enumerate(zip(eager.values, ours.values, strict=True)):
            # Autograd promises no strides of gradients.
            strides = i < len(eager.values) - eager.gradients
            if _layout(a, strides) != _layout(b, strides):
                raise Mismatch(f"yields {_layout(b)}, eager {_layout(a)}")
        if all(a is None or _identical(a, b) for a, b in zip(eager.values, ours.values)):
            return False
        reason = _excess([self._trio(0, call, eager, ours)])
        if reason:
            reason = _excess([self._trio(seed, call, *(run(seed) if seed else (eager, ours)), noise=NOISE)
                              for seed in range(DRAWS)])
        if reason:
            raise Mismatch(reason)
        return False

    def _trio(self, seed: int, call: Call, eager: Run, ours: Run, noise: int = 0) -> tuple[Run, Run, Run]:
        """(eager, ours, exact): with the same call in float64, or eager's own values where that does not run.

        `noise`: so many such calls on arguments that are a rounding step off, and as many of eager. Where
        one is further from the exact value than eager is, it stands in eager's place: eager was right by
        luck. A gradient that cancels for all arguments moves with eager's roundings alone."""
        if call not in self._copied:
            self._copied[call] = []
            self.run(seed, call, mode=_Exact(self._copied[call], record=True))
        exact = self.run(seed, call, wide=True)
        wide = exact.error is None and len(exact.values) == len(eager.values)
        exact = exact if wide else eager
        near, high = list(eager.values), list(exact.values)
        for i, (low, value) in enumerate(zip(near, high)):
            if value is None or value.shape != low.shape or not torch.equal(value.isfinite(), low.isfinite()):
                high[i] = low
        for k in range(noise):
            moved = self.run(seed, call, wide=wide, noise=k + 1).values
            near = [_farther(*values) for values in zip(near, moved, high, strict=True)]
            again = self.run(seed, call, noise=k + 1).values if wide else ()
            if len(again) == len(moved):
                near = [_farther(low, _error_at(value, *others), value) for low, value, *others in
                        zip(near, high, again, moved)]
        return Run(tuple(near)), ours, Run(tuple(high))

    def run(self, seed: int, call: Call, compiled: bool = False, wide: bool = False, noise: int = 0,
            mode: _Exact | None = None) -> Run:
        """One call on fresh arguments, whose values are those of the seed in their dtypes; in float64 where
        `wide`, and a rounding step off where there is `noise` (its seed)."""
        program, scope = self.program, self.scope
        seed += DRAWS * bool(call.name)  # other values than those of the first call
        with torch.random.fork_rng(devices=[]), ExitStack() as modes:
            torch.manual_seed(seed)
            leaves = scope["bases"](call.batch)
            kinds = [b.dtype for b in leaves]
            if wide or noise:
                torch.manual_seed(noise)
                wider = [b.double() * (1 + bool(noise) * max(program.step, torch.finfo(b.dtype).eps)
                                       * torch.randn(b.shape, dtype=torch.float64).sign()) for b in leaves]
                leaves = wider if wide else [w.to(b.dtype) for w, b in zip(wider, leaves)]
            torch.manual_seed(seed)
            memory = leaves
            if program.grad == "training":
                leaves = [b.requires_grad_() for b in leaves]
                memory = [b * 1 for b in leaves]  # a leaf cannot be written in place
            memory = call.memory(memory, kinds)
            modes.enter_context(torch.set_grad_enabled(program.grad != "no_grad"))
            if program.autocast:
                modes.enter_context(eval(CONTEXTS["autocast"], scope))
            if wide or mode is not None:
                modes.enter_context(mode or _Exact(self._copied[call]))
            try:
                arguments = scope["arguments"](*memory)
                made = function = scope["make"](*memory)
                if compiled:
                    made, function = self._compile(made, arguments)
                return _seen(self._called(call, function, arguments, memory), made, leaves, memory)
            except Exception as error:
                return Run(error=error)

    def _called(self, call: Call, function: Callable, arguments: Sequence, memory: list) -> list:
        """What the call yields, and then what earlier calls with the same arguments have yielded, as it is
        now: no later call may change it otherwise than eager's does."""
        before = [[t.detach() for t in tensors(function(*arguments))]
                  for _ in range(CALLS_BEFORE.get(call.name, 0))]
        if call.name == "written between":
            with torch.no_grad():
                eval(WRITE_BETWEEN, {"memory": memory})
        with eval(CALL_MODES[call.name], self.scope) if call.name in CALL_MODES else nullcontext():
            return [function(*arguments), *before]

    def _compile(self, made: Callable, arguments: Sequence) -> tuple[Callable, Callable]:
        """What was compiled (once), with the weights of `made`, and its compiled form."""
        if self._compiled is None or not self._serves(arguments):
            self._callable = made
            self._compiled = self._aten(made, arguments) if self.program.route == "aten" else \
                torch.compile(made, **self._given)
        elif isinstance(made, torch.nn.Module):
            for old, new in zip(self._callable.parameters(), made.parameters()):
                old.data = new.data
        return self._callable, self._compiled

    def _serves(self, arguments: Sequence) -> bool:
        """Whether what was traced holds at these sizes; Dynamo's guards see to that themselves."""
        if self.program.route != "aten" or not self.program.dynamic:
            return True
        return self._shapes.evaluate_guards_for_args(self._fakes, list(arguments), ignore_static=False)

    def _aten(self, made: Callable, arguments: Sequence) -> Callable:
        """The graph of make_fx, through the pass."""
        mode = "symbolic" if self.program.dynamic else "fake"
        traced = make_fx(lambda *args: made(*args), tracing_mode=mode)(*arguments)
        self._fakes = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
        self._shapes = self._fakes[0].fake_mode.shape_env
        if self._given["backend"] != "ascend_ln_fuse":
            return traced
        graph, sites = fuse_graph(traced.graph, OFF)
        self.sites += sites
        return traced if graph is None else GraphModule(traced, graph)


def _seen(outputs, made, leaves, memory) -> Run:
    values = tensors(outputs)
    places = [x.untyped_storage().data_ptr() or None for x in (*values, *memory)]
    aliases = []
    for value, place in zip(values, places):
        first = places.index(place)
        shared = place is not None and places.count(place) > 1
        offset = value.storage_offset() - (*values, *memory)[first].storage_offset()
        aliases.append((first, offset) if shared else None)
    gradients: tuple[torch.Tensor | None, ...] = ()
    made_of = [*leaves, *made.parameters()] if isinstance(made, torch.nn.Module) else leaves
    made_of = [t for t in made_of if t.requires_grad]
    if made_of:
        used = [v for v in values if v.requires_grad]
        if used:
            total = sum((v.double().sin() * (i + 1)).sum() for i, v in enumerate(used))
            gradients = torch.autograd.grad(total, made_of, allow_unused=True)
    return Run((*(v.detach() for v in (*values, *memory)), *gradients),
               (*aliases, *(v.requires_grad for v in values)), len(gradients))


def _excess(trios: Sequence[tuple[Run, Run, Run]]) -> str:
    """What is out of the bound of tests/checks.py for (eager, ours, exact) of several draws, as if each
    value were one tensor over all of them; nothing where all is within."""
    for position, value in enumerate(trios[0][0].values):
        if value is None:
            continue
        eager, ours, exact = (torch.cat([trio[i].values[position].reshape(-1) for trio in trios])
                              for i in range(3))
        try:
            assert_within_bound(ours, eager, exact)
        except AssertionError as error:
            return str(error)
    return ""


def _farther(low, moved, exact) -> torch.Tensor | None:
    """Of two values the one further from `exact`, in the dtype of the first."""
    if low is None or moved is None or not low.dtype.is_floating_point or moved.shape != low.shape or \
            not low.numel():
        return low
    moved, finite = moved.to(low.dtype), low.isfinite()
    if not finite.any() or not torch.equal(moved.isfinite(), finite):
        return low
    errors = [(value[finite].double() - exact[finite].double()).abs().max() for value in (low, moved)]
    return moved if errors[1] > errors[0] else low


def _error_at(exact, again, moved) -> torch.Tensor | None:
    """`exact` with the error that eager has on other arguments, where it gives `again` instead of `moved`."""
    if any(value is None for value in (exact, again, moved)) or not exact.dtype.is_floating_point or \
            not exact.shape == again.shape == moved.shape:
        return exact
    return exact + (again.to(exact.dtype) - moved)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) and \
        torch.equal(a.nan_to_num(0.25), b.nan_to_num(0.25))


def _layout(t: torch.Tensor | None, with_strides: bool = True) -> str:
    """What two equal layouts have in common. Strides of dims of size 1 say nothing, and PyTorch's own fakes
    do not have those of eager."""
    if t is None:
        return "nothing"
    strides = [stride if size != 1 else "any" for stride, size in zip(t.stride(), t.shape)
               if t.numel() and with_strides]
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with strides {strides}"
