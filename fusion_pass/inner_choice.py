"""Which sites stay fused in front of a compiler that fuses on its own: measured once a graph, and kept.

A fused site is one op that such a compiler cannot see into. Often that op is faster than what the compiler
makes of the site, and sometimes what it keeps the compiler from is worth more. So a graph comes in forms:
with all of its sites, with those of short rows (q and k, with their rotary embedding), where one launch does
what such compilers do worst, and as it was. All are compiled, run on the inputs of the first call and timed
by turns; the plain one is taken unless another is clearly faster. It happens while the graph is compiled,
because Dynamo hands over the inputs of the call that it compiles for: what runs later is the compiled graph
itself, with nothing in front of it, and Dynamo sets the random stream back to where it was.

The choice is kept on disk (kernels/store.py) under the device, the versions, the settings and the text of the
graph: the next process compiles the chosen form only. An entry is a word and what to print; a wrong one can
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
from .kernels.store import Store
from .options import Options
from .versions import sources

#: By how much a form must beat the plain one: below it, the difference is noise.
MARGIN = 1.01

#: Seconds of timing, all forms together. Forms that take longer are timed once.
SECONDS = 0.5

#: Seconds of one compilation from which on the user is told that there are others.
LONG_SECONDS = 5.0

#: Columns up to which a row is short: a head's.
SHORT_ROW = 256

#: The forms of a graph.
FUSED, SHORT, PLAIN = "fused", "short rows fused", "plain"

#: Reasons of sites in a graph that runs without them.
LEFT_SLOWER = "left to the inner compiler, which is as fast without it, or faster"
LEFT_UNKNOWN = "left to the inner compiler: which is faster was not measured"

_store = Store("inner")
_lock = threading.RLock()  # two measurements at a time would measure each other


@dataclass(frozen=True)
class Choice:
    """Which form of a graph is run.

    Attributes:
        form: FUSED, SHORT or PLAIN.
        times: form -> milliseconds of a call, the median; empty where nothing was measured.
        reason: why nothing was measured, or what became of a form that was not.
        lasting: False where other processes should measure again: something failed that may work there.
    """

    form: str
    times: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    lasting: bool = True

    def words(self, inner: str) -> str:
        """In a line: "left to inductor: plain 12.3 ms, fused 12.9 ms"."""
        start = f"left to {inner}" if self.form == PLAIN else f"{self.form}, with {inner} around"
        times = ", ".join(f"{name} {_milliseconds(self.times[name])}" for name in (PLAIN, FUSED, SHORT)
                          if name in self.times)
        return f"{start}: {'; '.join(filter(None, (times, self.reason)))}"


def _milliseconds(ms: float) -> str:
    return f"{ms:.{1 if ms >= 10 else 3}f} ms"


@dataclass(frozen=True)
class Question:
    """A graph in its forms, and how to compile them.

    Attributes:
        inner: the name of the compiler.
        forms: the form's word -> the form; PLAIN is one, and the first is what is fused without a choice.
        inputs: of the call that the graph is compiled for, as Dynamo hands them over.
        compile: compiles a form.
        compile_trial: compiles it without CUDA graphs, which must not be recorded for a trial: what other
            graphs left in their memory would be gone. None where `compile` makes none.
        settings: what else the times depend on.
        fell_back: whether plain PyTorch runs for a kernel of a fused form.
        say: prints a line of progress.
        raises: whether a fused form that fails is an error, not a reason to take another form.
    """

    inner: str
    forms: Mapping[str, GraphModule]
    inputs: Sequence[object]
    compile: Callable[[GraphModule], Callable]
    compile_trial: Callable[[GraphModule], Callable] | None = None
    settings: str = ""
    fell_back: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda words: None
    raises: bool = False


def choose(question: Question) -> tuple[Callable, Choice]:
    """The compiled form that is fastest, and why: measured, or as it was measured before.

    Raises:
        whatever the inner compiler raises for the plain form, and with `question.raises` for the others.
    """
    device, why = _accelerator(question.inputs)
    why = why or unrepeatable(question.forms[PLAIN].graph) or _unreal(question.inputs)
    if why:
        return _compiled(question, Choice(PLAIN, reason=f"not measured: {why}"))
    key = _key(question, device)
    with _lock:
        known = _stored(key, question.forms)
        if known is None and measure.is_capturing(device):
            known = Choice(PLAIN, reason="not measured: a graph of the device is being captured")
        if known is not None:
            return _compiled(question, known)
        compiled, choice = _measured(question, device)
        if choice.lasting:
            _store.put(key, {"form": choice.form, "reason": choice.reason[:500],
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
    """The chosen form alone, compiled; the plain one where another fails."""
    if choice.form != PLAIN:
        try:
            return question.compile(question.forms[choice.form]), choice
        except Exception as error:
            why = _failure(question, error, choice.form)
            choice = Choice(PLAIN, reason=f"{choice.form}: {why}", lasting=False)
    return question.compile(question.forms[PLAIN]), choice


def _measured(question: Question, device: torch.device) -> tuple[Callable, Choice]:
    args = [hint(x) if isinstance(x, torch.SymInt) else x for x in question.inputs]
    make = question.compile_trial or question.compile
    compiled: dict[str, Callable] = {}
    failed: dict[str, str] = {}
    for number, (name, form) in enumerate(question.forms.items()):
        started = time.perf_counter()
        try:
            trial = make(form)
            trial(*args)  # what is compiled or tuned at a first call
            compiled[name] = trial
        except Exception as error:
            failed[name] = f"{name}: {_failure(question, error, name)}"
        seconds = time.perf_counter() - started
        if number == 0 and seconds > LONG_SECONDS:
            others = ", ".join(list(question.forms)[1:])
            question.say(f"{question.inner} took {seconds:.0f} s for the graph with fused sites, and now "
                         f"compiles it in other forms ({others}), to see which is fastest")
    choice = _judged(question, device, compiled, failed, args)
    if question.compile_trial is None and choice.form in compiled:
        return compiled[choice.form], choice
    compiled.clear()  # before memory is needed for another
    return _compiled(question, choice)


def _judged(question: Question, device: torch.device, compiled: Mapping[str, Callable],
            failed: Mapping[str, str], args: Sequence[object]) -> Choice:
    """The fastest of the forms that were compiled and ran."""
    reason = "; ".join(failed.values())
    others = [name for name in compiled if name != PLAIN]
    if not others:
        return Choice(PLAIN, reason=reason, lasting=False)
    if PLAIN in failed:
        return Choice(others[0], reason=reason, lasting=False)
    calls = {name: partial(call, *args) for name, call in compiled.items()}
    try:
        if question.compile_trial is not None:
            calls = {name: measure.replayed(call, device) for name, call in calls.items()}
        found = dict(zip(calls, measure.by_turns(list(calls.values()), device, SECONDS)))
    except Exception as error:
        return Choice(PLAIN, reason=f"not measured: {_failure(question, error, others[0])}", lasting=False)
    times = {name: median(turns) for name, turns in found.items()}
    faster = [name for name in others if clearly_less(found[name], found[PLAIN])]
    # A kernel that was late or without memory here may run elsewhere.
    return Choice(min(faster, key=times.__getitem__, default=PLAIN), times, reason,
                  lasting=not failed and not question.fell_back())


def clearly_less(ours: Sequence[float], other: Sequence[float]) -> bool:
    """Whether times differ by more than noise: medians by MARGIN, and three quarters of one below three
    quarters of the other."""
    if median(ours) * MARGIN >= median(other):
        return False
    return len(ours) < 2 or quantiles(ours)[2] < quantiles(other)[0]


def _failure(question: Question, error: Exception, form: str) -> str:
    """What failed, in a line. Raises `error` where it is no reason to take another form."""
    if isinstance(error, RestartAnalysis) or device_lost(error) or (form != PLAIN and question.raises):
        raise error
    return _words(error)


# -- what is kept


def _key(question: Question, device: torch.device) -> str:
    text = hashlib.sha256(graph_text(question.forms[PLAIN].graph).encode()).hexdigest()
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


def _stored(key: str, forms: Mapping[str, GraphModule]) -> Choice | None:
    entry = _store.get(key)
    if entry is None:
        return None
    form, times, reason = (entry.get(name) for name in ("form", "times", "reason"))
    if not isinstance(form, str) or form not in forms or not isinstance(reason, str) or \
            not isinstance(times, dict) or not all(isinstance(ms, (int, float)) for ms in times.values()):
        return None
    return Choice(form, times, reason)
