"""Python's parser in several threads."""

import ast
import gc
import sys
import threading

import pytest

from ascend_ln_fuse.kernels.parsing import MISMATCH, parsers_apart, parsing

SOURCE = "def kernel():\n" + "\n".join(f"    x{i} = (a + {i}) * b[{i}]" for i in range(2000))


class Cycle:
    """Garbage whose end runs Python code: a thread that builds a tree can lose the GIL there."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(50):
            pass


@pytest.fixture
def hasty():
    """Threads switch, and the collector runs, as often as they can."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


def test_threads_that_parse(hasty):
    """Fails in CPython 3.11 without the second try: about one of a hundred trees."""
    errors = []

    def work():
        try:
            for _ in range(30):
                for _ in range(20):
                    Cycle()
                parsing(lambda: ast.parse(SOURCE))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_is_called_again_for_this_error_alone():
    calls = []

    def work(message):
        calls.append(message)
        if len(calls) < 3:
            raise SystemError(message)
        return "tree"

    assert parsing(lambda: work(f"AST constructor {MISMATCH} (before=39, after=57)")) == "tree"
    assert len(calls) == 3
    calls.clear()
    with pytest.raises(SystemError, match="another"):
        parsing(lambda: work("another"))
    assert len(calls) == 1


def test_what_lasts_is_raised():
    def work():
        raise SystemError(MISMATCH)

    with pytest.raises(SystemError, match=MISMATCH):
        parsing(work)


@pytest.mark.parametrize("version, apart", [
    ((3, 10, 14), True), ((3, 11, 0), False), ((3, 11, 7), False), ((3, 11, 8), True), ((3, 12, 1), False),
    ((3, 12, 2), True), ((3, 13, 0), True)])
def test_versions_whose_threads_parse_at_once(version, apart):
    """gh-106905: mended in 3.11.8 and 3.12.2; 3.10 does not count."""
    assert parsers_apart(version) is apart
