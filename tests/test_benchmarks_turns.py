"""Runs of benchmarks/models at once: who times something is alone, and nobody starves or waits for itself."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
pytest.importorskip("fcntl")


def run(path, number):
    """A log of (time, what, number) of a run that compiles and times by turns."""
    from benchmarks.models.turns import Turns

    turns, log = Turns(path), []

    def hold(what):
        log.append((time.monotonic(), f"begin {what}", number))
        time.sleep(0.01)
        log.append((time.monotonic(), f"end {what}", number))

    for _ in range(4):
        with turns.together():
            hold("compile")
            with turns.alone():
                hold("time")
        with turns.alone():
            hold("time")
    return log


def test_timing_is_alone(tmp_path):
    with ProcessPoolExecutor(3) as pool:
        logs = list(pool.map(run, [tmp_path / "turn"] * 3, range(3)))
    inside, both = set(), 0
    for _, what, number in sorted(event for log in logs for event in log):
        word, what = what.split()
        if word == "end":
            inside.discard((what, number))
            continue
        assert not any(other == "time" or what == "time" for other, _ in inside), (what, inside)
        inside.add((what, number))
        both += len(inside) > 1
    assert both  # they do compile beside each other


def test_without_a_file_nothing_waits():
    from benchmarks.models.turns import Turns

    turns = Turns(None)
    with turns.alone(), turns.together(), turns.alone():
        pass


def test_a_function_that_times_is_alone(tmp_path):
    import types

    from benchmarks.models.turns import Turns

    turns, module = Turns(tmp_path / "turn"), types.SimpleNamespace(time=lambda x: x + 1)
    with turns.together(), turns.timing_alone(module, "time"):
        assert module.time(1) == 2
    assert module.time.__name__ == "<lambda>"
