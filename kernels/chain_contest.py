"""Measuring the ways of one segment against each other, on the tensors of a live call.

A way counts when it runs and gives the library's results. The device's time of each is measured, and of those
that it could matter for how long a call keeps the host busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median

import torch

from .chain_question import ACTIVATED, LIBRARY, ONE_KERNEL, Choice, Question, Way
from .compiling import CompileTimeout, settle
from .guard import _words, device_lost
from .layout import Unsupported
from .measure import ColdCache, by_turns, device_microseconds, host_microseconds

#: Another way must beat the library by this factor: below it, the difference is noise.
MARGIN = 1.02

#: Seconds that one segment may take on a first call: to wait for its kernels' compiler, all together, and to
#: measure them. What is left then is not tried.
COMPILE_SECONDS, MEASURE_SECONDS = 4.0, 0.3

#: Milliseconds from which on a call is timed as it is: what the host does for it (some 50 us for a segment by
#: the library) is long done.
LONG_MS = 0.5

BY_LIBRARY, BY_ACTIVATED = Way(LIBRARY), Way(ACTIVATED)


#: Elements that `agree` compares at once, so that it takes little memory beside large tensors.
PIECE = 1 << 24


def contest(question: Question, configs: Sequence[object], unsplit: Sequence[object]) -> Choice:
    """The fastest ways, with these block shapes of kernels, and with `unsplit` where the fastest keeps the
    host busy for longer than the device. A way that fails is dropped; what the library raises is raised."""
    with torch.no_grad(), ColdCache(question.device) as cold:
        return _Contest(question, configs, unsplit, cold).held()


class _Contest:
    """Attributes:
        cold: empties the cache before calls that are timed on the device.
        device_us, host_us: of the ways that were measured.
        dropped: why others were not, or are no candidates.
        lasting: see Choice.
    """

    def __init__(self, question: Question, configs: Sequence[object], unsplit: Sequence[object],
                 cold: ColdCache):
        self.question, self.configs, self.unsplit, self.cold = question, configs, unsplit, cold
        self.calls: dict[Way, Callable] = {BY_LIBRARY: question.by_library}
        self.device_us: dict[Way, float] = {}
        self.host_us: dict[Way, float] = {}
        self.dropped: list[str] = []
        self.lasting = True
        self.compiling, self.measuring = _Budget(COMPILE_SECONDS), _Budget(MEASURE_SECONDS)

    def held(self) -> Choice:
        question = self.question
        for config in (*self.configs, *self.unsplit):
            with suppress(Exception):  # `by_kernel` fails in the same way
                question.begin(config)
        wanted = question.by_library()
        settle(COMPILE_SECONDS)  # compilers that run beside it would slow the host down
        if question.by_activated is not None:
            self.enter_activated(wanted)
        if self.configs:
            self.device_us[BY_LIBRARY] = device_microseconds(question.by_library, self.cold)
            if BY_ACTIVATED in self.calls:
                self.time(BY_ACTIVATED)
            self.try_kernels(self.configs, wanted)
        else:
            wanted = ()  # of any size, and nothing else is compared with it
            self.time_by_turns()
        plain, fastest = self.for_plain_calls(), self.fastest()
        launching = fastest in self.host_us and self.host_us[fastest] > self.device_us[fastest]
        if fastest.word == ONE_KERNEL and launching:
            self.try_kernels(self.unsplit, wanted)
            plain, fastest = self.for_plain_calls(), self.fastest()
        times, host = ({way.name: us for way, us in measured.items()}
                       for measured in (self.device_us, self.host_us))
        return Choice(*plain, times, "; ".join(self.dropped), lasting=self.lasting, host_times=host,
                      in_graph=None if fastest == plain else fastest)

    # -- who takes part

    def enter_activated(self, wanted: Sequence[torch.Tensor]) -> None:
        """The activation sees the product before it is rounded, so this way may be the more exact of the two:
        beside `agree`, which all of the result goes through, the error bound itself decides. `agree` refuses
        more than it must: in the tail of gelu, rounding the product moves a result by more than a rounding
        step of its own. Only where nearly all results lie there does that count, and the library runs."""
        way = BY_ACTIVATED
        try:
            found = self.question.by_activated()
            if agree(found, wanted) and self.question.within_bound(found):
                self.calls[way] = self.question.by_activated
            else:
                self.dropped.append(f"{way.name}: other results than the library")
        except Exception as error:
            self.drop(way, error)

    def try_kernels(self, configs: Sequence[object], wanted: Sequence[torch.Tensor]) -> None:
        """Compile, check and time the kernels with these block shapes, as far as there is time for them."""
        for number, config in enumerate(configs):
            if spent := "compiling" if self.compiling.over else "measuring" if self.measuring.over else "":
                left = len(configs) - number
                self.dropped.append(f"{left} more not tried: {spent} the others took too long")
                self.lasting = self.lasting and not self.compiling.over  # another process finds them compiled
                break
            way, by_kernel = Way(ONE_KERNEL, config), partial(self.question.by_kernel, config)
            try:
                with self.compiling:
                    right = agree(by_kernel(), wanted)
            except CompileTimeout as error:
                self.drop(way, error)
                self.dropped.append("no other kernel was tried")  # one is enough to wait for
                break
            except Exception as error:
                self.drop(way, error)
                continue
            if not right:
                self.dropped.append(f"{config}: other results than the library")
                continue
            self.calls[way] = by_kernel
            with self.measuring:
                self.time(way)

    def drop(self, way: Way, error: Exception) -> None:
        if device_lost(error):
            raise error
        self.lasting = self.lasting and isinstance(error, Unsupported)
        self.dropped.append(f"{way.name}: {_reason(error)}")
        self.calls.pop(way, None)
        self.device_us.pop(way, None)

    # -- times

    def time(self, way: Way) -> None:
        try:
            self.device_us[way] = device_microseconds(self.calls[way], self.cold)
        except Exception as error:
            self.drop(way, error)

    def time_by_turns(self) -> None:
        """The times of calls of any length. Long ones are not told apart by a clock rate that changes between
        them; and what a graph would hold of their memory nobody else could use."""
        question, ways = self.question, list(self.calls)
        if len(ways) == 1:
            return None
        try:
            times = by_turns(list(self.calls.values()), question.device, MEASURE_SECONDS)
        except Exception as error:
            return self.drop(BY_ACTIVATED, error)
        milliseconds = dict(zip(ways, map(median, times)))
        if min(milliseconds.values()) >= LONG_MS:
            self.device_us = {way: ms * 1e3 for way, ms in milliseconds.items()}
        else:
            self.device_us[BY_LIBRARY] = device_microseconds(question.by_library, self.cold)
            self.time(BY_ACTIVATED)
        return None

    def fastest(self) -> Way:
        """On the device."""
        return _least(self.device_us)

    def for_plain_calls(self) -> Way:
        """The way whose longer time of the two, the device's and the host's, is shortest; the fastest on the
        device where that makes no difference. Times the host where that is still to do."""
        if len(self.device_us) < 2:
            return BY_LIBRARY
        if not self.host_us and min(self.device_us.values()) >= LONG_MS * 1e3:
            return self.fastest()
        plain = {BY_LIBRARY: max(self.device_us[BY_LIBRARY], self.host(BY_LIBRARY))}
        for way in sorted(self.device_us, key=self.device_us.__getitem__):
            if way == BY_LIBRARY or self.device_us[way] >= min(plain.values()):
                continue
            try:
                plain[way] = max(self.device_us[way], self.host(way))
            except Exception as error:
                self.drop(way, error)
        fastest = self.fastest()
        if plain.get(fastest, float("inf")) <= MARGIN * min(plain.values()):
            return fastest
        return _least(plain)

    def host(self, way: Way) -> float:
        """Microseconds."""
        if way not in self.host_us:
            self.host_us[way] = host_microseconds(self.calls[way], self.question.device)
        return self.host_us[way]


def _least(times: dict[Way, float]) -> Way:
    """The way with the shortest time; the library where that is less than MARGIN longer."""
    others = {way: us for way, us in times.items() if way != BY_LIBRARY}
    best = min(others, key=others.__getitem__, default=BY_LIBRARY)
    return best if best != BY_LIBRARY and times[best] * MARGIN < times[BY_LIBRARY] else BY_LIBRARY


class _Budget:
    """Seconds that may be spent inside of its contexts, all together."""

    def __init__(self, seconds: float):
        self.left = seconds

    @property
    def over(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> None:
        self.left += time.monotonic()

    def __exit__(self, *error) -> None:
        self.left -= time.monotonic()


def _reason(error: Exception) -> str:
    """Why a way was dropped, in a line."""
    known = isinstance(error, (Unsupported, CompileTimeout, torch.OutOfMemoryError))
    return str(error) if known else _words(error)


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether two ways gave the same results up to how they round: the norm of the difference is within
    one rounding step of the norm of the result, and NaN and infinities stand in the same places."""
    return all(a.shape == b.shape and a.dtype == b.dtype and _alike(a, b)
               for a, b in zip(found, wanted, strict=True))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    eps = torch.finfo(a.dtype).eps
    differences, norms, places = [], [], []
    for x, y in zip(a.flatten().split(PIECE), b.flatten().split(PIECE)):
        places.append((x.isfinite() == y.isfinite()).all())
        x, y = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (x, y))
        differences.append((x - y).norm())
        norms.append(y.norm())
    if not places:
        return True
    distance, length = (torch.stack(parts).norm() for parts in (differences, norms))
    return bool(torch.stack(places).all() & (distance <= eps * length))
