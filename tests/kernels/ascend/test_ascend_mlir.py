"""The reader of generic MLIR."""

import pytest

from ascend_ln_fuse.kernels.ascend.core_ops import affine_function, wrap
from ascend_ln_fuse.kernels.ascend.mlir import (
    MlirError,
    attribute_dict,
    enum_word,
    int_array,
    memref_type,
    parse_generic,
    split_top_level,
)

TWO_LOOPS = """
"builtin.module"() ({
  "func.func"() <{function_type = (index) -> (), sym_name = "k"}> ({
  ^bb0(%arg0: index):
    %0 = "arith.constant"() <{value = 0 : index}> : () -> index
    "scf.for"(%0, %arg0, %arg0) ({
    ^bb0(%arg1: index):
      %1 = "arith.addi"(%arg1, %0) : (index, index) -> index
      "scf.yield"() : () -> ()
    }) {a.flag, note = "a, {b"} : (index, index, index) -> ()
    %2:2 = "scf.for"(%0, %arg0, %arg0, %0, %0) ({
    ^bb0(%arg1: index, %arg2: index, %arg3: index):
      %1 = "arith.muli"(%arg1, %0) : (index, index) -> index
      "scf.yield"(%1, %arg3) : (index, index) -> ()
    }) : (index, index, index, index, index) -> (index, index)
    "test.use"(%2#1) : (index) -> ()
    "func.return"() : () -> ()
  }) {hacc.function_kind = #hacc.function_kind<DEVICE>} : () -> ()
}) {dlti = #spec<"UB_SIZE", 1572864 : i32>} : () -> ()
"""


def test_names_of_sibling_regions_are_different_values():
    module = parse_generic(TWO_LOOPS)
    ops = module.funcs["k"].entry.ops
    assert [op.name for op in ops] == [
        "arith.constant",
        "scf.for",
        "scf.for",
        "test.use",
        "func.return",
    ]
    first, second = (loop.regions[0][0].ops[0] for loop in ops[1:3])
    assert first.result.name == second.result.name == "%1" and first.result is not second.result
    slots = [
        value.slot for op in module.funcs["k"].op.walk() for value in op.results if op.name != "func.func"
    ]
    assert len(slots) == len(set(slots)) and max(slots) < module.funcs["k"].slots


def test_results_attributes_and_target():
    module = parse_generic(TWO_LOOPS)
    loop, use = module.funcs["k"].entry.ops[2:4]
    assert use.operands[0] is loop.results[1] and loop.results[1].producer is loop
    assert module.funcs["k"].entry.ops[1].attributes == {"a.flag": "", "note": '"a, {b"'}
    assert module.device_spec("UB_SIZE") == 1572864
    with pytest.raises(MlirError, match="no L9_SIZE"):
        module.device_spec("L9_SIZE")


@pytest.mark.parametrize(
    "text, message",
    [
        (TWO_LOOPS.replace("(%2#1)", "(%7)"), "%7 is used before"),
        (TWO_LOOPS.replace("(%2#1)", "(%1)"), "%1 is used before"),
        (TWO_LOOPS.replace("-> (index, index)\n", "-> index\n"), "2 results, 1 types"),
        (TWO_LOOPS.replace('"func.return"()', '"cf.br"()[^bb1]'), "successor"),
        (TWO_LOOPS[: TWO_LOOPS.index("}) {dlti")], "expected"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(MlirError, match=message):
        parse_generic(text)


def test_attributes():
    assert split_top_level('a<b, c>, "x, y", (d) -> (e, f)') == [
        "a<b, c>",
        '"x, y"',
        "(d) -> (e, f)",
    ]
    assert attribute_dict("{a = array<i64: 1, 2>, b}") == {"a": "array<i64: 1, 2>", "b": ""}
    assert int_array("array<i64: 1, -2>") == (1, -2) and int_array("array<i64>") == ()
    assert enum_word("#hivm.pipe<PIPE_V>") == "PIPE_V"


def test_memref_types():
    dense = memref_type("memref<64x128xbf16, #hivm.address_space<ub>>")
    assert (dense.shape, dense.strides, dense.space, dense.bytes) == (
        (64, 128),
        (128, 1),
        "ub",
        16384,
    )
    view = memref_type("memref<?x128xf32, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>")
    assert (view.shape, view.strides, view.space, view.is_static) == (
        (None, 128),
        (None, 1),
        "gm",
        False,
    )
    assert memref_type("memref<20xi1, #hivm.address_space<ub>>").bytes == 3
    with pytest.raises(MlirError):
        memref_type("i32")


@pytest.mark.parametrize(
    "text, arguments, expected",
    [
        ("affine_map<()[s0, s1, s2] -> (((s0 - s1) floordiv s2) mod 2)>", (7, 1, 2), (1,)),
        ("affine_map<(d0)[s0] -> (d0 ceildiv 4 + s0, -d0)>", (9, 1), (4, -9)),
        ("affine_map<(d0) -> ((d0 + 3) ceildiv 4 * 2)>", (-9,), (-2,)),
    ],
)
def test_affine_maps(text, arguments, expected):
    assert affine_function(text)(*arguments) == expected


def test_integers_wrap():
    assert wrap(2**31, 32) == -(2**31) and wrap(-1, 1) == 1 and wrap(70000 * 70000, 32) == 605032704
