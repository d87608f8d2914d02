"""Options of the backend: one dataclass for `torch.compile(options=...)` and `auto_fusion(...)`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .kernels.settings import DEFAULT_SELF_CHECK, SELF_CHECKS, strict

__all__ = ["Options", "parse_options", "strict"]

#: Inner compilers that run each operation as it is written. Others see through products, but not through
#: ours, and choose themselves how what they compute lies in memory.
RUN_AS_WRITTEN = ("eager", "aot_eager", "cudagraphs", "npugraphs")

_CHOICES = {
    "report": ("off", "table", "full"),
    "training": ("fuse", "decline"),
    "self_check": SELF_CHECKS,
    "masks": ("simplify", "keep"),
    "cats": ("simplify", "keep"),
    "streams": ("simplify", "keep"),
    "inner_choice": ("measure", "fuse"),
}


@dataclass(frozen=True)
class Options:
    """What a user may set.

    Attributes:
        report: "table" prints one table per compiled graph to stderr; "full" adds the region text and
            the kernel source of each site; "off" prints nothing. `last_reports()` has them in any case.
        inner: the compiler of the rest of the graph: "eager" (default: runs it as is) or the name of
            any Dynamo backend, e.g. "inductor".
        training: sites whose inputs require grad while grad mode is on: "fuse" (backward differentiates
            the reference) or "decline".
        self_check: when a kernel's results are compared with plain PyTorch on the tensors of the call, on
            a sample of rows: "first_call" with new shapes, "always" on each call, or "off". A kernel
            outside the error bound is replaced by plain PyTorch, with a warning; "raise" is "first_call"
            but raises, also where a kernel does not compile or start.
        masks: attention masks that the graph builds from sizes alone, and that are all True or causal:
            "simplify" (scaled_dot_product_attention gets none, or is_causal) or "keep".
        cats: torch.cat of all pieces of one tensor, in order: "simplify" (the tensor itself is read) or
            "keep".
        streams: residual streams whose last dim is not the innermost in memory: "simplify" (laid out
            where they begin, by a convolution in channels_last or a copy, if that saves bytes) or "keep".
        inner_choice: what becomes of fused sites in front of an `inner` that fuses on its own, on an
            accelerator: "measure" compiles the graph with all of them, with those of short rows and with
            none, times these forms and keeps the fastest, and leaves what cannot be measured (gradients,
            written inputs, random numbers) to `inner`; "fuse" fuses without asking.
    """

    report: str = "table"
    inner: str = "eager"
    training: str = "fuse"
    self_check: str = DEFAULT_SELF_CHECK
    masks: str = "simplify"
    cats: str = "simplify"
    streams: str = "simplify"
    inner_choice: str = "measure"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                raise TypeError(f"option {field.name!r} of ascend_ln_fuse must be a str "
                                f"({_describe(field.name)}), not {type(value).__name__} {value!r}")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise ValueError(f"option {field.name!r} of ascend_ln_fuse must be "
                                 f"{_describe(field.name)}, not {value!r}")
        if self.inner == "ascend_ln_fuse":
            raise ValueError("option 'inner' of ascend_ln_fuse must be another backend")


def _describe(name: str) -> str:
    choices = _CHOICES.get(name)
    return "the name of a Dynamo backend" if choices is None else \
        " or ".join(repr(choice) for choice in choices)


def parse_options(options: Mapping[str, object] | Options | None, also: tuple[str, ...] = ()) -> Options:
    """Options from a mapping, as `torch.compile(options=...)` hands them over.

    also: what else the caller takes, for the message of a name that nobody does.

    Raises:
        ValueError: an unknown name (the message lists the valid ones), or a value out of range.
        TypeError: a value or `options` of the wrong type.
    """
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    if not isinstance(options, Mapping):
        raise TypeError(f"options of ascend_ln_fuse must be a dict, not {type(options).__name__}")
    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(str(name), [*names, *also], n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else \
                " (inner='cudagraphs' is what mode='reduce-overhead' does)" if name == "mode" else ""
            raise ValueError(f"unknown option {name!r} of ascend_ln_fuse{hint}; "
                             f"valid options: {', '.join((*names, *also))}")
    return Options(**options)
