"""A check against float64 for models that name their dtypes."""

import copy
from collections.abc import Sequence

import torch
from ascend_ln_fuse import FusionReport, last_reports
from checks import assert_within_bound, fresh, tensors
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Wide(TorchFunctionMode):
    """Runs a model in float64 whatever dtypes it names: the exact result."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16"):
            func = torch.Tensor.double
        args, kwargs = tree_map(
            lambda x: torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x,
            (args, kwargs or {}))
        return func(*args, **kwargs)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def check_wide(model: torch.nn.Module, *inputs, fused: int = 1, declined: Sequence[str] = (),
               dynamic: bool = False, grad: bool = False) -> FusionReport:
    """As `checks.check`, with the exact result from `Wide`; `declined` has a word of the reason of each
    norm that is declined, in order. One graph only."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True, dynamic=dynamic or None,
                             options={"report": "off"})
    with torch.set_grad_enabled(grad):
        eager, ours = tensors(model(*map(fresh, inputs))), tensors(compiled(*map(fresh, inputs)))
        with Wide():
            exact = tensors(copy.deepcopy(model).double()(*map(double, map(fresh, inputs))))
    assert len(ours) == len(eager) == len(exact)
    for a, b, c in zip(ours, eager, exact):
        assert_within_bound(a.detach(), b.detach(), c.detach())
    report = last_reports()[-1]
    assert report.error is None
    reasons = [site.reason for site in report.sites if site.status != "fused"]
    assert len(report.sites) - len(reasons) == fused, (report.fused, reasons)
    assert len(reasons) == len(declined), reasons
    assert all(want in reason for want, reason in zip(declined, reasons)), reasons
    return report
