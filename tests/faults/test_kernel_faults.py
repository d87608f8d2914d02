"""A kernel that is wrong, does not compile, does not start or hangs: the model stays right."""

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
from norm_cases import assert_right, inputs_for, region, scalars_for
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import inplace_layer_norm_, last_reports
from ascend_ln_fuse.kernels import guard, launch, reproduction, settings
from ascend_ln_fuse.kernels.guard import SelfCheckError
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.ops import runner

#: What a generated norm says, as a regular expression, and what makes it wrong.
WRONG = r"RSTD_\w+ = ", r"\g<0>1.1 * "

AFFINE = r"(v0 = .*) \* w \+ b\n"
MUTATIONS = {
    "a factor": WRONG,
    "no eps": (r" \+ eps\)", ")"),
    "a mean that is off": (r"MEAN_\w+ = ", r"\g<0>1.04 * "),
    "no mean": ("x - MEAN_v0", "x"),
    "variance about zero": (r"tl\.sum\(C_v0 \* C_v0,", "tl.sum(x * x,"),
    "padded lanes in the variance": (r"tl\.where\(COL_IN, x - MEAN_v0, 0\.0\)", "x - MEAN_v0"),
    "the last row": (AFFINE, r"\1 * tl.where(ROW_0 + ROW == N_1 - 1, 2.0, 1.0) * w + b\n"),
    "the last row of a tile": (AFFINE, r"\1 * tl.where(ROW == 15, 2.0, 1.0) * w + b\n"),
    "one lane": (AFFINE, r"\1 * w + tl.where(COL == 23, 2 * b, b)\n"),
    "NaN": (AFFINE, r"\1 * w + tl.where(COL == 0, float('nan'), b)\n"),
    "infinity": (AFFINE, r"\1 * w + tl.where(COL == 0, float('inf'), b)\n"),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.norm(x) * 2


def compiled(model, **options):
    return torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", **options})


def assert_model_right(model, ours, x):
    with torch.no_grad():
        exact = F.layer_norm(x.double(), (24,), model.norm.weight.double(), model.norm.bias.double()) * 2
        assert_within_bound(ours, model(x), exact)


def layer_norm_case(dtype="bf16", outer=(2, 40)):
    r = region("layer_norm", 24, dtype)
    return r, inputs_for(r, outer), scalars_for(r)


WRONG_NUMBERS = pytest.mark.fault(
    "a kernel that returns wrong numbers",
    "PyTorch's results from that very call on, one warning, a file that reproduces it")


#: fp32 kernels centre twice, and so forgive a wrong mean; bf16 rounds away what eps does.
HARMLESS = {("f32", "a mean that is off"), ("f32", "no mean"), ("bf16", "no eps")}


@WRONG_NUMBERS
@pytest.mark.parametrize("dtype, mutation", [(dtype, name) for dtype in ("bf16", "f32")
                                             for name in sorted(MUTATIONS) if (dtype, name) not in HARMLESS])
def test_a_wrong_kernel_is_replaced(dtype, mutation, mutate, warned):
    mutate(*MUTATIONS[mutation])
    r, inputs, scalars = layer_norm_case(dtype)
    run = Runner(r)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    (text,) = warned()
    assert "is wrong on cpu" in text and r.text in text and "PyTorch runs instead" in text
    # Other shapes and later calls: no kernel any more, and no second warning.
    for outer in ((2, 40), (3, 5)):
        more = inputs_for(r, outer, seed=1)
        assert_right(r, more, scalars, run(more, scalars))
    assert len(warned()) == 1
    assert run.record.fallback().startswith("the self-check failed: ")
    assert not any(isinstance(plan, launch._Kernel) for plan in run._plans.values())


@WRONG_NUMBERS
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_kernel_in_a_model(inner, grad, mutate, warned):
    mutate(*WRONG)
    model, x = Model(), torch.randn(2, 40, 24)
    with torch.set_grad_enabled(grad):
        ours = compiled(model, inner=inner)(x)
    assert_model_right(model, ours.detach(), x)
    (text,), (site,) = warned(), last_reports()[-1].sites
    assert f"the kernel of {site.where} is wrong" in text and "test_kernel_faults.py" in site.where
    assert "the self-check failed" in site.fallback_words() and site.self_check_words()
    saved = json.loads(last_reports()[-1].to_json())["sites"][0]
    assert saved["fallback"] == site.fallback_words() and "error" in saved["self_check"]
    assert "runs as plain PyTorch: the self-check failed" in re.sub(r"\s+", " ", str(last_reports()[-1]))


@WRONG_NUMBERS
def test_a_wrong_kernel_in_place(mutate, warned):
    """What the kernel has written over is put back before PyTorch runs."""
    mutate(*WRONG)
    packed = torch.randn(7, 9, 24)
    want = packed.clone()
    want[:, :3] = F.layer_norm(packed[:, :3], (24,))
    inplace_layer_norm_(packed[:, :3])
    torch.testing.assert_close(packed, want)
    assert len(warned()) == 1


@pytest.mark.fault("a wrong kernel, with `self_check=\"raise\"` or ASCEND_LN_FUSE_STRICT=1",
                   "an exception that names the site; inputs are as they were")
@pytest.mark.parametrize("way", ["option", "strict"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_raise(way, inner, mutate, monkeypatch):
    mutate(*WRONG)
    if way == "strict":
        monkeypatch.setenv(settings.STRICT, "1")
    model = compiled(Model(), inner=inner, self_check="raise" if way == "option" else "first_call")
    for _ in range(2):  # a kernel that was not replaced is not trusted the second time either
        with torch.no_grad(), pytest.raises(SelfCheckError, match="norm.*is wrong on cpu"):
            model(torch.randn(2, 40, 24))


def test_raise_in_place_loses_nothing(mutate, monkeypatch):
    mutate(*WRONG)
    monkeypatch.setenv(settings.STRICT, "1")
    x = torch.randn(7, 24)
    before = x.clone()
    with pytest.raises(SelfCheckError):
        inplace_layer_norm_(x)
    assert torch.equal(x, before)


def test_off_does_not_check(mutate, warned):
    """The control of all of the above: without the check, these kernels do go wrong."""
    mutate(*WRONG)
    model, x = Model(), torch.randn(2, 40, 24)
    with torch.no_grad():
        assert not torch.allclose(compiled(model, self_check="off")(x), model(x))
    assert not warned() and not last_reports()[-1].sites[0].self_check_words()


def test_always_finds_what_comes_later(mutate, monkeypatch, warned):
    r, inputs, scalars = layer_norm_case()
    run, first_only = Runner(r, self_check="always"), Runner(r)
    for each in (run, first_only):
        assert_right(r, inputs, scalars, each(inputs, scalars))
    original = launch._Interpreted.__call__

    def spoilt(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        outputs[0][-1] += 1
        return outputs

    monkeypatch.setattr(launch._Interpreted, "__call__", spoilt)
    assert not torch.allclose(first_only(inputs, scalars)[0], run(inputs, scalars)[0])
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 2 and len(warned()) == 1


def test_a_right_kernel_is_left_to_run():
    """The plan that later calls look up is the kernel's own, as if nothing had been checked."""
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    run(inputs, scalars)
    assert [type(plan) for plan in run._plans.values()] == [launch._Interpreted]
    assert run.record.checks == 1 and "error" in run.record.self_check() and not run.record.fallback()


# -- the file that reproduces it


def reproduction_file(texts):
    (path,) = {re.search(r"A file that reproduces it: (\S+\.py)", text)[1] for text in texts}
    return Path(path)


@pytest.mark.parametrize("save", [False, True])
def test_the_file_reproduces_it(save, mutate, monkeypatch, warned, capsys, tmp_path):
    mutate(*WRONG)
    if save:
        monkeypatch.setenv(settings.SAVE_INPUTS, "1")
    r, inputs, scalars = layer_norm_case()
    Runner(r)(inputs, scalars)
    path = reproduction_file(warned())
    assert path.is_relative_to(tmp_path) and path.stat().st_mode & 0o077 == 0o044 & path.stat().st_mode
    assert [p.suffix for p in sorted(path.parent.iterdir())] == ([".pt", ".py"] if save else [".py"])
    ast.parse(path.read_text())
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:  # with the wrong kernel
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 1 and "OUTSIDE the bound: error" in capsys.readouterr().out
    # In a process of its own, where the kernel is right.
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "within the bound: error" in done.stdout, done.stderr
    assert ("random numbers" in done.stdout) is not save


def test_the_file_has_the_calls_layout(mutate, warned):
    mutate(*WRONG)
    r, _, scalars = layer_norm_case("bf16")
    x = torch.randn(4, 9, 25).bfloat16()[:, ::3, 1:]
    Runner(r)([x, torch.randn(24).bfloat16(), torch.randn(24).bfloat16()], scalars)
    scope = runpy.run_path(str(reproduction_file(warned())))
    shape, strides, offset, dtype, alignment = scope["INPUTS"][0]
    assert (shape, strides, offset, dtype) == ((4, 3, 24), (225, 75, 1), 1, "bfloat16")
    placed = reproduction._like(scope["INPUTS"][0], torch.Generator(), "cpu")
    assert placed.stride() == strides and placed.data_ptr() % 16 == alignment == x.data_ptr() % 16


@pytest.mark.fault("the file that reproduces a failed self-check cannot be written",
                   "the warning says so; everything else as before")
def test_no_place_for_the_file(mutate, monkeypatch, warned, tmp_path):
    mutate(*WRONG)
    (tmp_path / "plain file").write_text("")
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "plain file"))
    r, inputs, scalars = layer_norm_case()
    assert_right(r, inputs, scalars, Runner(r)(inputs, scalars))
    (text,) = warned()
    assert "A file that reproduces it: not written: " in text


# -- the check itself


@pytest.mark.fault("out of memory in the self-check",
                   "the kernel's results; the report says that nothing was checked")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_out_of_memory_in_the_check(error, monkeypatch, warned):
    monkeypatch.setenv(settings.STRICT, "1")  # no failure: nothing to raise

    def compare(*args):
        raise error

    monkeypatch.setattr(guard, "compare", compare)
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.self_check() == "not checked: out of memory" and not run.record.fallback()
    assert not warned() and [type(p) for p in run._plans.values()] == [launch._Interpreted]


def test_out_of_memory_for_the_copy_in_place(monkeypatch):
    x = torch.randn(7, 24)
    want = F.layer_norm(x, (24,))

    def clone(self, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", clone)
        inplace_layer_norm_(x)
    torch.testing.assert_close(x, want)


def test_an_error_in_the_check_is_no_error_of_the_model(monkeypatch):
    def compare(*args):
        raise RuntimeError("index of bf16 is not implemented on this device")

    monkeypatch.setattr(guard, "compare", compare)
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.self_check() == \
        "not checked: RuntimeError: index of bf16 is not implemented on this device"
    monkeypatch.setenv(settings.STRICT, "1")
    with pytest.raises(RuntimeError, match="not implemented"):
        Runner(r)(inputs, scalars)


@pytest.mark.fault("a first call inside a graph capture", "no check then; the next call outside makes it")
def test_a_capture_postpones_the_check(monkeypatch):
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    monkeypatch.setattr(launch._Interpreted, "capturing", lambda self: True)
    for _ in range(2):
        run(inputs, scalars)
    assert run.record.checks == 0
    monkeypatch.setattr(launch._Interpreted, "capturing", lambda self: False)
    for _ in range(2):
        run(inputs, scalars)
    assert run.record.checks == 1


HIDDEN = pytest.mark.fault("a first call on values that hide a wrong kernel (zeros, constant rows)",
                           "the kernel stays on trial, for eight such calls at most")


def hiding_case():
    """`torch.ones` behind an add, in bf16: what is normalised is rounding errors, or zero."""
    r = region("add_norm", 24, "bf16")
    random = inputs_for(r, (2, 40), strided=False)  # of the same layout, so that one kernel serves both
    return r, [torch.ones_like(x) for x in random[:2]] + random[2:], random, scalars_for(r)


@HIDDEN
@pytest.mark.parametrize("calls", [1, guard.MAX_TRIALS - 1])
def test_a_wrong_kernel_that_ones_hide_is_found_later(calls, mutate, warned):
    mutate(*WRONG)
    r, hiding, random, scalars = hiding_case()
    run = Runner(r)
    for _ in range(calls):
        assert_right(r, hiding, scalars, run(hiding, scalars))
    assert not warned()
    assert_right(r, random, scalars, run(random, scalars))
    assert len(warned()) == 1 and run.record.fallback().startswith("the self-check failed: ")


@HIDDEN
def test_a_right_kernel_that_ones_hide_leaves_its_trial():
    r, hiding, random, scalars = hiding_case()
    run = Runner(r)
    run(hiding, scalars)
    assert [type(plan) for plan in run._plans.values()] == [guard.Guard]
    for _ in range(2):
        run(random, scalars)
    assert [type(plan) for plan in run._plans.values()] == [launch._Interpreted]
    assert run.record.checks == 2 and not run.record.fallback()
    assert "not checked" not in run.record.self_check()


@HIDDEN
def test_a_trial_ends():
    r, hiding, _, scalars = hiding_case()
    run = Runner(r)
    for _ in range(guard.MAX_TRIALS + 2):
        run(hiding, scalars)
    assert [type(plan) for plan in run._plans.values()] == [launch._Interpreted]
    assert run.record.checks == guard.MAX_TRIALS and not run.record.fallback()
    assert "not checked: what a norm does, which the values of 8 calls hide" in run.record.self_check()


# -- kernels that do not run

BROKEN = {"does not compile": ("    ROW = ", "    ROW == = "),
          "cannot be launched": (r"tl\.program_id\(0\)", "tl.no_such_thing(0)")}


@pytest.mark.fault("a kernel that does not compile, or does not start", "PyTorch's results, one warning")
@pytest.mark.parametrize("how", sorted(BROKEN))
@pytest.mark.parametrize("mode", ["first_call", "off"])
def test_a_kernel_that_does_not_run(how, mode, mutate, warned, monkeypatch):
    mutate(*BROKEN[how])
    r, inputs, scalars = layer_norm_case()
    run = Runner(r, self_check=mode)
    for outer in ((2, 40), (2, 40), (3, 1)):
        inputs = inputs_for(r, outer)
        assert_right(r, inputs, scalars, run(inputs, scalars))
    (text,) = warned()
    assert how in text and f"the kernel {how}: " in run.record.fallback()
    strict = Runner(r, self_check="raise")
    with pytest.raises(Exception, match="no_such_thing|syntax"):
        strict(inputs, scalars)
    monkeypatch.setenv(settings.STRICT, "1")
    with pytest.raises(Exception, match="no_such_thing|syntax"):
        Runner(r)(inputs, scalars)


def test_a_kernel_that_cannot_be_generated(monkeypatch, warned):
    def generate(*args):
        raise AssertionError("a bug in the generator")

    monkeypatch.setattr(launch, "generate", generate)
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.fallback() == "the kernel does not compile: AssertionError: a bug in the generator"


def test_a_failure_inside_a_capture_is_not_for_good(mutate, monkeypatch, warned):
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    with monkeypatch.context() as patched:
        patched.setattr(launch._Interpreted, "capturing", lambda self: True)
        patched.setattr(launch, "_function", lambda source: 1 / 0)
        assert_right(r, inputs, scalars, run(inputs, scalars))
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 1 and not run.record.fallback() and not warned()


@pytest.mark.fault("a kernel that breaks the device (illegal memory access)",
                   "the device's own error: nothing runs on it any more")
@pytest.mark.parametrize("where", ["launch", "check"])
def test_a_lost_device_is_an_error(where, monkeypatch):
    def lost(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    r, inputs, scalars = layer_norm_case()
    place = (launch._Interpreted, "__call__") if where == "launch" else (guard, "compare")
    monkeypatch.setattr(*place, lost)
    run = Runner(r)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(inputs, scalars)
    assert not run.record.fallback()


def test_out_of_memory_of_the_call_is_the_callers(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    with monkeypatch.context() as patched:
        patched.setattr(launch._Outputs, "allocate", full)
        with pytest.raises(torch.OutOfMemoryError):
            run(inputs, scalars)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert not run.record.fallback()


# -- compilers that hang


@pytest.fixture
def slow_compiler(monkeypatch):
    """A compiler that waits until the test lets it go on, and a limit that does not."""
    monkeypatch.setenv(settings.COMPILE_SECONDS, "0.2")
    go, original = threading.Event(), launch._function

    def compile_slowly(source):
        if threading.current_thread().name.startswith("ascend_ln_fuse"):
            assert go.wait(60)
        return original(source)

    monkeypatch.setattr(launch, "_function", compile_slowly)
    yield go
    go.set()


@pytest.mark.fault("a compiler that hangs",
                   "PyTorch's results once ASCEND_LN_FUSE_COMPILE_SECONDS are over, one warning; a kernel "
                   "that comes late is used from then on")
def test_a_compiler_that_hangs(slow_compiler, warned):
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    for _ in range(3):
        assert_right(r, inputs, scalars, run(inputs, scalars))
    (text,) = warned()
    assert "compiling took longer than 0.2 s" in text and "compiling took longer" in run.record.fallback()
    slow_compiler.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ascend_ln_fuse"):
            thread.join(60)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 1 and not run.record.fallback()


def test_one_wait_for_all_calls(slow_compiler, warned):
    """Threads that want the same kernel wait for one compiler, and the time it has had counts for all."""
    r, inputs, scalars = layer_norm_case()
    runners = [Runner(r) for _ in range(4)]
    for run in runners:
        assert_right(r, inputs, scalars, run(inputs, scalars))
    compilers = [t for t in threading.enumerate() if t.name.startswith("ascend_ln_fuse")]
    assert len(compilers) == 1


def test_a_hanging_compiler_raises_when_asked(slow_compiler, monkeypatch):
    r, inputs, scalars = layer_norm_case()
    with pytest.raises(Exception, match="compiling took longer than 0.2 s"):
        Runner(r, self_check="raise")(inputs, scalars)


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_a_limit_that_is_none(text, monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, text)
    with pytest.raises(ValueError, match="ASCEND_LN_FUSE_COMPILE_SECONDS must be a number"):
        settings.compile_seconds()


def test_a_limit_beyond_what_the_system_can_wait(monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, "inf")
    r, inputs, scalars = layer_norm_case()
    run = Runner(r)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 1


def test_no_limit_needs_no_thread(monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, "0")
    seen, original = [], launch._function
    monkeypatch.setattr(launch, "_function",
                        lambda source: seen.append(threading.current_thread()) or original(source))
    r, inputs, scalars = layer_norm_case()
    Runner(r)(inputs, scalars)
    assert set(seen) == {threading.current_thread()}


def test_modes_have_runners_of_their_own():
    text = region("layer_norm", 24, "f32").text
    assert runner(text) is runner(text, "first_call") is not runner(text, "off")
    with pytest.raises(ValueError, match="off, first_call, always, raise"):
        runner(text, "sometimes")
