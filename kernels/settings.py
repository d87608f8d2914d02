"""What the environment sets for the kernels, and the words of the self-check."""

from __future__ import annotations

import os

#: Set to 1: kernels run on CPU tensors, through Triton's interpreter (for tests; slow).
INTERPRET = "ASCEND_LN_FUSE_INTERPRET"

#: Set to 1: whatever would fall back to plain PyTorch because of a failure raises instead.
STRICT = "ASCEND_LN_FUSE_STRICT"

#: Where files are kept; else ascend_ln_fuse under XDG_CACHE_HOME or ~/.cache.
CACHE_DIR = "ASCEND_LN_FUSE_CACHE_DIR"

#: Seconds that compiling one kernel may take before PyTorch runs instead; 0 waits without end.
COMPILE_SECONDS = "ASCEND_LN_FUSE_COMPILE_SECONDS"
DEFAULT_COMPILE_SECONDS = 600.0

#: Set to 1: a failed self-check saves the tensors of its call beside the file that reproduces it.
SAVE_INPUTS = "ASCEND_LN_FUSE_SAVE_INPUTS"

#: When a kernel is compared with plain PyTorch; `Options.self_check` explains them.
SELF_CHECKS = ("off", "first_call", "always", "raise")
DEFAULT_SELF_CHECK = "first_call"


def switched_on(variable: str) -> bool:
    """Whether an environment variable is set to something else than 0."""
    return os.environ.get(variable, "") not in ("", "0")


def strict() -> bool:
    """Whether failures raise (see STRICT)."""
    return switched_on(STRICT)


def compile_seconds() -> float | None:
    """The time limit of one compilation; None where there is none.

    Raises:
        ValueError: the environment variable holds no number, or a negative one.
    """
    text = os.environ.get(COMPILE_SECONDS, "")
    try:
        seconds = float(text) if text else DEFAULT_COMPILE_SECONDS
        if not seconds >= 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"{COMPILE_SECONDS} must be a number of seconds, or 0 for no limit, not {text!r}") \
            from None
    return seconds or None
