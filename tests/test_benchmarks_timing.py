"""How contenders are timed against each other, without a device."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from timing import by_turns, paired  # noqa: E402


def test_every_round_has_each_contender_once_in_an_order_of_its_own():
    called = []
    timers = {name: lambda name=name: called.append(name) or len(called) for name in "abcd"}
    times = by_turns(timers, 12)
    rounds = [tuple(called[i:i + 4]) for i in range(0, 48, 4)]
    assert all(sorted(order) == list("abcd") for order in rounds) and len(set(rounds)) > 4
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abcd", 12)
    called.clear()
    assert by_turns(timers, 12) == times  # a seed, and so the same order again


def test_ratios_are_those_of_the_rounds():
    """A clock that changes between rounds moves the medians apart, and no ratio."""
    ours, other = [10.0, 20.0, 10.0], [22.0, 44.0, 22.0]
    assert paired({"ours": ours, "other": other}, "ours") == {"other": pytest.approx(2.2)}
    with pytest.raises(ValueError):
        paired({"ours": ours, "other": other[:2]}, "ours")
