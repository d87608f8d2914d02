"""`ascend-ln-fuse tune`: compile and measure a model's kernels ahead, so that no first call waits for it.

What is measured is kept where a model's own first calls keep it (kernels/store.py), under the device, the
versions, the region and the number of rows: the process that serves the model reads it from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .backend import ascend_ln_fuse
from .errors import UserError
from .loading import Example, describe
from .options import Options
from .report import FusionReport, clear_reports, last_reports
from .trace import cause

_ON_A_CPU = "nothing is measured on a CPU, where the fused sites run as plain PyTorch"


class TuneError(UserError):
    """Nothing can be measured there, or the model does not run."""


@dataclass(frozen=True)
class Tuned:
    """What came of tuning a model.

    Attributes:
        device: the device's name.
        reports: a report per graph, with what was chosen (`SiteReport.chain_ways`).
        seconds: all of it, tracing and compiling included.
    """

    device: str
    reports: tuple[FusionReport, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"device": self.device, "seconds": round(self.seconds, 1),
                "reports": [report.to_dict() for report in self.reports]}


def device_for_tuning(name: str | None) -> torch.device:
    """The device of that name; by default the accelerator that is there.

    Raises:
        TuneError: there is none, it is no device, or nothing can be measured on it.
    """
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is None:
            raise TuneError(f"no accelerator is there: {_ON_A_CPU}")
        name = str(found)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TuneError(f"--device {name}: {describe(error)}") from error
    if device.type == "cpu":
        raise TuneError(f"--device cpu: {_ON_A_CPU}")
    return device


def tune(example: Example, device: torch.device, grad: bool = False, options: Options | None = None,
         progress: Callable[[FusionReport], None] = lambda report: None) -> Tuned:
    """Two calls of the model on `device`: the first compiles, measures and checks, the second runs on that.

    options: the backend's, of which `report` is "off" here. grad: with gradients on. progress: called with
    each report as it is made.

    Raises:
        TuneError: a call fails.
    """
    started = time.perf_counter()
    chosen = replace(options or Options(), report="off")

    def backend(gm, inputs):
        call = ascend_ln_fuse(gm, inputs, options=chosen)
        progress(last_reports()[-1])
        return call

    clear_reports()
    torch._dynamo.reset()
    try:
        model = example.model.to(device) if isinstance(example.model, torch.nn.Module) else example.model
        given = (example.args, dict(example.kwargs))
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(device), given)
        compiled = torch.compile(model, backend=backend)
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                compiled(*args, **kwargs)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except (Exception, SystemExit) as error:
        raise TuneError(f"the model does not run on {device}: {cause(error)}") from error
    return Tuned(_name(device), tuple(last_reports()), time.perf_counter() - started)


def _name(device: torch.device) -> str:
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(ask(device)) if ask else str(device)
