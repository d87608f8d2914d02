"""Compiling ahead of the call that needs the kernel: jobs, what a Runner and a chain expect, launchers."""

import os
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chain_cases import ffn, ffn_inputs, packed, packed_inputs
from norm_cases import assert_right, inputs_for, region, scalars_for
from test_chain_backward import CHAINS, tensors

from ascend_ln_fuse.kernels import (
    chain_choice,
    chain_contest,
    compiling,
    fused_linear,
    fused_linear_plan,
    launch,
    launchers,
    settings,
)
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.compiling import CompileTimeout, ahead, settle, within_limit
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.likeness import Likeness
from ascend_ln_fuse.kernels.ops import runner
from ascend_ln_fuse.kernels.recent import layouts
from ascend_ln_fuse.kernels.targets import cuda

WAIT = 60


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    """No job of another test; threads work ahead at once, as where parsers do not disturb each other."""
    settle(WAIT)
    monkeypatch.setattr(compiling, "PARSERS_APART", True)
    monkeypatch.setattr(compiling, "_jobs", {})
    yield compiling._jobs
    settle(WAIT)


def like(x: torch.Tensor) -> Likeness:
    return Likeness(tuple(x.shape), x.stride(), x.dtype, x.device, x.data_ptr() & 15)


def never():
    raise AssertionError("done twice")


# Jobs


def test_work_ahead_is_done_once(jobs):
    ahead("a", lambda: threading.current_thread())
    ahead("a", never)
    settle(WAIT)
    assert within_limit("a", never) is not threading.current_thread()
    assert not jobs and within_limit("a", lambda: 2) == 2


def test_an_error_is_told_to_who_asks_and_to_nobody_else(jobs):
    def fail():
        raise KeyError("a compiler's")

    ahead("a", fail)
    ahead("b", fail)
    settle(WAIT)
    with pytest.raises(KeyError, match="a compiler's"):
        within_limit("a", never)
    assert list(jobs) == ["b"] and within_limit("a", lambda: 1) == 1


@pytest.mark.parametrize("limit", ["0", "600"])
def test_what_waits_behind_others_is_not_waited_for(limit, monkeypatch):
    """A caller runs it itself, in a thread with a limit and in its own without."""
    monkeypatch.setenv(settings.COMPILE_SECONDS, limit)
    monkeypatch.setattr(compiling, "MOST_WORKERS", 1)
    begun, go, count = threading.Event(), threading.Event(), []
    ahead("slow", lambda: (begun.set(), go.wait(WAIT)))
    assert begun.wait(WAIT)
    ahead("next", lambda: count.append(1))
    within_limit("next", never)
    assert count == [1]
    go.set()
    settle(WAIT)
    assert count == [1]


def test_the_time_that_work_ahead_has_had_counts(monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, "0.2")
    begun, go = threading.Event(), threading.Event()
    ahead("hangs", lambda: begun.set() or go.wait(WAIT) and 7)
    assert begun.wait(WAIT)
    for _ in range(2):
        with pytest.raises(CompileTimeout, match=r"longer than 0.2 s"):
            within_limit("hangs", never)
    go.set()
    settle(WAIT)
    assert within_limit("hangs", never) == 7


def test_several_at_once(monkeypatch):
    monkeypatch.setattr(compiling, "_processors", lambda: 3)
    together = threading.Barrier(3)
    for number in range(3):
        ahead(number, lambda: together.wait(WAIT))
    settle(WAIT)
    assert sorted(within_limit(number, never) for number in range(3)) == [0, 1, 2]


def test_where_parsers_disturb_each_other_no_thread_works_before_a_call_waits(monkeypatch):
    """Dynamo parses guards between the pass and the first call."""
    monkeypatch.setattr(compiling, "PARSERS_APART", False)
    done = threading.Event()
    ahead("a", done.set)
    assert not compiling._workers and not done.is_set()
    within_limit("b", lambda: None)
    assert done.wait(WAIT)


def test_results_that_nobody_asks_for_do_not_pile_up(jobs, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_UNASKED", 4)
    for number in range(20):
        ahead(number, lambda: None)
        settle(WAIT)
    assert len(jobs) <= 4 and 19 in jobs


def test_settling_has_an_end():
    go = threading.Event()
    ahead("a", lambda: go.wait(WAIT))
    settle(0.05)
    assert compiling._workers
    go.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_begins_anew(jobs):
    go = threading.Event()
    ahead("a", lambda: go.wait(WAIT))
    child = os.fork()
    if not child:
        os._exit(0 if not jobs and not compiling._workers and within_limit("a", lambda: 3) == 3 else 1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# What a Runner expects


@pytest.fixture
def compiled(monkeypatch):
    """The tiles that were compiled, and in which kind of thread."""
    pytest.importorskip("triton")
    monkeypatch.setenv(settings.INTERPRET, "1")
    found = []
    original = launch._Interpreted.compile

    def compile(self, stand_ins, scalars):
        assert not any(isinstance(x, torch.Tensor) for x in stand_ins)
        found.append(threading.current_thread().name)
        return original(self, stand_ins, scalars)

    monkeypatch.setattr(launch._Interpreted, "compile", compile)
    return found


AHEAD = "ascend_ln_fuse compiling ahead"


def case(width=24):
    r = region("layer_norm", width, "bf16")
    return r, inputs_for(r, (2, 5)), scalars_for(r)


def test_a_call_that_was_expected_compiles_nothing(compiled):
    r, inputs, scalars = case()
    run = Runner(r)
    run.expect([like(x) for x in inputs])
    settle(WAIT)
    assert compiled == [AHEAD] and not run._plans
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert compiled == [AHEAD] and run.record.checks == 1
    run.expect([like(x) for x in inputs])
    settle(WAIT)
    assert compiled == [AHEAD]


def test_so_does_a_call_that_writes_over_an_input(compiled):
    r, (x, w, b), scalars = case()
    run, x = Runner(r), x.contiguous()
    run.expect([like(t) for t in (x, w, b)], [like(x)])
    settle(WAIT)
    before = x.clone()
    run.into([x, w, b], scalars, [x])
    assert_right(r, [before, w, b], scalars, (x,))
    assert compiled == [AHEAD]


def test_a_call_that_was_not_expected_compiles_its_own(compiled):
    r, (x, w, b), scalars = case()
    run = Runner(r)
    run.expect([like(t) for t in (x, w, b)])
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert_right(r, [odd, w, b], scalars, run([odd, w, b], scalars))
    assert len(compiled) == 2


def test_nothing_is_compiled_where_plain_pytorch_runs(compiled, jobs, monkeypatch):
    r, inputs, _ = case()
    monkeypatch.delenv(settings.INTERPRET)
    Runner(r).expect([like(x) for x in inputs])
    assert not jobs
    monkeypatch.setenv(settings.INTERPRET, "1")
    rejected = Runner(r)
    rejected.reject(torch.device("cpu"), "it was wrong")
    rejected.expect([like(x) for x in inputs])
    assert not jobs


def test_what_no_kernel_serves_is_told_by_the_call_alone(compiled, jobs):
    r, (x, w, b), scalars = case()
    x = torch.empty(2, 5, 48, dtype=x.dtype)[..., ::2].copy_(x)
    run = Runner(r)
    run.expect([like(t) for t in (x, w, b)])
    assert not jobs and not run.reasons
    run([x, w, b], scalars)
    assert len(run.reasons) == 1 and "lane stride" in next(iter(run.reasons))


def test_a_compiler_that_fails_ahead_is_told_by_the_call_alone(compiled, monkeypatch):
    r, inputs, scalars = case()
    monkeypatch.delenv(settings.STRICT, raising=False)
    monkeypatch.setattr(launch, "_function", lambda source: 1 / 0)
    run = Runner(r)
    run.expect([like(x) for x in inputs])
    settle(WAIT)
    assert compiled == [AHEAD] and not run.record.fallback()
    with pytest.warns(RuntimeWarning, match="does not compile: ZeroDivisionError"):
        assert_right(r, inputs, scalars, run(inputs, scalars))
    assert "does not compile" in run.record.fallback() and len(compiled) == 1


# What a chain expects


@pytest.fixture
def asked(monkeypatch):
    """(keys of work ahead, keys of what calls waited for)"""
    pytest.importorskip("triton")
    monkeypatch.setenv(settings.INTERPRET, "1")
    begun, waited = [], []
    for module in (launch, fused_linear_plan):
        monkeypatch.setattr(module, "ahead", lambda key, work: begun.append(key))
        monkeypatch.setattr(module, "within_limit", lambda key, work: (waited.append(key), work())[1])
    runner.cache_clear()
    yield begun, waited
    runner.cache_clear()


def other_products(name):
    chain, how = CHAINS[name]
    return pytest.param(lambda: chain, lambda: tensors(chain, **how), id=name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make, inputs", [
    pytest.param(lambda: ffn("bf16"), lambda: ffn_inputs(torch.bfloat16), id="ffn"),
    pytest.param(packed, packed_inputs, id="packed"), other_products("patches"),
    *(other_products(name) for name in CHAINS if name.startswith("score"))])
def test_a_chain_expects_the_kernels_of_its_regions(make, inputs, keep, asked):
    begun, waited = asked
    chain, inputs = make(), inputs()
    keep = chain.kept if keep else ()
    run = ChainRunner(chain, "off", lambda question: Choice(LIBRARY))
    run.expect([like(x) for x in inputs], keep)
    assert not waited
    run.values(inputs, (1e-5,), keep)
    assert waited and set(waited) == set(begun)


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """As if times could be taken here; and a store of this test's own."""
    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chain_choice, "_store", chain_choice.Store("chains"))
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)
    monkeypatch.setattr(chain_contest, "host_microseconds", lambda call, device: 1.0)
    monkeypatch.setattr(chain_contest, "device_microseconds",
                        lambda call, cold: 2.0 if hasattr(call, "args") else 9.0)


@pytest.mark.parametrize("make, inputs", [(lambda: ffn("bf16"), lambda: ffn_inputs(torch.bfloat16)),
                                          (packed, packed_inputs)], ids=["ffn", "packed"])
def test_a_chain_expects_the_kernels_that_it_measures(make, inputs, asked, measuring):
    begun, waited = asked
    chain, inputs = make(), inputs()
    run = ChainRunner(chain, "off")
    run.expect([like(x) for x in inputs])
    expected = set(begun)
    run(inputs, (1e-5,))
    assert {choice.way for choice in run.choices.values()} == {ONE_KERNEL}
    assert set(waited) == expected and set(begun) == expected

    begun.clear()
    again = ChainRunner(chain, "off")  # another process: what was chosen is all that it needs of them
    again.expect([like(x) for x in inputs])
    few = set(begun)
    waited.clear()
    again(inputs, (1e-5,))
    assert set(waited) <= few < expected


def test_what_is_tried_in_one_launch_is_expected_too(asked, measuring, monkeypatch):
    """A kernel that may be measured last begins with the others."""
    narrow = fused_linear.GemmTile(16, 16, 32)
    monkeypatch.setattr(fused_linear, "unsplit", lambda *sizes: (narrow,))
    run = ChainRunner(ffn("bf16"), "off")
    run.expect([like(x) for x in ffn_inputs(torch.bfloat16)])
    assert [key[2] for key in asked[0] if len(key) == 6].count(narrow) == len(run.segments)


def test_a_likeness_answers_as_its_tensor():
    x = torch.zeros(3, 4, 10, dtype=torch.bfloat16)
    for t in (x, x.transpose(0, 1), x.narrow(-1, 3, 5), x[:, :1], x[:0], torch.zeros(2, 1).t()):
        other = like(t)
        assert layouts([t]) == layouts([other])
        assert (t.dim(), t.numel(), t.is_contiguous()) == (other.dim(), other.numel(), other.is_contiguous())
        assert [t.stride(i) for i in range(t.dim())] == [other.stride(i) for i in range(t.dim())]
        if t.numel() and t.shape[-1] > 2:
            assert layouts([t.narrow(-1, 1, 2)]) == layouts([other.narrow(-1, 1, 2)])
        if t.numel() and t.shape[-1] > 4:
            assert layouts([t.unfold(-1, 2, 3)]) == layouts([other.unfold(-1, 2, 3)])
        assert layouts([t.transpose(-1, 0)]) == layouts([other.transpose(-1, 0)])
    dense = torch.empty(2, 5, 3).transpose(0, 1).contiguous().transpose(0, 1)
    assert Likeness.dense((2, 5, 3), torch.float32, dense.device, (1, 0, 2)).stride() == dense.stride()


# Launchers


PARAMS = (("x", "*bf16"), ("n", "i32"), ("eps", "fp32"))


@pytest.fixture
def driver(monkeypatch):
    """Triton's driver, whose `launcher_cls` a test sets."""
    active = SimpleNamespace(launcher_cls=None)
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setattr(launchers, "_builds", {})
    return active


def test_the_launcher_is_built_beside_the_kernel_and_once(driver):
    begun, go, signatures = threading.Event(), threading.Event(), []

    def make(source, metadata):
        signatures.append(list(source.signature.values()))
        assert metadata.launch_pdl == 0 and not hasattr(source, "constants")
        begun.set()
        assert go.wait(WAIT)
        signatures.append("done")

    driver.launcher_cls = make
    first = launchers.begin(PARAMS)
    with launchers.building((("y", "*fp32"), *PARAMS[1:])):
        assert begun.wait(WAIT)  # while the kernel is compiled
        go.set()
    assert signatures == [["*bf16", "i32", "fp32"], "done"] and not first.is_alive()


def test_another_cache_of_tritons_gets_a_launcher_of_its_own(driver, monkeypatch, tmp_path):
    signatures = []
    driver.launcher_cls = lambda source, metadata: signatures.append(source.signature)
    for folder in ("a", "b"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        launchers.begin(PARAMS).join()
    assert len(signatures) == 2


def test_a_launcher_that_cannot_be_built_is_no_error(driver, monkeypatch):
    def make(source, metadata):
        raise OSError("no compiler")

    driver.launcher_cls = make
    with launchers.building(PARAMS):
        pass
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    with pytest.raises(KeyError), launchers.building(PARAMS[1:]):
        raise KeyError("the kernel's")


def test_a_gpu_begins_the_launcher_at_once(driver, monkeypatch):
    """It parses nothing: it need not wait until a call waits."""
    monkeypatch.setattr(compiling, "PARSERS_APART", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    built = []
    driver.launcher_cls = lambda source, metadata: built.append(tuple(source.signature.values()))
    r, inputs, _ = case()
    gpu = [replace(like(x), device=torch.device("cuda", 0)) for x in inputs]
    Runner(r, cuda.describe("sm_90", 132)).expect(gpu)
    (thread,) = launchers._builds.values()
    thread.join()
    assert len(built) == 1 and built[0][:4] == ("*bf16",) * 4 and not compiling._workers
    compiling._waiting.clear()
