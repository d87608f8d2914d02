"""Keeps Dynamo out of the launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: Modules with frames that handle tensors in a launch. Those of chains are loaded by the first chain.
MODULES = ("launch", "recent", "likeness", "launchers", "guard", "self_check", "reproduction", "record",
           "compiling", "triton_cache", "directories", "reference", "fused_linear", "fused_linear_plan",
           "fused_linear_check", "fused_linear_structure", "chain_ways", "chain_program", "chain_products",
           "chain_fused", "chain_choice", "chain_contest", "chain_question", "chain_trial", "chain_activated",
           "chain_segments", "measure")

_skipped: set[str] = set()


def skip_frames() -> None:
    """Has Dynamo skip the frames of launching and of the reference, where it meets them as frames of
    their own (after a graph break before a Runner)."""
    from torch._dynamo.eval_frame import skip_code

    found = []
    for name in MODULES:
        module = sys.modules.get(f"{__package__}.{name}")
        if name in _skipped or module is None:
            continue
        _skipped.add(name)
        owners = [vars(module), *(vars(x) for x in vars(module).values() if isinstance(x, type))]
        for owner in owners:
            codes = [getattr(f, "__code__", None) for f in owner.values()
                     if getattr(f, "__module__", None) == module.__name__]
            # A decorator may lend its name to code that others use too.
            found += [code for code in codes if code is not None and code.co_filename == module.__file__]
    while found:
        code = found.pop()
        skip_code(code)
        found += [c for c in code.co_consts if hasattr(c, "co_code")]


def skip_frames_of(function: Callable) -> None:
    """The same for a function that was written out as source, if Dynamo is there to meet it."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import skip_code

        skip_code(function.__code__)
