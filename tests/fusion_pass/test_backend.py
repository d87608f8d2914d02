"""The backend end to end: what users call, and what must never happen to their models."""

import copy
import io
import pickle
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from checks import assert_within_bound, tensors
from small_models import Attention, Block, Projected
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.nn import functional as F

from ascend_ln_fuse import auto_fusion, backend, last_reports
from ascend_ln_fuse.hidden import norm_kernels

ROOT = Path(__file__).parents[2]
OFF = {"report": "off"}


def python(code, *flags, **environment):
    """Run code in an interpreter of its own; its stdout."""
    import os

    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, **environment}, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# auto_fusion.


def test_auto_fusion_compiles_in_place():
    model = Block().eval()
    keys, before = list(model.state_dict()), copy.deepcopy(model)
    x = torch.randn(2, 5, 64)
    eager = model(x)
    assert auto_fusion(model, report="off") is model
    torch.testing.assert_close(model(x), eager)
    assert sum(r.fused for r in last_reports()) == 3
    assert list(model.state_dict()) == keys == [*before.state_dict()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in before.named_modules()]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
def test_copies_of_a_compiled_model(duplicate, called):
    model = auto_fusion(Attention().eval(), report="off")
    x = torch.randn(2, 5, 64)
    if called:
        model(x)
    twin = duplicate(model)
    assert type(twin) is Attention and list(twin.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(twin(x), model(x))
    with torch.no_grad():
        twin.norm_q.weight.zero_()
    assert model.norm_q.weight.all()
    torch.testing.assert_close(auto_fusion(twin, report="off")(x), twin.forward(x))


def test_weights_that_are_loaded_later_are_used():
    model, other = auto_fusion(Attention().eval(), report="off"), Attention().eval()
    x = torch.randn(2, 5, 64)
    model(x)
    nn.init.normal_(other.norm_q.weight)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))
    model.bfloat16(), other.bfloat16()
    torch.testing.assert_close(model(x.bfloat16()), other(x.bfloat16()))


@pytest.mark.parametrize("model", [F.gelu, "model", None, Attention], ids=str)
def test_auto_fusion_takes_modules_only(model):
    with pytest.raises(TypeError, match="must be a torch.nn.Module.*torch.compile"):
        auto_fusion(model)


class Inherited(nn.Sequential):
    """A user's class with PyTorch's forward."""


@pytest.mark.parametrize("make, shape, where", [
    (lambda: nn.LayerNorm(8), (3, 8), [""]),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8))), (3, 8), ["1.0"]),
    (lambda: Inherited(nn.LayerNorm(8), nn.GELU()), (3, 8), ["0"]),
    (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), (2, 3, 8), ["norm1", "norm2"]),
], ids=["norm", "sequential", "inherited", "encoder"])
def test_modules_whose_forward_is_pytorchs_own(make, shape, where):
    """nn.Module.compile captures nothing there."""
    for _ in range(10):  # more than Dynamo compiles one code object
        model = auto_fusion(make().eval(), report="off")
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), model.forward(x))
    reports = last_reports()
    assert len(reports) == 10 and all(r.fused == len(where) for r in reports)
    assert [s.where.split(",")[0] or "" for s in reports[-1].sites] == where or where == [""]
    assert "backend.py" not in str(reports[-1].to_dict())
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and list(twin.state_dict()) == list(make().state_dict())
    torch.testing.assert_close(twin(x), model(x))


def test_hooks_registered_before_compiling_run():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8)
    seen = []
    model[1].register_forward_hook(lambda m, args, out: out * 3)
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.register_forward_hook(lambda m, args, out: seen.append(out))
    eager = model(x)
    torch.testing.assert_close(auto_fusion(model, report="off")(x), eager)
    assert len(seen) == 2 and last_reports()[-1].fused == 1


# Processes of their own.


def test_no_import_of_ours_is_needed():
    assert python("""
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
compiled = torch.compile(model, backend="ascend_ln_fuse")
x = torch.randn(3, 8)
torch.testing.assert_close(compiled(x), model(x))
import ascend_ln_fuse
print(ascend_ln_fuse.last_reports()[-1].fused)
""") == "1"


BLOCKED = """
import sys
for name in ("triton", "torch_npu", "rich", "networkx", "einops", "transformers"):
    sys.modules[name] = None
import ascend_ln_fuse
ascend_ln_fuse.Options, ascend_ln_fuse.last_reports()
"""


def test_importing_needs_nothing_but_torch():
    python(BLOCKED)


@pytest.mark.parametrize("name", ["triton", "torch_npu", "rich"])
def test_models_run_without(name):
    """The table needs rich, kernels on devices Triton: the model neither."""
    assert python(f"""
import sys
sys.modules[{name!r}] = None
import torch
model = torch.nn.LayerNorm(8)
x = torch.randn(3, 2, 8)[:, 1]
torch.testing.assert_close(torch.compile(model, backend="ascend_ln_fuse")(x), model(x))
import ascend_ln_fuse
print(ascend_ln_fuse.last_reports()[-1].fused)
""") == "1"


def test_importing_costs_at_most_50_ms():
    spent = min(float(python("""
import time, torch
start = time.perf_counter()
import ascend_ln_fuse
print(time.perf_counter() - start)
""")) for _ in range(3))
    assert spent <= 0.05


def test_importing_starts_nothing():
    assert python("""
import sys, threading
import ascend_ln_fuse
print(threading.active_count(), "torch" in sys.modules, "networkx" in sys.modules)
""") == "1 False False"


def test_transformers_beside_our_folders():
    """The folder `kernels` must not be taken for the Hugging Face package of that name."""
    pytest.importorskip("transformers")
    assert python("""
import sys
sys.path.insert(0, ".")
from transformers import LlamaConfig, LlamaModel
import ascend_ln_fuse, torch
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                     vocab_size=10)
model = LlamaModel(config).eval()
ids = torch.arange(6)[None]
expected = model(ids, use_cache=False).last_hidden_state
ascend_ln_fuse.auto_fusion(model, report="off")
torch.testing.assert_close(model(ids, use_cache=False).last_hidden_state, expected)
print(sum(r.fused for r in ascend_ln_fuse.last_reports()))
""") == "3"


# The safety net.


@pytest.mark.parametrize("place", ["Lens", "find_norms", "candidate", "select", "rewrite"])
def test_a_failure_leaves_the_model_running_and_is_reported(place, monkeypatch, capfd):
    def fail(*args, **kwargs):
        raise ZeroDivisionError(f"in {place}")

    monkeypatch.setattr(backend, place, fail)
    model, x = Attention().eval(), torch.randn(2, 5, 64)
    with pytest.raises(Exception, match=f"in {place}"):
        torch.compile(model, backend="ascend_ln_fuse", options=OFF)(x)
    torch._dynamo.reset()
    monkeypatch.delenv("ASCEND_LN_FUSE_STRICT")
    torch.testing.assert_close(torch.compile(model, backend="ascend_ln_fuse")(x), model(x), rtol=0, atol=0)
    report = last_reports()[-1]
    assert report.error == f"ZeroDivisionError: in {place}" and report.fused == 0
    assert f"in {place}" in capfd.readouterr().err


# The report.


@pytest.mark.parametrize("mode, words", [
    ("off", []), ("table", ["1 fused", "norm"]), ("full", ["1 fused", "space [*, 8]", "layer_norm(x0"])])
def test_the_report_is_printed_to_stderr(mode, words, capfd):
    torch.compile(nn.LayerNorm(8), backend="ascend_ln_fuse", options={"report": mode})(torch.ones(3, 8))
    out, err = capfd.readouterr()
    assert out == "" and bool(err) is bool(words)
    for word in words:
        assert word in err


def test_a_closed_stderr_does_not_break_the_model(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    x = torch.randn(3, 8)
    ours = torch.compile(nn.LayerNorm(8), backend="ascend_ln_fuse")(x)
    torch.testing.assert_close(ours, F.layer_norm(x, (8,)))


def test_reports_come_in_the_order_of_compiling():
    for size in (8, 9, 10):
        torch.compile(nn.LayerNorm(size), backend="ascend_ln_fuse", options=OFF)(torch.ones(3, size))
    reports = last_reports()
    assert [r.sites[0].region.splitlines()[0] for r in reports] == [f"space [*, {n}]" for n in (8, 9, 10)]
    assert [r.graph_index for r in reports] == sorted(r.graph_index for r in reports)


def test_what_a_report_says_of_a_site():
    torch.compile(Block().eval(), backend="ascend_ln_fuse", options=OFF)(torch.randn(2, 5, 64))
    report = last_reports()[-1].to_dict()
    assert (report["found"], report["fused"], report["declined"], report["error"]) == (3, 3, 0, None)
    where = [site["where"] for site in report["sites"]]
    assert [w.split(",")[0] for w in where] == ["attn.norm_q", "attn.norm_k", "norm"]
    assert all(re.search(r", \w+\.py:\d+\Z", w) for w in where)
    site = report["sites"][0]
    assert site["status"] == "fused" and site["reason"] == "" and "layer_norm" in site["pattern"]
    assert site["region"].startswith("space [") and site["device"] == "cpu"
    assert tuple(site["hidden_kernels"]) == norm_kernels(
        "layer_norm", (2, 5, 4, 16), (960, 192, 16, 1), "float32", has_weight=True, has_bias=True,
        weight_dtype="float32")
    assert site["bytes_before"] > site["bytes_after"] > 0


def test_mode_is_not_ignored_in_silence():
    with pytest.warns(UserWarning, match="mode='max-autotune'.*inner"):
        torch.compile(nn.LayerNorm(8), backend="ascend_ln_fuse", mode="max-autotune")(torch.ones(3, 8))


# Recompiles.


def counted(model, dynamic=None, **options):
    """The compiled model, and the counter of its graphs."""
    counter = CompileCounterWithBackend("ascend_ln_fuse")
    return torch.compile(model, backend=counter, dynamic=dynamic), counter


@pytest.mark.parametrize("make, shapes", [
    (Attention, [(2, 5, 64), (3, 7, 64), (4, 2, 64), (9, 31, 64)]),
    (Block, [(2, 5, 64), (3, 7, 64), (4, 2, 64), (9, 31, 64)]),
    (lambda: nn.LayerNorm(16), [(4, 16), (5, 16), (77, 16)]),
], ids=["attention", "block", "norm"])
@pytest.mark.parametrize("dynamic, most", [(True, 1), (None, 2)], ids=["dynamic", "default"])
def test_no_recompile_for_new_sizes(make, shapes, dynamic, most, capfd):
    model = make().eval()
    compiled, counter = counted(model, dynamic)
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == most
    assert all(r.fused == r.found > 0 for r in last_reports())


def graph_breaks(x):
    y = F.layer_norm(x[:, 1:], (16,))
    torch._dynamo.graph_break()
    return F.layer_norm(y + 1, (16,))


def test_as_many_graphs_and_guards_as_eager():
    counts = []
    for name in ("eager", "ascend_ln_fuse"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(name)
        compiled = torch.compile(graph_breaks, backend=counter, dynamic=True)
        for rows in (4, 5, 6):
            compiled(torch.randn(rows, 3, 16))
        counts.append(counter.frame_count)
    assert counts == [2, 2]


def test_fullgraph():
    x = torch.randn(2, 5, 64)
    model = Block().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True, options=OFF)
    torch.testing.assert_close(compiled(x), model(x))


# Inner compilers.


class Eps(nn.Module):
    """With dynamic=True eps is a run-time scalar."""

    def __init__(self):
        super().__init__()
        self.eps = 0.5

    def forward(self, x):
        return F.layer_norm(x, (16,), eps=self.eps) + F.layer_norm(x[:, :1], (16,), eps=1e-12)


class Pointwise(Projected):
    """And here it does."""

    def forward(self, x):
        return self.norm(x.unbind(1)[1].bfloat16().float()).sin() * 2


@pytest.mark.parametrize("inner, model, shape, dynamic", [
    ("aot_eager", Block, (5, 64), False), ("aot_eager", Block, (5, 64), True),
    ("inductor", Projected, (3, 16), False), ("inductor", Projected, (3, 16), True),
    ("inductor", Pointwise, (3, 16), True)])
def test_inner_compilers(inner, model, shape, dynamic):
    if model is Pointwise and not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    model = model().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic,
                             options={**OFF, "inner": inner})
    with torch.no_grad(), inductor.patch(cpp_cache_precompile_headers=False):  # one kernel: no gain
        for rows in (2, 3):
            x = torch.randn(rows, *shape)
            torch.testing.assert_close(compiled(x), model(x))
    assert all(r.fused == r.found > 0 for r in last_reports())


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_eps_at_run_time(inner):
    model = Eps()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True,
                             options={**OFF, "inner": inner})
    for rows, eps in [(4, 0.5), (5, 0.5), (5, 2.0)]:
        model.eps = eps
        x = torch.randn(rows, 3, 16)
        torch.testing.assert_close(compiled(x), model(x))
    assert all(r.fused == r.found > 0 for r in last_reports())


def test_an_inner_compiler_that_does_not_exist():
    with pytest.raises(ValueError, match="option 'inner'.*'inducktor'.*known: .*aot_eager.*inductor"):
        auto_fusion(nn.LayerNorm(8), inner="inducktor")
    if not hasattr(torch, "npu"):
        with pytest.raises(ValueError, match="'npugraphs' comes with torch_npu"):
            auto_fusion(nn.LayerNorm(8), inner="npugraphs")


def test_a_keyword_that_auto_fusion_does_not_know():
    with pytest.raises(ValueError, match="'mode'.*inner='cudagraphs'.*dynamic, fullgraph"):
        auto_fusion(nn.LayerNorm(8), mode="reduce-overhead")
    with pytest.raises(ValueError, match="did you mean 'dynamic'"):
        auto_fusion(nn.LayerNorm(8), dynamik=True)


# Threads.


def test_eight_threads_compile_and_run_different_models():
    """Dynamo compiles one frame at a time; running is concurrent."""
    failures, start = [], threading.Barrier(8)
    models = [nn.Sequential(nn.Linear(8, 8 + i), nn.LayerNorm(8 + i)).eval() for i in range(8)]

    def work(model):
        try:
            start.wait()
            auto_fusion(model, report="off")
            for rows in (3, 4, 5, 3):
                x = torch.randn(rows, 2, 8)[:, 1]
                torch.testing.assert_close(model(x), model.forward(x))
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(last_reports()) >= 8
    assert all(r.error is None and r.fused == r.found for r in last_reports())
    assert len({r.graph_index for r in last_reports()}) == len(last_reports())


def test_threads_share_one_compiled_model():
    model, x = auto_fusion(Attention().eval(), report="off"), torch.randn(2, 5, 64)
    expected, results = model(x), [None] * 8

    def work(i):
        results[i] = [model(x) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in tensors(results):
        assert_within_bound(result, expected, expected)
    assert len(tensors(results)) == 160
