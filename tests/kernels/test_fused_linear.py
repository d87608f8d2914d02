"""Segments with matrix products: the kernels through Triton's interpreter, against float64."""

import contextlib
import re
import threading
from dataclasses import replace

import pytest
import torch
from fused_linear_cases import EPS, LAYER_NORM, NAMES, assert_right, case, check, region

from ascend_ln_fuse.kernels import frames, fused_linear_plan
from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile, Projection, Segment
from ascend_ln_fuse.kernels.fused_linear_codegen import generate
from ascend_ln_fuse.kernels.fused_linear_structure import bind
from ascend_ln_fuse.kernels.fused_linear_tiles import (
    FEW,
    LAUNCH_BYTES,
    MANY,
    NARROW_FEW,
    NARROW_MANY,
    VECTOR,
    tiles,
    unsplit,
)
from ascend_ln_fuse.kernels.layout import Unsupported
from ascend_ln_fuse.kernels.reference import TORCH_DTYPES
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.targets import cuda, npu

pytest.importorskip("triton")
from ascend_ln_fuse.kernels.targets import interpreter  # noqa: E402

TARGET = interpreter.target()
DOT = GemmTile(16, 32, 32)
#: One of each kind of kernel, small.
KINDS = {
    "dot": DOT,
    "vector": GemmTile(1, 16, 32, num_stages=1),
    "swapped": replace(DOT, swapped=True),
    "split": replace(DOT, split=3),
    "ahead": replace(DOT, norm_ahead=True),
    "ahead, split vector": GemmTile(1, 16, 64, split=2, norm_ahead=True),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Outputs and what lies between kernels start as NaN: what is not written is seen."""
    monkeypatch.setattr(fused_linear_plan, "allocator", lambda device: (
        lambda size, strides, dtype: torch.full(size, float("nan"), dtype=dtype)))


def runner(segment) -> FusedLinear:
    return FusedLinear(segment, TARGET)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_segments(name, kind):
    """K and N are no multiples of the block, M is ragged; several outer dims that do not merge."""
    one = case(name, 80, 72)
    run = runner(one.segment)
    for outer in ((2, 5), (1, 1)):
        check(run, one.arguments(outer), KINDS[kind])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["gelu", "gated", "qkv"])
def test_large_means(name, dtype, kind):
    one = case(name, 144, 48, dtype)
    run = runner(one.segment)
    for mean in (1.0, 10.0, 100.0, 1000.0):
        check(run, one.arguments((1, 3), mean), KINDS[kind])


@pytest.mark.parametrize("tile", [*VECTOR, *FEW, *MANY, *NARROW_FEW, *NARROW_MANY], ids=str)
def test_every_tile_of_the_tuning_set(tile):
    one = case("gelu", 144, 80)
    run = runner(one.segment)
    outer = (1, 1) if tile.rows == 1 else (1, 19)
    for mean in (0.0, 1000.0):
        for ahead in (False, True):
            check(run, one.arguments(outer, mean), replace(tile, norm_ahead=ahead))


def test_a_norm_on_a_norm_and_values_of_a_row():
    norm = region("in x: X", "in w: L", "in t: T[*, 1]", "scalar eps, eps2", "a: T = mul(x, t)",
                  "n: T = layer_norm(a, w, none, eps)", "g: T = silu(n)", "m: T = rms_norm(g, w, eps2)",
                  "out m: T", "out g: T", lane=40, dtype="bf16")
    segment, x = Segment(norm, (Projection(),)), torch.randn(2, 3, 40).bfloat16()
    args = ([x, torch.randn(40).bfloat16(), torch.randn(3, 1).bfloat16()], [EPS, 1e-3],
            [torch.randn(24, 40).bfloat16()], [None], [], [])
    for tile in KINDS.values():
        check(runner(segment), args, tile)


@pytest.mark.parametrize("op", ["normalize", "l2_norm"])
def test_l2_norms_in_front(op):
    """Rows of zeros among them."""
    for dtype in ("bf16", "f16"):
        norm = region("in x: X", "in w: L", "scalar eps", f"n: T = {op}(x, none, eps)",
                      "m: T = mul(n, 6.0)", "y: T = mul(m, w)", "out y: T", lane=40, dtype=dtype)
        x = torch.randn(2, 5, 40)
        x[0, 1], x[1, 2:4] = 0, x[1, 2:4] * 1e-3
        args = ([x.to(TORCH_DTYPES[dtype]), torch.randn(40).to(TORCH_DTYPES[dtype])],
                [1e-3], [torch.randn(24, 40).to(TORCH_DTYPES[dtype])], [None],
                [], [])
        for tile in KINDS.values():
            check(runner(Segment(norm, (Projection(),))), args, tile)


@pytest.mark.parametrize("shape", [(40,), (7, 40), (2, 1, 3, 40)])
def test_any_number_of_outer_dims(shape):
    args = ([torch.randn(shape).bfloat16()], [], [torch.randn(24, 40).bfloat16()], [None], [], [])
    for tile in KINDS.values():
        check(runner(Segment(None, (Projection(),))), args, tile)


def test_expanded_rows():
    x = torch.randn(40).bfloat16().expand(5, 40)
    args = ([x], [], [torch.randn(24, 40).bfloat16()], [None], [], [])
    for tile in KINDS.values():
        check(runner(Segment(None, (Projection(),))), args, tile)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_past_the_ends_is_used(transposed, kind):
    """Every operand is a view inside NaN."""
    def inside(x: torch.Tensor) -> torch.Tensor:
        around = torch.full([size + 24 for size in x.shape], float("nan")).to(x.dtype)
        view = around[tuple(slice(8, 8 + size) for size in x.shape)]
        return view.copy_(x)

    one = case("conv1d" if transposed else "gelu", 80, 72)
    norm_inputs, eps, weights, biases, _, _ = one.arguments((1, 5))
    weights, biases = list(map(inside, weights)), list(map(inside, biases))
    args = (list(map(inside, norm_inputs)), eps, weights, biases, [], [])
    check(runner(one.segment), args, KINDS[kind])


def test_inf_and_nan_stay_in_their_row():
    one = case("gelu", 80, 72)
    args = one.arguments((1, 5))
    args[0][0][0, 1, 3], args[0][0][0, 2, 4] = float("inf"), float("nan")
    for tile in KINDS.values():
        result, = runner(one.segment)(*args, config=tile)
        assert torch.equal(result.isnan().all(-1)[0], torch.tensor([False, True, True, False, False]))
        assert result[0, [0, 3, 4]].isfinite().all()


def test_no_rows_and_no_features():
    one = case("qkv", 32, 24)
    outputs = runner(one.segment)(*one.arguments((2, 0)))
    assert [x.shape for x in outputs] == [(2, 0, 32), (2, 0, 24), (2, 0, 8), (2, 0, 12)]
    empty, = runner(Segment(None, (Projection(),)))(
        [torch.randn(3, 8).bfloat16()], [], [torch.randn(0, 8).bfloat16()], [None])
    assert empty.shape == (3, 0)


def test_the_first_proposal_runs_without_a_config():
    one = case("gelu", 128, 64)
    for outer in ((1, 1), (1, 4), (1, 20)):
        check(runner(one.segment), one.arguments(outer), None)


def test_one_plan_for_equal_calls():
    one = case("product", 32, 24)
    run = runner(one.segment)
    for outer in ((1, 4), (1, 4), (2, 4)):
        check(run, one.arguments(outer), DOT)
    assert len(run._plans) == 2


def test_threads():
    one = case("product", 32, 24)
    run, errors = runner(one.segment), []

    def work(rows):
        try:
            args = ([torch.randn(1, rows, 32).bfloat16()], *one.arguments((1, 1))[1:])
            check(run, args, DOT)
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# -- the source --------------------------------------------------------------------------------------


def source(name: str, tile: GemmTile, dependent: bool = False) -> str:
    one = case(name, 80, 72)
    bound = bind(one.segment, *(one.arguments((2, 5))[i] for i in (0, 2, 3, 4)))
    return generate(bound.problem, tile, cuda.describe("sm_90", 132), dependent).source


def test_statistics_come_before_the_products():
    text = source("gelu", DOT)
    loop = text[text.index("ACC_0 = "):]
    assert text.index("RSTD_") < text.index("ACC_0 = ") and "tl.sum" not in loop and "tl.dot" in loop


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_blocks_are_powers_of_two(rows):
    """Triton's compiler refuses others; its interpreter does not."""
    one = case("gelu", 80, 72)
    run = runner(one.segment)
    run(*one.arguments((1, rows)), config=KINDS["split"])
    plan, = run._plans.values()
    for launch in (plan.products, plan.reduction):
        sides = [int(side) for side in re.findall(r"tl\.arange\(0, (\d+)\)", launch.source.source)]
        assert sides and all(side & (side - 1) == 0 for side in sides), sides


def test_no_atomics():
    assert all("atomic" not in source(name, tile) for name in NAMES for tile in KINDS.values())


def test_a_name_says_what_the_kernel_does():
    names = {source(name, tile).split("\ndef ")[1].split("(")[0] for name in NAMES for tile in KINDS.values()
             if not tile.norm_ahead}
    assert all(name.startswith(("aln_layer_norm_linear_", "aln_rms_norm_linear_", "aln_linear_"))
               for name in names)
    assert len(names) == len(NAMES) * 4


def test_only_weights_are_touched_before_the_wait():
    text = source("gelu", replace(DOT, prefetch=2), dependent=True)
    before = text[:text.index("gdc_wait()\n", text.index("\ndef "))]
    assert before.count("prefetch.global.L2") == 2
    assert "tl.load" not in before and "tl.store" not in before
    assert "prefetch" not in source("gelu", replace(DOT, prefetch=2)).split("\ndef ")[1]


# -- the tuning set ----------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 16, 17, 128, 256])
@pytest.mark.parametrize("n, k", [(1024, 4096), (16384, 4096), (100, 60), (28672, 8192)])
@pytest.mark.parametrize("joint", [1, 2])
def test_proposals(m, n, k, joint):
    found = tiles(m, n, k, joint, True, 132)
    assert 0 < len(found) <= 6 and len(set(found)) == len(found)
    assert all((tile.rows == 1) == (m == 1) and tile.norm_ahead == (m > 1) for tile in found)
    assert all(tile.split == 1 or k // tile.split >= 1024 for tile in found)


@pytest.mark.parametrize("m, narrow", [(1, 0), (2, 1), (16, 1), (17, 1), (128, 1)])
@pytest.mark.parametrize("n, k", [(1024, 4096), (2048, 8192)])
def test_one_tile_without_a_second_launch(n, k, m, narrow):
    """Beside split ones: more programs than the widest of them has, none of which is known."""
    known, found = tiles(m, n, k, 1, False, 132), unsplit(m, n, k, 1, False, 132)
    assert len(found) == narrow and not set(found) & set(known)
    for tile in found:
        assert tile.split == 1 and tile.cols < min(other.cols for other in known)
        assert tile in (*NARROW_FEW, *NARROW_MANY) and (tile.rows == 16) == (m <= 16)


@pytest.mark.parametrize("m, n, k", [(16, 4096, 1024), (16, 4096, 16384), (128, 1024, 1000), (1, 1024, 4096)])
def test_no_tile_more_where_nothing_is_split_or_launching_is_not_the_time(m, n, k):
    split = any(tile.split > 1 for tile in tiles(m, n, k, 1, False, 132))
    assert split == (2 * n * k > LAUNCH_BYTES) and not unsplit(m, n, k, 1, False, 132)


def test_gated_weights_share_the_narrow_tiles():
    """`n` counts the features of both, of which a tile has its columns each."""
    tile, = unsplit(16, 2048, 4096, 2, False, 132)
    assert tile == unsplit(16, 1024, 4096, 1, False, 132)[0]


# -- refusals ----------------------------------------------------------------------------------------


def arguments(**changes):
    given = {"norm_inputs": [torch.randn(3, 8).bfloat16()], "weights": [torch.randn(4, 8).bfloat16()],
             "biases": [None], "epilogue_inputs": []}
    given.update(changes)
    return [given[name] for name in ("norm_inputs", "weights", "biases", "epilogue_inputs")]


@pytest.mark.parametrize("changes, words", [
    ({"norm_inputs": []}, "norm_inputs: expected 1, got 0"),
    ({"weights": []}, "weights: expected 1, got 0"),
    ({"biases": [None, None]}, "biases: expected 1, got 2"),
    ({"epilogue_inputs": [torch.ones(4)]}, "epilogue_inputs: expected 0, got 1"),
    ({"weights": [torch.randn(8, 4).bfloat16()]}, r"weight 0: expected the shape \(N, 8\), got \(8, 4\)"),
    ({"weights": [torch.randn(4, 8).half()]}, "weight 0: expected bf16, got torch.float16"),
    ({"biases": [torch.ones(4).bfloat16()]}, "bias 0: not declared"),
])
def test_what_does_not_fit_is_named(changes, words):
    given = arguments(**changes)
    with pytest.raises(ValueError, match=words):
        runner(Segment(None, (Projection(),)))(given[0], [], *given[1:])


@pytest.mark.parametrize("changes, words", [
    ({"norm_inputs": [torch.randn(3, 8)], "weights": [torch.randn(4, 8)]}, "products of f32"),
    ({"weights": [torch.randn(4, 16).bfloat16()[:, ::2]]}, "one must be 1"),
    ({"norm_inputs": [torch.randn(3, 16).bfloat16()[:, ::2]]}, "lane stride"),
    ({"norm_inputs": [torch.randn(3, 0).bfloat16()], "weights": [torch.randn(4, 0).bfloat16()]},
     "sums of no elements"),
])
def test_what_no_kernel_serves_has_a_reason(changes, words):
    run, given = runner(Segment(None, (Projection(),))), arguments(**changes)
    assert words in run.supports(*given)
    with pytest.raises(Unsupported, match=words):
        run(given[0], [], *given[1:])


@pytest.mark.parametrize("space, op, words", [
    ("64", "rotate_half", "rotate_half beside matrix products"),
    ("4 x 16", "rotate_pairs", "rotate_pairs beside matrix products"),
    ("4 x 16", "neg", "heads that share an operand"),
])
def test_elements_that_move_along_the_lane(space, op, words):
    """A kernel has pieces of the lane, in which the other half of a rotary embedding is not to be found."""
    head = space.split()[-1]
    norm = parse(f"space [*, {space}]\nin x: bf16[*, 64]\nin cos: bf16[*, {head}]\n"
                 f"n: bf16 = rms_norm(x, none, 1e-05)\nr: bf16 = {op}(n)\ny: bf16 = mul(r, cos)\n"
                 "out y: bf16 order(0, 1)")
    run = runner(Segment(norm, (Projection(),)))
    tensors = [torch.randn(3, 64).bfloat16(), torch.randn(3, int(head)).bfloat16()]
    assert words in run.supports(tensors, [torch.randn(24, 64).bfloat16()], [None], [])


def test_supported_means_no_reason():
    one = case("residual", 16, 24)
    args = one.arguments((2, 3))
    assert runner(one.segment).supports(args[0], args[2], args[3], args[4]) is None


def test_weights_of_two_orientations():
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    run = runner(Segment(None, (Projection(), Projection(transposed=True))))
    assert "some lie along K" in run.supports([x], [w, w], [None, None])
    assert run.supports([x], [w, w.t()], [None, None]) is None  # it is the strides that count


def test_not_on_an_npu_and_not_on_the_cpu():
    given = arguments()
    segment = Segment(None, (Projection(),))
    assert "cube and vector" in FusedLinear(segment, npu.describe("Ascend910B3")).supports(*given)
    assert "CPU" in FusedLinear(segment).supports(*given)


def test_segments_that_have_no_meaning():
    norm = region(*LAYER_NORM, lane=8, dtype="bf16")
    two = region("in y: X", "v0: T = silu(y)", "out v0: T", "out y: T", lane=8, dtype="bf16")
    for build, words in [
        (lambda: Segment(norm, ()), "needs a projection"),
        (lambda: Segment(None, (Projection(),), norm), "pointwise"),
        (lambda: Segment(None, (Projection(),), two), "one output"),
        (lambda: Segment(None, (Projection(), Projection()),
                         region("in y: X", "out y: T", lane=8, dtype="bf16")), "reads every projection"),
    ]:
        with pytest.raises(ValueError, match=words):
            build()


def test_results_do_not_depend_on_the_number_of_calls():
    one = case("qkv", 80, 72)
    args, run = one.arguments((1, 5)), runner(one.segment)
    first = run(*args, config=KINDS["split"])
    for ours, again in zip(first, run(*args, config=KINDS["split"]), strict=True):
        assert torch.equal(ours, again)
    assert_right(one.segment, args, first)


# -- what a launch costs the host --------------------------------------------------------------------


class Gpu:
    """What a launch on GPU 1 asks torch for, without a GPU."""

    def __init__(self, monkeypatch, count: int):
        self.current, self.asked, self.entered, self.launched = 1, 0, [], []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", self.current_device)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: (index, "stream"),
                            raising=False)

    def current_device(self) -> int:
        self.asked += 1
        return self.current

    @contextlib.contextmanager
    def device(self, index):
        self.entered.append(index)
        before, self.current = self.current, index
        yield
        self.current = before

    def plan(self, tile: GemmTile) -> tuple[fused_linear_plan.Plan, list]:
        """A plan whose kernels are compiled, for the tensors that come with it."""
        one = case("gelu", 80, 72)
        norm_inputs, _, weights, biases, _, _ = one.arguments((1, 3))
        bound = bind(one.segment, norm_inputs, weights, biases, [])
        tensors = [*norm_inputs, *weights, *biases]
        plan = fused_linear_plan.Plan(one.segment, bound, tile, cuda.describe("sm_90", 132), tensors)
        plan.device, plan.index, plan.several = torch.device("cuda", 1), 1, torch.cuda.device_count() > 1
        plan.ahead, plan.products, plan.reduction = plan._launches()
        for launch in (plan.ahead, plan.products, plan.reduction):
            if launch is not None:
                launch.function = launch.metadata = None
                launch.launch = lambda *args: self.launched.append((self.current, args[3]))
        plan.ready = True
        return plan, tensors


@pytest.mark.parametrize("count, asked", [(1, 0), (2, 1)])
def test_a_call_asks_once_for_the_current_device(count, asked, monkeypatch):
    """Not for each of its three launches, and not at all on the only GPU; memory comes from the allocator's
    own call, without torch's parser and dispatcher."""
    gpu = Gpu(monkeypatch, count)
    plan, tensors = gpu.plan(replace(DOT, split=2, norm_ahead=True))
    monkeypatch.setattr(torch, "empty", None)
    monkeypatch.setattr(torch, "empty_strided", None)
    plan(tensors, (), [EPS])
    assert gpu.asked == asked and not gpu.entered
    assert gpu.launched == [(1, (1, "stream"))] * 3


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    gpu = Gpu(monkeypatch, 2)
    plan, tensors = gpu.plan(DOT)
    gpu.current = 0
    plan(tensors, (), [EPS])
    assert gpu.entered == [1] and gpu.launched == [(1, (1, "stream"))] and gpu.current == 0


def test_memory_on_a_gpu_comes_from_inductors_call(monkeypatch):
    monkeypatch.undo()
    made = object()
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", made, raising=False)
    assert fused_linear_plan.allocator(torch.device("cuda", 0)) is made
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    assert fused_linear_plan.allocator(torch.device("cuda", 0)) is not made
    x = fused_linear_plan.allocator(torch.device("cpu"))((2, 3), (3, 1), torch.float16)
    assert x.shape == (2, 3) and x.dtype == torch.float16


def test_dynamo_does_not_trace_into_it(monkeypatch):
    """After a graph break in front of it, the frames of a first call are none that Dynamo compiles. Without
    Triton's interpreter, whose own frames are no concern here."""
    monkeypatch.undo()
    monkeypatch.setattr(frames, "_skipped", set())  # other tests had a function of theirs in the module
    monkeypatch.setattr(fused_linear_plan._Interpreted, "__call__", lambda self, tensors, scalars: None)
    one = case("gelu", 80, 72)
    run, arguments = FusedLinear(one.segment, TARGET, self_check="off"), one.arguments((1, 3))
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def model(x):
        y = x + 1
        torch._dynamo.graph_break()
        return run([y, *arguments[0][1:]], *arguments[1:], config=DOT)[0] + 1

    with torch.no_grad():
        model(arguments[0][0])
    assert len(traced) == 2, [str(graph.graph) for graph in traced]
