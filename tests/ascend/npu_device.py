"""A device named npu whose memory is the CPU's, and an Ascend Triton whose launches go to the interpreter.

For processes of their own: the name stays for the life of a process. `install()` makes

* a PrivateUse1 backend in Python: tensors are on "npu:0", dispatch goes through their own key, storages hold
  CPU memory; ops that nobody wrote for npu run on CPU tensors over the same memory;
* a module torch_npu, as far as triton-ascend and this project ask for it;
* Triton's driver for an Ascend910B3. Triton binds the arguments, parses the options and lowers the
  kernel as on an NPU; the official compiler makes the final module, and the interpreter runs that.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import types
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

SOC = "Ascend910B3"
_KEEP: list = []  # libraries and memory live as long as the process
_BACKEND_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


# -- tensors ------------------------------------------------------------------------------------


def _allocate(numel: int, dtype: torch.dtype) -> torch.UntypedStorage:
    """An npu storage over new CPU memory."""
    size = max(numel, 0) * dtype.itemsize
    memory = torch.UntypedStorage(max(size, 16))
    _KEEP.append(memory)
    return torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device("npu:0"), size)


def _on(storage, size, stride, offset, dtype, device: str) -> torch.Tensor:
    """A tensor over a storage, on the storage's device."""
    if device == "cpu":
        empty = torch.empty(0, dtype=dtype)
    else:
        empty = torch._C._acc.create_empty_tensor((0,), dtype)
    ATEN.set_.source_Storage_storage_offset.redispatch(_BACKEND_KEYS, empty, storage, offset, size, stride)
    return empty


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype = dtype or torch.get_default_dtype()
    numel = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))
    return _on(_allocate(numel, dtype), size, stride, 0, dtype, "npu")


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _empty_strided(size, like.stride(), dtype=dtype)


def cpu_view(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of an npu tensor."""
    storage = x.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"),
                                                          storage.nbytes())
    return _on(alias, x.size(), x.stride(), x.storage_offset(), x.dtype, "cpu")


def to_npu(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    made = _empty_strided(x.size(), x.stride(), dtype=x.dtype)
    cpu_view(made).copy_(x)
    return made


def _copy_from(source, target, non_blocking=False):
    plain = [cpu_view(t) if t.device.type == "npu" else t for t in (source, target)]
    plain[1].copy_(plain[0])
    return target


def _fallback(op, *args, **kwargs):
    """Any op: on the CPU, over the same memory; new results are moved to the npu."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lower(x):
        if isinstance(x, torch.Tensor) and x.device.type == "npu":
            pairs.append((x, cpu_view(x)))
            return pairs[-1][1]
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == "npu" else x

    def lift(x):
        if not isinstance(x, torch.Tensor):
            return x
        mine = [npu for npu, plain in pairs if plain is x]  # an in-place op returns what it was given
        return mine[0] if mine else to_npu(x)

    args, kwargs = pytree.tree_map(lower, (args, kwargs))
    return pytree.tree_map(lift, op(*args, **kwargs))


def _view(op):
    return lambda x, *args, **kwargs: op.redispatch(_BACKEND_KEYS, x, *args, **kwargs)


ATEN = torch.ops.aten
#: Views, whose CPU kernels only look at sizes and keep the tensor's keys and storage.
_VIEWS = (ATEN.as_strided.default, ATEN.view.default, ATEN._reshape_alias.default, ATEN.unfold.default,
          ATEN.set_.source_Storage_storage_offset)
#: Ops that PyTorch would otherwise put together from others, less exactly than its CPU kernels.
_WHOLE = (ATEN.native_layer_norm.default, ATEN.native_layer_norm_backward.default)


# -- torch_npu and the driver -----------------------------------------------------------------------


class _Npu:
    """torch.npu, with one device."""

    def __init__(self):
        self.is_available = self.is_initialized = lambda: True
        self.device_count = lambda: 1
        self.current_device = lambda: 0
        self.get_device_name = lambda index=0: SOC
        self._is_in_bad_fork = lambda: False
        self.manual_seed_all = lambda seed: None
        # AOTAutograd keeps the random state of any accelerator, in whatever test runs next in this process.
        self.get_rng_state = lambda device=0: torch.zeros(16, dtype=torch.uint8)
        self.set_rng_state = lambda state, device=0: None
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


@dataclass
class Launches:
    """What went to the driver. kernels: (name, grid, arguments) of each launch. options: those of each
    compilation. refused: the compiler's message of each tile that did not fit."""

    kernels: list = field(default_factory=list)
    options: list = field(default_factory=list)
    refused: list = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.kernels]


LAUNCHES = Launches()


class _Launcher:
    """What a compiled kernel is launched with."""

    def __init__(self, src, metadata):
        self.name = metadata.kernel_name

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *args):
        from ascend_ln_fuse.kernels.ascend import interpret

        assert (y, z) == (1, 1) and stream == 7
        for arg in args:
            assert not isinstance(arg, torch.Tensor) or arg.device == torch.device("npu:0"), arg.device
        LAUNCHES.kernels.append((self.name, x, args))
        plain = [cpu_view(a) if isinstance(a, torch.Tensor) else a for a in args]
        interpret(function, self.name, plain, (x,))


class _Driver:
    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.launcher_cls = _Launcher
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},
            load_binary=lambda name, binary, shared, device: (object(), binary.decode(), 0, 0))
        self.get_current_target = lambda: GPUTarget("npu", SOC, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: 7


def _compile(linalg: str, metadata: dict, options) -> bytes:
    """The last stage of triton-ascend: it runs the official compiler and fails with what that wrote."""
    from triton.backends.ascend.compiler import _parse_linalg_metadata

    from ascend_ln_fuse.kernels.ascend.toolchain import Lowered, compile_planned

    linalg, metadata = _parse_linalg_metadata(linalg, metadata)
    name = metadata["kernel_name"]
    LAUNCHES.options.append({k: metadata[k] for k in ("multibuffer", "num_warps", "compile_mode")})
    planned = compile_planned(Lowered(name, "", linalg, "aiv", SOC, {}), multibuffer=metadata["multibuffer"])
    if not planned.ok:
        LAUNCHES.refused.append(planned.message)
        error = RuntimeError("bishengir-compile failed")
        error.stderr = f"loc(...): error: {planned.message}".encode()
        raise error
    return planned.text.encode()


def install() -> Launches:
    """Make the device, torch_npu and the driver; returns the record of launches."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="ascend-ln-fuse-test-")
    module = _Npu()
    backend_registration._setup_privateuseone_for_python_backend("npu", module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for op in _VIEWS:
        library.impl(op, _view(op), "PrivateUse1")
    for op in _WHOLE:
        library.impl(op, functools.partial(_fallback, op), "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    _KEEP.extend([library, everything])
    torch_npu = types.ModuleType("torch_npu")
    torch_npu.npu = module
    sys.modules["torch_npu"] = torch_npu

    import triton
    from triton.compiler.compiler import make_backend

    driver = _Driver()
    triton.runtime.driver.set_active(driver)
    # Triton loads backends as modules of its own making, which no import statement finds.
    names = type(make_backend(driver.get_current_target())).add_stages.__globals__
    assert "linalg_to_bin_enable_npu_compile_A2_A3" in names
    names["linalg_to_bin_enable_npu_compile_A2_A3"] = _compile
    return LAUNCHES
