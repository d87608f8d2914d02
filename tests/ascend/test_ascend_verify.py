"""`check --verify` finds kernels that are wrong: each is a right one with a mistake in its source, compiled
and run like it."""

import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")
from grid import SOC, Case, cases, compiled  # noqa: E402

from ascend_ln_fuse.kernels.ascend import evidence, samples  # noqa: E402
from ascend_ln_fuse.kernels.ascend.conditioning import Conditioning  # noqa: E402
from ascend_ln_fuse.kernels.ascend.evidence import check_calls, compile_kernel  # noqa: E402
from ascend_ln_fuse.kernels.ascend.memory import InterpreterError  # noqa: E402
from ascend_ln_fuse.kernels.ascend.samples import edge_calls, far_call, row_kinds, small_call  # noqa: E402
from ascend_ln_fuse.kernels.ascend.verify import ORDINARY, _judge, verify  # noqa: E402
from ascend_ln_fuse.kernels.call import Call  # noqa: E402
from ascend_ln_fuse.kernels.offline import offline  # noqa: E402
from ascend_ln_fuse.kernels.region import parse  # noqa: E402
from ascend_ln_fuse.kernels.source import Tile  # noqa: E402

#: Norm -> kind of site of the grid.
SITES = {"layer_norm": "plain", "rms_norm": "RMS"}


def kernel_of(norm, dtype, lane, shape="rows"):
    return Case(SITES[norm], dtype, lane, shape).kernel()


def mutated(kernel, *edits):
    """`kernel` with (pattern, replacement) applied to its source, each at least once."""
    source, name = kernel.kernel.source, kernel.kernel.name
    for pattern, replacement in edits:
        source, count = re.subn(pattern, replacement, source)
        assert count, f"{pattern} is not in\n{source}"
    return replace(kernel, kernel=replace(
        kernel.kernel, name=f"{name}_wrong", source=source.replace(name, f"{name}_wrong")))


def run(kernel, scalars=(1e-5,)):
    planned = compile_kernel(kernel, SOC)
    assert planned.ok, planned.message
    return verify(kernel, planned, scalars=scalars)


def share_of(lane):
    return re.escape(f"{1.0 / lane!r}")


def mistakes(norm, lane):
    """Name -> edits of a kernel that holds whole rows."""
    share = share_of(lane)
    square = "x" if norm == "rms_norm" else "C_v0"
    mean = f"(tl.sum(x, axis=1)[:, None] * {1.0 / lane!r})"
    of_squares = [(rf"tl\.sum\({square} \* {square}", "tl.sum(x * x"),
                  (rf"(SQUARES_v0 \* {share}) \+", rf"\1 - {mean} * {mean} +")]
    return {
        "eps ten times too large": [(r"\+ eps", "+ 10.0 * eps")],
        "eps ten times too small": [(r"\+ eps", "+ 0.1 * eps")],
        "eps added to the deviation": [(rf"tl\.sqrt\(SQUARES_v0 \* {share} \+ eps\)",
                                        rf"(tl.sqrt(SQUARES_v0 * {1.0 / lane!r}) + eps)")],
        "D-1 for D": [(rf"SQUARES_v0 \* {share}", f"SQUARES_v0 * {1 / (lane - 1)!r}")],
        "E[x^2] - mean^2": of_squares,
        "a weight left out": [(r" \* w\b", "")],
    }


@pytest.mark.parametrize("lane", [128, 1024, 8192])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("norm", SITES)
def test_mistakes_in_the_arithmetic_are_found(norm, dtype, lane, kernel_cache):
    shape = "rows" if lane < 8192 else "row"
    kernel = kernel_of(norm, dtype, lane, shape)
    assert verify(kernel, compiled(kernel, kernel_cache), scalars=(1e-5,)).right
    for name, edits in mistakes(norm, lane).items():
        found = run(mutated(kernel, *edits))
        assert not found.right and found.problem, (name, found)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("norm", SITES)
def test_a_long_row_in_pieces(norm, dtype):
    """12288 columns: one part in 24576 is still found, and so is a second pass that forgets the mean."""
    kernel = kernel_of(norm, dtype, 12288, "columns")
    found = run(mutated(kernel, (rf"(SQUARES_v0 \* ){share_of(12288)}", rf"\g<1>{1 / 12287!r}")))
    assert not found.right, found
    if norm == "layer_norm":
        # The variance as E[x^2] - mean^2: of x in the second pass, and the mean taken off at the end.
        text = kernel.kernel.source
        rstd = r"tl\.maximum\(VAR_v0, 0\.0, propagate_nan=tl\.PropagateNan\.ALL\)" \
            if "VAR_v0" in text else rf"SQUARES_v0 \* {share_of(12288)}"
        found = run(mutated(kernel, (r"C_v0 = x - MEAN_v0\n(\s+(?:SUM|SQUARES))", r"C_v0 = x\n\1"),
                            (rf"tl\.sqrt\({rstd} \+ eps\)",
                             f"tl.sqrt(SQUARES_v0 * {1 / 12288!r} - MEAN_v0 * MEAN_v0 + eps)")))
        assert not found.right, found


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("norm", SITES)
def test_missing_masks_are_found(norm, dtype):
    """Of rows: accesses behind the tensor. Of columns: the next row's values in this row's sums."""
    rows = kernel_of(norm, dtype, 128)
    for edit in [(r"(tl\.load\(A_x.*), mask=ROW_IN, other=0\.0", r"\1"),
                 (r"(tl\.store\(.*), mask=ROW_IN", r"\1")]:
        with pytest.raises(InterpreterError):
            run(mutated(rows, edit))
    case = Case(SITES[norm], dtype, 600, "")
    call = case.call()
    ragged = offline(call.region, call.shapes, call.strides, SOC, tile=Tile(4, 256))
    assert run(ragged).right
    edits = [(r"(tl\.load\(A_x.*)ROW_IN & COL_IN", r"\1ROW_IN")]
    if norm == "layer_norm":
        edits.append((r"tl\.where\(COL_IN, (.*), 0\.0\)", r"\1"))
    for edit in edits:
        try:
            assert not run(mutated(ragged, edit)).right, edit
        except InterpreterError:  # behind the last row
            pass


def test_offsets_of_32_bits_are_found():
    kernel = kernel_of("layer_norm", "bf16", 128)
    with pytest.raises(InterpreterError, match="argument 0: elements -"):
        run(mutated(kernel, (r"ROW_0\.to\(tl\.int64\) \* S_x_", "(ROW_0 * S_x_D.to(tl.int32)) + 0 * S_x_"),
                    (r"S_x_D", re.search(r"S_x_\d", kernel.kernel.source)[0])))


def test_rows_beyond_2_31_elements():
    """They are there, and only what is written takes memory."""
    kernel = kernel_of("layer_norm", "bf16", 128)
    call = far_call(kernel)
    x = call.inputs[0]
    assert x.storage_offset() > 2**31 and x.isfinite().all()
    assert call.outputs[0].isnan().all() and x.shape[0] > 0


# -- tiles

#: Kind of site -> edits that break the walk over its tiles. A gate has a dim that rows do not run along.
WALKS = {
    "plain": [(r"tl\.minimum\(FIRST \+ PER, TILES\)", "tl.minimum(FIRST + 1, TILES)"),
              (r"tl\.minimum\(FIRST \+ PER, TILES\)", "tl.minimum(FIRST + 2, TILES)"),
              (r"FIRST = tl\.program_id\(0\) \* PER", "FIRST = tl.program_id(0)")],
    "modulate": [(r"tl\.minimum\(FIRST \+ PER, TILES\)", "tl.minimum(FIRST + 1, TILES)"),
                 (r"FIRST = tl\.program_id\(0\) \* PER", "FIRST = tl.program_id(0)"),
                 (r"BLOCKS = \((N_.) \+ \d+\) // (\d+)", r"BLOCKS = \1 // \2 + 1"),
                 (r"BLOCKS = \((N_.) \+ \d+\) // (\d+)", r"BLOCKS = tl.maximum((\1 + \2 - 1) // \2, 2)")],
}


@pytest.mark.parametrize("variant, edit", [(v, e) for v, edits in WALKS.items() for e in edits])
def test_mistakes_in_the_walk_over_tiles_are_found(variant, edit):
    """Programs that stop early or begin at the wrong tile, and too many tiles where the tile divides the
    rows, or where there are fewer than it has."""
    found = run(mutated(Case(variant, "bf16", 1024, "rows").kernel(), edit))
    assert found.share == float("inf"), found


def test_tiles_of_a_small_call():
    """The first program has at least three, more than the last; and the last program of a far call two."""
    for case in cases():
        kernel = case.kernel()
        call, rows = small_call(kernel), kernel.kernel.tile.rows
        share, tiles = call.arguments[-1 - len(call.scalars)], call.walk.tiles(rows)
        assert call.grid == 2 and share >= 3 and 2 <= tiles - share < share
        assert rows == 1 or call.walk.rows % rows
        sizes = [edge.walk.rows for edge in edge_calls(kernel)]
        assert not sizes if rows == 1 else sizes[0] % rows == 0 < sizes[1] < rows
        far = far_call(kernel)
        assert far.walk.tiles(rows) - far.arguments[-1 - len(far.scalars)] == 2


# -- numbers that a model adds

NUMBERS = ["add(v0, 0.3)", "sub(v0, 0.3)", "sub(0.3, v0)", "add(v0, s)", "mul(v0, 0.3)", "div(v0, 0.3)"]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("op", NUMBERS)
def test_a_number_is_not_rounded(op, dtype):
    """As on an accelerator; PyTorch on the CPU rounds what is added, and so does a kernel that is wrong."""
    r = parse(f"space [*, 128]\nin x: {dtype}[*, 128]\nscalar eps\nscalar s\n"
              f"v0: {dtype} = rms_norm(x, none, eps)\nz: {dtype} = {op}\nout z: {dtype} order(0, 1)")
    kernel = offline(r, [(4096, 128)], [(128, 1)], SOC)
    assert run(kernel, scalars=(1e-5, 0.3)).right
    if op.startswith(("add", "sub")):
        rounded = torch.tensor(0.3).to({"bf16": torch.bfloat16, "f16": torch.float16}[dtype]).item()
        pattern = r"(z = .*)\bs\b" if "s)" in op else r"(z = .*)\b0\.3\b"
        assert not run(mutated(kernel, (pattern, rf"\g<1>{rounded!r}")), scalars=(1e-5, 0.3)).right


def test_a_number_in_front_of_a_norm_and_one_that_cancels():
    kernel = offline(parse(
        "space [*, 128]\nin x: bf16[*, 128]\nscalar eps\nu: bf16 = add(x, 0.3)\n"
        "v0: bf16 = rms_norm(u, none, eps)\nv1: bf16 = add(v0, 10000.0)\nz: bf16 = sub(v1, 10000.0)\n"
        "out z: bf16 order(0, 1)\nout u: bf16 order(0, 1)"), [(4096, 128)], [(128, 1)], SOC)
    assert run(kernel).right


# -- what follows a norm makes its error larger in some elements than in others

#: Name -> lines from the norm v0 to the output z.
TAILS = {"rsqrt": ["rsqrt(v0)"], "sqrt": ["sqrt(v0)"], "reciprocal": ["reciprocal(v0)"],
         "div": ["div(u, v0)"], "a pole elsewhere": ["sub(v0, 0.5)", "reciprocal(t0)"]}


def with_tail(norm, tail, dtype):
    """A norm of 128 columns with weight (and bias), then `tail`."""
    inputs = {"x": "[*, 128]", "w": "[128]", "b": "[128]", "u": "[*, 128]"}
    first = f"{norm}(x, w, b, eps)" if norm == "layer_norm" else f"{norm}(x, w, eps)"
    text = " ".join([first, *TAILS[tail]])
    used = [name for name in inputs if re.search(rf"\b{name}\b", text)]
    names = ["v0", *(f"t{i}" for i in range(len(TAILS[tail]) - 1)), "z"]
    region = parse("\n".join([
        "space [*, 128]", *(f"in {name}: {dtype}{inputs[name]}" for name in used), "scalar eps",
        *(f"{name}: {dtype} = {op}" for name, op in zip(names, [first, *TAILS[tail]], strict=True)),
        f"out z: {dtype} order(0, 1)"]))
    shapes = [(4096, 128) if "*" in inputs[name] else (128,) for name in used]
    return offline(region, shapes, [torch.empty(shape).stride() for shape in shapes], SOC)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("norm", SITES)
def test_a_right_kernel_next_to_a_pole(norm, tail, dtype, kernel_cache):
    """Whatever the numbers are. The error of a norm in fp32 is carried on up to a million times larger."""
    kernel = with_tail(norm, tail, dtype)
    planned = compiled(kernel, kernel_cache)
    for seed in range(0, 10_000, 1000):
        found = verify(kernel, planned, scalars=(1e-5,), seed=seed)
        assert found.right and found.share < 0.8, (seed, found)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("norm", SITES)
def test_mistakes_next_to_a_pole_are_found(norm, tail, dtype):
    kernel = with_tail(norm, tail, dtype)
    for name, edits in mistakes(norm, 128).items():
        found = run(mutated(kernel, *edits))
        assert not found.right and found.problem, (name, found)
    with pytest.raises(InterpreterError):
        run(mutated(kernel, (r"(tl\.load\(A_x.*), mask=ROW_IN, other=0\.0", r"\1")))


# -- what is compared with what


def judge(ours, low=None, kind=ORDINARY):
    low = torch.ones(2, 4) if low is None else low
    true = low.double()
    zeros = torch.zeros_like(true)
    return _judge("rows", kind, ours, low, true, Conditioning(zeros, zeros, zeros.bool()), 1.0, 1)[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(bad):
    one, all_of_them = torch.ones(2, 4), torch.full((2, 4), bad)
    one[1, 2] = bad
    assert judge(torch.ones(2, 4)).right
    for ours in (one, all_of_them):
        assert not judge(ours).right and judge(ours).share == float("inf")
        assert not judge(torch.ones(2, 4), low=ours).right
        assert judge(ours, low=ours).right
    assert judge(all_of_them, low=all_of_them).blank and not judge(one, low=one).blank
    assert not judge(torch.full((2, 4), float("inf")), low=torch.full((2, 4), float("nan"))).right


def test_results_at_the_end_of_the_range():
    """A right kernel may round to infinity where PyTorch does not, or the other way round; of the same sign,
    and only there."""
    true = torch.tensor([[65510.0, -65510.0, 1.0, 2.0]], dtype=torch.float64)
    still = torch.zeros_like(true)
    carried = Conditioning(still, still + torch.tensor([100.0, 100.0, 0.0, 0.0]), still.bool())
    inf = float("inf")

    def judged(ours, low):
        halves = (torch.tensor([row]).half() for row in (ours, low))
        return _judge("rows", ORDINARY, *halves, true, carried, 1.0, 1)[0].right

    assert judged([inf, -inf, 1, 2], [65504.0, -65504.0, 1, 2])
    assert judged([65504.0, -65504.0, 1, 2], [inf, -inf, 1, 2])
    assert not judged([-inf, -65504.0, 1, 2], [65504.0, -65504.0, 1, 2])
    assert not judged([float("nan"), -65504.0, 1, 2], [65504.0, -65504.0, 1, 2])
    assert not judged([65504.0, -65504.0, inf, 2], [65504.0, -65504.0, 1, 2])


def test_a_kernel_that_writes_nan_in_one_row():
    found = run(mutated(kernel_of("layer_norm", "f32", 128),
                        (r"C_v0 \* RSTD_v0", "C_v0 * RSTD_v0 / tl.where(RSTD_v0 > 316.0, 0.0, 1.0)")))
    assert found.share == float("inf") and not found.right


def test_nothing_to_compare_is_not_right():
    kernel = offline(parse("space [*, 128]\nin x: f32[*, 128]\nscalar eps\nv0: f32 = rms_norm(x, none, eps)\n"
                           "v1: f32 = mul(v0, inf)\nv2: f32 = mul(v1, 0.0)\nout v2: f32 order(0, 1)"),
                     [(300, 128)], [(128, 1)], SOC)
    found = run(kernel)
    assert found.blank == "output v2, rows with ordinary" and not found.right


# -- the model's own numbers


def test_rows_are_made_for_the_eps_of_the_call():
    kernel = kernel_of("layer_norm", "f32", 128)
    deviations = []
    for eps in (1e-3, 1e-12):
        call = small_call(kernel, scalars=(eps,))
        assert call.scalars == [eps] and call.arguments[-1] == eps
        place = [k.name for k in call.kinds].index(f"variance of the size of eps ({eps:g})")
        rows = call.inputs[0].select(1, 0) if call.axis == 0 else call.inputs[0][0]
        deviations.append(rows[place::len(call.kinds)].std().item())
    assert deviations[0] == pytest.approx(1e-3**0.5, rel=0.3)
    assert deviations[1] == pytest.approx(1e-6, rel=0.3)
    assert [k.name for k in row_kinds([])] == \
        ["ordinary", "mean far above deviation", "equal values", "zeros", "one NaN", "one infinity"]


def test_every_eps_of_a_kernel_is_tried(monkeypatch):
    """Two calls with different eps launch one kernel."""
    seen = []
    monkeypatch.setattr(evidence, "verify", lambda offline, planned, scalars: seen.append(scalars) or
                        verify(offline, planned, scalars=scalars))
    call = Case("plain", "bf16", 64, "").call()
    calls = [replace(call, scalars=(eps,)) for eps in (1e-5, 1e-6, 1e-5)]
    (found,) = check_calls(calls, SOC, run=True)
    assert found.verdict == "ok" and found.calls == 3 and seen == [(1e-5,), (1e-6,)]


# -- verdicts


def test_a_wrong_kernel_fails_with_its_reason(monkeypatch):
    call = Case("plain", "bf16", 64, "").call()
    kernel = next(call.candidates(SOC))
    wrong = mutated(kernel, (r"\+ eps", "+ 10.0 * eps"))
    monkeypatch.setattr(Call, "candidates", lambda self, soc: iter([wrong]))
    (found,) = check_calls([call], SOC, run=True)
    assert found.verdict == "wrong code" and found.failed and "eps (1e-05)" in found.reason
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_run_that_breaks_off_is_json_too(monkeypatch):
    def breaks(*args, **kwargs):
        raise InterpreterError("a deadlock")

    monkeypatch.setattr(evidence, "verify", breaks)
    (found,) = check_calls([Case("plain", "bf16", 64, "").call()], SOC, run=True)
    assert found.verdict == "wrong code" and "a deadlock" in found.reason
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["error_share"] is None


@pytest.mark.parametrize("soc, rows", [("Ascend950PR_9589", 144), (SOC, 112)])
def test_a_kernel_that_lost_double_buffering(soc, rows, monkeypatch):
    """It is no failure, and it says what it lost."""
    call = Case("plain", "bf16", 128, "").call()
    big = offline(call.region, call.shapes, call.strides, soc, tile=Tile(rows, 128))
    monkeypatch.setattr(Call, "candidates", lambda self, soc: iter([big]))
    (found,) = check_calls([call], soc)
    assert found.verdict == "degraded" and not found.failed and not found.double_buffered
    assert found.reason.startswith("double buffering dropped: ") and len(found.reason) > 40
    # Where there is a smaller tile, a launch on a 950 takes it before it gives double buffering up.
    small = next(Case("plain", "bf16", 128, "rows").call().candidates(soc))
    monkeypatch.setattr(Call, "candidates", lambda self, soc: iter([big, small]))
    (found,) = check_calls([call], soc)
    if soc.startswith("Ascend950"):
        assert found.verdict == "degraded" or found.refused and found.verdict == "ok"


def test_kinds_are_in_every_small_call():
    """Also of a kernel that takes one row a tile."""
    call = small_call(kernel_of("rms_norm", "bf16", 8192, "row"))
    assert call.inputs[0].shape[call.axis] >= len(call.kinds) == len(row_kinds(samples._eps_of(
        call.region, call.scalars)))


# -- what is pointwise behind a chain's products


def activation(word, dtype):
    region = parse(f"space [*, 512]\nin x0: {dtype}[*, 512]\nv0: {dtype} = {word}(x0)\n"
                   f"out v0: {dtype} order(0, 1)")
    return next(Call(region, ((256, 512),), ((512, 1),), torch.device("cpu")).candidates(SOC))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("word", ["tanh", "mish", "silu", "gelu", "gelu_tanh", "relu", "hardswish",
                                  "sigmoid"])
def test_activations_are_right(word, dtype):
    """In fp32 tanh was not, and mish below -5 unseen."""
    found = run(activation(word, dtype), scalars=())
    assert found.right and not found.blank, found.problem


@pytest.mark.parametrize("word, dtype, edit", [
    ("silu", "f32", (r"\(x0\) / \(1\.0 \+ tl\.exp\(-\(x0\)\)\)", "(x0) * tl.exp(x0) / (1.0 + tl.exp(x0))")),
    ("silu", "bf16", (r"\(x0\) / \(1\.0 \+ tl\.exp\(-\(x0\)\)\)", "(x0) * tl.exp(x0) / (1.0 + tl.exp(x0))")),
    ("silu", "f32", (r"tl\.exp\(-\(x0\)\)", "tl.exp(tl.minimum(-(x0), 4.0))")),
    ("silu", "bf16", (r"tl\.exp\(-\(x0\)\)", "tl.exp(tl.minimum(-(x0), 4.0))")),
    ("relu", "bf16", (r", propagate_nan=tl\.PropagateNan\.ALL", "")),
    ("tanh", "f32", (r"2\.0 \* tl\.abs\(x0\)", "2.0 * tl.minimum(tl.abs(x0), 4.0)"))])
def test_mistakes_far_from_zero_are_found(word, dtype, edit):
    """An activation that overflows, saturates or loses NaN is right on ordinary values."""
    assert not run(mutated(activation(word, dtype), edit), scalars=()).right
