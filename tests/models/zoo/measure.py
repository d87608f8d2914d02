"""One model of the zoo, compiled by the backend, compared with itself in eager."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import catalogue
import torch
from checks import NoRounding, assert_within_bound, tensors

from ascend_ln_fuse import clear_reports, last_reports
from ascend_ln_fuse.graph import module_path
from ascend_ln_fuse.kinds import base_name

#: What eager's own relative error may be for float64 to count as its exact value: beyond it the two took
#: different ways (another expert, another draw), and a bound made of it would allow anything.
CREDIBLE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
#: Reseeded before each run, for the models that draw in eval mode.
SEED = 1


@dataclass
class Result:
    """What became of a model. `problem` is "" where all is well; the JSON of a result is its fields.

    Attributes:
        skipped: why there is nothing to compare: eager itself fails, or Dynamo does, whatever the backend.
        sites, fused: norm sites that the backend reports, and those that it fused.
        declined: reason -> number of sites.
        fallbacks: why plain PyTorch ran in the place of a kernel (never on the CPU, which has no kernels).
        modules: norm modules in the graphs that Dynamo makes.
        missed: those of them that no report names.
        error: the largest share of the allowed error that an output's element takes.
        reference: what the error is measured against.
    """

    name: str
    dtype: str
    problem: str = ""
    skipped: str = ""
    sites: int = 0
    fused: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    modules: int = 0
    missed: list[str] = field(default_factory=list)
    error: float = 0.0
    reference: str = ""
    graphs: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Mismatch(AssertionError):
    """The compiled model is not what eager is."""


def measure(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Result:
    """Build the model, run it in eager, in float64 and compiled, and compare.

    Raises:
        AssertionError: an output differs in structure, layout or by more than the bound, or the number of
            graphs from that of backend="eager".
        Exception: what a run raised.
    """
    started = time.perf_counter()
    result = Result(name, str(dtype).removeprefix("torch."))
    model, inputs = catalogue.build(name)
    model, inputs = model.to(device, dtype), _cast(inputs, dtype, device)
    with torch.no_grad():
        try:
            eager = run(model, inputs)
        except Exception as error:  # a dtype that the model is not written for
            result.skipped = f"eager fails: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
            return result
        reference, result.reference = _reference(model, inputs, eager)
        try:
            dynamo, graphs = _dynamo_alone(model, inputs)
        except Exception as error:
            result.skipped = f"Dynamo fails: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
            return result
        torch._dynamo.reset()
        clear_reports()
        ours = run(torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"}), inputs)
    reports = last_reports()
    result.graphs = len(reports)
    sites = [site for report in reports for site in report.sites]
    result.sites, result.fused = len(sites), sum(report.fused for report in reports)
    result.declined = dict(Counter(site.reason for site in sites if site.status == "declined"))
    for modules, report in zip(graphs, reports):
        named = {site.where.partition(",")[0] for site in report.sites}
        result.modules += len(modules)
        result.missed += sorted(modules - named - {""})
    result.fallbacks = sorted({site.fallback_words() for site in sites} - {""})
    if any(report.error for report in reports):
        raise Mismatch("the pass failed")
    if len(reports) != len(graphs):
        raise Mismatch(f"{len(reports)} graphs, and {len(graphs)} for another backend")
    check_structure(ours, dynamo)
    if result.reference.startswith("float") and not _is_within(dynamo, eager, reference):
        result.reference += ", where Dynamo itself goes another way"
    else:
        dynamo = eager
    for a, b, c, e in zip(*map(tensors, (ours, dynamo, reference, eager)), strict=True):
        exact = b.double() + (c.double() - e.double()) if dynamo is not eager else c
        result.error = max(result.error, assert_within_bound(a, b, exact))
    result.seconds = time.perf_counter() - started
    return result


def run(model, inputs: Mapping[str, Any]) -> Any:
    """A forward on a copy of `inputs`, with the random stream where it always is."""
    torch.manual_seed(SEED)
    return model(**copy.deepcopy(dict(inputs)))


def _dynamo_alone(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, list[set[str]]]:
    """What the model yields with a backend that leaves graphs as they are; and of each graph the paths of
    its norm modules."""
    graphs: list[set[str]] = []

    def backend(gm, _):
        graphs.append({module_path(node) for node in gm.graph.nodes if _in_norm(node)})
        return gm.forward

    torch._dynamo.reset()
    return run(torch.compile(model, backend=backend), inputs), graphs


def _is_within(dynamo: Any, eager: Any, reference: Any) -> bool:
    """Whether Dynamo, with nothing fused, keeps the bound: it has bugs of its own, which are not judged
    here."""
    try:
        for values in zip(*map(tensors, (dynamo, eager, reference)), strict=True):
            assert_within_bound(*values)
    except AssertionError:
        return False
    return True


#: norms of other dims than a LayerNorm's or RMSNorm's
_OTHER_NORMS = ("batch", "group", "instance", "weight", "spectral", "l2", "grn", "actnorm", "minmax")


def _in_norm(node: torch.fx.Node) -> bool:
    """Whether the innermost module of `node` is a norm that computes: an AdaLayerNormSingle, say, holds
    linear layers, and what it does itself is only arithmetic."""
    stack = node.meta.get("nn_module_stack")
    if not stack or node.op not in ("call_function", "call_method"):
        return False
    kind = list(stack.values())[-1][1]
    word = (kind if isinstance(kind, str) else kind.__name__).lower()
    return "norm" in word and not any(other in word for other in _OTHER_NORMS) and \
        base_name(node) in _STATISTICS


#: what only a norm computes
_STATISTICS = frozenset("layer_norm rms_norm native_layer_norm mean var std var_mean rsqrt".split())


def _reference(model: torch.nn.Module, inputs: Mapping[str, Any], eager: Any) -> tuple[Any, str]:
    """What the outputs would be without rounding, and how that is known.

    Where float64 does not run, or takes another way than eager: fp32 for a narrower model; eager itself
    with every weight off by half an ulp for fp32, as far from the exact value as eager is.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with contextlib.suppress(Exception), NoRounding():
        wide = copy.deepcopy(model).double()
        if hasattr(wide, "set_experts_implementation"):
            wide.set_experts_implementation("eager")  # grouped_mm knows no float64
        exact = run(wide, _cast(inputs, torch.float64))
        if _credible(eager, exact, dtype):
            return exact, "float64"
    if dtype != torch.float32:
        with contextlib.suppress(Exception):
            exact = run(copy.deepcopy(model).float(), _cast(inputs, torch.float32))
            if _credible(eager, exact, dtype):
                return exact, "float32"
    shaken = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(SEED)  # (the CPU's)
    for parameter in shaken.parameters():
        if parameter.is_floating_point():
            step = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.mul_((1 + torch.finfo(dtype).eps * step).to(dtype).to(parameter.device))
    return run(shaken, inputs), "eager, weights off by half an ulp"


def _credible(eager: Any, exact: Any, dtype: torch.dtype) -> bool:
    """Whether `exact` can be what `eager` rounds."""
    low, high = tensors(eager), tensors(exact)
    if [t.shape for t in low] != [t.shape for t in high]:
        return False
    for a, b in zip(low, high):
        if not a.is_floating_point():
            if not torch.equal(a, b.to(a.dtype)):
                return False
        elif b.dtype not in (torch.float64, torch.float32):
            return False
        elif a.numel() and a.isfinite().all():
            far = (a.double() - b.double()).abs().max()
            if not far <= CREDIBLE[dtype] * b.double().abs().max().clamp(min=1e-3):
                return False
    return True


def _cast(value: Any, dtype: torch.dtype, device: str | None = None) -> Any:
    """`value` with its float tensors in `dtype`, and all tensors on `device` where one is given."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype, device) for item in value)
    return value


def check_structure(ours: Any, eager: Any, path: str = "output") -> None:
    """Raise Mismatch where the two are not built alike: classes, keys, lengths, None and plain values."""
    if type(ours) is not type(eager):
        raise Mismatch(f"{path} is a {type(ours).__name__}, in eager a {type(eager).__name__}")
    if isinstance(eager, torch.Tensor):
        return  # layout and values: assert_within_bound
    if isinstance(eager, dict):
        if list(ours) != list(eager):
            raise Mismatch(f"{path} has {list(ours)}, in eager {list(eager)}")
        for key in eager:
            check_structure(ours[key], eager[key], f"{path}.{key}")
    elif isinstance(eager, (tuple, list)):
        if len(ours) != len(eager):
            raise Mismatch(f"{path} has {len(ours)} items, in eager {len(eager)}")
        for i, (a, b) in enumerate(zip(ours, eager)):
            check_structure(a, b, f"{path}[{i}]")
    elif isinstance(eager, (int, float, str, type(None))) and ours != eager:
        raise Mismatch(f"{path} is {ours!r}, in eager {eager!r}")
