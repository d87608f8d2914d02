"""The interpreter: right results on ragged shapes, exact bytes, trouble caught."""

import pytest
import torch
from ascend_kernels import (
    DTYPES,
    LayerNormCase,
    assert_one_ulp,
    make,
    plan_for,
    plan_layer_norm,
    signature,
)

from ascend_ln_fuse.kernels.ascend import interpreter
from ascend_ln_fuse.kernels.ascend.interpreter import interpret
from ascend_ln_fuse.kernels.ascend.memory import InterpreterError, MemRef, OutOfBounds, Storage
from ascend_ln_fuse.kernels.ascend.op_table import OPS, UnknownOp
from ascend_ln_fuse.kernels.ascend.toolchain import ToolchainError, plan

nan = float("nan")


# -------------------------------------------------------------------------------- right results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "S, H, index, programs",
    [(300, 3, 0, 4), (1, 1, 2, 1), (65, 2, 1, 7), (64, 1, 0, 1), (63, 5, 2, 40)],
)
def test_strided_layer_norm(dtype, S, H, index, programs):
    case = LayerNormCase(dtype, S, H, index=index)
    packed = case.packed.clone()
    interpret(plan_layer_norm(dtype), "layer_norm", case.args, (programs,))
    assert_one_ulp(case.out, case.reference)
    assert torch.equal(case.packed, packed), "the input was written"


def test_writes_only_its_part_of_a_packed_output():
    case = LayerNormCase("bf16", S=70)
    packed = torch.full((70, 3, 3, 128), 7.0, dtype=torch.bfloat16)
    out = packed.unbind(1)[1]
    args = [*case.args[:3], out, *case.args[4:8], out.stride(0), out.stride(1), 1e-5]
    interpret(plan_layer_norm("bf16"), None, args, (3,))
    assert_one_ulp(out, case.reference)
    assert (packed[:, 0] == 7).all() and (packed[:, 2] == 7).all()


def test_a_row_does_not_depend_on_the_grid():
    results = []
    for programs in (1, 5):
        case = LayerNormCase("fp32", S=130)
        interpret(plan_layer_norm("fp32"), None, case.args, (programs,))
        results.append(case.out)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_column_tiles(dtype):
    x = (torch.randn(13, 5000, generator=torch.Generator().manual_seed(1)) + 3).to(DTYPES[dtype])
    out = torch.full_like(x, nan)
    planned = plan_for(
        "layer_norm_by_columns", {"x_ptr": f"*{dtype}", "o_ptr": f"*{dtype}"}, {"BS": 4, "BC": 1024}
    )
    interpret(planned, None, [x, out, 13, 5000, 1e-5], (3,))
    assert_one_ulp(out, torch.nn.functional.layer_norm(x.double(), (5000,)))


EXPRESSIONS = {
    "0.5 * x * (1 + tl.erf(x * 0.7071067811865476))": lambda x: torch.nn.functional.gelu(x),
    "x * tl.sigmoid(x)": lambda x: torch.nn.functional.silu(x),
    "1 - 2 / (tl.exp(2 * x) + 1)": torch.tanh,
    "tl.where((x > 0) | (x < -1), x, 2.0)": lambda x: torch.where((x > 0) | (x < -1), x, 2.0),
    "tl.maximum(x, 0.0)": torch.relu,
    "tl.clamp(x, -1.0, 1.0)": lambda x: x.clamp(-1, 1),
    "tl.floor(x)": torch.floor,
    "tl.abs(x) + tl.log(x * x + 1)": lambda x: x.abs() + (x * x + 1).log(),
    "x.to(tl.int32)": torch.trunc,
    "x.to(tl.bfloat16)": lambda x: x.to(torch.bfloat16).double(),
    "tl.sin(x)": torch.sin,
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_pointwise(expression):
    x = torch.randn(1500, generator=torch.Generator().manual_seed(2))
    out = torch.full_like(x, nan)
    fn = make("activation", BS=1024, EXPRESSION=expression)
    interpret(plan(fn, signature("activation", x_ptr="*fp32", o_ptr="*fp32")), None, [x, out, 1500], (2,))
    assert_one_ulp(out, EXPRESSIONS[expression](x.double()))


@pytest.mark.parametrize("rows, BS", [(37, 8), (5, 2)])
def test_interleaved_lanes(rows, BS):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 128, generator=generator).to(torch.bfloat16)
    c, s = torch.randn(2, rows, 64, generator=generator).unbind(0)
    s = s.clone()  # storage of its own
    out = torch.full_like(x, nan)
    pointers = {"x_ptr": "*bf16", "c_ptr": "*fp32", "s_ptr": "*fp32", "o_ptr": "*bf16"}
    interpret(
        plan_for("rotate_pairs", pointers, {"BS": BS, "HALF": 64}),
        None,
        [x, c, s, out, rows],
        (-(-rows // BS),),
    )
    even, odd = x.double()[:, ::2], x.double()[:, 1::2]
    assert_one_ulp(out, torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(1))


def test_boolean_tensors():
    x = torch.randn(1500, generator=torch.Generator().manual_seed(4))
    flag, out = x > 0.3, torch.full_like(x, nan)
    planned = plan_for("choose", {"x_ptr": "*fp32", "flag_ptr": "*i1", "o_ptr": "*fp32"}, {"BS": 1024})
    interpret(planned, None, [x, flag, out, 1500], (2,))
    assert torch.equal(out, torch.where(flag, x, -x))


# ----------------------------------------------------------------------------------- exact counts


@pytest.mark.parametrize("dtype, item", [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_bytes_are_exact(dtype, item):
    case = LayerNormCase(dtype)  # S=300, H=3, D=128
    counters = interpret(plan_layer_norm(dtype), None, case.args, (4,))
    tensor, parameters_per_program = 300 * 3 * 128 * item, 2 * 128 * item
    assert counters.ub_to_gm == tensor
    assert counters.gm_to_ub == tensor + 4 * parameters_per_program
    if dtype == "bf16":
        assert (counters.gm_to_ub, counters.ub_to_gm) == (232_448, 230_400)
    assert set(counters.bytes) == {"GM->UB", "UB->GM"}
    assert counters.peak_bytes == plan_layer_norm(dtype).peak_bytes


def test_instructions_are_exact():
    counters = interpret(plan_layer_norm("bf16"), None, LayerNormCase("bf16", S=256).args, (4,))
    tiles, parameters = 4 * 3, 4 * 2  # full tiles only, so no fill; each program casts g and b
    assert counters.vector_ops == 15 * tiles + parameters
    assert counters.vector_elements == 74_112 * tiles + parameters * 128
    assert counters.vector_barriers == 13 * tiles
    assert (counters.ops["load"], counters.ops["store"]) == (tiles + parameters, tiles)


# ------------------------------------------------------------------------------ trouble is caught


def test_reads_past_the_end_are_caught():
    planned = plan_for("reversed_mask", {"x_ptr": "*fp32", "o_ptr": "*fp32"}, {"BS": 1024})
    x, out = torch.zeros(1500), torch.zeros(1500)
    with pytest.raises(OutOfBounds, match="argument 0: elements 1024 to 2047 of a memory of 1500 f32"):
        interpret(planned, None, [x, out, 1500], (2,))
    padded = torch.ones(2048)[:1500]  # the same kernel is in bounds when the storage goes on
    interpret(planned, None, [padded, torch.zeros(2048)[:1500], 1500], (2,))


def test_a_write_past_the_end_is_caught():
    case = LayerNormCase("bf16", S=64, H=1)
    case.args[3] = torch.zeros(64 * 128 - 1, dtype=torch.bfloat16)
    with pytest.raises(OutOfBounds, match="argument 3"):
        interpret(plan_layer_norm("bf16"), None, case.args, (1,))


def edited(text, old, new, count=1):
    assert old in text
    return text.replace(old, new, count)


def layer_norm_lines(word):
    return [line + "\n" for line in plan_layer_norm("bf16").text.splitlines() if word in line]


def test_a_lost_load_gives_nan():
    text = edited(plan_layer_norm("bf16").text, layer_norm_lines("hivm.hir.load")[-1], "")
    case = LayerNormCase("bf16", S=64, H=1)
    interpret(text, "layer_norm", case.args, (1,))
    assert case.out.isnan().all()


def test_a_wrong_memory_plan_gives_wrong_results():
    # The second parameter's fp32 form is moved onto the first one's: 1024 becomes 256.
    text = edited(plan_layer_norm("bf16").text, "arith.constant 1024 : i64", "arith.constant 256 : i64")
    case = LayerNormCase("bf16", S=64, H=1)
    interpret(text, "layer_norm", case.args, (1,))
    with pytest.raises(AssertionError):
        assert_one_ulp(case.out, case.reference)


def test_a_temporary_buffer_over_a_live_one_gives_nan():
    # The second reduction's 16 KiB of scratch memory are moved onto x - mean.
    text = plan_layer_norm("bf16").text
    text = edited(text, "arith.constant 102432 : i64", "arith.constant 17920 : i64")
    case = LayerNormCase("bf16", S=64, H=1)
    interpret(text, "layer_norm", case.args, (1,))
    assert case.out[:32].isnan().all()


def test_copies_between_different_shapes_are_caught():
    text = plan_layer_norm("bf16").text
    (line,) = [line for line in text.splitlines() if "%subview_20 = " in line]
    wider = edited(line, "[%96, 128]", "[%c64, 128]")
    with pytest.raises(InterpreterError, match=r"store of sizes \[44, 128\] to sizes \[64, 128\]"):
        interpret(edited(text, line, wider), "layer_norm", LayerNormCase("bf16").args, (1,))


def test_padding_on_the_left_is_not_modelled():
    text = edited(plan_layer_norm("bf16").text, "left_padding_num = %c0", "left_padding_num = %c64")
    with pytest.raises(InterpreterError, match="padding on the left"):
        interpret(text, "layer_norm", LayerNormCase("bf16").args, (1,))


def test_a_buffer_past_the_end_of_the_unified_buffer_is_caught():
    text = edited(plan_layer_norm("bf16").text, "arith.constant 137536 : i64", "arith.constant 187536 : i64")
    with pytest.raises(InterpreterError, match="ub: planned up to byte"):
        interpret(text, "layer_norm", LayerNormCase("bf16").args, (1,))


def test_flags_between_pipes_are_paired():
    text = plan_layer_norm("bf16").text
    sets = layer_norm_lines("hivm.hir.set_flag")
    with pytest.raises(InterpreterError, match="nobody set"):
        interpret(edited(text, sets[0], ""), "layer_norm", LayerNormCase("bf16").args, (1,))
    with pytest.raises(InterpreterError, match="still set"):
        interpret(edited(text, sets[0], sets[0] * 2), "layer_norm", LayerNormCase("bf16").args, (1,))


def test_an_unknown_op_is_named(monkeypatch):
    monkeypatch.delitem(OPS, "hivm.hir.vsqrt")
    interpreter._load.cache_clear()
    with pytest.raises(UnknownOp, match=r"hivm\.hir\.vsqrt"):
        interpret(plan_layer_norm("bf16"), None, LayerNormCase("bf16").args, (1,))
    monkeypatch.undo()
    interpreter._load.cache_clear()


def test_an_attribute_that_is_not_modelled_is_named():
    planned = plan_for("arg_max", {"x_ptr": "*fp32", "o_ptr": "*i32"}, {"BS": 16})
    with pytest.raises(UnknownOp, match=r"hivm\.hir\.vreduce"):
        interpret(planned, None, [torch.zeros(16, 64), torch.zeros(16, dtype=torch.int32)], (1,))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda args: args.pop(), "takes 11 arguments, got 10"),
        (lambda args: args.append(1), "takes 11 arguments, got 12"),
        (lambda args: args.__setitem__(0, args[0].to("meta")), "a tensor on meta"),
        (
            lambda args: args.__setitem__(0, args[0].float()),
            r"argument 0: a tensor of torch\.float32",
        ),
        (lambda args: args.__setitem__(0, 1), "argument 0: int for memref"),
        (lambda args: args.__setitem__(4, 2**31), "argument 4: 2147483648 does not fit i32"),
    ],
)
def test_arguments_are_checked(change, message):
    args = LayerNormCase("bf16").args
    change(args)
    with pytest.raises(InterpreterError, match=message):
        interpret(plan_layer_norm("bf16"), None, args, (1,))


@pytest.mark.parametrize("grid", [(0,), (65536,), (1, 1, 1, 1), (-1, -1)])
def test_grids_are_checked(grid):
    with pytest.raises(InterpreterError, match="grid"):
        interpret(plan_layer_norm("bf16"), None, LayerNormCase("bf16").args, grid)


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ToolchainError, match="overflow"):
        interpret(plan_layer_norm("bf16", BS=256), None, [], (1,))
    with pytest.raises(InterpreterError, match="has no kernel other; it has layer_norm"):
        interpret(plan_layer_norm("bf16"), "other", [], (1,))


# ------------------------------------------------------------------------------ cube and vector

SIZES = {"BM": 64, "BN": 64, "BK": 64}


def linear(name, dtype, M=100, N=50, K=200):
    """Runs x @ w.T - rowsum(x) and returns the planned kernel, the result, and the reference."""
    pointers = [part for part in signature(name) if part.endswith("_ptr")]
    planned = plan_for(name, {pointer: f"*{dtype}" for pointer in pointers}, SIZES)
    generator = torch.Generator().manual_seed(5)
    x, w = (
        torch.randn(M, K, generator=generator).to(DTYPES[dtype]),
        torch.randn(N, K, generator=generator).to(DTYPES[dtype]),
    )
    out = torch.full((M, N), nan, dtype=DTYPES[dtype])
    counters = interpret(planned, None, [*[x] * (len(pointers) - 2), w, out, M, N, K], (2,))
    return planned, out, x.double() @ w.double().T - x.double().sum(1, keepdim=True), counters


@pytest.mark.parametrize("dtype", DTYPES)
def test_cube_and_vector_cores_together(dtype):
    _, out, reference, counters = linear("linear_sound", dtype)
    assert_one_ulp(out, reference, small=5e-5)  # fp32 sums of 200 products, magnitude 50
    item = DTYPES[dtype].itemsize
    assert counters.bytes["GM->L1"] == (100 * 200 + 2 * 50 * 200) * item  # w once per program
    assert counters.macs == 100 * 50 * 200  # the ragged tiles multiply no padding


@pytest.mark.parametrize("name", ["linear_shared", "linear_shared_columns"])
def test_the_miscompiled_kernel_gives_nan(name):
    assert linear(name, "bf16")[1].isnan().any()


def test_deadlock_of_cube_and_vector_cores_is_found():
    planned, *_ = linear("linear_sound", "bf16")
    line = next(line for line in planned.text.splitlines() if "sync_block_set" in line)
    x, w, out = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(InterpreterError, match="deadlock"):
        interpret(edited(planned.text, line + "\n", ""), "linear_sound", [x, x, w, out, 64, 64, 64], (1,))


# -------------------------------------------------------------------------------------- memory


def test_booleans_are_packed_on_the_chip():
    storage = Storage.poisoned(8, "ub", "ub")
    bits = torch.tensor([True, False, False, True, True, False, True, False, True, True])
    MemRef(storage, "i1", 3, (10,), (1,)).write(bits)
    assert torch.equal(MemRef(storage, "i1", 3, (10,), (1,)).tensor(), bits)
    assert storage.bytes[0] & 7 == 7 and storage.bytes[2] == 0xFF, "a neighbour was changed"


def test_views_are_bounded_below_too():
    with pytest.raises(OutOfBounds):
        MemRef(Storage.poisoned(64, "ub", "ub"), "f32", -1, (4,), (1,)).tensor()
    with pytest.raises(OutOfBounds):
        MemRef(Storage.poisoned(64, "ub", "ub"), "i1", 510, (3,), (1,)).tensor()
    assert MemRef(Storage.poisoned(64, "ub", "ub"), "f32", 99, (0,), (1,)).tensor().numel() == 0
