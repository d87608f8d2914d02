"""Timing by turns, on an accelerator whose clock is a list of events."""

import contextlib
from statistics import median

import pytest
import torch

from ascend_ln_fuse.kernels import measure

DEVICE = torch.device("meta")


class Accelerator:
    """Calls advance its clock by `ms`, and are noted in `made`."""

    def __init__(self):
        self.now, self.made = 0.0, []
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        self.Event = Event

    device = staticmethod(lambda device: contextlib.nullcontext())

    def synchronize(self):
        pass

    def call(self, name, ms):
        def made():
            self.made.append(name)
            self.now += ms

        return made


@pytest.fixture
def accelerator(monkeypatch):
    made = Accelerator()
    monkeypatch.setattr(measure, "_module", lambda device: made)
    return made


@pytest.mark.parametrize("a, b", [(0.001, 0.003), (0.4, 0.5), (30.0, 31.0), (240.0, 250.0)])
def test_times_and_their_bound(a, b, accelerator):
    found = measure.by_turns([accelerator.call("a", a), accelerator.call("b", b)], DEVICE, 0.5)
    assert median(found[0]) == pytest.approx(a) and median(found[1]) == pytest.approx(b)
    assert 1 <= len(found[0]) == len(found[1]) <= measure.TURNS
    assert accelerator.now <= 500 + a + b
    assert accelerator.made.count("a") == accelerator.made.count("b")


def test_a_call_that_is_too_long_is_timed_once(accelerator):
    assert measure.by_turns([accelerator.call("a", 4000.0), accelerator.call("b", 5000.0)], DEVICE, 0.5) == [
        [4000.0], [5000.0]]
    assert accelerator.made == ["a", "b"]


def test_who_comes_first_changes(accelerator):
    measure.by_turns([accelerator.call("a", 10.0), accelerator.call("b", 10.0)], DEVICE, 0.1)
    assert "".join(accelerator.made[2:10]) == "baabbaab"


def test_which_devices_have_a_clock(accelerator, monkeypatch):
    assert measure.has_events(DEVICE) and not measure.has_events(torch.device("cpu"))
    assert not measure.is_capturing(DEVICE)
    accelerator.is_current_stream_capturing = lambda: True
    assert measure.is_capturing(DEVICE)
    monkeypatch.undo()
    assert not measure.has_events(DEVICE) and not measure.is_capturing(DEVICE)
