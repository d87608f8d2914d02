"""What a ChainRunner runs where a segment has several ways: in plain calls, while a graph is captured, and
with the activation in the product."""

import re
from dataclasses import replace

import pytest
import torch
from chain_cases import K, N, ffn, ffn_inputs, norm, packed_inputs, plain_packed, pointwise
from test_chain_program import settle_nothing
from torch.nn import functional as F

from ascend_ln_fuse.kernels import chain_activated, chain_choice, chain_contest, chain_ways
from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_choice import ACTIVATED, LIBRARY, ONE_KERNEL, Choice, Way, agree, choose
from ascend_ln_fuse.kernels.chain_ops import chain_call
from ascend_ln_fuse.kernels.chain_products import LinearStage
from ascend_ln_fuse.kernels.chain_ways import FEW_ROWS, SURE_ROWS, ChainRunner
from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile
from ascend_ln_fuse.kernels.fused_linear_plan import Plan
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.store import Store

EPS = (1e-5,)
TILE, SPLIT = GemmTile(16, 32, 32), GemmTile(16, 32, 16, split=2)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")


def is_right(runner, inputs, scalars=EPS):
    return agree(runner(inputs, scalars), tuple(evaluate(runner.chain, inputs, scalars).values()))


class Stream:
    """capturing: whether a graph is captured; asked: how often that was asked; launched: block shapes."""

    def __init__(self):
        self.capturing, self.asked, self.launched = False, 0, []

    def is_capturing(self, device):
        self.asked += 1
        return self.capturing

    def clear(self):
        self.asked = 0
        self.launched.clear()


@pytest.fixture
def stream(monkeypatch):
    stream, original = Stream(), Plan.__call__

    def launch(self, *args):
        stream.launched.append(self.tile)
        return original(self, *args)

    monkeypatch.setattr(chain_ways, "is_capturing", stream.is_capturing)
    monkeypatch.setattr(Plan, "capturing", lambda self: stream.capturing)
    monkeypatch.setattr(Plan, "__call__", launch)
    return stream


# Two answers

BY_LIBRARY, BY_KERNEL, BY_SPLIT = Choice(LIBRARY), Choice(ONE_KERNEL, TILE), Choice(ONE_KERNEL, SPLIT)
PAIRS = [(BY_LIBRARY, BY_KERNEL), (BY_KERNEL, BY_LIBRARY), (BY_KERNEL, BY_SPLIT), (BY_SPLIT, BY_KERNEL)]


def two(plain, captured):
    return lambda question: replace(plain, in_graph=captured.plain)


def compile_nothing(monkeypatch):
    """From here on every plan that is made is an error."""
    def never(*args):
        raise AssertionError("made during a capture")

    for owner, name in ((ChainRunner, "_first"), (Runner, "_first"), (Plan, "prepare"),
                        (FusedLinear, "_make")):
        monkeypatch.setattr(owner, name, never)


def tiles(choice, segments=2):
    return [choice.config] * segments if choice.way == ONE_KERNEL else []


@pytest.mark.parametrize("self_check", ["off", "first_call"])
@pytest.mark.parametrize("plain, captured", PAIRS, ids=lambda choice: str(choice))
def test_a_capture_takes_the_fastest_on_the_device(plain, captured, self_check, stream, monkeypatch):
    """It finds the kernels compiled and checked, and settles nothing; nor does the next plain call."""
    runner = ChainRunner(ffn("bf16"), self_check, two(plain, captured))
    for _ in range(4):
        assert is_right(runner, ffn_inputs(torch.bfloat16))
    assert [fused.run.record.checks for fused in runner._fused] == \
        [0 if self_check == "off" else len({*tiles(plain), *tiles(captured)})] * 2
    for patches in (compile_nothing, settle_nothing):
        with monkeypatch.context() as patched:
            patches(patched)
            for capturing, way in ((True, captured), (False, plain), (True, captured)):
                stream.clear()
                stream.capturing = capturing
                assert is_right(runner, ffn_inputs(torch.bfloat16), (1e-3,))
                assert stream.launched == tiles(way) and stream.asked == 1


def test_a_layout_has_its_own_two_programs(stream):
    runner = ChainRunner(plain_packed(), "off", two(BY_LIBRARY, BY_KERNEL))
    others = packed_inputs()
    others[0] = torch.randn(3, 2, K).bfloat16().transpose(0, 1)
    for inputs in (packed_inputs(), others):
        is_right(runner, inputs)
        stream.clear()
        assert is_right(runner, inputs) and not stream.launched
        stream.capturing = True
        assert is_right(runner, inputs) and stream.launched == [TILE] * 2
        stream.capturing = False
    assert len(runner._bound) == 2


@pytest.mark.parametrize("choice", [BY_LIBRARY, BY_KERNEL], ids=str)
def test_where_one_answer_serves_both_nobody_asks(choice, stream):
    runner = ChainRunner(ffn("bf16"), "off", lambda question: choice)
    inputs = ffn_inputs(torch.bfloat16)
    runner(inputs, EPS)
    stream.clear()
    for _ in range(3):
        assert is_right(runner, inputs)
    assert stream.asked == 0 and [bound.captured for bound in runner._bound.values()] == [None]


@pytest.mark.parametrize("plain, captured", [(BY_LIBRARY, BY_KERNEL), (BY_KERNEL, BY_LIBRARY)], ids=str)
def test_a_first_call_inside_a_capture(plain, captured, stream):
    """Runs what a capture runs, as far as it is known, launches nothing else, and binds nothing for later."""
    runner = ChainRunner(ffn("bf16"), "first_call", two(plain, captured))
    stream.capturing = True
    inputs = ffn_inputs(torch.bfloat16)
    assert is_right(runner, inputs) and stream.launched == tiles(captured)
    assert not runner._bound
    stream.capturing = False
    assert is_right(runner, inputs) and len(runner._bound) == 1
    stream.clear()
    assert is_right(runner, inputs) and stream.launched == tiles(plain)


def test_a_kernel_for_captures_that_is_wrong(stream, monkeypatch):
    """Found out by the plain call that tries it, whose own results are the library's."""
    original = Plan.__call__

    def spoilt(self, *args):
        return tuple(out.mul_(2) for out in original(self, *args))

    monkeypatch.setattr(Plan, "__call__", spoilt)
    monkeypatch.delenv("ASCEND_LN_FUSE_STRICT", raising=False)

    def decide(question):
        if question.unsupported is not None:
            return Choice(LIBRARY, reason=question.unsupported)
        return two(BY_LIBRARY, BY_KERNEL)(question)

    runner = ChainRunner(ffn("bf16"), "first_call", decide)
    inputs = ffn_inputs(torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="is wrong on cpu"):
        assert is_right(runner, inputs)
    for capturing in (False, True, False):
        stream.capturing = capturing
        stream.clear()
        assert is_right(runner, inputs) and not stream.launched
    assert all("library (the self-check failed" in way for way in runner.ways())


def test_without_memory_for_the_other_way_the_next_call_tries(stream, monkeypatch):
    original = Plan.__call__

    def no_memory(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner, inputs = ChainRunner(ffn("bf16"), "off", two(BY_LIBRARY, BY_KERNEL)), ffn_inputs(torch.bfloat16)
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "__call__", no_memory)
        assert is_right(runner, inputs) and not runner._bound
    assert Plan.__call__ is original and is_right(runner, inputs) and len(runner._bound) == 1


def test_the_report_names_both(stream):
    runner = ChainRunner(ffn("bf16"), "off", two(BY_LIBRARY, BY_KERNEL))
    runner(ffn_inputs(torch.bfloat16), EPS)
    assert runner.ways()[0] == f"part 1 of 2, up to 8 rows: library; in a CUDA graph one kernel [{TILE}]"


def test_contiguous_inputs_of_any_number_of_rows_share_a_choice():
    asked = []
    runner = ChainRunner(ffn("bf16"), "off", lambda question: asked.append(question.rows) or BY_LIBRARY)
    weights = ffn_inputs(torch.bfloat16)[1:]
    for rows in (5, 6, 7, 8):
        assert is_right(runner, [torch.randn(2, rows, K).bfloat16(), *weights])
    assert asked == [16, 16] and len(runner.ways()) == 2


# Measuring


def parallel_block():
    """One norm, q and a feed-forward block: the activation is written over a product of another segment."""
    return Chain(("x", "w", "b", "wq", "w1", "w2"), ("eps",), (
        RegionStage(("h",), norm("bf16"), ("x", "w", "b"), ("eps",)),
        LinearStage("q", "h", "wq"), LinearStage("z", "h", "w1"),
        RegionStage(("a",), pointwise("gelu", "bf16"), ("z",)), LinearStage("y", "a", "w2")), ("q", "y"))


@pytest.mark.parametrize("way", [BY_LIBRARY, BY_KERNEL], ids=str)
@pytest.mark.parametrize("outputs", [("q", "y"), ("q", "a", "y")], ids=str)
def test_what_a_segment_reads_survives_that_it_is_measured(outputs, way, stream):
    chain = replace(parallel_block(), outputs=outputs)
    shapes = (2, 3, K), (K,), (K,), (K, K), (N, K), (K, N)
    inputs = [torch.randn(shape).mul(0.3).bfloat16() for shape in shapes]
    compared = []

    def decide(question):
        wanted = [x.clone() for x in question.by_library()]
        for _ in range(2):
            compared.append(agree(question.by_library(), wanted) and agree(question.by_kernel(TILE), wanted))
        return way

    runner = ChainRunner(chain, "off", decide)
    assert runner._over[("a",)] == "z"
    for _ in range(2):
        assert is_right(runner, inputs)
    assert compared == [True] * 4
    runner = ChainRunner(chain, "off", two(BY_LIBRARY, BY_KERNEL))  # which tries both in one call
    assert is_right(runner, inputs) and len(stream.launched) > 0


# The activation in the product


def act(op, dtype="bf16", bias="b1", extra=(), outputs=("y",), transposed=False, region=None):
    """ffn, with another activation; `extra`: stages behind."""
    stages = [RegionStage(("h",), norm(dtype), ("x", "w", "b"), ("eps",)),
              LinearStage("z", "h", "w1", bias, transposed),
              RegionStage(("a",), region or pointwise(op, dtype), ("z",)),
              LinearStage("y", "a", "w2", "b2", transposed)]
    return Chain(("x", "w", "b", "w1", "b1", "w2", "b2"), ("eps",), (*stages, *extra), outputs)


def act_inputs(dtype=torch.bfloat16, rows=3, transposed=False):
    inputs = ffn_inputs(dtype)
    inputs[0] = torch.randn(2, rows, K).to(dtype)
    return [x.t().contiguous() if transposed and x.dim() == 2 else x for x in inputs]


class Product:
    """Stands for torch._addmm_activation of CUDA: `raises` instead, if anything."""

    def __init__(self):
        self.calls, self.raises = 0, None

    def __call__(self, bias, rows, weight, *, use_gelu):
        self.calls += 1
        if self.raises is not None:
            raise self.raises
        z = torch.addmm(bias.float(), rows.float(), weight.float())
        return (F.gelu(z, approximate="tanh") if use_gelu else z.relu()).to(rows.dtype)


@pytest.fixture
def product(monkeypatch):
    """As if this were a device whose library has such products."""
    product = Product()
    monkeypatch.setattr(torch, "_addmm_activation", product)
    monkeypatch.setattr(chain_ways, "serves", lambda device: True)
    return product


def take_activated(question):
    return Choice(LIBRARY if question.by_activated is None else ACTIVATED)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", ["relu", "gelu_tanh"])
def test_the_activation_in_the_product(op, dtype, transposed, product, monkeypatch):
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    chain, bounds = act(op, dtype, transposed=transposed), []

    def decide(question):
        if question.by_activated is not None:
            found = question.by_activated()
            bounds.append(question.within_bound(found))
            found[-1][..., -1].add_(0.5)
            bounds.append(question.within_bound(found))
        return take_activated(question)

    for rows in (3, FEW_ROWS):
        runner, inputs = ChainRunner(chain, "off", decide), act_inputs(torch_dtype, rows, transposed)
        bounds.clear()
        for _ in range(3):
            before = product.calls
            tolerance = 1e-5 if dtype == "f32" else 1e-2
            found, wanted = runner(inputs, EPS)[0].float(), evaluate(chain, inputs, EPS)["y"].float()
            assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
        assert bounds == [True, False] and product.calls == before + 1
        assert runner.ways()[0] == f"part 1 of 2, up to {512 if rows > 3 else 8} rows: {ACTIVATED}"
        with monkeypatch.context() as patched:
            settle_nothing(patched)
            runner(inputs, EPS)
        assert product.calls == before + 2


def test_the_real_product_with_relu(monkeypatch):
    """On a CPU PyTorch's own op means the same for relu."""
    monkeypatch.setattr(chain_ways, "serves", lambda device: True)
    runner = ChainRunner(act("relu"), "off", take_activated)
    for rows in (3, 2 * FEW_ROWS):
        assert is_right(runner, act_inputs(rows=rows))
    assert any(ACTIVATED in way for way in runner.ways())


def relu_of_a_sum():
    return parse(f"space [*, *, {N}]\nin x: bf16[*, *, {N}]\nv0: bf16 = relu(x)\nv1: bf16 = add(v0, 1.0)\n"
                 f"out v1: bf16 order(0, 1, 2)")


def relu_in_fp32():
    return parse(f"space [*, *, {N}]\nin x: bf16[*, *, {N}]\nv0: f32 = relu(x)\nout v0: f32 order(0, 1, 2)")


@pytest.mark.parametrize("chain", [
    act("gelu"), act("silu"), act("relu", bias=None), act("relu", region=relu_of_a_sum()),
    act("relu", region=parse(pointwise("relu", "bf16").text.replace("order(0, 1, 2)", "order(1, 0, 2)"))),
    act("relu", outputs=("z", "y")), act("relu", "f64"), plain_packed(),
    act("relu", extra=(RegionStage(("s",), pointwise("silu", "bf16"), ("z",)),), outputs=("y", "s")),
    replace(act("relu"), stages=(*act("relu").stages[:2], RegionStage(("a",), relu_in_fp32(), ("z",))),
            outputs=("a",)),
], ids=["gelu", "silu", "no bias", "more behind", "another order", "the product is an output", "f64", "gated",
        "the product is read again", "another dtype"])
def test_what_has_no_such_way(chain, product):
    runner = ChainRunner(chain, "off", take_activated)
    assert not any(ACTIVATED in steps for steps in runner._steps)


def test_the_control_has(product):
    assert [ACTIVATED in steps for steps in ChainRunner(act("relu"), "off")._steps] == [True, False]


def test_where_it_is_not_asked_about(product, monkeypatch):
    asked = []

    def decide(question):
        asked.append(question.by_activated is not None)
        return Choice(LIBRARY)

    monkeypatch.setattr(chain_ways, "serves", chain_activated.serves)  # this CPU
    runner = ChainRunner(act("relu"), "off", decide)
    assert is_right(runner, act_inputs()) and is_right(runner, act_inputs(rows=FEW_ROWS))
    assert asked == [False, False]  # few rows, and about kernels
    serves = {kind: chain_activated.serves(torch.device(kind)) for kind in ("cuda", "cpu", "xpu")}
    assert serves == {"cuda": True, "cpu": False, "xpu": False}
    monkeypatch.setattr(chain_ways, "serves", lambda device: True)
    monkeypatch.delattr(torch, "_addmm_activation")
    runner = ChainRunner(act("relu"), "off", decide)
    asked.clear()
    assert is_right(runner, act_inputs()) and not any(asked)


@pytest.mark.parametrize("light, asked", [(True, [128, 256]), (False, [128])])
def test_for_more_rows_kernels_are_asked_about_where_weights_are_light(light, asked, monkeypatch):
    rows = []

    def decide(question):
        rows.append(question.rows)
        return Choice(LIBRARY)

    heaviest = max(w.numel() * w.itemsize for w in act_inputs())
    monkeypatch.setattr(chain_ways, "LIGHT_BYTES", heaviest if light else 0)
    runner = ChainRunner(act("relu"), "off", decide)
    for half in (SURE_ROWS // 2, SURE_ROWS // 2 + 1, FEW_ROWS // 2 + 1):
        assert is_right(runner, act_inputs(rows=half))  # two of them
    assert list(dict.fromkeys(rows)) == asked


def test_a_value_that_is_not_contiguous_stays_with_the_library(product):
    chain = Chain(("x", "w1", "b1"), (), (
        LinearStage("z", "x", "w1", "b1"), RegionStage(("a",), pointwise("relu", "bf16"), ("z",))), ("a",))
    asked = []
    runner = ChainRunner(chain, "off", lambda question: asked.append(question.by_activated) or take_activated(
        question))
    weights = torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    for x in (torch.randn(2, 3, 2 * K).bfloat16()[..., :K], torch.randn(2, 3, K).bfloat16()):
        assert is_right(runner, (x, *weights), ())
    assert asked[0] is None and asked[1] is not None and product.calls == 1


def test_gradients_are_eagers(product):
    runner, inputs = ChainRunner(act("gelu_tanh"), "off", take_activated), act_inputs()
    call = chain_call(runner.chain, runner=runner)
    call(*inputs, *EPS)
    assert product.calls == 1
    inputs[3].requires_grad_()
    call(*inputs, *EPS).sum().backward()
    assert inputs[3].grad is not None and product.calls == 1


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_product_that_fails_in_a_call(when, product, monkeypatch):
    """That call's results are eager's, one warning says so, and nobody tries it again."""
    monkeypatch.delenv("ASCEND_LN_FUSE_STRICT", raising=False)
    runner, inputs = ChainRunner(act("gelu_tanh"), "off", take_activated), act_inputs()
    if when == "later":
        for _ in range(3):
            assert is_right(runner, inputs)
        assert runner._bound
    product.raises = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")
    with pytest.warns(RuntimeWarning, match=r"linear -> gelu_tanh.*: RuntimeError: CUDA error: CUBLAS_S"):
        assert is_right(runner, inputs)
    assert not runner._bound
    failed = product.calls
    for _ in range(3):
        assert is_right(runner, inputs)
    assert product.calls == failed and not any(ACTIVATED in way for way in runner.ways())


@pytest.mark.parametrize("error, strict", [
    (torch.OutOfMemoryError("CUDA out of memory"), "0"), (RuntimeError("no such algorithm"), "1"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "0")], ids=repr)
def test_what_a_failing_product_does_not_hide(error, strict, product, monkeypatch):
    monkeypatch.setenv("ASCEND_LN_FUSE_STRICT", strict)
    runner, inputs = ChainRunner(act("relu"), "off", take_activated), act_inputs()
    runner(inputs, EPS)
    product.raises = error
    with pytest.raises(type(error), match=re.escape(str(error))):
        runner(inputs, EPS)


@pytest.mark.parametrize("rows", [3, FEW_ROWS])
def test_it_is_chosen_by_measurement(rows, product, monkeypatch, tmp_path):
    """Through all of it: measured, kept, bound, found again by the next process."""
    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chain_choice, "_store", Store("chains"))
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)

    def timed(call, device):
        before = product.calls
        call()
        return 5.0 if product.calls > before else 9.0

    monkeypatch.setattr(chain_contest, "device_microseconds", timed)
    monkeypatch.setattr(chain_contest, "host_microseconds", timed)
    monkeypatch.setattr(chain_contest, "by_turns", lambda calls, device, seconds: [
        [timed(call, device) / 1e3] for call in calls])
    for _ in range(2):
        runner, inputs = ChainRunner(act("relu"), "off", choose), act_inputs(rows=rows)
        assert is_right(runner, inputs)
        choice = next(iter(runner.choices.values()))
        assert choice.plain == choice.captured == Way(ACTIVATED)
        assert f"{ACTIVATED} 5.0 us and 5.0 us of the host" in runner.ways()[0]
        for name in ("device_microseconds", "host_microseconds", "by_turns"):
            monkeypatch.setattr(chain_contest, name, None)  # nothing can be measured any more
