"""How the ways of a chain's segment are measured, chosen, and remembered; without a device."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from ascend_ln_fuse.kernels import chain_choice, chain_contest
from ascend_ln_fuse.kernels.chain_choice import ACTIVATED, LIBRARY, ONE_KERNEL, Question, Way, agree, choose
from ascend_ln_fuse.kernels.compiling import CompileTimeout
from ascend_ln_fuse.kernels.layout import Unsupported

CPU = torch.device("cpu")


def question(rows=4, unsupported=None, kernel=None):
    wanted = [torch.ones(3)]
    return Question("text", CPU, rows, lambda: wanted, kernel or (lambda config: wanted), unsupported,
                    lambda: ("slow", "fast", "wrong"))


def name_of(call):
    """The way that is called: block shapes, ACTIVATED, or nothing for the library."""
    return call.args[0] if hasattr(call, "args") else LIBRARY


class Clock(dict):
    """Device times by the way that is called; `host`: the host's, 1.0 where none is given."""

    def __init__(self):
        super().__init__({LIBRARY: 10.0, "slow": 9.9, "fast": 5.0, "wrong": 1.0})
        self.host = {}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Times that are not measured; and a store of this test's own."""
    from ascend_ln_fuse.kernels.store import Store

    clock = Clock()
    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chain_choice, "_store", Store("chains"))
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)
    monkeypatch.setattr(chain_contest, "host_microseconds",
                        lambda call, device: clock.host.get(name_of(call), 1.0))
    monkeypatch.setattr(chain_contest, "device_microseconds", lambda call, cold: clock[name_of(call)])
    monkeypatch.setattr(chain_contest, "by_turns", lambda calls, device, seconds: [
        [clock[name_of(call)] / 1e3] * 3 for call in calls])
    return clock


def stored(text="text", rows=4):
    return chain_choice._store.get(chain_choice._key(text, CPU, rows))


def by_kernel(config):
    return [torch.full((3,), 1.1 if config == "wrong" else 1.0)]


def test_the_fastest_right_way_is_taken(clock):
    choice = choose(question(kernel=by_kernel))
    assert (choice.way, choice.config) == (ONE_KERNEL, "fast")
    assert choice.times == {LIBRARY: 10.0, "slow": 9.9, "fast": 5.0}
    assert "wrong: other results" in choice.reason
    assert "fast 5.0 us" in str(choice)


def test_one_cold_cache_for_all_ways(clock, monkeypatch):
    """Made once, and given back behind the last of them."""
    used, given_back = [], []

    class Cold(chain_contest.ColdCache):
        def __exit__(self, *error):
            given_back.append((self, len(used)))

    monkeypatch.setattr(chain_contest, "ColdCache", Cold)
    monkeypatch.setattr(chain_contest, "device_microseconds",
                        lambda call, cold: used.append(cold) or clock[name_of(call)])
    choose(question(kernel=by_kernel))
    assert len(used) == 3 and len(set(used)) == 1 and used[0].device == CPU
    assert given_back == [(used[0], 3)]


# Two answers


def test_a_kernel_that_keeps_the_host_longer_is_for_captures(clock):
    clock.host = {LIBRARY: 20.0, "fast": 30.0, "slow": 30.0}
    choice = choose(question(kernel=by_kernel))
    assert (choice.plain, choice.captured) == (Way(LIBRARY), Way(ONE_KERNEL, "fast"))
    words = ", ".join(f"{name} {us} us and {clock.host[name]} us of the host"
                      for name, us in choice.times.items())
    assert str(choice).startswith(f"library; in a CUDA graph one kernel [fast] ({words};")
    clock.clear()  # nothing can be measured any more
    again = choose(question(kernel=by_kernel))
    assert again == choice and str(again) == str(choice)


@pytest.mark.parametrize("host, plain", [
    ((20.0, 19.0, 30.0), "fast"), ((20.0, 20.2, 30.0), "fast"), ((4.0, 9.0, 4.0), "fast"),
    ((4.0, 11.0, 30.0), None), ((20.0, 30.0, 12.0), "slow"), ((20.0, 30.0, 19.9), None),
    ((9.0, 30.0, 1.0), None)], ids=str)
def test_the_longer_of_both_times_counts_in_plain_calls(clock, host, plain):
    """What differs by noise is no reason for another way than a graph's, nor for another than the library."""
    clock.host = dict(zip((LIBRARY, "fast", "slow"), host))
    choice = choose(question(kernel=by_kernel))
    assert choice.captured == Way(ONE_KERNEL, "fast")
    assert choice.plain == (Way(LIBRARY) if plain is None else Way(ONE_KERNEL, plain))


def test_a_kernel_that_is_slower_on_the_device_may_win_plain_calls(clock):
    clock.update(fast=10.5, slow=11.0)
    clock.host = {LIBRARY: 20.0, "fast": 12.0, "slow": 12.0}
    choice = choose(question(kernel=by_kernel))
    assert (choice.plain, choice.captured) == (Way(ONE_KERNEL, "fast"), Way(LIBRARY))


def test_who_reads_a_choice_reports_the_same_times(clock):
    clock.update(fast=5.6451, slow=5.7349)  # as 5.65 and 5.73, each shown with one digit
    clock.host = {LIBRARY: 20.0449, "fast": 19.9451}
    first = choose(question(kernel=by_kernel))
    clock.clear()
    assert str(choose(question(kernel=by_kernel))) == str(first)


def test_one_answer_is_shown_as_one(clock):
    choice = choose(question(kernel=by_kernel))
    assert choice.in_graph is None and str(choice).startswith("one kernel [fast] (library 10.0 us")


# One launch


def with_unsplit(tried):
    def kernel(config):
        tried.append(config)
        return by_kernel(config)

    return replace(question(kernel=kernel), unsplit=lambda: ("narrow",))


def test_one_launch_is_tried_where_two_keep_the_host_longer(clock):
    clock.update(narrow=8.0)
    clock.host = {LIBRARY: 20.0, "fast": 30.0, "slow": 30.0, "narrow": 11.0}
    choice = choose(with_unsplit([]))
    assert (choice.plain, choice.captured) == (Way(ONE_KERNEL, "narrow"), Way(ONE_KERNEL, "fast"))
    assert "narrow 8.0 us and 11.0 us of the host" in str(choice)
    clock.clear()
    assert choose(with_unsplit([])) == choice


@pytest.mark.parametrize("host, measured", [(1.0, False), (4.9, False), (9.0, True)], ids=str)
def test_one_launch_is_tried_nowhere_else(clock, host, measured):
    """Nor is it taken where it is slower. It is among what begins to compile."""
    clock.update(narrow=9.5)
    clock.host = {"fast": host}
    tried, begun = [], []
    choice = choose(replace(with_unsplit(tried), begin=begun.append))
    assert ("narrow" in tried) is ("narrow" in choice.times) is measured
    assert begun == ["slow", "fast", "wrong", "narrow"] and choice.plain == choice.captured


def test_one_launch_has_the_time_that_is_left(clock, monkeypatch):
    clock.host = {LIBRARY: 20.0, "fast": 30.0, "slow": 30.0}
    tried = []

    def measured(call, cold):
        if name_of(call) == "fast":
            monkeypatch.setattr(chain_contest._Budget, "over", True)
        return clock[name_of(call)]

    monkeypatch.setattr(chain_contest, "device_microseconds", measured)
    choice = choose(with_unsplit(tried))
    assert "narrow" not in tried and choice.plain == Way(LIBRARY)
    assert "1 more not tried" in choice.reason


# The activation in the product


def activated_question(found=1.0, within=lambda found: True, **changes):
    def by_activated(word):
        if isinstance(found, Exception):
            raise found
        return [torch.full((3,), found)]

    return replace(question(kernel=by_kernel), by_activated=partial(by_activated, ACTIVATED),
                   within_bound=within, **changes)


@pytest.mark.parametrize("us, way", [(4.0, Way(ACTIVATED)), (6.0, Way(ONE_KERNEL, "fast"))], ids=str)
def test_the_activation_in_the_product_is_a_way_like_others(clock, us, way):
    clock.update({ACTIVATED: us})
    choice = choose(activated_question())
    assert choice.plain == choice.captured == way and choice.times[ACTIVATED] == us
    clock.clear()
    assert choose(activated_question()) == choice


@pytest.mark.parametrize("changes, words", [
    ({"found": 1.1}, "other results than the library"),
    ({"within": lambda found: False}, "other results than the library"),
    ({"found": RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")}, "CUBLAS_STATUS_NOT_SUPPORTED"),
], ids=["other results", "beyond the bound", "it raises"])
@pytest.mark.parametrize("unsupported", [None, "no kernel for fp32"])
def test_an_activation_in_the_product_that_is_wrong_or_fails(clock, unsupported, changes, words):
    clock.update({ACTIVATED: 1.0})
    choice = choose(activated_question(unsupported=unsupported, **changes))
    assert choice.plain == choice.captured == (Way(LIBRARY) if unsupported else Way(ONE_KERNEL, "fast"))
    assert f"{ACTIVATED}: " in choice.reason and words in choice.reason


def test_a_lost_device_is_told(clock):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        choose(activated_question(found=RuntimeError("CUDA error: an illegal memory access was encountered")))


@pytest.mark.parametrize("scale", [1.0, 1e3], ids=["short", "long"])
@pytest.mark.parametrize("us, way", [(8.0, ACTIVATED), (9.9, LIBRARY), (12.0, LIBRARY)], ids=str)
@pytest.mark.parametrize("unsupported", [None, "no kernel for fp32"])
def test_two_ways_of_the_library(clock, unsupported, us, way, scale):
    """For many rows, and where no kernel serves: two ways by turns. Long calls hide what the host does."""
    clock.update({LIBRARY: 10.0 * scale, ACTIVATED: us * scale})
    choice = choose(activated_question(unsupported=unsupported, configs=tuple))
    assert choice.plain == choice.captured == Way(way)
    assert choice.times == pytest.approx({LIBRARY: 10.0 * scale, ACTIVATED: us * scale})
    assert bool(choice.host_times) is (scale == 1.0)
    assert (unsupported or "(library") in str(choice)
    clock.clear()
    assert choose(activated_question(unsupported=unsupported, configs=tuple)) == choice


def test_a_launch_less_counts_in_plain_calls(clock):
    clock.update({ACTIVATED: 9.9})
    clock.host = {LIBRARY: 20.0, ACTIVATED: 12.0}
    choice = choose(activated_question(configs=tuple))
    assert (choice.plain, choice.captured) == (Way(ACTIVATED), Way(LIBRARY))


def test_what_is_measured_without_a_kernel_is_no_answer_with_one(clock):
    clock.update({ACTIVATED: 8.0})
    assert choose(activated_question(unsupported="the self-check failed")).plain == Way(ACTIVATED)
    assert stored() is None
    assert choose(activated_question()).plain == Way(ONE_KERNEL, "fast")
    again = choose(activated_question(unsupported="fp32"))
    assert again.plain == Way(ACTIVATED) and again.reason == "fp32"  # not what was in the way before


def test_a_kept_way_that_there_is_no_more(clock):
    clock.update({ACTIVATED: 1.0})
    assert choose(activated_question()).plain == Way(ACTIVATED)
    assert choose(question(kernel=by_kernel)).plain == Way(ONE_KERNEL, "fast")


def test_timing_by_turns_that_fails(clock, monkeypatch):
    def by_turns(calls, device, seconds):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(chain_contest, "by_turns", by_turns)
    choice = choose(activated_question(configs=tuple))
    assert choice.plain == Way(LIBRARY) and "launch failed" in choice.reason and stored() is None


# One answer after the other


def test_noise_is_no_reason(clock):
    clock.update(fast=9.95)
    assert choose(question(kernel=by_kernel)).way == LIBRARY  # 9.9 is within the margin


def test_a_choice_is_kept_and_read_again(clock):
    choose(question(kernel=by_kernel))
    clock.clear()  # nothing can be measured any more
    again = choose(question(kernel=by_kernel))
    assert (again.way, again.config, again.times["fast"]) == (ONE_KERNEL, "fast", 5.0)
    with pytest.raises(KeyError):
        choose(question(rows=8, kernel=by_kernel))  # another bucket is measured


BY_LIBRARY, BY_FAST = {"way": LIBRARY, "config": "None"}, {"way": ONE_KERNEL, "config": "fast"}


def entry(**changes):
    return {"plain": BY_LIBRARY, "in graph": BY_FAST, "times": {}, "host times": {}, "reason": "", **changes}


def test_an_entry_as_it_is_written(clock):
    """What the strange ones below differ from."""
    chain_choice._store.put(chain_choice._key("text", CPU, 4), entry())
    choice = choose(question(kernel=by_kernel))
    assert (choice.plain, choice.captured) == (Way(LIBRARY), Way(ONE_KERNEL, "fast")) and not choice.times


@pytest.mark.parametrize("entry", [
    {}, {"way": LIBRARY, "config": "None", "times": {}, "reason": ""},  # of a version with one way for all
    entry(plain={"way": "sudo", "config": "fast"}), entry(**{"in graph": {"way": [LIBRARY]}}),
    entry(plain={"way": ONE_KERNEL, "config": "__import__('os')"}), entry(plain="library"),
    entry(**{"in graph": {"way": ONE_KERNEL, "config": ["fast"]}}), entry(plain={"way": ONE_KERNEL}),
    entry(plain={"way": ACTIVATED, "config": "None"}),  # of which there is none here
    entry(times={"fast": "1"}), entry(times=[]), entry(**{"host times": None}), entry(reason=3),
], ids=str)
def test_a_strange_entry_is_measured_again(clock, entry):
    chain_choice._store.put(chain_choice._key("text", CPU, 4), entry)
    choice = choose(question(kernel=by_kernel))
    assert choice.plain == choice.captured == Way(ONE_KERNEL, "fast") and choice.times


def test_where_nothing_can_be_measured_the_library_runs_and_is_asked_again(clock, monkeypatch):
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: False)
    choice = choose(question(kernel=by_kernel))
    assert choice.way == LIBRARY and not choice.final
    assert not choose(activated_question(unsupported="no kernel")).final
    assert stored() is None
    assert choose(question(unsupported="no kernel")).reason == "no kernel"


def test_a_kernel_without_memory_is_passed_over(clock):
    def kernel(config):
        if config == "fast":
            raise torch.OutOfMemoryError("no memory")
        return by_kernel(config)

    clock.update(slow=3.0)
    choice = choose(question(kernel=kernel))
    assert choice.config == "slow" and "fast: no memory" in choice.reason


class CompilationError(Exception):
    """Triton's has this name; it needs no Triton to be told from others."""


FAILURES = [CompilationError("at 3:4: no such thing\nmore"), RuntimeError("PTXAS error: too many registers"),
            TypeError("launcher() takes 3 arguments"), CompileTimeout("compiling took longer than 600 s"),
            AssertionError(), Unsupported("out of resource: shared memory")]


def failing(error, *which):
    def kernel(config):
        if config in which:
            raise error
        return by_kernel(config)

    return kernel


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_kernel_that_fails_is_dropped_and_the_report_says_why(clock, error):
    clock.update(slow=3.0)
    choice = choose(question(kernel=failing(error, "fast")))
    word = str(error).split("\n")[0] or type(error).__name__
    assert (choice.way, choice.config) == (ONE_KERNEL, "slow")
    assert "fast: " in choice.reason and word in choice.reason and word in str(choice)
    assert "\n" not in choice.reason
    # Another process asks again, but where the device has not enough memory on chip for good.
    known = stored()
    assert (known is not None) is isinstance(error, Unsupported)


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_the_library_runs_where_every_kernel_fails(clock, error):
    choice = choose(question(kernel=failing(error, "slow", "fast", "wrong")))
    assert choice.way == LIBRARY and choice.config is None and choice.times == {LIBRARY: 10.0}
    assert choice.final  # not measured at every call


def test_one_compiler_that_hangs_is_waited_for(clock):
    tried = []

    def kernel(config):
        tried.append(config)
        raise CompileTimeout("compiling took longer than 600 s")

    assert "no other kernel was tried" in choose(question(kernel=kernel)).reason
    assert tried == ["slow"]


def test_kernels_begin_to_compile_together(clock):
    """Before the first is waited for; one that cannot be begun fails where it is tried."""
    told = []

    def begin(config):
        told.append(config)
        raise CompilationError("no")

    choice = choose(replace(question(kernel=lambda config: told.append("called") or by_kernel(config)),
                            begin=begin))
    assert told[:4] == ["slow", "fast", "wrong", "called"] and choice.config == "fast"


@pytest.mark.parametrize("word, lasting", [("compiling", False), ("measuring", True)])
def test_one_segment_does_not_take_all_the_time(word, lasting, clock, monkeypatch):
    """What is left is not tried, and the report says so. Where a compiler was slow, another process measures
    again, and finds the kernels compiled."""
    monkeypatch.setattr(chain_contest, f"{'COMPILE' if word == 'compiling' else 'MEASURE'}_SECONDS", 1e-9)
    choice = choose(question(kernel=by_kernel))
    assert list(choice.times) == [LIBRARY, "slow"]
    assert f"2 more not tried: {word} the others took too long" in str(choice)
    assert choice.lasting == lasting
    kept = stored()
    assert (kept is not None) == lasting


def test_a_kernel_that_fails_when_the_host_is_timed(clock, monkeypatch):
    def host(call, device):
        if hasattr(call, "args"):
            raise RuntimeError("launch failed")
        return 1.0

    monkeypatch.setattr(chain_contest, "host_microseconds", host)
    choice = choose(question(kernel=by_kernel))
    assert choice.way == LIBRARY and "fast: RuntimeError: launch failed" in choice.reason


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1),
                                   RuntimeError("CUDA error: an illegal memory access was encountered")],
                         ids=repr)
def test_what_ends_a_program_is_not_swallowed(clock, error):
    with pytest.raises(type(error)):
        choose(question(kernel=failing(error, "fast")))


def test_what_the_library_raises_is_raised(clock):
    def by_library():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        choose(replace(question(kernel=by_kernel), by_library=by_library))


@pytest.mark.parametrize("where", ["library", "timing"])
def test_out_of_memory_while_measuring(clock, monkeypatch, where):
    """The call in hand is the library's, nothing that was measured stays, and nothing is written."""
    held, released = [], []

    def by_library():
        results = [torch.ones(3)]
        held.append(weakref.ref(results[0]))
        if where == "library":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return results

    def no_memory(call, cold):
        kept = call()  # noqa: F841 - in the frames of the exception
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(chain_contest, "device_microseconds", no_memory)
    monkeypatch.setattr(chain_choice, "_release", lambda device: released.append([x() for x in held]))
    choice = choose(replace(question(kernel=by_kernel), by_library=by_library))
    assert choice.way == LIBRARY and "out of memory" in choice.reason and choice.final
    assert released == [[None] * len(held)] and held
    assert stored() is None


@pytest.mark.parametrize("ours, same", [
    ([1.0, 2.0, 3.0], True), ([1.0, 2.0, 3.02], True), ([1.1, 2.2, 3.3], False),
    ([1.0, 2.0, float("nan")], False), ([1.0, 2.0], False)])
def test_agree(ours, same):
    wanted = [torch.tensor([1.0, 2.0, 3.0]).bfloat16()]
    assert agree([torch.tensor(ours).bfloat16()], wanted) is same
    nan = [torch.tensor([1.0, float("nan")])]
    assert agree(nan, nan)


def test_agree_of_pieces(monkeypatch):
    """Large tensors are compared a piece at a time, by the norm of the whole."""
    wanted = torch.linspace(1, 2, 100).view(10, 10).bfloat16()
    off = wanted.clone()
    off[0, 0] += 0.05
    far = wanted.clone()
    far[9, 9] += 1.0
    for piece in (7, 1000):
        monkeypatch.setattr(chain_contest, "PIECE", piece)
        assert agree([off], [wanted]) and not agree([far], [wanted])
        assert not agree([wanted.masked_fill(wanted == 2, float("inf"))], [wanted])
    assert agree([wanted[:0]], [wanted[:0]])
