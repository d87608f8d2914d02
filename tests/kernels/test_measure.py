"""Timing by turns, on an accelerator whose clock is a list of events; and with an empty cache."""

import contextlib
import weakref
from statistics import median
from types import SimpleNamespace

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


# Calls that find an empty cache


class Cuda:
    """In the place of torch.cuda: streams without effect, and graphs that replay what was called while they
    were captured. A call advances the clock by its `ms`; a reduction over `zeros` by FLUSH_MS."""

    FLUSH_MS = 0.25

    def __init__(self):
        self.now, self.capturing, self.captures, self.alive = 0.0, None, 0, weakref.WeakSet()
        cuda = self

        class Graph:
            def __init__(self):
                self.ms = 0.0
                cuda.alive.add(self)

            def capture_begin(self, capture_error_mode):
                assert cuda.capturing is None and capture_error_mode == "thread_local"
                cuda.capturing, cuda.captures = self, cuda.captures + 1

            def capture_end(self):
                cuda.capturing = None

            def replay(self):
                cuda.pass_by(self.ms)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Stream:
            def __init__(self):
                cuda.alive.add(self)

            def wait_stream(self, other):
                pass

            def synchronize(self):
                pass

        class Memory:
            def __init__(self, size, device):
                assert size * 4 == 2 * 1000 and device == DEVICE  # floats; twice the cache
                cuda.alive.add(self)

            def sum(self):
                cuda.pass_by(cuda.FLUSH_MS)

        self.CUDAGraph, self.Event, self.Stream, self.zeros = Graph, Event, Stream, Memory
        self.caller = Stream()

    device = stream = staticmethod(lambda which: contextlib.nullcontext())
    get_device_properties = staticmethod(lambda device: SimpleNamespace(L2_cache_size=1000))

    def current_stream(self):
        return self.caller

    def pass_by(self, ms):
        if self.capturing is None:
            self.now += ms
        else:
            self.capturing.ms += ms

    def kept(self):
        """Names of what is alive beside the caller's stream."""
        return sorted(type(x).__name__ for x in self.alive if x is not self.caller)


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    for name in ("CUDAGraph",
                 "Event", "Stream", "current_stream", "device", "get_device_properties", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch, "zeros", made.zeros)
    return made


def test_the_cache_is_emptied_by_what_is_made_once(cuda):
    with measure.ColdCache(DEVICE) as cold:
        assert not cuda.kept()  # nothing before it is needed
        for number, ms in enumerate((0.5, 0.004, 7.0), 1):
            found = measure.device_microseconds(lambda: cuda.pass_by(ms), cold)  # noqa: B023
            assert found == pytest.approx(ms * 1e3)
            assert cuda.captures == 1 + number and cuda.kept() == ["Graph", "Memory", "Stream"]
    assert not cuda.kept()


def test_the_clock_rate_changes_between_calls(cuda):
    """What emptying takes is measured beside each call."""
    with measure.ColdCache(DEVICE) as cold:
        measure.device_microseconds(lambda: cuda.pass_by(0.5), cold)
        original = cuda.pass_by
        cuda.pass_by = lambda ms: original(ms if cuda.capturing else 2 * ms)
        assert measure.device_microseconds(lambda: cuda.pass_by(0.5), cold) == pytest.approx(1000.0)


@pytest.mark.parametrize("fails_in", ["the call", "the capture"])
def test_a_call_that_fails_leaves_nothing(fails_in, cuda):
    def failing():
        if fails_in == "the call" or cuda.capturing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with measure.ColdCache(DEVICE) as cold:
        measure.device_microseconds(lambda: cuda.pass_by(0.5), cold)
        with pytest.raises(torch.OutOfMemoryError):
            measure.device_microseconds(failing, cold)
        assert not cuda.kept() and cuda.capturing is None
        assert measure.device_microseconds(lambda: cuda.pass_by(0.5), cold) == pytest.approx(500.0)
        with pytest.raises(torch.OutOfMemoryError):
            measure.device_microseconds(failing, cold)
    assert not cuda.kept()
