"""Single ops of the interpreter, where whole kernels do not reach the corner."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest

from ascend_ln_fuse.kernels.ascend import cube_ops, interpreter  # noqa: F401  (fills the op table)
from ascend_ln_fuse.kernels.ascend.counters import Counters
from ascend_ln_fuse.kernels.ascend.effects import Dataflow
from ascend_ln_fuse.kernels.ascend.memory import InterpreterError, MemRef, Storage
from ascend_ln_fuse.kernels.ascend.mlir import Op, Value, parse_generic
from ascend_ln_fuse.kernels.ascend.op_table import OPS, UnknownOp

GM = "#hivm.address_space<gm>"


def run(name, operands, result_type, **properties):
    """The result of one op; operands are (value, type) pairs."""
    values = [Value(f"%{i}", type_, i) for i, (_, type_) in enumerate(operands)]
    result = Value("%r", result_type, len(values))
    step = OPS[name](Op(name, values, [result], properties))
    core = SimpleNamespace(registers=[value for value, _ in operands] + [None])
    step(core)
    return core.registers[-1]


@pytest.mark.parametrize(
    "name, operands, type_, expected",
    [
        ("arith.extsi", [(1, "i1")], "i64", -1),
        ("arith.extui", [(1, "i1")], "i64", 1),
        ("arith.extui", [(-1, "i8")], "i32", 255),
        ("arith.trunci", [(2**32 + 5, "i64")], "i32", 5),
        ("arith.index_cast", [(3, "index")], "i1", 1),
        ("arith.addi", [(2**31 - 1, "i32"), (1, "i32")], "i32", -(2**31)),
        ("arith.muli", [(2**16, "i32"), (2**16, "i32")], "i32", 0),
        ("arith.divsi", [(-7, "i32"), (2, "i32")], "i32", -3),
        ("arith.remsi", [(-7, "i32"), (2, "i32")], "i32", -1),
        ("arith.divui", [(-2, "i32"), (2, "i32")], "i32", 2**31 - 1),
        ("arith.ceildivsi", [(7, "i32"), (2, "i32")], "i32", 4),
        ("arith.addf", [(1.0, "f32"), (2.0**-30, "f32")], "f32", 1.0),
        ("arith.mulf", [(1e30, "f32"), (1e30, "f32")], "f32", math.inf),
        ("arith.divf", [(-1.0, "f32"), (0.0, "f32")], "f32", -math.inf),
        ("arith.truncf", [(1.00390625, "f32")], "bf16", 1.0),
        ("arith.maxnumf", [(math.nan, "f32"), (2.0, "f32")], "f32", 2.0),
        ("arith.select", [(0, "i1"), (5, "i32"), (6, "i32")], "i32", 6),
    ],
)
def test_scalars(name, operands, type_, expected):
    assert run(name, operands, type_) == expected


def test_nan_stays_nan():
    assert math.isnan(run("arith.maximumf", [(math.nan, "f32"), (2.0, "f32")], "f32"))
    assert math.isnan(run("arith.divf", [(0.0, "f32"), (0.0, "f32")], "f32"))


def test_division_by_zero_is_an_error():
    with pytest.raises(InterpreterError, match="division by zero"):
        run("arith.divsi", [(1, "i32"), (0, "i32")], "i32")


@pytest.mark.parametrize(
    "predicate, a, b, expected",
    [(2, -1, 1, True), (6, -1, 1, False), (8, -1, 1, True), (0, 4, 4, True)],
)  # slt, ult, ugt, eq
def test_integer_comparison(predicate, a, b, expected):
    operands = [(a, "i32"), (b, "i32")]
    assert run("arith.cmpi", operands, "i1", predicate=f"{predicate} : i64") is expected


def test_float_constants_given_by_their_bits():
    assert run("arith.constant", [], "f32", value="0xFF800000 : f32") == -math.inf
    assert run("arith.constant", [], "bf16", value="0x7F80 : bf16") == math.inf
    assert run("arith.constant", [], "i1", value="true") == 1


def memref(offset=0, sizes=(4, 8), strides=(8, 1), base=0):
    return MemRef(Storage.poisoned(256, "ub", "ub"), "f32", offset, sizes, strides, base)


def view(name, source, type_, sizes, offsets=(0, 0), strides=(1, 1)):
    def array(numbers):
        return f"array<i64: {', '.join(map(str, numbers))}>"

    return run(
        name,
        [(source, "memref<4x8xf32, strided<[8, 1], offset: ?>>")],
        type_,
        operandSegmentSizes="array<i32: 1, 0, 0, 0>",
        static_offsets=array(offsets),
        static_sizes=array(sizes),
        static_strides=array(strides),
    )


def test_reinterpret_cast_counts_from_the_pointer_not_from_the_view():
    result = view("memref.reinterpret_cast", memref(offset=20, base=3), "memref<2xf32>", [2], [5], [1])
    assert (result.offset, result.sizes) == (8, (2,))


def test_subview_steps_and_starts():
    result = view("memref.subview", memref(2), "memref<2x3xf32>", [2, 3], [1, 2], [2, 1])
    assert (result.offset, result.sizes, result.strides) == (2 + 8 + 2, (2, 3), (16, 1))


def test_a_tile_past_the_end_is_empty():
    result = view("memref.subview", memref(), "memref<?x8xf32>", [-5, 8])
    assert result.sizes == (0, 8) and result.tensor().numel() == 0


@pytest.mark.parametrize("type_, strides", [("strided<[8]>", (8,)), ("strided<[1]>", (1,))])
def test_dropped_unit_dims_are_told_apart_by_their_strides(type_, strides):
    assert view("memref.subview", memref(), f"memref<1xf32, {type_}>", [1, 1]).strides == strides


def test_attributes_that_are_not_modelled_are_refused():
    types = [f"memref<8xf32, {GM}>", "memref<8xf32, #hivm.address_space<ub>>"]
    operands = [Value("%0", types[0], 0), Value("%1", types[1], 1)]
    with pytest.raises(UnknownOp, match=r"hivm\.hir\.load: init_out_buffer"):
        OPS["hivm.hir.load"](Op("hivm.hir.load", operands, [], {"init_out_buffer": "true"}))


def test_a_flag_goes_from_one_kind_of_core_to_the_other():
    def sync(core, word):
        properties = {"static_flag_id": "3 : i64", "operandSegmentSizes": "array<i32: 0, 0>"}
        OPS[f"hivm.hir.sync_block_{word}"](Op(f"hivm.hir.sync_block_{word}", [], [], properties))(core)

    def core(is_cube, sub_block=0):
        def wait_until(condition, what):
            if not condition():
                raise InterpreterError(f"blocked on {what}")

        return SimpleNamespace(
            is_cube=is_cube,
            sub_block=sub_block,
            sub_blocks=2,
            signals=signals,
            counters=Counters(),
            wait_until=wait_until,
        )

    signals = Counter()
    cube, vectors = core(True), [core(False, 0), core(False, 1)]
    sync(cube, "set")
    with pytest.raises(InterpreterError, match="blocked on flag 3"):
        sync(cube, "wait")  # its own flag is not for itself
    for vector in vectors:
        sync(vector, "wait")
    with pytest.raises(InterpreterError):
        sync(vectors[0], "wait")  # each wait takes the flag away
    sync(vectors[0], "set")
    with pytest.raises(InterpreterError):
        sync(cube, "wait")  # it waits for both
    sync(vectors[1], "set")
    sync(cube, "wait")


def test_a_loop_that_never_runs_is_not_live():
    text = """
"builtin.module"() ({
  "func.func"() <{sym_name = "k"}> ({
  ^bb0(%arg0: index):
    %0 = "arith.constant"() <{value = 7 : index}> : () -> index
    %1 = "arith.constant"() <{value = 7 : index}> : () -> index
    "scf.for"(%0, %1, %arg0) ({
    ^bb0(%arg1: index):
      "test.dead"() : () -> ()
    }) : (index, index, index) -> ()
    "scf.for"(%0, %arg0, %arg0) ({
    ^bb0(%arg1: index):
      "test.live"() : () -> ()
    }) : (index, index, index) -> ()
    "func.return"() : () -> ()
  }) : () -> ()
}) : () -> ()
"""
    places = Dataflow(parse_generic(text).funcs["k"]).places
    live = {place.op.name: place.is_live for place in places}
    assert not live["test.dead"] and live["test.live"]
