"""Whether sites stay fused in front of a compiler that fuses on its own: measured once a graph, and kept.

A fused site is one op that such a compiler cannot see into. Often that op is faster than what the compiler
makes of the site, and sometimes what it keeps the compiler from is worth more. So both forms of the graph are
compiled, run on the inputs of the first call and timed by turns; the plain one is taken unless the fused one
is clearly faster. All of it happens while the graph is compiled, because Dynamo hands over the inputs of the
call that it compiles for: what runs later is the compiled graph itself, with nothing in front of it, and
Dynamo sets the random stream back to where it was.

The choice is kept on disk (kernels/store.py) under the device, the versions, the settings and the text of the
graph: the next process compiles the chosen form only. An entry is one bit and what to print; a wrong one can
make a graph slower, never wrong.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx import Graph, GraphModule, Node

from .effects import (
    RANDOM,
    WORLD,
    effects_of,
    is_attention_without_dropout,
    is_fence,
    storages_of,
    tensors_of,
    value_of,
)
from .graph import hint
from .kernels import measure
from .kernels.guard import _words, device_lost
from .kernels.settings import strict
from .kernels.store import Store
from .options import Options
from .versions import sources

#: By how much the fused graph must beat the plain one: below it, the difference is noise.
MARGIN = 1.01

#: Seconds of timing, both forms together. A form that takes longer than that is timed once.
SECONDS = 0.5

#: Seconds of one compilation from which on the user is told that there is another.
LONG_SECONDS = 5.0

FUSED, PLAIN = "fused", "plain"

#: Reasons of sites in a graph that runs without them.
LEFT_SLOWER = "left to the inner compiler, which is as fast without it, or faster"
LEFT_UNKNOWN = "left to the inner compiler: which is faster was not measured"

_store = Store("inner")
_lock = threading.RLock()  # two measurements at a time would measure each other


@dataclass(frozen=True)
class Choice:
    """Which form of a graph is run.

    Attributes:
        fused: the one with fused sites.
        times: FUSED and PLAIN -> milliseconds of a call, the median; empty where nothing was measured.
        reason: why nothing was measured, or what became of the form that was not.
        lasting: False where other processes should measure again: something failed that may work there.
    """

    fused: bool
    times: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    lasting: bool = True

    def words(self, inner: str) -> str:
        """In a line: "left to inductor: plain 12.3 ms, fused 12.9 ms"."""
        start = f"fused, with {inner} around" if self.fused else f"left to {inner}"
        times = ", ".join(f"{name} {_milliseconds(self.times[name])}" for name in (PLAIN, FUSED)
                          if name in self.times)
        return f"{start}: {'; '.join(filter(None, (times, self.reason)))}"


def _milliseconds(ms: float) -> str:
    return f"{ms:.{1 if ms >= 10 else 3}f} ms"


@dataclass(frozen=True)
class Question:
    """A graph in two forms, and how to compile them.

    Attributes:
        inner: the name of the compiler.
        plain, fused: the forms.
        inputs: of the call that the graph is compiled for, as Dynamo hands them over.
        compile: compiles a form.
        compile_trial: compiles it without CUDA graphs, which must not be recorded for a trial: what other
            graphs left in their memory would be gone. None where `compile` makes none.
        settings: what else the times depend on.
        fell_back: whether plain PyTorch runs for a kernel of the fused form.
        say: prints a line of progress.
    """

    inner: str
    plain: GraphModule
    fused: GraphModule
    inputs: Sequence[object]
    compile: Callable[[GraphModule], Callable]
    compile_trial: Callable[[GraphModule], Callable] | None = None
    settings: str = ""
    fell_back: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda words: None


def choose(question: Question) -> tuple[Callable, Choice]:
    """The compiled form that is faster, and why: measured, or as it was measured before.

    Raises:
        whatever the inner compiler raises for the plain form; in strict mode for the fused one, too.
    """
    device, why = _accelerator(question.inputs)
    why = why or unrepeatable(question.plain.graph) or _unreal(question.inputs)
    if why:
        return _compiled(question, Choice(False, reason=f"not measured: {why}"))
    key = _key(question, device)
    with _lock:
        known = _stored(key)
        if known is None and measure.is_capturing(device):
            known = Choice(False, reason="not measured: a graph of the device is being captured")
        if known is not None:
            return _compiled(question, known)
        compiled, choice = _measured(question, device)
        if choice.lasting:
            _store.put(key, {"fused": choice.fused, "reason": choice.reason[:500],
                             "times": {name: round(ms, 4) for name, ms in choice.times.items()}})
    return compiled, choice


# -- Inductor's settings


def inductor_arguments(kwargs: Mapping[str, object]) -> dict[str, object]:
    """What `compile_fx` takes in the place of the `mode` that `torch.compile` hands over.

    Raises:
        RuntimeError: no mode of Inductor's.
    """
    from torch._inductor import list_mode_options

    rest = {name: value for name, value in kwargs.items() if name != "mode"}
    return {**rest, "config_patches": list_mode_options(kwargs["mode"])} if "mode" in kwargs else rest


def without_cuda_graphs(inner: str, kwargs: Mapping[str, object]) -> dict[str, object] | None:
    """`kwargs` of an inner compiler such that it makes no CUDA graphs; None where it makes none anyway."""
    if inner != "inductor":
        return None
    from torch._inductor import config

    patches = kwargs.get("config_patches") or {}
    if not patches.get("triton.cudagraphs", config.triton.cudagraphs):
        return None
    return {**kwargs, "config_patches": {**patches, "triton.cudagraphs": False}}


def settings_of(inner: str, kwargs: Mapping[str, object], options: Options) -> str:
    """What the speed of either form depends on beside the graph."""
    config: dict[str, object] = {}
    if inner == "inductor":
        from torch._inductor.config import save_config_portable

        config = save_config_portable()
    digest = hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()
    return f"{sorted(kwargs.items())} {options.training} {options.self_check} {digest}"


# -- whether a graph can be measured


def _accelerator(inputs: Sequence[object]) -> tuple[torch.device, str]:
    """The accelerator that the inputs are on, and why nothing can be measured there, or ""."""
    devices = {t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type != "cpu"}
    if len(devices) != 1:
        return torch.device("cpu"), "more than one accelerator" if devices else "no accelerator"
    device = devices.pop()
    return device, "" if measure.has_events(device) else f"no clock on {device.type}"


def unrepeatable(graph: Graph) -> str:
    """Why running the graph twice is not as running it once, or its forward alone does not tell which form
    is faster; "" where it can be measured."""
    placeholders = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    lasting = frozenset().union(*map(storages_of, placeholders))
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if any(t.requires_grad for t in tensors_of(value_of(node))):
            return "gradients are recorded, and the backward of a fused site is plain PyTorch"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"the higher-order op {node.target.name()}"
        if is_fence(node):  # sets state that the graph sets back
            continue
        writes = effects_of(node).writes
        if writes & lasting:
            return f"an input is written (node {node.name})"
        if writes & {WORLD, RANDOM} and not is_attention_without_dropout(node):
            return f"random numbers, or an op whose effects are not known (node {node.name})"
    return ""


def _unreal(inputs: Sequence[object]) -> str:
    for x in inputs:
        if isinstance(x, torch.Tensor):
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or \
                    torch._C._functorch.is_functorch_wrapped_tensor(x):
                return "the inputs are no plain tensors"
        elif not isinstance(x, (int, torch.SymInt)):
            return f"an input is a {type(x).__name__}"
    return ""


# -- measuring


def _compiled(question: Question, choice: Choice) -> tuple[Callable, Choice]:
    """The chosen form alone, compiled; the plain one where the fused one fails."""
    if choice.fused:
        try:
            return question.compile(question.fused), choice
        except Exception as error:
            choice = Choice(False, reason=f"with fused sites: {_failure(error, FUSED)}", lasting=False)
    return question.compile(question.plain), choice


def _measured(question: Question, device: torch.device) -> tuple[Callable, Choice]:
    args = [hint(x) if isinstance(x, torch.SymInt) else x for x in question.inputs]
    forms = {FUSED: question.fused, PLAIN: question.plain}
    make = question.compile_trial or question.compile
    compiled: dict[str, Callable] = {}
    failed: dict[str, str] = {}
    for name, form in forms.items():
        started = time.perf_counter()
        try:
            trial = make(form)
            trial(*args)  # what is compiled or tuned at a first call
            compiled[name] = trial
        except Exception as error:
            failed[name] = _failure(error, name)
        seconds = time.perf_counter() - started
        if name == FUSED and seconds > LONG_SECONDS:
            question.say(f"{question.inner} took {seconds:.0f} s for the graph with fused sites, and now "
                         "compiles it without them, to see which is faster")
    choice = _judged(question, device, compiled, failed, args)
    chosen = FUSED if choice.fused else PLAIN
    if question.compile_trial is None and chosen in compiled:
        return compiled[chosen], choice
    compiled.clear()  # before memory is needed for another
    return _compiled(question, choice)


def _judged(question: Question, device: torch.device, compiled: Mapping[str, Callable],
            failed: Mapping[str, str], args: Sequence[object]) -> Choice:
    if FUSED in failed:
        return Choice(False, reason=f"with fused sites: {failed[FUSED]}", lasting=False)
    if PLAIN in failed:
        return Choice(True, reason=f"without fused sites: {failed[PLAIN]}", lasting=False)
    calls = [partial(compiled[name], *args) for name in (FUSED, PLAIN)]
    try:
        if question.compile_trial is not None:
            calls = [measure.replayed(call, device) for call in calls]
        fused, plain = measure.by_turns(calls, device, SECONDS)
    except Exception as error:
        return Choice(False, reason=f"not measured: {_failure(error, FUSED)}", lasting=False)
    times = {FUSED: median(fused), PLAIN: median(plain)}
    # A kernel that was late or without memory here may run elsewhere.
    return Choice(clearly_less(fused, plain), times, lasting=not question.fell_back())


def clearly_less(ours: Sequence[float], other: Sequence[float]) -> bool:
    """Whether times differ by more than noise: medians by MARGIN, and three quarters of one below three
    quarters of the other."""
    if median(ours) * MARGIN >= median(other):
        return False
    return len(ours) < 2 or quantiles(ours)[2] < quantiles(other)[0]


def _failure(error: Exception, form: str) -> str:
    """What failed, in a line. Raises `error` where it is no reason to take the other form."""
    if isinstance(error, RestartAnalysis) or device_lost(error) or (form == FUSED and strict()):
        raise error
    return _words(error)


# -- what is kept


def _key(question: Question, device: torch.device) -> str:
    text = hashlib.sha256(graph_text(question.plain.graph).encode()).hexdigest()
    return "\n".join((measure.machine(device), f"sources {sources()}", f"inner {question.inner}",
                      question.settings, f"graph {text}"))


def graph_text(graph: Graph) -> str:
    """The nodes with the shapes, strides, dtypes and devices of what they yield; a size that may vary counts
    by its power of two."""
    return "\n".join(f"{node.format_node()} {_fakes(node)}" for node in graph.nodes)


def _fakes(node: Node) -> list[str]:
    return [f"{t.dtype} {[*map(_size, t.shape)]} {[*map(_size, _strides(t))]} {t.device}"
            for t in tensors_of(value_of(node))]


def _strides(tensor: torch.Tensor) -> Sequence:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _size(size) -> str:
    return str(size) if isinstance(size, int) else f"~{1 << (hint(size) - 1).bit_length()}"


def _stored(key: str) -> Choice | None:
    entry = _store.get(key)
    if entry is None:
        return None
    fused, times, reason = (entry.get(name) for name in ("fused", "times", "reason"))
    if not isinstance(fused, bool) or not isinstance(reason, str) or not isinstance(times, dict) or \
            not all(isinstance(ms, (int, float)) for ms in times.values()):
        return None
    return Choice(fused, times, reason)
