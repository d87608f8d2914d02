"""What the backend would do to a model on an NPU, found without one: fake tensors on a fake device.

The model is traced by Dynamo as `torch.compile` would, with tensors that have a shape, strides, a dtype
and the device "npu", but no memory. Every graph goes through the pass; then the graph as it came runs on
the fakes, so that graph breaks and what follows them are seen too. No kernel is compiled or launched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .backend import Fused, fuse, model_name
from .errors import UserError
from .loading import Example, describe
from .options import Options, parse_options, strict
from .report import FusionReport
from .simplify import simplified

#: Compilations of one function that Dynamo may make: every one is a graph to report on.
MAX_GRAPHS = 4096


#: Ends what is said of autocast.
_INSTEAD_OF_AUTOCAST = "what comes nearest to it here: leave it out, and return the model and its inputs " \
    "in its dtype, as in model.bfloat16()"


class TraceError(UserError):
    """The model does not run on fake tensors; the message says where it stopped."""


def ensure_npu() -> None:
    """A device type "npu" in this process: torch_npu's, else one that has a name and nothing else.

    It stays for the life of the process. Raises TraceError where this torch has no way to add one.
    """
    if hasattr(torch, "npu"):
        return
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise TraceError(f"torch {torch.__version__} cannot name a device that is not there; install "
                         "torch_npu, or a later torch (2.13 will do)")
    setup("npu", _Npu())


class _Npu:
    """What libraries ask of `torch.npu`: one device that does nothing."""

    def __init__(self):
        self.is_available = self.is_initialized = lambda: True
        self.is_bf16_supported = lambda including_emulation=True: True
        self.device_count = lambda: 1
        self.current_device = lambda: 0
        self._is_in_bad_fork = lambda: False
        self.manual_seed_all = self.manual_seed = self.set_device = lambda value: None
        self.synchronize = self.empty_cache = lambda device=None: None
        # AOTAutograd keeps the random state of any accelerator, whatever it compiles later in this process.
        self.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
        self.set_rng_state = lambda state, device=None: None
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def trace(example: Example, options: Mapping[str, object] | Options | None = None, grad: bool = False,
          progress: Callable[[FusionReport], None] = lambda report: None) -> list[FusionReport]:
    """A report per graph that Dynamo makes of one call of the model, in order.

    The model's parameters and buffers are replaced by fakes on "npu:0", and those of the modules that a
    function calls (`modules_of`); so are the tensors of the call.
    options: the backend's, in any form that it takes; no mask is simplified, since none has values here.
    grad: trace with gradients on. progress: called with each report as it is made.

    Raises:
        TraceError: the call fails on fake tensors.
        ValueError, TypeError: for an unknown option, or a value out of range.
    """
    ensure_npu()
    chosen = parse_options(options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode)
    reports: list[FusionReport] = []

    def backend(gm, inputs):
        reports.append(_report(gm, chosen, len(reports)))
        progress(reports[-1])
        return gm.forward

    fakes.replace_in(modules_of(example.model))
    args, kwargs = fakes.of((example.args, dict(example.kwargs)))
    torch._dynamo.reset()
    limits = {"recompile_limit": MAX_GRAPHS, "accumulated_recompile_limit": MAX_GRAPHS,
              "suppress_errors": False}
    try:
        with _quiet(), _no_device(), mode, torch.set_grad_enabled(grad), torch._dynamo.config.patch(limits):
            torch.compile(example.model, backend=backend)(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise TraceError(f"the model does not run on fake tensors: {cause(error)}") from error
    finally:
        torch._dynamo.reset()
    return reports


def _report(gm: torch.fx.GraphModule, options: Options, number: int) -> FusionReport:
    """What the backend would report of a graph, which is left as it is. Not how long that took: in a
    report on an NPU it would read as a time of the NPU's."""
    error, fused, notes = None, Fused(None), ()
    try:
        # (Masks have no values here.)
        plain = simplified(gm.graph, replace(options, masks="keep"))
        fused, notes = fuse(plain.graph, options, lens=plain.lens), plain.notes
    except Exception as failure:
        if strict():
            raise
        error, notes = f"{type(failure).__name__}: {failure}", ()
    return FusionReport(model_name(gm), number, fused.sites, error, seconds=math.nan, rotary=fused.rotary,
                        notes=(*notes, *_autocast_elsewhere(gm)))


def _autocast_elsewhere(gm: torch.fx.GraphModule) -> list[str]:
    """A note for each device type but "npu" for which the graph switches autocast on: that casts nothing of
    what is on an NPU."""
    entered = [node.args for node in gm.graph.nodes if node.target is torch.amp.autocast_mode._enter_autocast]
    return [f'torch.autocast("{device}") casts nothing that is on "npu"; {_INSTEAD_OF_AUTOCAST}'
            for device in dict.fromkeys(device for device, _, enabled, *_ in entered if enabled)
            if device != "npu"]


@contextlib.contextmanager
def _no_device() -> Iterator[None]:
    """torch takes it that there is a device behind the name, and would make constants there."""
    with mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns of and logs about tracing: what matters is in the reports, or in the error.
    The model's own warnings are shown, and torch's logs where TORCH_LOGS asks for them."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [log for name, log in list(logging.root.manager.loggerDict.items())
               if name.partition(".")[0] == "torch" and isinstance(log, logging.Logger)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\b")
        for handler in {handler for log in loggers for handler in log.handlers}:
            handler.addFilter(_nothing)
            stack.callback(handler.removeFilter, _nothing)
        # Not all of them have a handler of torch's: these would come to Python's own.
        for log in loggers:
            stack.enter_context(mock.patch.object(log, "disabled", True))
        yield


def _nothing(record: logging.LogRecord) -> bool:
    return False


def cause(error: BaseException) -> str:
    """The innermost error, the user's line, and a word on why where fakes are to blame."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorDeviceMismatchError,
    )

    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    text = describe(chain[-1])
    # Dynamo writes the user's frames into its message; where torch alone is in them, no line is to blame.
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(error).partition("from user code")[2])
    frames = frames or [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames
           if not re.search(r"[\\/]torch[\\/]", path) and Path(path).parent != Path(__file__).parent and
           not path.startswith("<")]
    if own:
        path, line = own[-1]
        text += f" ({Path(path).name}:{line})"
    if any(isinstance(e, (DataDependentOutputException, DynamicOutputShapeException)) for e in chain):
        text += ". It needs a value out of a tensor (.item(), nonzero, a branch on data), and there are no " \
                "values here"
    if any(isinstance(e, FakeTensorDeviceMismatchError) for e in chain):
        text += ". A tensor that is no parameter, no buffer and no input of the call stays where it was " \
                "made: register it as a buffer, or make it on the input's device"
    if any("AutocastPrivateUse1" in str(e) for e in chain):
        text += f'. torch.autocast("npu") needs torch_npu; {_INSTEAD_OF_AUTOCAST}'
    return text


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The modules that a call of `model` runs, as far as can be seen without one: itself; those that a
    function closes over or reads from its file, that a method is bound to, and that a partial or another
    callable object holds. Not the modules in these."""
    found: list[torch.nn.Module] = []
    seen: dict[int, Any] = {}  # what was looked into, kept alive
    ahead = [model]
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            ahead += value
        elif isinstance(value, Mapping):
            ahead += value.values()
        elif isinstance(value, functools.partial):
            ahead += (value.func, value.args, value.keywords)
        elif inspect.ismethod(value):
            ahead += (value.__self__, value.__func__)
        elif inspect.isfunction(value):
            ahead += _closed_over(value)
            ahead += (v for name in value.__code__.co_names
                      if isinstance(v := value.__globals__.get(name), torch.nn.Module))
        elif callable(value) and not isinstance(value, type):
            ahead += getattr(value, "__dict__", {}).values()
    return found


def _closed_over(function: Callable) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell: of a variable that is set later
            yield cell.cell_contents


class Fakes:
    """Fake tensors on "npu:0" in the place of others. Tensors that share memory get fakes that do."""

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> (kept alive, its fake)
        self._bases: dict[tuple, tuple[Any, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """`value` with every tensor in it replaced; containers that pytree knows are walked."""
        return torch.utils._pytree.tree_map(
            lambda x: self.tensor(x) if isinstance(x, torch.Tensor) else x, value)

    def replace_in(self, models: Iterable[torch.nn.Module]) -> None:
        """Parameters and buffers of modules, and of those in them, become fakes, in place."""
        for module in dict.fromkeys(module for model in models for module in model.modules()):
            for tensors in (module._parameters, module._buffers):
                for name, value in tensors.items():
                    if value is not None:
                        tensors[name] = self.tensor(value)

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        found = self._known.get(id(t))
        if found is None:
            found = self._known[id(t)] = (t, self._make(t))
        return found[1]

    def _make(self, t: torch.Tensor) -> torch.Tensor:
        with self.mode:
            if t.layout is not torch.strided:
                raise TraceError(f"a {str(t.layout).removeprefix('torch.')} tensor of shape "
                                 f"{tuple(t.shape)}: only strided ones can be faked")
            fake = torch.as_strided(self._base(t), t.shape, t.stride(), t.storage_offset())
            if isinstance(t, torch.nn.Parameter):
                return torch.nn.Parameter(fake, requires_grad=t.requires_grad)
            return fake.requires_grad_() if t.requires_grad else fake

    def _base(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        key = (storage._cdata, t.dtype)
        if key not in self._bases:
            base = torch.empty(storage.nbytes() // t.element_size(), dtype=t.dtype, device="npu")
            self._bases[key] = storage, base
        return self._bases[key][1]
