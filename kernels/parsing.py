"""Python's parser in several threads: CPython 3.11 and 3.12 count the depth of all threads' trees together.

Where a thread that builds a syntax tree loses the GIL to another one that does, the first finds the counter
changed and raises "SystemError: AST constructor recursion depth mismatch", though its source is right
(https://github.com/python/cpython/issues/106905). Triton parses each kernel that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: what the error says in every version that has it
MISMATCH = "recursion depth mismatch"

_TRIES = 20


def parsing(work: Callable[[], T]) -> T:
    """`work()`, called again where another thread disturbed the parser. Raises whatever `work` raises."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except SystemError as error:
            if MISMATCH not in str(error):
                raise
    return work()
