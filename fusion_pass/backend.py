"""The Dynamo backend and `auto_fusion`: view, match, select, rewrite, lower, report."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from . import cost
from .across import why_not
from .ahead import begin_kernels
from .cat_site import CatSite, RestSite
from .chain_site import ChainSite
from .effects import value_of
from .graph import Lens, hint, module_path, source_line
from .inner_choice import (
    FUSED,
    LEFT_SLOWER,
    LEFT_UNKNOWN,
    PLAIN,
    SHORT,
    SHORT_ROW,
    Question,
    choose,
    inductor_arguments,
    settings_of,
    without_cuda_graphs,
)
from .kernels.chain_ops import chain_runner
from .kernels.ops import runner
from .kernels.settings import compile_seconds
from .options import RUN_AS_WRITTEN, Options, parse_options, strict
from .patterns import candidate, find_norms
from .patterns.cat_places import place_in_cats
from .patterns.cats import join_cats
from .patterns.chain import extend_chains
from .patterns.packed import join_packed
from .patterns.rotary_site import PATTERN as ROTARY
from .patterns.rotary_site import take_rotary
from .remedies import remedy
from .report import FusionReport, SiteReport, emit, progress, record
from .rewrite import Unit, read_by_result, rewrite
from .select import select
from .simplify import simplified
from .site import Decline, Site

#: What mode="reduce-overhead" means on devices that can replay a graph; others have no launches to save.
_GRAPH_COMPILERS = {"cuda": "cudagraphs", "npu": "npugraphs"}

_graph_numbers = itertools.count()
_lock = threading.Lock()


def ascend_ln_fuse(gm: GraphModule, example_inputs, *,
                   options: Mapping[str, object] | None = None, **kwargs) -> Callable:
    """The backend `torch.compile(model, backend="ascend_ln_fuse")` calls with each Dynamo graph.

    Prints and records a FusionReport. When the pass fails, the graph as it came runs, and the report
    says why; with ASCEND_LN_FUSE_STRICT=1 in the environment the failure is raised.

    Raises:
        ValueError, TypeError: for an unknown or ill-typed option, naming the valid ones.
    """
    chosen = parse_options(options)
    compile_seconds()  # a wrong value is said here, not laid at a kernel's door
    if chosen.inner == "eager" and kwargs.get("mode") == "reduce-overhead":
        del kwargs["mode"]
        chosen = replace(chosen, inner=_GRAPH_COMPILERS.get(device_type(example_inputs), "eager"))
    inner = inner_compiler(chosen.inner)
    if chosen.inner == "inductor":
        kwargs = inductor_arguments(kwargs)
    if inner is None and kwargs:  # torch.compile(mode=...)
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        warnings.warn(f"ascend_ln_fuse ignores {given}: what is not fused runs as it is, unless "
                      "options={'inner': ...} names a compiler for it", stacklevel=2)
    if inner is None:
        fuse_module(gm, chosen)
        return gm.forward
    report, plain = _fused_module(gm, chosen)
    try:
        if report.fused and chosen.inner_choice == "measure" and chosen.inner not in RUN_AS_WRITTEN and \
                device_type(example_inputs) != "cpu":
            compiled, report = _compile_the_fastest(gm, plain, example_inputs, chosen, inner, kwargs,
                                                    report)
        else:
            compiled = inner(gm, example_inputs, **kwargs)
    except RestartAnalysis:
        raise  # Dynamo comes again with another graph, which is the one to report
    except Exception:
        _publish(report, chosen)
        raise
    _publish(report, chosen)
    return compiled


def _compile_the_fastest(gm: GraphModule, plain: Graph, inputs, chosen: Options, inner: Callable, kwargs,
                         report: FusionReport) -> tuple[Callable, FusionReport]:
    """What `inner` makes of the fused graph of `gm`, of one with some of its sites, or of `plain`, without
    any; and what became of `report`."""
    forms, kept = {FUSED: gm}, {FUSED: {site.node for site in report.sites}, PLAIN: set()}
    some, kept[SHORT] = _short_rows_fused(plain, chosen)
    if some is not None and len(kept[SHORT]) < report.fused:
        forms[SHORT] = _twin(gm, some)
    forms[PLAIN] = _twin(gm, plain)
    trial = without_cuda_graphs(chosen.inner, kwargs)
    compiled, choice = choose(Question(
        chosen.inner, forms, inputs, lambda form: inner(form, list(inputs), **kwargs),
        None if trial is None else lambda form: inner(form, list(inputs), **trial),
        settings=settings_of(chosen.inner, kwargs, chosen),
        fell_back=lambda: any(site.fallback_words() for site in report.sites),
        say=lambda words: progress(report, words, chosen.report),
        raises=strict() or chosen.self_check == "raise"))
    reason = LEFT_SLOWER if choice.times else LEFT_UNKNOWN
    return compiled, report.chosen(choice.words(chosen.inner), reason, kept[choice.form], remedy(reason))


def _short_rows_fused(graph: Graph, chosen: Options) -> tuple[Graph | None, set[str]]:
    """The graph with the sites of short rows alone, and the names of their nodes; None where none are."""
    try:
        some = fuse(graph, chosen, lambda site: site.region.lane <= SHORT_ROW)
    except Exception:
        if strict():
            raise
        return None, set()
    return some.graph, {site.node for site in some.sites if site.status == "fused"}


def _twin(gm: GraphModule, graph: Graph) -> GraphModule:
    """A module with another graph over what `gm` holds, and all that compilers read of `gm`."""
    twin = GraphModule(gm, graph)
    twin.meta = dict(gm.meta)
    for name, value in vars(gm).items():  # Dynamo's notes on parameters, among others
        vars(twin).setdefault(name, value)
    return twin


def device_type(inputs) -> str:
    """The type of the accelerator that the graph has tensors on, else "cpu"."""
    types = [x.device.type for x in inputs if isinstance(x, torch.Tensor)]
    return next((kind for kind in types if kind != "cpu"), "cpu")


def fuse_module(gm: GraphModule, chosen: Options) -> FusionReport:
    """Fuses the graph of `gm` in place; records and prints the report, and returns it.

    Where the pass fails, `gm` is as it was, and the report says why; in strict mode it raises.
    """
    report, _ = _fused_module(gm, chosen)
    _publish(report, chosen)
    return report


def _publish(report: FusionReport, chosen: Options) -> None:
    record(report)
    emit(report, chosen.report)


def _fused_module(gm: GraphModule, chosen: Options) -> tuple[FusionReport, Graph]:
    """`fuse_module`, the report not recorded; and the graph without fused sites."""
    started = time.perf_counter()
    error, notes = None, ()
    fused = Fused(None)
    original = plain = gm.graph
    try:
        with _collector_paused():
            simple = simplified(original, chosen)
            plain, notes = simple.graph, simple.notes
            fused = fuse(plain, chosen, begin=True, lens=simple.lens)
            if fused.graph is not None or plain is not original:
                gm.graph = fused.graph or plain
                _LazyGraphModule.force_recompile(gm)  # here, where a failure falls back
    except Exception as failure:
        if strict():
            raise
        if gm.graph is not original:
            gm.graph = original
        plain, notes = original, ()
        error = f"{type(failure).__name__}: {failure}"
    with _lock:
        number = next(_graph_numbers)
    report = FusionReport(name=model_name(gm), graph_index=number, sites=fused.sites, rotary=fused.rotary,
                          error=error, seconds=time.perf_counter() - started, notes=notes)
    return report, plain


@dataclass(frozen=True)
class Fused:
    """What the pass makes of a graph.

    Attributes:
        graph: the fused form; None where nothing was fused.
        sites: a report for each norm site, in the order of the graph.
        rotary: one for each rotary embedding that is in none of them, fused by itself or declined.
    """

    graph: Graph | None
    sites: tuple[SiteReport, ...] = ()
    rotary: tuple[SiteReport, ...] = ()


def fuse_graph(graph: Graph, options: Options | None = None) -> tuple[Graph | None, list[SiteReport]]:
    """`fuse`, of which the graph and the reports of norm sites."""
    fused = fuse(graph, options or Options())
    return fused.graph, list(fused.sites)


def fuse(graph: Graph, options: Options, wanted: Callable[[Site], bool] | None = None,
         begin: bool = False, lens: Lens | None = None) -> Fused:
    """The fused form of a Dynamo or ATen graph whose nodes carry fakes; `graph` itself is left as it is.

    Args:
        wanted: sites that would be fused and are not wanted stay as they are, and have no report.
        begin: begin to compile the kernels, in the background, since the graph will run.
        lens: of `graph`, where there is one already.
    """
    with _collector_paused():
        return _fuse(graph, options, wanted, begin, lens)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The pass allocates many small objects and little garbage: full collections, which walk all that
    Dynamo holds, would only add to its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fuse(graph: Graph, options: Options, wanted: Callable[[Site], bool] | None, begin: bool,
          lens: Lens | None) -> Fused:
    read = read_by_result(graph)
    if lens is None or read is not graph:
        lens = Lens(read)
    norms, refused = find_norms(lens)
    claimed = {node for found in norms for node in found.norm.interior}
    no_grad = options.training == "decline"
    candidates = [candidate(lens, found, claimed, no_grad) for found in norms]
    taken, lost = select(lens, candidates, claimed)
    join_packed(lens, taken)
    if wanted is not None:
        taken = taken.only(wanted)
    unchained: dict[Node, Decline] = {}
    rotary, left = [], []
    if options.inner in RUN_AS_WRITTEN:
        unchained = extend_chains(lens, taken, differentiable=options.inner == "eager")
        rotary, left = take_rotary(lens, taken, claimed, no_grad)
    besides = {part.anchor for site in rotary for part in site.parts or (site,)}
    if options.inner == "eager":
        join_cats(lens, taken)
        place_in_cats(lens, taken)
    by_out = {found.norm.out: found.norm for found in norms}
    declined = [_declined(lens, c.anchor, c.reason, by_out[c.anchor]) for c in lost]
    declined += [_declined(lens, node, why) for node, why in refused]
    fused = rewrite(lens, taken, traceable=options.inner != "eager",
                    self_check=options.self_check) if taken.sites else None
    if begin:
        try:
            begin_kernels(lens, taken, options.self_check)
        except Exception:  # what it would have gained is time alone
            if strict():
                raise
    reports = [pair for unit in taken.sites for pair in _reports(lens, unit, options.self_check)]
    apart = [pair for pair in reports if pair[0] in besides]
    apart += [_declined(lens, node, why, pattern=ROTARY) for node, why in left]
    alone = {anchor: f"no chain behind it: {why.reason}" for anchor, why in unchained.items()}
    norms_alone = [(anchor, _noted(report, alone.get(anchor, "")))
                   for anchor, report in reports if anchor not in besides]
    return Fused(fused, (*_in_order(lens, norms_alone + declined), *_nested(graph)), _in_order(lens, apart))


def _in_order(lens: Lens, reports) -> tuple[SiteReport, ...]:
    """The reports of (anchor, report), in the order of the graph."""
    return tuple(report for _, report in sorted(reports, key=lambda pair: lens.position[pair[0]]))


def _reports(lens: Lens, taken: Unit, self_check: str):
    """(anchor, report) of each norm of a taken site, or of each rotary embedding."""
    if isinstance(taken, RestSite):
        return []
    if isinstance(taken, CatSite):
        found = [_reports_of(lens, piece, piece, _call(piece, taken.places(piece)), self_check)
                 for piece in taken.pieces]
        return [(anchor, _noted(report, "written to its place in the result of torch.cat"))
                for pairs in found for anchor, report in pairs]
    if not isinstance(taken, ChainSite):
        return _reports_of(lens, taken, taken, _call(taken), self_check)
    call = _call(taken.site, taken.places(lens, taken.site))
    found = _reports_of(lens, taken, taken.site, call, self_check)
    return found if not taken.wholes else [
        (anchor, _noted(report, "written to its place in the result of a later torch.cat"))
        for anchor, report in found]


def _noted(report: SiteReport, note: str) -> SiteReport:
    """The report with a note more, if there is one."""
    return replace(report, note="; ".join(filter(None, (report.note, note)))) if note else report


def _reports_of(lens: Lens, taken: Site | ChainSite, site: Site, call, self_check: str):
    chain = taken.chain if isinstance(taken, ChainSite) else None
    outcome = runner(site.region.text, self_check).record  # tells reports later of checks and fallbacks
    ways = chain_runner(chain, self_check) if chain is not None else None
    behind = tuple(_call(piece, taken.places(lens, piece)) for piece in taken.pieces[1:]) \
        if isinstance(taken, ChainSite) else ()
    found = [(part.anchor, _fused(lens, site, part, call, behind, ways, outcome))
             for part in site.parts or (site,)]
    for _, report in found:
        outcome.name_site(report.where)
    return found


def _nested(graph: Graph) -> list[SiteReport]:
    """The norms inside higher-order ops (checkpoint, cond): their graphs run as they are."""
    found: list[SiteReport] = []
    for node in graph.nodes:
        inner = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(inner, GraphModule):
            continue
        lens = Lens(inner.graph)
        norms, refused = find_norms(lens)
        nodes = [(f.norm.out, f.norm) for f in norms] + [(n, None) for n, _ in refused]
        found += [_declined(lens, n, Decline(
            "inside a higher-order op (checkpoint, cond, ...), which runs as it is", n), norm)[1]
            for n, norm in nodes]
        found += _nested(inner.graph)
    return found


def _fused(lens: Lens, site: Site, part: Site, call, behind, ways, outcome) -> SiteReport:
    """The report of `part`, which is `site` itself or one of those that share its launch."""
    others = Counter(_name_beside(part, other) for other in site.parts if other is not part)
    words = [name if times == 1 else f"{name} x{times}" for name, times in others.items()]
    notes = [f"shares one kernel launch with {', '.join(words)}"] if others else []
    notes += [f"reads a contiguous copy of its input: {why_not(value_of(node))}" for node in part.copied]
    return SiteReport(
        status="fused", pattern=part.pattern, where=lens.where(part.anchor), node=part.anchor.name,
        region=site.region.text, device=str(lens.tensor(part.anchor).device),
        kernels_removed=cost.kernels_removed(lens, part), hidden_kernels=cost.hidden_kernels(part),
        bytes_before=cost.bytes_before(lens, part), bytes_after=cost.bytes_after(lens, part),
        symbolic=any(not isinstance(n, int) for fake in part.fakes for n in fake.shape),
        note="; ".join(notes),
        chain=ways.chain.words if ways is not None else "", call=call, calls_behind=behind, record=outcome,
        chain_runner=ways)


def _name_beside(part: Site, other: Site) -> str:
    """What the report of `part` calls `other`, which is in its launch."""
    is_norm, line = bool(other.norms[0].op), source_line(other.anchor)
    path = module_path(other.anchor) if is_norm else ""  # q's rotary embedding and k's are of one module
    if path and path != module_path(part.anchor):
        # The last word: a name that is the same in every layer keeps layers in one row.
        return path.rpartition(".")[2]
    what = "norm" if is_norm else "rotary embedding"
    if not line:
        return f"the {what} {other.anchor.name}"
    return f"the {what} at {line}" if line != source_line(part.anchor) else \
        f"the other {what} on this source line"


def _declined(lens: Lens, node, decline: Decline, norm=None, pattern: str = ""):
    value = lens.tensor(node)
    report = SiteReport(
        status="declined", pattern=pattern or (norm.spelling if norm else lens.kind(node) or "norm"),
        where=lens.where(node), reason=decline.reason,
        node=(decline.node if decline.node is not None else node).name,
        device=str(value.device) if value is not None else "",
        hidden_kernels=cost.predicted(norm) if norm else (), remedy=remedy(decline.reason))
    return node, report


def _call(site: Site, places=None):
    """The call of the site's kernel, for the sizes seen here; `places` as in `Call`."""
    from .kernels.call import Call

    return Call(site.region, tuple(tuple(map(hint, fake.shape)) for fake in site.fakes),
                tuple(tuple(map(hint, fake.stride())) for fake in site.fakes), site.fakes[0].device,
                scalars=tuple(None if isinstance(s, Node) else s for s in site.scalars),
                places=places and tuple(tuple(map(hint, strides)) for strides in places))


def model_name(gm: GraphModule) -> str:
    """`forward in model.py`: the outermost frame of the user's that Dynamo traced, as far as the graph
    tells; one of PyTorch's where there is no other."""
    for node in gm.graph.nodes:
        frames = _FRAME.findall(node.meta.get("stack_trace") or "") if node.op != "placeholder" else ()
        frames = [frame for frame in frames if frame[0] != __file__]
        if frames:
            own = [f for f in frames if not _TORCH.search(f[0])] or frames
            own = [(path, _RESUMED.sub(r"\1", name)) for path, name in own]
            # Decorators of a library come before the model's own forward.
            path, name = next((f for f in own if f[1] == "forward"), own[0])
            return f"{name} in {Path(path).name}"
    return ""


_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)')
_TORCH = re.compile(r"[\\/]torch[\\/]")
#: What Dynamo calls the rest of a function behind a graph break.
_RESUMED = re.compile(r"\A(?:torch_dynamo_resume_in_)+(\w+?)(?:_at_\d+)+\Z")


def inner_compiler(name: str) -> Callable | None:
    """The Dynamo backend of that name; None for "eager", which needs none.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if name == "eager":
        return None
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        if name == "npugraphs":
            raise ValueError("option 'inner' of ascend_ln_fuse: the backend 'npugraphs' comes with "
                             "torch_npu, which is not imported here") from None
        names = {"eager", *list_backends(exclude_tags=())} - {"ascend_ln_fuse"}
        known = ", ".join(sorted(name for name in names if "TESTING" not in name))
        raise ValueError(f"option 'inner' of ascend_ln_fuse: no Dynamo backend {name!r}; "
                         f"known: {known}") from None


def auto_fusion(model: torch.nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False,
                **options) -> torch.nn.Module:
    """Compile `model` in place with this backend and return the same object.

    The first call of the model traces it. state_dict keys, deepcopy and pickle stay as they were (a
    copy is not compiled; call `auto_fusion` on it again).

    Args:
        model: any torch.nn.Module.
        dynamic, fullgraph: as in `torch.compile`.
        **options: the fields of `ascend_ln_fuse.Options`.

    Raises:
        TypeError: `model` is no module, or an option has the wrong type.
        ValueError: an unknown option, or a value out of range.
    """
    for name, value in (("dynamic", dynamic), ("fullgraph", fullgraph)):
        if not isinstance(value, bool) and (value is not None or name == "fullgraph"):
            raise TypeError(f"{name} must be a bool, as in torch.compile, not {value!r}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}; for a function "
                        'use torch.compile(f, backend="ascend_ln_fuse")')
    from torch._dynamo import trace_rules

    chosen = parse_options(options, also=("dynamic", "fullgraph"))
    inner_compiler(chosen.inner)
    given = {"backend": "ascend_ln_fuse", "dynamic": dynamic, "fullgraph": fullgraph,
             "options": {name: getattr(chosen, name) for name in options}}
    if trace_rules.check(model.forward):
        # Module.compile captures nothing where forward is PyTorch's own (nn.Sequential).
        model._compiled_call_impl = torch.compile(frame_round(model), **given)
    else:
        model.compile(**given)
    return model


def frame_round(model: Callable) -> Callable:
    """A function that calls `model` (a module as if it were not compiled in place), with a code object of its
    own: Dynamo keeps what it compiled, and counts how often, by code object."""
    if isinstance(model, torch.nn.Module):
        def call(*args, **kwargs):
            return model._call_impl(*args, **kwargs)
    else:
        def call(*args, **kwargs):
            return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None,
                              call.__closure__)
