"""The one kernel of a chain's segment that is wrong, does not compile, does not start or hangs: PyTorch's
results in that very call, and the library's products from then on."""

import ast
import json
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checks import assert_within_bound
from fused_linear_cases import NAMES, assert_right, case
from threads import GRAIN, InThreads
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.kernels import chain_ops, fused_linear_check, fused_linear_plan, settings
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice, choose
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile
from ascend_ln_fuse.kernels.fused_linear_plan import Plan
from ascend_ln_fuse.kernels.fused_linear_structure import grouped, parse
from ascend_ln_fuse.kernels.guard import SelfCheckError

TILE = GemmTile(16, 32, 32)
GENERATES = fused_linear_plan  # see conftest.mutate
C = 32

#: What a generated kernel says, as a regular expression, and what makes it wrong.
WRONG = r"(ACC_\d = tl\.full\(.*), 0\.0,", r"\1, 0.5,"
WRONG_NORMS = {"statistics": (r"RSTD_\w+ = ", r"\g<0>1.1 * "),
               "bias": (r"(v0 = .*) \* w \+ b", r"\1 * w - b")}
BROKEN = {"does not compile": ("    ROW = ", "    ROW == = "),
          "cannot be launched": (r"tl\.program_id\(0\)", "tl.no_such_thing(0)")}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


def one_kernel(question):
    if question.unsupported is not None:
        return Choice(LIBRARY, reason=question.unsupported)
    return Choice(ONE_KERNEL, TILE)


@pytest.fixture
def chains(monkeypatch):
    """Every segment of a model's chains as one kernel."""
    chain_ops.chain_runner.cache_clear()
    original = ChainRunner.__init__
    monkeypatch.setattr(ChainRunner, "__init__", lambda self, chain, self_check="first_call", decide=None:
                        original(self, chain, self_check, one_kernel))


def run_model(model, x, **options):
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", **options})
    with torch.no_grad():
        return [compiled(x) for _ in range(3)]


def assert_model_right(model, ours, x):
    with torch.no_grad():
        wide = Model().double()
        wide.load_state_dict(model.state_dict())
        assert_within_bound(ours, model(x), wide(x.double()))


def model_case():
    return Model().bfloat16(), torch.randn(2, 3, C).bfloat16()


def chain_runner():
    return last_reports()[-1].sites[0].chain_runner


def bound_kernels():
    """Those that later calls run without asking."""
    return [kernel for bound in chain_runner()._bound.values() for kernel in bound.kernels]


WRONG_NUMBERS = pytest.mark.fault(
    "a chain's kernel that returns wrong numbers",
    "PyTorch's results from that very call on, one warning, a file that reproduces it")


@WRONG_NUMBERS
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_kernel_is_replaced(name, mutate, warned):
    mutate(*WRONG)
    one = case(name, 80, 72)
    run = FusedLinear(one.segment)
    for outer in ((2, 5), (2, 5), (1, 1)):
        arguments = one.arguments(outer)
        assert_right(one.segment, arguments, run(*arguments, config=TILE))
    text, = warned()
    assert "is wrong on cpu" in text and one.segment.text in text and "PyTorch runs instead" in text
    assert run.record.checks == 1 and run.record.fallback().startswith("the self-check failed: ")
    assert "self-check failed" in run.supports(*(arguments[i] for i in (0, 2, 3, 4)))


@WRONG_NUMBERS
def test_a_wrong_kernel_in_a_model(mutate, chains, warned):
    mutate(*WRONG)
    model, x = model_case()
    for ours in run_model(model, x):
        assert_model_right(model, ours, x)
    site, = last_reports()[-1].sites
    texts = warned()
    assert len(texts) == 2 and all(f"the kernel of {site.where} with linear" in text for text in texts)
    assert "in one kernel with linear -> gelu: the self-check failed" in site.fallback_words()
    assert "error" in site.self_check_words()
    saved = json.loads(last_reports()[-1].to_json())["sites"][0]
    assert saved["fallback"] == site.fallback_words()
    ways = site.chain_ways()
    assert len(ways) == 2 and all("library (the self-check failed" in way for way in ways)
    assert not bound_kernels()


@WRONG_NUMBERS
@pytest.mark.parametrize("change", sorted(WRONG_NORMS))
def test_a_wrong_norm_inside(change, mutate, warned):
    mutate(*WRONG_NORMS[change])
    one = case("gelu", 80, 72)
    arguments = one.arguments((2, 5))
    assert_right(one.segment, arguments, FusedLinear(one.segment)(*arguments, config=TILE))
    text, = warned()
    assert "is wrong on cpu" in text


def test_off_does_not_check(mutate, chains, warned):
    """The control: without the check, these kernels do go wrong."""
    mutate(*WRONG)
    model, x = model_case()
    ours = run_model(model, x, self_check="off")
    with torch.no_grad():
        assert not torch.allclose(ours[0], model(x), rtol=0.05, atol=0.05)
    assert not warned()


def test_right_kernels_are_checked_once_and_bound(chains, warned, monkeypatch):
    """The second call finds the plans themselves: no guard, no look-up."""
    model, x = model_case()
    run_model(model, x)
    runner, = [chain_runner()]
    plans = [plan for fused in runner._fused for plan in fused.run._plans.values()]
    assert [type(plan) for plan in plans] == [Plan, Plan] and not warned()
    assert [fused.run.record.checks for fused in runner._fused] == [1, 1] and bound_kernels() == plans
    assert not last_reports()[-1].sites[0].fallback_words()
    run_model(model, torch.randn(1, 5, C).bfloat16())
    runner = chain_runner()
    assert all(fused.run.record.checks for fused in runner._fused)


def test_always_checks_every_call(chains, monkeypatch, warned):
    model, x = model_case()
    run_model(model, x, self_check="always")
    runner = chain_runner()
    assert [fused.run.record.checks for fused in runner._fused] == [3, 3] and not bound_kernels()
    original = Plan.__call__

    def spoilt(self, *args):
        outputs = original(self, *args)
        outputs[0][..., -1] += 1
        return outputs

    monkeypatch.setattr(Plan, "__call__", spoilt)
    for ours in run_model(model, x, self_check="always"):
        assert_model_right(model, ours, x)
    assert len(warned()) == 2


def test_what_is_bound_goes_with_the_kernel(chains, monkeypatch, warned):
    """A kernel that is rejected for other shapes: calls that were bound do not run it either."""
    model, x = model_case()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=True)
    others = torch.randn(2, 7, C).bfloat16()
    with torch.no_grad():
        compiled(x)
        assert len(bound_kernels()) == 2
        original = Plan.__call__

        def spoilt(self, *args):
            return tuple(out.mul_(2) for out in original(self, *args))

        monkeypatch.setattr(Plan, "__call__", spoilt)
        assert_model_right(model, compiled(others), others)
        assert not bound_kernels()
        assert_model_right(model, compiled(x), x)


@pytest.mark.parametrize("way", ["option", "strict"])
def test_raise(way, mutate, chains, monkeypatch):
    mutate(*WRONG)
    if way == "strict":
        monkeypatch.setenv(settings.STRICT, "1")
    model, x = model_case()
    with pytest.raises(SelfCheckError, match="with linear -> gelu is wrong on cpu"):
        run_model(model, x, self_check="raise" if way == "option" else "first_call")


def test_a_measured_kernel_never_is_the_reference(mutate, warned):
    """What would take its place is not what is to be measured."""
    one = case("gelu", 80, 72)
    arguments = one.arguments((2, 5))
    tensors = [*arguments[0], *arguments[2], *arguments[3]]
    mutate(*BROKEN["does not compile"])
    with pytest.raises(SyntaxError):
        FusedLinear(one.segment).attempt(tensors, arguments[1], TILE)
    mutate(*WRONG)
    run = FusedLinear(one.segment)
    wanted = run(*arguments, config=TILE)
    text, = warned()
    assert "is wrong on cpu" in text
    with pytest.raises(Exception, match="self-check failed"):
        run.attempt(tensors, arguments[1], TILE)
    found, = FusedLinear(one.segment).attempt(tensors, arguments[1], TILE)
    assert not torch.allclose(found, wanted[0])


def test_a_kernel_that_fails_while_it_is_measured(mutate, monkeypatch, warned):
    """Dropped with its reason, nothing rejected, nobody warned."""
    from ascend_ln_fuse.kernels import chain_choice, chain_contest

    mutate(*BROKEN["cannot be launched"])
    for name in ("device_microseconds", "host_microseconds"):
        monkeypatch.setattr(chain_contest, name, lambda call, device: 1.0)
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)
    monkeypatch.setenv(settings.STRICT, "1")
    original = ChainRunner.__init__
    monkeypatch.setattr(ChainRunner, "__init__", lambda self, chain, self_check="first_call", decide=None:
                        original(self, chain, self_check, choose))
    chain_ops.chain_runner.cache_clear()
    model, x = model_case()
    for ours in run_model(model, x):
        assert_model_right(model, ours, x)
    ways = chain_runner().ways()
    assert len(ways) == 2 and all("library (" in way and "no_such_thing" in way for way in ways)
    assert not warned() and not any(fused.run.record.rejected for fused in chain_runner()._fused)


# -- the file that reproduces it


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("name", ["qkv", "residual"])
def test_the_file_reproduces_it(name, save, mutate, monkeypatch, warned, capsys):
    mutate(*WRONG)
    if save:
        monkeypatch.setenv(settings.SAVE_INPUTS, "1")
    one = case(name, 80, 72)
    FusedLinear(one.segment)(*one.arguments((2, 5)), config=TILE)
    path = Path(re.search(r"A file that reproduces it: (\S+\.py)", warned()[0])[1])
    assert [p.suffix for p in sorted(path.parent.iterdir())] == ([".pt", ".py"] if save else [".py"])
    ast.parse(path.read_text())
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:  # with the wrong kernel
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 1 and "OUTSIDE the bound: error" in capsys.readouterr().out
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "within the bound: error" in done.stdout, done.stdout + done.stderr
    assert ("random numbers" in done.stdout) is not save


# -- the check itself


def many(name="gelu", k=512, n=4096, rows=200):
    """A call of which a check takes a sample."""
    one = case(name, k, n)
    arguments = one.arguments((1, rows))
    tensors = [*arguments[0], *arguments[2], *[b for b in arguments[3] if b is not None], *arguments[4]]
    return one.segment, tensors, [*arguments[1], *arguments[5]]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_a_right_call_passes(name):
    segment, tensors, scalars = many(name)
    outputs = fused_linear_check.run_reference(segment, tensors, scalars)
    finding = fused_linear_check.compare(segment, TILE, tensors, scalars, outputs)
    assert finding.within and finding.of == 200
    sample = fused_linear_check._sample(segment, TILE, tensors, outputs)
    widths = [w.shape[0] for w in grouped(sample.segment, sample.tensors)[1]]
    assert max(widths) < 4096 and sum(x.numel() for x in sample.tensors) < sum(x.numel() for x in tensors) / 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_products_takes_threads(name):
    segment, tensors, scalars = many(name)
    outputs = fused_linear_check.run_reference(segment, tensors, scalars)
    sample = fused_linear_check._sample(segment, TILE, tensors, outputs)
    assert max(x.numel() for x in (*sample.tensors, *sample.outputs)) > GRAIN
    with InThreads() as threads:
        finding = fused_linear_check.compare(segment, TILE, tensors, scalars, outputs)
    assert finding.within and threads.seen > 20
    assert not [op for op in threads.found if op.split()[0] not in ("mm", "addmm")]


@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (16, 5), (0, 31), (0, 32)], ids=str)
def test_a_sample_sees_the_edges_of_tiles(place):
    segment, tensors, scalars = many()
    output, = fused_linear_check.run_reference(segment, tensors, scalars)
    row, column = place
    output[0, row, column if column != 5 else slice(None)] += 1
    assert not fused_linear_check.compare(segment, TILE, tensors, scalars, [output]).within


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 1, 3, 40)])
def test_a_check_of_any_number_of_outer_dims(shape):
    from ascend_ln_fuse.kernels.fused_linear import Projection, Segment

    segment = Segment(None, (Projection(),))
    tensors = [torch.randn(shape).bfloat16(), torch.randn(24, 40).bfloat16()]
    output, = fused_linear_check.run_reference(segment, tensors, [])
    assert fused_linear_check.compare(segment, TILE, tensors, [], [output]).within
    output[..., -1] += 8
    assert not fused_linear_check.compare(segment, TILE, tensors, [], [output]).within


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_segment_says_all(name):
    segment = case(name, 80, 72).segment
    assert parse(segment.text) == segment


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr)
def test_out_of_memory_in_the_check(error, monkeypatch, warned):
    def compare(*args):
        raise error

    monkeypatch.setattr(fused_linear_check, "compare", compare)
    monkeypatch.setenv(settings.STRICT, "1")  # no failure: nothing to raise
    one = case("gelu", 80, 72)
    run, arguments = FusedLinear(one.segment), one.arguments((2, 5))
    assert_right(one.segment, arguments, run(*arguments, config=TILE))
    assert run.record.self_check() == "not checked: out of memory" and not warned()
    assert [type(plan) for plan in run._plans.values()] == [Plan]


def test_a_capture_postpones_the_check(chains, monkeypatch):
    model, x = model_case()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(Plan, "capturing", lambda self: True)
            compiled(x)
            assert [fused.run.record.checks for fused in chain_runner()._fused] == [0, 0]
            assert not bound_kernels()
        compiled(x)
    assert [fused.run.record.checks for fused in chain_runner()._fused] == [1, 1]
    assert len(bound_kernels()) == 2


# -- kernels that do not run


@pytest.mark.fault("a chain's kernel that does not compile, or does not start",
                   "PyTorch's results, one warning")
@pytest.mark.parametrize("how", sorted(BROKEN))
@pytest.mark.parametrize("mode", ["first_call", "off"])
def test_a_kernel_that_does_not_run(how, mode, mutate, chains, warned, monkeypatch):
    mutate(*BROKEN[how])
    model, x = model_case()
    for ours in run_model(model, x, self_check=mode):
        assert_model_right(model, ours, x)
    site, = last_reports()[-1].sites
    assert len(warned()) == 2 and all(how in text for text in warned())  # one for each of two segments
    assert f"in one kernel with linear -> gelu: the kernel {how}: " in site.fallback_words()
    assert all(f"library (the kernel {how}: " in way for way in site.chain_ways())
    monkeypatch.setenv(settings.STRICT, "1")
    chain_ops.chain_runner.cache_clear()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no_such_thing|syntax"):
        run_model(model, x, self_check=mode)


def test_a_lost_device_is_an_error(monkeypatch):
    def lost(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = case("gelu", 80, 72)
    monkeypatch.setattr(Plan, "__call__", lost)
    run = FusedLinear(one.segment)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(*one.arguments((2, 5)), config=TILE)
    assert not run.record.fallback()


# -- compilers that hang


@pytest.mark.fault("a compiler that hangs on a chain's kernel",
                   "PyTorch's results once ASCEND_LN_FUSE_COMPILE_SECONDS are over, one warning; a kernel "
                   "that comes late is used from then on")
def test_a_compiler_that_hangs(chains, warned, monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, "0.2")
    go, original = threading.Event(), fused_linear_plan.generate

    def slowly(*args):
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr(fused_linear_plan, "generate", slowly)
    model, x = model_case()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    try:
        with torch.no_grad():
            for _ in range(3):
                assert_model_right(model, compiled(x), x)
            assert len(warned()) == 2 and all("compiling took longer than 0.2 s" in text for text in warned())
            assert "compiling took longer" in last_reports()[-1].sites[0].fallback_words()
            assert not bound_kernels()
            go.set()
            for thread in threading.enumerate():
                if thread.name.startswith("ascend_ln_fuse"):
                    thread.join(60)
            for _ in range(2):
                assert_model_right(model, compiled(x), x)
    finally:
        go.set()
    assert [fused.run.record.checks for fused in chain_runner()._fused] == [1, 1]
    assert not last_reports()[-1].sites[0].fallback_words() and len(bound_kernels()) == 2
