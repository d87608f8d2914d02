"""ascend_ln_fuse: a torch.compile backend that fuses normalisation sites into Triton kernels.

    torch.compile(model, backend="ascend_ln_fuse")      # needs no import of this package
    ascend_ln_fuse.auto_fusion(model)                   # compiles in place
    ascend_ln_fuse.last_reports()                       # what was done, newest compile last

Importing this costs next to nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PLACES = {
    "auto_fusion": "backend", "Options": "options", "FusionReport": "report",
    "SiteReport": "report", "last_reports": "report", "clear_reports": "report",
    "inplace_layer_norm_": "kernels.inplace",
    "LayerNormLinear": "chain_modules", "LayerNormLinearFusion": "chain_modules",
    "FusionChain": "chain_builder", "FusionMode": "chain_run", "ShapeRange": "shape_range",
    "kernel_info": "kernel_info",
    "inductor_pass": "graph_passes", "npugraph_ex_pass": "graph_passes",
    "register_pattern": "patterns", "unregister_pattern": "patterns",
    "Norm": "site", "Decline": "site",
}
__all__ = [*_PLACES, "__version__"]


def __getattr__(name: str):
    if name in _PLACES:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
