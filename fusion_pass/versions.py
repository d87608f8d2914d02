"""Which version of this package runs: a part of keys under which others keep what it made."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def sources() -> str:
    """A hash of this package's sources. Those of kernels/ascend are left out: they check and compile without
    an accelerator, and change no graph."""
    from . import kernels, patterns
    from .kernels import targets

    digest = hashlib.sha256()
    folders = (Path(__file__).parent, *(Path(p.__file__).parent for p in (kernels, targets, patterns)))
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
