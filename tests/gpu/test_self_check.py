"""The self-check on an NVIDIA GPU: wrong kernels replaced, captures left alone, warm calls as before."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import assert_within_bound
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for
from torch import nn

from ascend_ln_fuse import inplace_layer_norm_, last_reports
from ascend_ln_fuse.kernels import guard, launch, ops, settings
from ascend_ln_fuse.kernels.guard import SelfCheckError
from ascend_ln_fuse.kernels.launch import Runner

#: What a generated norm says, as a regular expression, and what makes it wrong.
WRONG = r"RSTD_\w+ = ", r"\g<0>1.1 * "


@pytest.fixture(autouse=True)
def net(monkeypatch, tmp_path):
    """Failures fall back, and files go to a directory of the test's own."""
    monkeypatch.delenv(settings.STRICT, raising=False)
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "cache"))
    ops.runner.cache_clear()
    yield
    ops.runner.cache_clear()


@pytest.fixture
def wrong_kernels(monkeypatch):
    original = launch.generate

    def generate(*args):
        kernel = original(*args)
        source, found = re.subn(*WRONG, kernel.source)
        if not found:  # no Exception: the net would catch that
            pytest.fail(f"{WRONG[0]} is not in\n{kernel.source}")
        return replace(kernel, source=source)

    monkeypatch.setattr(launch, "generate", generate)


def on(device, inputs):
    return [x.to(device) for x in inputs]


def case(device, name="layer_norm", dtype="bf16", outer=(3, 700), lane=128):
    r = region(name, lane, dtype)
    return r, on(device, inputs_for(r, outer, strided=False)), scalars_for(r)


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", pytest.param("f64", marks=pytest.mark.real_gpu)])
@pytest.mark.parametrize("lane, outer", [(8, (1, 1)), (128, (3, 700)), (1000, (2, 40))], ids=str)
def test_right_kernels_pass(name, dtype, lane, outer, device, monkeypatch):
    monkeypatch.setenv(settings.STRICT, "1")
    r, inputs, scalars = case(device, name, dtype, outer, lane)
    run = Runner(r)
    for seed in range(3):
        inputs = on(device, inputs_for(r, (outer[0], outer[1] + seed), seed=seed, ratio=10.0**seed))
        assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 3 and run.record.worst.within and not run.record.fallback()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_wrong_kernel_is_replaced(dtype, device, wrong_kernels):
    r, inputs, scalars = case(device, dtype=dtype)
    run = Runner(r)
    with pytest.warns(RuntimeWarning, match="is wrong on") as caught:
        assert_right(r, inputs, scalars, run(inputs, scalars))
    assert Path(re.search(r"reproduces it: (\S+\.py)", str(caught[0].message))[1]).exists()
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert "self-check failed" in run.record.fallback() and run.record.checks == 1


def test_a_wrong_kernel_in_place(device, wrong_kernels):
    packed = torch.randn(700, 9, 128, device=device).bfloat16()
    want = packed.clone()
    want[:, :3] = torch.nn.functional.layer_norm(packed[:, :3], (128,))
    with pytest.warns(RuntimeWarning, match="is wrong on"):
        inplace_layer_norm_(packed[:, :3])
    assert torch.equal(packed, want)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.real_gpu)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_kernel_in_a_model(inner, grad, device, wrong_kernels):
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)).to(device)
    x = torch.randn(9, 128, device=device)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={
        "report": "off", "inner": inner, "inner_choice": "fuse"})
    with torch.set_grad_enabled(grad), pytest.warns(RuntimeWarning, match=r"is wrong on"):
        ours = compiled(x).detach()
    with torch.no_grad():
        low = model(x)
        assert_within_bound(ours, low, model.double()(x.double()))
    assert "self-check failed" in last_reports()[-1].sites[0].fallback_words()


def test_raise(device, wrong_kernels):
    r, inputs, scalars = case(device)
    with pytest.raises(SelfCheckError, match="is wrong on"):
        Runner(r, self_check="raise")(inputs, scalars)


@pytest.mark.real_gpu
@pytest.mark.parametrize("broken", [("tl.program_id(0)", "tl.no_such_thing(0)"),
                                    ("    ROW = ", "    ROW == = ")])
def test_a_kernel_that_does_not_compile(broken, device, monkeypatch):
    original = launch.generate

    def generate(*args):
        kernel = original(*args)
        return replace(kernel, source=kernel.source.replace(*broken))

    monkeypatch.setattr(launch, "generate", generate)
    r, inputs, scalars = case(device)
    with pytest.warns(RuntimeWarning, match="does not compile"):
        assert_right(r, inputs, scalars, Runner(r)(inputs, scalars))


@pytest.mark.real_gpu
def test_a_capture_postpones_the_check(device):
    """A first call inside a capture is recorded; the check comes with the next call outside, and no replay
    pays for it."""
    r, inputs, scalars = case(device)
    Runner(r, self_check="off")(inputs, scalars)  # Triton loads the binary: not allowed in a capture
    run = Runner(r)
    run(inputs, scalars)
    run._plans.clear()  # as for shapes that are seen in a capture for the first time
    run.record.checks = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(inputs, scalars)
    assert run.record.checks == 0
    inputs[0].normal_()
    graph.replay()
    assert_right(r, inputs, scalars, outputs)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.checks == 1
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(inputs, scalars)
    assert run.record.checks == 1


@pytest.mark.real_gpu
def test_warm_calls_do_not_wait(device, monkeypatch):
    """After the first call the plan is the kernel's own, and no call waits for the device."""
    r, inputs, scalars = case(device)
    run = Runner(r)
    run(inputs, scalars)
    assert [type(plan) for plan in run._plans.values()] == [launch._Cuda]
    monkeypatch.setenv(settings.STRICT, "1")  # what a check raises is then not set down as "not checked"
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run(inputs, scalars)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the control: a check does wait
            Runner(r)(inputs, scalars)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.real_gpu
def test_memory_of_a_check(device):
    """A call of 2 GiB is checked in a few MiB."""
    r = region("layer_norm", 128, "bf16")
    inputs = [torch.randn(4, 2**20, 128, device=device, dtype=torch.bfloat16),
              *torch.randn(2, 128, device=device).bfloat16().unbind(0)]
    outputs = Runner(r, self_check="off")(inputs, [1e-5])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert guard.compare(r, inputs, [1e-5], outputs, 16).within
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20


@pytest.mark.real_gpu
def test_out_of_memory_in_the_check(device, monkeypatch):
    """With the allocator's own error."""
    monkeypatch.setenv(settings.STRICT, "1")
    r, inputs, scalars = case(device, outer=(64, 4096))
    run = Runner(r)
    original = guard.compare

    def compare(*args):
        free = torch.cuda.mem_get_info()[0]
        torch.empty(2 * free, dtype=torch.uint8, device=device)
        return original(*args)

    monkeypatch.setattr(guard, "compare", compare)
    assert_right(r, inputs, scalars, run(inputs, scalars))
    assert run.record.self_check() == "not checked: out of memory" and not run.record.fallback()


LOST = """
import torch
from dataclasses import replace
from ascend_ln_fuse.kernels import launch
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.region import parse
original = launch.generate
def generate(*args):
    kernel = original(*args)
    return replace(kernel, source=kernel.source.replace("tl.store(", "tl.store((1 << 45) * 8 + "))
launch.generate = generate
r = parse("space [*, 128]\\nin x: f32[*, 128]\\ny: f32 = rms_norm(x, none, 1e-06)\\nout y: f32 order(0, 1)")
try:
    Runner(r)([torch.randn(50, 128, device="cuda")])
except RuntimeError as error:
    assert "illegal memory access" in str(error), error
    print("the device's own error")
"""


@pytest.mark.real_gpu
def test_a_lost_device_is_an_error(device):
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300)
    assert "the device's own error" in done.stdout, done.stderr


PROCESS = """
import sys, torch
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for
from ascend_ln_fuse.kernels.launch import Runner
for name in sorted(TEXTS):
    r = region(name, 64, "bf16")
    inputs = [x.to("cuda") for x in inputs_for(r, (3, 70), strided=False)]
    run = Runner(r)
    assert_right(r, inputs, scalars_for(r), run(inputs, scalars_for(r)))
    assert run.record.checks == 1 and not run.record.fallback()
print("done")
"""


@pytest.mark.real_gpu
@pytest.mark.parametrize("shared_with_others", [False, True])
def test_two_processes_share_tritons_cache(shared_with_others, device, tmp_path):
    """Where others can write to the cache, nothing is put there or taken from there."""
    cache = tmp_path / "triton"
    cache.mkdir()
    if shared_with_others:
        cache.chmod(0o777)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), settings.STRICT: "1",
                   "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS], env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        printed, errors = process.communicate(timeout=400)
        assert "done" in printed, errors
        assert ("Triton's cache is not used" in errors) is shared_with_others
    assert bool(list(cache.iterdir())) is not shared_with_others
