"""Python's parser in several threads: CPython up to 3.11.7 counts the depth of all threads' trees together.

Where a thread that builds a syntax tree loses the GIL to another one that does, the first finds the counter
changed and raises "SystemError: AST constructor recursion depth mismatch", though its source is right
(https://github.com/python/cpython/issues/106905). 3.10 has no such counter; 3.11.8, 3.12.2 and later have one
for each tree. 3.12.0 and 3.12.1 share it, and count as disturbed, though they collect no garbage, which is
where the GIL was lost, while a tree is built. Triton parses each kernel that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: what the error says in every version that has it
MISMATCH = "recursion depth mismatch"

_TRIES = 20


def parsers_apart(version: tuple[int, int, int]) -> bool:
    """Whether threads of that version of CPython may parse at the same time."""
    return not ((3, 11, 0) <= version < (3, 11, 8) or (3, 12, 0) <= version < (3, 12, 2))


def parsing(work: Callable[[], T]) -> T:
    """`work()`, called again where another thread disturbed the parser. Raises whatever `work` raises."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except SystemError as error:
            if MISMATCH not in str(error):
                raise
    return work()
