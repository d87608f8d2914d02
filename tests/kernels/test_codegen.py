"""Generated kernels, run by Triton's interpreter on CPU tensors, against float64."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.launch import launch_facts
from ascend_ln_fuse.kernels.layout import Unsupported, layout
from ascend_ln_fuse.kernels.pointwise import torch_function
from ascend_ln_fuse.kernels.reference import TORCH_DTYPES, reference
from ascend_ln_fuse.kernels.region import NORMS, parse
from ascend_ln_fuse.kernels.source import KernelSource, Tile, load
from ascend_ln_fuse.kernels.targets import cuda, npu
from ascend_ln_fuse.kernels.tiling import ladder

pytest.importorskip("triton")
from ascend_ln_fuse.kernels.targets import interpreter  # noqa: E402

CUDA = cuda.describe("sm_90", 4).interpreted()
NPU = npu.describe("Ascend910B3").interpreted()
RULES = {"cuda": CUDA, "npu": NPU}
LANES = [1, 3, 17, 64, 80, 96, 128, 513, 1024, 3072, 8192]


def make(r, inputs, target, tile=None) -> tuple[KernelSource, object]:
    walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], target.units)
    tile = tile or ladder(r, walk.structure, walk.sizes, target)[0]
    return generate(r, walk.structure, tile, target), walk


def run(r, inputs, scalars, target, tile=None):
    kernel, walk = make(r, inputs, target, tile)
    outputs = [torch.full_like(x, float("nan")) for x in reference(r, inputs, scalars)]
    integers, grid = launch_facts(walk, kernel.tile.rows, target)
    interpreter.run(load(kernel), grid, [*inputs, *outputs, *integers, *scalars])
    return outputs


def check(name, lane, dtype, target, outer=(2, 5), ratio=1.0, tile=None):
    r = region(name, lane, dtype)
    inputs, scalars = inputs_for(r, outer, ratio), scalars_for(r)
    assert_right(r, inputs, scalars, run(r, inputs, scalars, target, tile))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("rules", sorted(RULES))
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "normalize", "l2_norm"])
def test_norms(name, rules, dtype, lane):
    outer = (2, 3) if lane > 1000 else (3, 11)
    for ratio in (1.0, 1000.0):
        check(name, lane, dtype, RULES[rules], outer, ratio)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("rules", sorted(RULES))
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_regions(name, rules, dtype):
    check(name, 96, dtype, RULES[rules], (2, 9))
    check(name, 96, dtype, RULES[rules], (2, 9), tile=Tile(4, 128 if rules == "cuda" else 96))
    check(name, 96, dtype, RULES[rules], (1, 1))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("rows, cols", [(1, 64), (4, 32), (2, 16)])
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_column_passes(name, rows, cols, dtype):
    """D 80 in pieces, with and without a ragged last one."""
    target = CUDA if cols == 64 else NPU
    check(name, 80, dtype, target, (2, 7), ratio=30.0, tile=Tile(rows, cols))


def test_mean_1000_in_column_passes():
    for dtype in ("bf16", "f32"):
        check("layer_norm", 3000, dtype, NPU, (1, 3), 1000.0, Tile(2, 1024))


def test_float64():
    """Runs on GPUs only (tests/gpu): triton-ascend's interpreter refuses the type."""
    r = region("layer_norm", 96, "f64")
    kernel, _ = make(r, inputs_for(r, (2, 5)), cuda.describe("sm_90", 4))
    assert kernel.signature["P_x"] == "*fp64" and kernel.signature["BITS_eps"] == "i64"
    assert "tl.float32" not in kernel.source


@pytest.mark.parametrize("tile", [Tile(4, 128), Tile(2, 32)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_stay_in_their_row(value, tile):
    r = region("layer_norm", 96, "f32")
    inputs = inputs_for(r, (1, 6))
    clean = run(r, inputs, [1e-5], CUDA, tile)[0]
    inputs[0][0, 2, 50] = value
    got = run(r, inputs, [1e-5], CUDA, tile)[0]
    assert got[0, 2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[0, others], clean[0, others])


#: what rows are multiplied by: zeros, below eps, squares that underflow, in fp16 a length that overflows, in
#: fp32 squares that do
EXTREMES = [0.0, 1e-7, 1e-30, 1.0, 1e4, 1e20, 3e38]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("eps", [1e-12, 0.0, 0.5])
@pytest.mark.parametrize("rules, tile", [("cuda", Tile(4, 128)), ("cuda", Tile(1, 32)), ("npu", Tile(4, 96)),
                                         ("npu", Tile(2, 48))], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", ["normalize", "l2_norm"])
def test_lengths_of_every_size(op, dtype, rules, tile, eps, weighted):
    """Zeros, NaN and infinities are where PyTorch has them, and all else is close."""
    r = parse(f"space [*, 96]\nin x: {dtype}[*, 96]\nin w: {dtype}[96]\nscalar eps\n"
              f"v: {dtype} = {op}(x, {'w' if weighted else 'none'}, eps)\nout v: {dtype} order(0, 1)")
    x, w = torch.randn(len(EXTREMES) + 2, 96), torch.rand(96) + 0.5
    x[:len(EXTREMES)] *= torch.tensor(EXTREMES)[:, None]
    x[-2, 7], x[-1, 95] = float("inf"), float("nan")
    inputs = [x.to(TORCH_DTYPES[dtype]), w.to(TORCH_DTYPES[dtype])]
    (got,), (want,) = run(r, inputs, [eps], RULES[rules], tile), reference(r, inputs, [eps])
    assert want.isnan().any() and (want == 0).any()
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(got.dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("tile", [Tile(4, 128), Tile(4, 32)])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_equal_values_are_centred_to_zero(dtype, tile):
    """What rounding leaves of a mean would be blown up by 1/sqrt(eps)."""
    r = region("layer_norm", 96, dtype)
    inputs = inputs_for(r, (1, 6))
    inputs[0][:] = torch.tensor([1000.0, -3.1, 0.0, 7e4 if dtype != "f16" else 6e4, 1.1, 999.0])[:, None]
    assert_right(r, inputs, [1e-5], run(r, inputs, [1e-5], CUDA, tile))


def test_a_lane_of_one_number_per_row():
    r = parse("space [*, 96]\nin x: f32[*, 96]\nin s: f32[*, 1]\nin c: f32[]\na: f32 = mul(s, c)\n"
              "b: f32 = add(a, 1.0)\nv: f32 = rms_norm(x, none, 1e-05)\ny: f32 = mul(v, b)\n"
              "out y: f32 order(0, 1)\nout b: f32 order(0, 1)")
    inputs = [torch.randn(10, 96), torch.randn(10, 1), torch.tensor(0.5)]
    for target in (CUDA, NPU):
        for tile in (Tile(4, 128 if target is CUDA else 96), Tile(1, 32)):
            assert_right(r, inputs, [], run(r, inputs, [], target, tile))


def test_an_expanded_input():
    r = region("layer_norm", 96, "f32")
    _, w, b = inputs_for(r, (1, 1))
    for x in (torch.randn(1, 1, 96).expand(3, 5, 96), torch.randn(3, 1, 96).expand(3, 5, 96)):
        for target in (CUDA, NPU):
            assert_right(r, [x, w, b], [1e-5], run(r, [x, w, b], [1e-5], target))


def test_names_that_python_or_the_source_uses():
    words = ["tl", "if", "lambda", "range", "def", "triton", "int"]
    ins = "\n".join(f"in {w}: f32[*, 8]" for w in words)
    lines = [f"v0: f32 = add({words[0]}, {words[1]})"]
    lines += [f"v{i + 1}: f32 = add(v{i}, {w})" for i, w in enumerate(words[2:])]
    last = f"v{len(words) - 2}"
    r = parse(f"space [*, 8]\n{ins}\nscalar print\n" + "\n".join(lines) +
              f"\nfor: f32 = layer_norm({last}, none, none, print)\nout for: f32 order(0, 1)")
    inputs = [torch.randn(5, 8) for _ in words]
    for target in (CUDA, NPU):
        assert_right(r, inputs, [1e-5], run(r, inputs, [1e-5], target))


# -- the text --------------------------------------------------------------------------------------


def sources():
    for name in TEXTS:
        for target in (CUDA, NPU):
            for lane, tile in ((96, None), (96, Tile(2, 32))):
                r = region(name, lane, "bf16")
                yield make(r, inputs_for(r, (2, 5)), target, tile)[0]


@pytest.mark.parametrize("kernel", list(sources()), ids=lambda k: k.name)
def test_source_rules(kernel):
    text = kernel.source
    assert re.fullmatch(rf"aln_({'|'.join(NORMS)})_[0-9a-f]{{10}}", kernel.name) and len(kernel.name) <= 49
    doc = text.split('"""')[1]
    assert parse(doc.split("\n\n")[0])  # a person finds the region on top
    body = text.split("):\n", 1)[1]
    assert "constexpr" not in text
    assert "break" not in body and "continue" not in body and "libdevice" not in body
    # Scalars only: the operands of // and % are indices and counts, never ROW or COL.
    for line in body.splitlines():
        if "//" in line or "%" in line.split("#")[0]:
            assert not re.search(r"\b(ROW|COL)\b", line), line
    # Masks per dimension, index on the left.
    for mask in re.findall(r"mask=([^,)]*)", body):
        assert re.fullmatch(r"(ROW_IN|COL_IN)( & (ROW_IN|COL_IN))*", mask)
    assert all(len(line) <= 130 for line in text.splitlines())


@pytest.mark.parametrize("name", ["modulate", "cast_chain", "rms_norm"])
def test_loads_first_moves_loads_alone(name):
    r = region(name, 513, "bf16")
    inputs, scalars = inputs_for(r, (2, 5)), scalars_for(r)
    texts, found = [], []
    for loads_first in (False, True):
        tile = Tile(1, 1024, loads_first=loads_first)
        found.append(run(r, inputs, scalars, CUDA, tile))
        texts.append(make(r, inputs, CUDA, tile)[0].source.split("):\n")[1])
    late, first = ([line.split("=")[0] for line in text.splitlines() if "=" in line] for text in texts)
    assert late != first and sorted(late) == sorted(first)
    assert texts[0].index("tl.sum") < texts[0].rindex("tl.load")
    assert texts[1].index("tl.sum") > texts[1].rindex("tl.load")
    for a, b in zip(*found, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_reading_again_changes_no_bit(name, dtype):
    r = region(name, 80, dtype)
    inputs, scalars = inputs_for(r, (2, 5), 100.0), scalars_for(r)
    kept, again = (run(r, inputs, scalars, CUDA, Tile(2, 128, reads_again=x)) for x in (False, True))
    assert_right(r, inputs, scalars, again)
    for a, b in zip(kept, again, strict=True):
        assert a.equal(b)


def test_what_is_read_again_does_not_wait_in_registers():
    r = region("add_norm", 80, "bf16")
    text = make(r, inputs_for(r, (2, 5)), CUDA, Tile(1, 128, reads_again=True))[0].source
    statistics, rest = text.split("# Normalise and store.")
    for part, hint in ((statistics, "evict_last"), (rest, "evict_first")):
        loads = re.findall(r"(\w+) = tl.load\(A_(?:.|\n)*?eviction_policy=\"(\w+)\"", part)
        assert loads == [("x", hint), ("r", hint)]
    assert "tl.store" not in statistics and "tl.sum" not in rest


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_axes_of_the_grid_are_the_dims(dims):
    """The same numbers as by division, whichever dim rows run along."""
    stars = ", ".join(["*"] * dims)
    ones = ", ".join(["1"] * (dims - 1))
    r = parse(f"space [{stars}, 80]\nin x: bf16[{stars}, 80]\nin s: bf16[*, {ones}, 80]\nscalar eps\n"
              f"v: bf16 = layer_norm(x, none, none, eps)\nu: bf16 = mul(v, s)\n"
              f"out u: bf16 order({', '.join(map(str, range(dims + 1)))})")
    outer = (2, 3, 2, 7)[-dims:]
    wide = torch.randn(*(n + 1 for n in outer), 80).bfloat16()  # parts of every dim: none merges
    x = wide[tuple(slice(n) for n in outer)].transpose(0, dims - 1)
    inputs = [x, torch.randn(x.shape[0], *(1,) * (dims - 1), 80).bfloat16()]
    walk = layout(r, [t.shape for t in inputs], [t.stride() for t in inputs])
    assert walk.structure.axes and walk.structure.dims == dims
    flat = replace(walk, structure=replace(walk.structure, axes=False))
    found = []
    for each in (walk, flat):
        for rows in (1, 4):
            kernel = generate(r, each.structure, Tile(rows, 128), CUDA)
            assert ("//" in kernel.source.split("):\n")[1]) == (not each.structure.axes or dims == 4)
            out = torch.full_like(reference(r, inputs, [1e-5])[0], float("nan"))
            integers, grid = launch_facts(each, rows, CUDA)
            assert len(grid) == 3 and (grid[1:] == (1, 1)) == (not each.structure.axes)
            interpreter.run(load(kernel), grid, [*inputs, out, *integers, 1e-5])
            assert_right(r, inputs, [1e-5], [out])
            found.append(out)
    assert found[0].equal(found[2]) and found[1].equal(found[3])


@pytest.mark.parametrize("rows", [1, 4])
def test_known_strides_and_narrow_offsets_change_no_bit(rows):
    """Rows behind one another are walked by literals, in 32 bits, as others are by arguments in 64."""
    r = region("modulate", 80, "bf16")
    inputs = inputs_for(r, (3, 7))
    walk = layout(r, [t.shape for t in inputs], [t.stride() for t in inputs])
    assert walk.structure.narrow and any(x.dense for x in walk.structure.operands)
    told = tuple(replace(x, dense=False) for x in walk.structure.operands)
    found = []
    for structure, stride in ((walk.structure, "tl.int32"),
                              (replace(walk.structure, operands=told, narrow=False), "tl.int64")):
        each = replace(walk, structure=structure)
        kernel = generate(r, structure, Tile(rows, 128), CUDA)
        assert set(re.findall(r"S_\w+: (tl\.\w+)", kernel.source)) == {stride}
        out = torch.full_like(reference(r, inputs, [1e-5])[0], float("nan"))
        integers, grid = launch_facts(each, rows, CUDA)
        interpreter.run(load(kernel), grid, [*inputs, out, *integers, 1e-5])
        assert_right(r, inputs, [1e-5], [out])
        found.append((out, len(integers)))
    assert found[0][0].equal(found[1][0]) and found[0][1] < found[1][1]


def test_same_input_same_text():
    r = region("add_norm", 128, "bf16")
    inputs = inputs_for(r, (2, 5))
    first = make(r, inputs, NPU)[0]
    generate.cache_clear()
    assert make(r, inputs, NPU)[0] == first


def test_rounding_only_where_it_matters():
    r = parse("space [*, 8]\nin x: bf16[*, 8]\na: f32 = cast(x)\nb: bf16 = cast(a)\nc: bf16 = neg(b)\n"
              "d: bf16 = add(c, 1.0)\ne: bf16 = mul(d, d)\nf: bf16 = rms_norm(e, none, 1e-06)\n"
              "out f: bf16 order(0, 1)\nout d: bf16 order(0, 1)")
    text = make(r, [torch.randn(4, 8).bfloat16()], CUDA)[0].source
    assert text.count(".to(tl.bfloat16)") == 3  # d, e; f once, at its store


@pytest.mark.parametrize("text, why", [
    ("in x: f64[*, 8]\nv: f64 = rms_norm(x, none, 1e-06)\nout v: f64 order(0, 1)", "does not compute in f64"),
    ("in x: f32[*, 1]\nin y: f32[*, 8]\nv: f32 = rms_norm(x, none, 1e-06)\nu: f32 = add(v, y)\n"
     "out u: f32 order(0, 1)", "without a lane"),
    ("in x: f32[*, 8]\nin e: f32[8]\nv: f32 = rms_norm(x, none, e)\nout v: f32 order(0, 1)", "eps of v"),
])
def test_unsupported(text, why):
    r = parse(f"space [*, 8]\n{text}")
    inputs = inputs_for(r, (4,))
    with pytest.raises(Unsupported, match=why):
        make(r, inputs, NPU)


def test_a_process_can_interpret_and_compile():
    """The interpreter leaves `triton.language` as it was."""
    import triton.language as tl

    before = {name: vars(tl)[name] for name in ("sum", "load", "program_id", "reduce", "full")}
    check("layer_norm", 64, "f32", CUDA)
    assert {name: vars(tl)[name] for name in before} == before
    assert "__index__" not in vars(tl.tensor)


def test_importing_does_not_import_triton():
    code = ("import sys; import ascend_ln_fuse.kernels.launch, ascend_ln_fuse.kernels.targets.interpreter;"
            "assert 'triton' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("word", ["tanh", "mish", "silu", "sigmoid", "hardswish"])
def test_activations_keep_their_digits(word):
    """Relative to each value, from -15 to 15: where a difference cancels, a small result has none left."""
    r = parse(f"space [*, 1024]\nin x: f32[*, 1024]\nv0: f32 = {word}(x)\nout v0: f32 order(0, 1)")
    x = torch.linspace(-15, 15, 4096).view(4, 1024)
    got, = run(r, [x], [], CUDA)
    least = 2.0**-24 if word == "hardswish" else 0.0  # x + 3 next to 0
    torch.testing.assert_close(got.double(), torch_function(word)(x.double()), rtol=2.0**-20, atol=least)


@pytest.mark.parametrize("dtype, instructions", [("bf16", ["rsqrt.approx.ftz.f32"]),
                                                 ("f32", ["div.rn.f32", "div.rn.f32", "sqrt.rn.f32"])])
def test_instructions_are_written_for_nvidia_alone(dtype, instructions):
    """They are what Triton would take from libdevice, which takes long to link."""
    r = region("layer_norm", 96 if dtype == "f32" else 128, dtype)
    inputs, gpu = inputs_for(r, (2, 5)), cuda.describe("sm_90", 4)
    written, spelled = (make(r, inputs, target)[0].source for target in (gpu, replace(gpu, ptx=False)))
    assert sorted(re.findall(r'elementwise\("([\w.]+) ', written)) == instructions
    assert not re.search(r"tl\.(rsqrt|div_rn|sqrt_rn)", written) and not re.search("elementwise", spelled)
    assert len(re.findall(r"tl\.(?:rsqrt|div_rn|sqrt_rn)", spelled)) == len(instructions)
