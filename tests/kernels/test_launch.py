"""Runner: what runs where, plans, reasons, errors. GPU launches are tested in tests/gpu."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for

from ascend_ln_fuse.kernels import launch
from ascend_ln_fuse.kernels.call import Call
from ascend_ln_fuse.kernels.launch import Runner, runs_reference
from ascend_ln_fuse.kernels.layout import Unsupported
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.targets import cuda, npu

CPU = torch.device("cpu")
NPU_RULES = npu.describe("Ascend910B3").interpreted()


@pytest.fixture
def interpret(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(launch.INTERPRET, "1")


def plan_types(run):
    return [type(plan).__name__ for plan in run._plans.values()]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_cpu_tensors_run_the_reference(name):
    r = region(name, 32, "bf16")
    inputs, run = inputs_for(r, (2, 5)), Runner(r)
    for ours, want in zip(run(inputs, scalars_for(r)), reference(r, inputs, scalars_for(r))):
        assert torch.equal(ours, want)
    assert runs_reference(CPU) and not run.reasons


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_kernels_on_cpu_tensors(name, interpret):
    r = region(name, 40, "bf16")
    run = Runner(r)
    assert not runs_reference(CPU)
    for outer in ((2, 5), (2, 5), (1, 3)):
        inputs = inputs_for(r, outer)
        assert_right(r, inputs, scalars_for(r), run(inputs, scalars_for(r)))
    assert plan_types(run) == ["_Interpreted"] * 2 and not run.reasons


def test_npu_rules_on_cpu_tensors():
    pytest.importorskip("triton")
    r = region("layer_norm", 128, "bf16")
    packed = torch.randn(50, 9, 128).bfloat16()
    x = packed.view(50, 3, 3, 128).unbind(1)[2]
    w, b = torch.randn(2, 128).bfloat16().unbind(0)
    outputs = Runner(r, NPU_RULES)([x, w, b], [1e-5])
    assert_right(r, [x, w, b], [1e-5], outputs)


def test_a_plan_per_layout_dtype_and_alignment(interpret):
    r = region("layer_norm", 8, "f32")
    run = Runner(r)
    w, b = torch.ones(8), torch.zeros(8)
    buffer = torch.randn(65)
    for x in (buffer[:64].view(2, 4, 8), buffer[1:].view(2, 4, 8), buffer[:64].view(4, 2, 8).transpose(0, 1),
              buffer[:64].view(2, 4, 8)):
        assert_right(r, [x, w, b], [1e-5], run([x, w, b], [1e-5]))
    assert len(run._plans) == 3


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 4)
    run = Runner(region("layer_norm", 8, "f32"))
    for rows in range(1, 9):
        run([torch.randn(1, rows, 8), torch.ones(8), torch.zeros(8)], [1e-5])
    assert len(run._plans) == 4


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_no_rows(shape, interpret):
    r = region("add_norm", 8, "bf16")
    x = torch.empty(shape, dtype=torch.bfloat16)
    run = Runner(r)
    outputs = run([x, x, torch.ones(8).bfloat16()], [1e-5])
    assert [o.shape for o in outputs] == [x.shape] * 2
    assert plan_types(run) == ["_Empty"]


def test_no_columns(interpret):
    r = parse("space [*, 0]\nin x: f32[*, 0]\ny: f32 = add(x, 1.0)\nout y: f32 order(0, 1)")
    assert Runner(r)([torch.empty(3, 0)])[0].shape == (3, 0)


def test_a_layout_that_no_kernel_serves(interpret):
    """The reference runs, and the reason is on record."""
    r = region("layer_norm", 8, "f32")
    run = Runner(r)
    inputs = [torch.randn(2, 5, 16)[..., ::2], torch.ones(8), torch.zeros(8)]
    for _ in range(3):
        assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
    assert run.reasons == {"lane stride of x is 2, not 1": 1}


def test_a_missing_triton_is_a_reason(interpret, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    r = region("layer_norm", 24, "f32")
    run, inputs = Runner(r), inputs_for(r, (2, 3))
    assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
    assert list(run.reasons) and "triton" in list(run.reasons)[0]


@pytest.mark.parametrize("change, message", [
    (lambda x, w, b: [x, w], "3 inputs, got 2"),
    (lambda x, w, b: [x.double(), w, b], "got torch.float64"),
    (lambda x, w, b: [x, w[:4], b], "dim 0 is 4"),
    (lambda x, w, b: [x[0], w, b], "2 dims"),
])
def test_inputs_that_do_not_fit(change, message, interpret):
    with pytest.raises(ValueError, match=message):
        Runner(region("layer_norm", 8, "f32"))(change(torch.randn(2, 5, 8), torch.ones(8), torch.ones(8)),
                                               [1e-5])


def test_eps_is_a_run_time_number(interpret):
    r = region("layer_norm", 8, "f32")
    run, inputs = Runner(r), inputs_for(r, (2, 3))
    for eps in (1e-5, 0.3, 2):
        assert_right(r, inputs, [eps], run(inputs, [eps]))
    assert len(run._plans) == 1


@pytest.mark.parametrize("kernel", [False, True])
def test_into(kernel, monkeypatch):
    if kernel:
        pytest.importorskip("triton")
        monkeypatch.setenv(launch.INTERPRET, "1")
    r = region("layer_norm", 16, "f32")
    packed = torch.randn(7, 9, 16)
    before = packed.clone()
    x = packed.view(7, 3, 3, 16).unbind(1)[1]
    w, b = torch.randn(2, 16).unbind(0)
    want = torch.nn.functional.layer_norm(x, (16,), w, b)
    Runner(r).into([x, w, b], [1e-5], [x])
    torch.testing.assert_close(x, want)
    assert torch.equal(packed[:, :3], before[:, :3]) and torch.equal(packed[:, 6:], before[:, 6:])


@pytest.mark.parametrize("output, message", [
    (torch.empty(2, 4, 8), "expected f32"), (torch.empty(2, 5, 8).double(), "expected f32"),
])
def test_into_a_wrong_output(output, message):
    with pytest.raises(ValueError, match=message):
        Runner(region("layer_norm", 8, "f32")).into(
            [torch.randn(2, 5, 8), torch.ones(8), torch.zeros(8)], [1e-5], [output])


def test_into_a_strided_lane(interpret):
    r = region("layer_norm", 8, "f32")
    run, inputs = Runner(r), inputs_for(r, (2, 5))
    output = torch.empty(2, 5, 16)[..., ::2]
    run.into(inputs, [1e-5], [output])
    torch.testing.assert_close(output, torch.nn.functional.layer_norm(inputs[0], (8,), *inputs[1:]))
    assert list(run.reasons) == ["lane stride of output v0 is 2, not 1"]


def test_threads(interpret):
    r = region("rms_norm", 16, "f32")
    run, errors = Runner(r), []

    def work(seed):
        try:
            for rows in (1, 2, 5):
                inputs = inputs_for(r, (2, rows), seed=seed)
                assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_records_no_gradient():
    r = region("layer_norm", 8, "f32")
    inputs = [x.requires_grad_() for x in inputs_for(r, (2, 5), strided=False)]
    assert not Runner(r)(inputs, [1e-5])[0].requires_grad


def test_dynamo_does_not_trace_into_it():
    r = region("layer_norm", 8, "f32")
    run, inputs = Runner(r), inputs_for(r, (2, 5))
    want = torch.nn.functional.layer_norm(inputs[0], (8,), *inputs[1:]) + 1

    @torch.compile(backend="eager")
    def model(*xs):
        return run(xs, [1e-5])[0] + 1

    torch.testing.assert_close(model(*inputs), want)
    torch.testing.assert_close(model(*inputs), want)
    assert len(run._plans) == 1


def test_source_of_a_call():
    r = region("layer_norm", 128, "bf16")
    shapes, strides = ((50, 3, 128), (128,), (128,)), ((1152, 128, 1), (1,), (1,))
    text = Call(r, shapes, strides, CPU).source()
    assert r.text in text and "Ascend910B3" in text and "for TILE in range" in text
    assert Call(r, shapes, ((1152, 128, 2), (1,), (1,)), CPU).source() is None
    assert Call(r, ((0, 3, 128), (128,), (128,)), strides, CPU).source() is None


def test_candidates_of_a_call():
    r = region("layer_norm", 128, "bf16")
    call = Call(r, ((50_000, 3, 128), (128,), (128,)), ((1152, 128, 1), (1,), (1,)), CPU)
    found = list(call.candidates("Ascend910B3"))
    assert found[0].kernel == call.kernel()
    assert found[0].kernel != replace(call, soc="Ascend910B1").kernel()
    assert [x.kernel.tile.rows for x in found[:3]] == [96, 48, 24]
    assert not list(Call(r, ((0, 3, 128), (128,), (128,)), call.strides, CPU).candidates("Ascend910B3"))
    with pytest.raises(Unsupported, match="lane stride"):
        list(Call(r, call.shapes, ((1152, 128, 2), (1,), (1,)), CPU).candidates("Ascend910B3"))


class _FakeKernel:
    """Stands for a JIT function of an NPU whose compiler overflows for tiles above `fits` rows."""

    tried: list = []
    launched: list = []
    fits = 24

    def __init__(self, source):
        self.rows = source.tile.rows

    def warmup(self, *arguments, grid, **options):
        self.tried.append((self.rows, options))
        if self.rows > self.fits * (1 if options["multibuffer"] else 2):
            raise RuntimeError("ub overflow, requires 2097152 bits while 1572864 bits available!")

    def __getitem__(self, grid):
        def launched(*arguments):
            self.launched.append((self.rows, asked[-1]))

        asked: list = []
        return lambda *arguments, **options: asked.append(options) or {grid: launched}


@pytest.fixture
def fake_npu(monkeypatch):
    class Npu:
        @staticmethod
        def current_device():
            return None  # the index of a CPU device

    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    monkeypatch.setattr(launch, "_jit", _FakeKernel)
    _FakeKernel.tried, _FakeKernel.launched = [], []
    return npu.describe("Ascend910B3")


def test_npu_falls_down_the_ladder(fake_npu):
    r = region("layer_norm", 128, "bf16")
    run = Runner(r, fake_npu, "off")
    inputs = [torch.randn(3, 20_000, 128).bfloat16(), *(torch.randn(128).bfloat16() for _ in range(2))]
    for _ in range(2):
        run(inputs, [1e-5])
    double = {"multibuffer": True}
    assert _FakeKernel.tried == [(96, double), (48, double), (24, double)]
    assert _FakeKernel.launched == [(24, double)]
    assert not run.reasons


def test_npu_does_without_double_buffering_at_last(fake_npu, monkeypatch):
    monkeypatch.setattr(_FakeKernel, "fits", 0.5)
    r = region("layer_norm", 128, "bf16")
    run, inputs = Runner(r, fake_npu, "off"), inputs_for(r, (2, 5))
    for _ in range(2):
        run(inputs, [1e-5])
    *tries, last = _FakeKernel.tried
    tiles = [rows for rows, _ in tries]
    assert tiles == sorted(tiles, reverse=True)
    assert all(options == {"multibuffer": True} for _, options in tries)
    assert last == (1, {"multibuffer": False}) == _FakeKernel.launched[-1]
    assert not run.reasons


def test_each_device_gets_its_own_options_only(fake_npu, monkeypatch):
    """num_warps to CUDA; multibuffer, whose default depends on the SoC, to an NPU and never to CUDA."""
    inputs = inputs_for(region("layer_norm", 128, "bf16"), (2, 5))
    Runner(region("layer_norm", 128, "bf16"), fake_npu, "off")(inputs, [1e-5])
    assert {str(options) for _, options in _FakeKernel.tried} == {"{'multibuffer': True}"}
    asked = []

    class Compiled:
        function, packed_metadata, run = None, None, None

    plan = object.__new__(launch._Cuda)
    plan.grid, plan.integers, plan.region = (1, 1, 1), (), region("layer_norm", 128, "bf16")
    plan.source = type("Source", (), {"tile": type("T", (), {"num_warps": 8})})
    plan.warm_up = lambda source, stand_ins, scalars, **options: asked.append(options)
    _, plan.options = plan.compile(inputs, [1e-5])
    jit = {(1, 1, 1): lambda *arguments, **options: asked.append(options) or Compiled}
    monkeypatch.setattr(launch, "_jit", lambda source: jit)
    plan.first(inputs, [1e-5], ())
    assert asked == [{"num_warps": 8}] * 2


def test_npu_gives_up_with_a_reason(fake_npu, monkeypatch):
    monkeypatch.setattr(_FakeKernel, "fits", 0)
    r = region("layer_norm", 128, "bf16")
    run, inputs = Runner(r, fake_npu, "off"), inputs_for(r, (2, 5))
    assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
    assert list(run.reasons) == ["no tile fits the Unified Buffer of Ascend910B3"]


def test_npu_has_no_float64(fake_npu):
    r = region("layer_norm", 128, "f64")
    run, inputs = Runner(r, fake_npu, "off"), inputs_for(r, (2, 5))
    assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
    assert list(run.reasons) == ["Ascend910B3 does not compute in f64"]


def test_nothing_is_written_to_disk(tmp_path):
    """A kernel's text lives in linecache, where a traceback finds it; no file is made or read."""
    pytest.importorskip("triton")
    code = f"""
import os, builtins, inspect, torch
os.environ["{launch.INTERPRET}"] = "1"
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels import launch
from ascend_ln_fuse.kernels.call import Call
from ascend_ln_fuse.kernels.region import parse
r = parse("space [*, 8]\\nin x: f32[*, 8]\\ny: f32 = rms_norm(x, none, 1e-06)\\nout y: f32 order(0, 1)")
run = Runner(r)
run([torch.randn(3, 8)])
plan = next(iter(run._plans.values()))
fn = launch._function(plan.source)
assert inspect.getsource(fn).startswith("def aln_rms_norm_"), inspect.getsource(fn)
assert not os.path.exists(fn.__code__.co_filename) and os.listdir(".") == []
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_interpreted_cuda_rules():
    pytest.importorskip("triton")
    r = region("qk", 24, "f16")
    run, inputs = Runner(r, cuda.describe("sm_80", 108).interpreted()), inputs_for(r, (3, 4))
    assert_right(r, inputs, scalars_for(r), run(inputs, scalars_for(r)))
