"""How tests compare: a model fused by the backend against eager, by the design's error bound."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.overrides import TorchFunctionMode

from ascend_ln_fuse import FusionReport, last_reports


def tensors(value) -> list[torch.Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of `dtype` at each |x|, as float64."""
    info = torch.finfo(dtype)
    magnitude = x.double().abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


#: How far the float64 reference itself may be from the exact value, as a share of eager's error. It rounds
#: 2**29 times as finely as fp32; the rest is room for how sums are ordered. It decides ties: where a value
#: cancels to zero, errors are powers of two, and ours may be exactly twice eager's. A program in float64
#: gains nothing: eager is the reference there, and a share of its error, 0, is 0.
_REFERENCE_NOISE = 2.0 ** -23


def assert_within_bound(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> float:
    """The design's bound: error against float64 at most twice eager's own (its largest in the tensor)
    plus one ulp of the output dtype. NaN and Inf stand where eager has them.

    Returns the largest share of what is allowed that an element's error takes.
    """
    assert ours.shape == eager.shape and ours.dtype == eager.dtype
    assert ours.stride() == eager.stride(), (ours.stride(), eager.stride())
    assert ours.device == eager.device
    if not ours.dtype.is_floating_point:
        assert torch.equal(ours, eager)
        return 0.0
    finite = eager.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours.isnan(), eager.isnan())
    ours, low, exact = (t[finite].double() for t in (ours, eager, exact))
    if not ours.numel():
        return 0.0
    allowed = 2 * (1 + _REFERENCE_NOISE) * (low - exact).abs().max() + ulp(exact, eager.dtype)
    error = (ours - exact).abs()
    excess = (error - allowed).max().item()
    assert excess <= 0, f"error exceeds the bound by {excess:.3e}"
    return (error / allowed).max().item()


class NoRounding(TorchFunctionMode):
    """Under this mode every cast to a float dtype keeps (or makes) float64, so that a model which forces
    fp32 or rounds to bf16 inside computes its exact value."""

    _CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}
    _FLOATS = (torch.float16, torch.bfloat16, torch.float32)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {key: self._wide(value) for key, value in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if name in self._CASTS and args and isinstance(args[0], torch.Tensor):
            target = next((a for a in (*args[1:], *kwargs.values())
                           if isinstance(a, (torch.dtype, torch.Tensor))), None)
            wanted = target.dtype if isinstance(target, torch.Tensor) else target
            if name in ("float", "double", "half", "bfloat16") or \
                    (wanted is not None and wanted.is_floating_point):
                return args[0] if args[0].dtype == torch.float64 else args[0].double()
        return func(*map(self._wide, args), **kwargs)

    def _wide(self, value):
        return torch.float64 if isinstance(value, torch.dtype) and value in self._FLOATS else value


def exact_copy(model: torch.nn.Module, inputs: Sequence):
    """`model` and `inputs` in float64 (with the values they have in their own dtype)."""
    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return copy.deepcopy(model).double(), [wide(x) for x in inputs]


def check(model: torch.nn.Module, *inputs, fused: int | None = None, declined: int | None = 0,
          dynamic: bool = False, grad: bool = False, backend_options: dict | None = None,
          exact: bool = True) -> FusionReport:
    """Compile `model` with the backend, compare its outputs with eager's by `assert_within_bound`, and
    assert the numbers of sites over all of its graphs. Returns the report of the last graph.

    `exact=False`: eager itself is the reference (for models that do not run in float64).
    """
    model = model.eval()
    before = len(last_reports())
    options = {"report": "off", **(backend_options or {})}
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic or None, options=options)
    with torch.set_grad_enabled(grad):
        eager = tensors(model(*map(fresh, inputs)))
        ours = tensors(compiled(*map(fresh, inputs)))
        if exact:
            wide, wide_inputs = exact_copy(model, inputs)
            with NoRounding():
                reference = tensors(wide(*wide_inputs))
        else:
            reference = eager
    assert len(ours) == len(eager)
    for a, b, c in zip(ours, eager, reference):
        assert_within_bound(a.detach(), b.detach(), c.detach())
    reports = last_reports()[before:]
    assert reports, "nothing was compiled"
    for report in reports:
        assert report.error is None
    counts = sum(r.fused for r in reports), sum(r.declined for r in reports)
    why = [s.reason for r in reports for s in r.sites if s.reason]
    if fused is not None:
        assert counts[0] == fused, (counts, why)
    if declined is not None:
        assert counts[1] == declined, (counts, why)
    return reports[-1]


def fresh(x):
    """A copy with the same strides, so that a model that writes its input cannot spoil another run."""
    if not isinstance(x, torch.Tensor):
        return x
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) \
        if 0 not in x.stride() else x.clone()
    return y.copy_(x).requires_grad_(x.requires_grad)
