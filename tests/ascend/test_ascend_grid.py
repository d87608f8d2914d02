"""Every kernel of the grid compiles for Ascend with double buffering, is clean, and computes right.

The whole grid for Ascend910B3, and compilations of a sample for one A3 and one 950.
"""

import pytest
import torch

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")
from grid import (  # noqa: E402
    DTYPES,
    LANES,
    SOC,
    VARIANTS,
    Case,
    cases,
    compiled,
    is_first,
    prove,
    table,
)
from norm_cases import region  # noqa: E402
from pages import read_section  # noqa: E402

from ascend_ln_fuse.kernels.ascend import Outcome, interpret  # noqa: E402
from ascend_ln_fuse.kernels.ascend.evidence import compile_kernel  # noqa: E402
from ascend_ln_fuse.kernels.ascend.traffic import ideal_bytes, launch_bytes, source_bytes  # noqa: E402
from ascend_ln_fuse.kernels.ascend.verify import verify  # noqa: E402
from ascend_ln_fuse.kernels.call import Call  # noqa: E402
from ascend_ln_fuse.kernels.offline import offline  # noqa: E402
from ascend_ln_fuse.kernels.region import parse  # noqa: E402
from ascend_ln_fuse.kernels.source import Tile  # noqa: E402


@pytest.mark.parametrize("case", cases(), ids=str)
def test_proven(case, kernel_cache):
    result = prove(case, kernel_cache)
    assert not result.problem, result.problem
    run = result.verified
    assert run.written == run.ideal_written, "outputs are written once"
    assert run.read >= run.ideal_read


def test_the_grid_is_whole():
    """Of each dtype, D and kind of site the kernel that is launched, and where there are such the ones that
    take rows singly or in pieces."""
    found = set(cases())
    assert {(c.variant, c.dtype, c.lane) for c in found if is_first(c)} == \
        {(v, t, d) for v in VARIANTS for t in DTYPES for d in LANES}
    for lane in LANES:
        shapes = {c.shape for c in found if c.lane == lane and c.variant == "plain"}
        assert ("row" in shapes) == (lane <= 8192) and ("rows" in shapes) == (lane <= 4096)
        assert "columns" in shapes or lane < 3072


def test_profiles_tell_all_kernels_apart():
    """By the last 49 characters of their names, all that a profile shows: of every tile of every case."""
    sources = {}
    for case in cases():
        for one in case.call().candidates(SOC):
            assert sources.setdefault(one.kernel.name[-49:], one.kernel.source) == one.kernel.source
    assert len(sources) == len(set(sources.values())) > len(cases())


@pytest.mark.parametrize("soc", ["Ascend910_9382", "Ascend950PR_9589"])
@pytest.mark.parametrize("lane, dtype", [(80, "f16"), (1024, "f32"), (4096, "bf16"), (12288, "bf16")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_generations(variant, lane, dtype, soc, kernel_cache):
    offline = next(Case(variant, dtype, lane, "").call().candidates(soc))
    planned = compiled(offline, kernel_cache, soc)
    assert planned.outcome is Outcome.PASSED, planned.message
    assert planned.double_buffered
    limit = (248 if soc.startswith("Ascend950") else 192) * 1024
    assert limit // 2 < planned.peak_bytes["ub"] <= limit


# -- bytes

CPU = torch.device("cpu")
ARTICLE = [(50220, 3, 128), (1152, 128, 1)]  # q of a [50220, 9, 128] packed qkv


def article(dtype="bf16"):
    r = region("layer_norm", 128, dtype)
    return Call(r, (ARTICLE[0], (128,), (128,)), (ARTICLE[1], (1,), (1,)), CPU, SOC)


def test_bytes_of_the_articles_shape_are_the_ideal(kernel_cache):
    """Each input once, each output once, the parameters once a program: counted while it runs."""
    kernel = next(article().candidates(SOC))
    planned = compiled(kernel, kernel_cache)
    run = verify(kernel, planned, sizes=kernel.walk.sizes)
    elements = 50220 * 3 * 128
    assert (run.read, run.written) == (run.ideal_read, run.ideal_written)
    assert run.written == 2 * elements and run.right
    # The small launch has 2 programs; that of the model as many as there are vector cores.
    assert run.read == 2 * elements + 2 * 2 * 128 * 2
    assert ideal_bytes(kernel, kernel.grid) == (2 * elements + 40 * 2 * 128 * 2, 2 * elements)
    counted = launch_bytes(kernel, planned)
    assert 0 <= counted - sum(ideal_bytes(kernel, kernel.grid)) < 2 * 96 * 3 * 128 * 2  # ragged tiles


@pytest.mark.parametrize("case", [c for c in cases() if c.dtype == "bf16" and (c.lane, c.shape) in (
    (513, "rows"), (8192, "row"), (8192, "columns"), (12288, "columns"))], ids=str)
def test_bytes_by_the_source_are_those_of_the_module(case, kernel_cache):
    """What `explain` says without a compiler. The model's call has no ragged tile at these D's but 513; a
    gate that is one number a sample goes through the scalar unit, which the module's count leaves out."""
    kernel = case.kernel()
    ours, module = source_bytes(kernel), launch_bytes(kernel, compiled(kernel, kernel_cache))
    assert ours == pytest.approx(module, rel=0.002 if case.lane == 513 else 1e-5)
    read_more = ours / sum(ideal_bytes(kernel, kernel.grid))
    assert 1.3 < read_more < 4 if case.shape == "columns" else read_more == pytest.approx(1, abs=0.05)


COPY = "space [*, *, 128]\nin x: {a}[*, *, 128]\nv0: {b} = cast(x)\nout v0: {b} order(0, 1, 2)"


def run_whole(r, inputs, scalars=()):
    """(outputs, bytes moved) of the kernel for a call, compiled and interpreted."""
    kernel = offline(r, [x.shape for x in inputs], [x.stride() for x in inputs], cores=4)
    arguments, outputs = kernel.arguments(inputs, scalars)
    counters = interpret(compile_kernel(kernel, SOC), None, arguments, (kernel.grid,))
    return outputs, counters.gm_to_ub + counters.ub_to_gm


def test_the_unfused_chain_moves_what_was_predicted():
    """Cast up, slice, norm and cast down as kernels of their own: 28 bytes an element against 4. Each is
    generated and compiled like the fused one."""
    packed = torch.randn(300, 9, 128).bfloat16()
    w, b = torch.randn(2, 128).unbind(0)
    q = packed.view(300, 3, 3, 128).unbind(1)[0]
    (fused,), together = run_whole(region("cast_chain", 128, "bf16"), [q, w, b], [1e-5])

    (wide,), cast = run_whole(parse(COPY.format(a="bf16", b="f32")), [q])
    spread = torch.zeros(300, 9, 128)
    spread.view(300, 3, 3, 128)[:, 0] = wide
    (dense,), copy = run_whole(parse(COPY.format(a="f32", b="f32")), [spread.view(300, 3, 3, 128)[:, 0]])
    (normed,), norm = run_whole(region("layer_norm", 128, "f32"), [dense, w, b], [1e-5])
    (narrow,), back = run_whole(parse(COPY.format(a="f32", b="bf16")), [normed])
    assert torch.equal(narrow, fused)
    elements, parameters = q.numel(), 4 * 2 * 128 * 4
    assert together == 4 * elements + parameters
    assert (cast, copy, norm, back) == (6 * elements, 8 * elements, 8 * elements + parameters, 6 * elements)


# -- the planner's memory model

RMS_RESIDUAL = """\
space [*, *, {D}]
in x: bf16[*, *, {D}]
in r: bf16[*, *, {D}]
in w: bf16[{D}]
scalar eps
h: bf16 = add(x, r)
v0: bf16 = rms_norm(h, w, eps)
out h: bf16 order(0, 1, 2)
out v0: bf16 order(0, 1, 2)"""
MODULATE = """\
space [*, *, {D}]
in x: bf16[*, *, {D}]
in scale: bf16[*, 1, {D}]
in shift: bf16[*, 1, {D}]
scalar eps
v0: bf16 = layer_norm(x, none, none, eps)
v1: bf16 = add(scale, 1.0)
v2: bf16 = mul(v0, v1)
v3: bf16 = add(v2, shift)
out v3: bf16 order(0, 1, 2)"""
#: D -> rows of handwritten kernels that were found to keep double buffering on a 910B3 (bf16).
FITS = {
    "layer_norm": {128: 96, 1024: 12, 3072: 3, 4096: 2, 8192: 1},
    "rms residual": {128: 64, 1024: 8, 3072: 3, 4096: 2, 8192: 1},
    "modulate": {1152: 8, 1536: 8, 3072: 3, 4096: 2},
}


def planned_call(kind, lane):
    r = region("layer_norm", lane, "bf16") if kind == "layer_norm" else \
        parse({"rms residual": RMS_RESIDUAL, "modulate": MODULATE}[kind].format(D=lane))
    sizes = (4, 8000, lane)
    shapes = tuple(tuple(1 if d == 1 else sizes[3 - len(x.dims) + i] for i, d in enumerate(x.dims))
                   for x in r.inputs)
    strides = tuple((s[1] * lane, lane, 1) if len(s) == 3 else (1,) for s in shapes)
    return Call(r, shapes, strides, CPU, SOC)


@pytest.mark.parametrize("kind, lane, rows", [(k, d, n) for k, v in FITS.items() for d, n in v.items()])
def test_rows_that_are_known_to_fit_are_used(kind, lane, rows, kernel_cache):
    kernel = next(planned_call(kind, lane).candidates(SOC))
    assert kernel.kernel.tile.cols == lane and kernel.kernel.tile.rows >= 0.8 * rows
    planned = compiled(kernel, kernel_cache)
    assert planned.outcome is Outcome.PASSED and planned.double_buffered


def test_more_rows_than_planned_are_too_many():
    """The limit is real: a quarter more rows, and the compiler drops double buffering or gives up."""
    call = planned_call("layer_norm", 128)
    rows = [96, 112, 120, 512]
    found = [compile_kernel(offline(call.region, call.shapes, call.strides, tile=Tile(n, 128)), SOC)
             for n in rows]
    assert [x.outcome for x in found[:1] + found[-1:]] == [Outcome.PASSED, Outcome.OVERFLOW]
    assert Outcome.DEGRADED in [x.outcome for x in found[1:3]]
    assert "ub overflow" in found[-1].message


# -- the page


def test_the_table_of_the_page_is_what_the_compiler_says(kernel_cache):
    """A row of it, made again; `make ascend-sweep` makes all."""
    shown = read_section("ascend.md", "grid")
    assert f"{len(cases())} of {len(cases())} kernels compile for {SOC}" in shown
    results = [prove(c, kernel_cache) for c in cases() if c.dtype == "bf16" and is_first(c)]
    assert table(results) in shown
