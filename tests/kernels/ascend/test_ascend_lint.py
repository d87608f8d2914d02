"""Lint: clean kernels are clean, each defect is found, and by its own rule."""

import pytest
import torch
from ascend_kernels import DTYPES, plan_for, plan_layer_norm, signature

from ascend_ln_fuse.kernels.ascend.interpreter import interpret
from ascend_ln_fuse.kernels.ascend.lint import Severity, errors, lint
from ascend_ln_fuse.kernels.ascend.toolchain import ToolchainError

SIZES = {"BM": 64, "BN": 64, "BK": 64}


def rules(planned):
    return {finding.rule for finding in errors(lint(planned))}


def plan_simple(name, sizes, dtype="fp32"):
    pointers = [part for part in signature(name) if part.endswith("_ptr")]
    return plan_for(name, {pointer: f"*{dtype}" for pointer in pointers}, sizes)


@pytest.mark.parametrize("multibuffer", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_clean(dtype, multibuffer):
    assert lint(plan_layer_norm(dtype, multibuffer=multibuffer)) == []


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("layer_norm_by_columns", {"BS": 4, "BC": 1024}),
        ("rotate_pairs", {"BS": 8, "HALF": 64}),
        ("in_place", {"BS": 1024}),
        ("join", {"BS": 1024}),
        ("relu_whole", {"BS": 1024}),
        ("in_place_whole", {"BS": 1024}),
    ],
)
def test_sound_kernels_are_clean(name, sizes):
    assert lint(plan_simple(name, sizes)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lost_load_of_a_shared_tile_is_found(dtype):
    """One tile feeds tl.dot and tl.sum: ascendnpu-ir 1.2.0 ends well, and a core never loads x."""
    found = errors(lint(plan_simple("linear_shared", SIZES, dtype)))
    assert [(f.rule, f.function) for f in found] == [("never-written", "linear_shared_mix_aiv")]
    found = errors(lint(plan_simple("linear_shared_columns", SIZES, dtype)))
    assert [(f.rule, f.function) for f in found] == [("never-written", "linear_shared_columns_mix_aic")]
    assert "mmadL1 reads a cbuf buffer" in found[0].message


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sound_form_of_it_is_clean(dtype):
    assert lint(plan_simple("linear_sound", SIZES, dtype)) == []


def test_any_lost_load_is_found():
    text = plan_layer_norm("bf16").text
    loads = [line + "\n" for line in text.splitlines() if "hivm.hir.load" in line]
    assert len(loads) == 3
    for load in loads:
        assert rules(text.replace(load, "", 1)) == {"never-written"}


def test_a_load_in_a_loop_that_never_runs_is_lost():
    text = plan_layer_norm("bf16").text
    load = [line + "\n" for line in text.splitlines() if "hivm.hir.load" in line][-1]
    dead = "scf.for %never = %c0 to %c0 step %c64 {\n" + load + "}\n"
    assert rules(text.replace(load, dead)) == {"never-written"}


def test_filling_a_tile_for_the_cube_is_not_loading_it():
    text = plan_simple("linear_sound", SIZES, "bf16").text
    text = text.replace(" {hivm.unlikely_condition}", "")
    assert rules(text) == set()
    load = next(line + "\n" for line in text.splitlines() if "hivm.hir.nd2nz" in line)
    assert rules(text.replace(load, "")) == {"never-written"}


def test_a_computed_index_is_a_scalar_loop_too():
    text = plan_simple("divided_index", {"BS": 1024}).text.replace(" {ExtractedLoadOrStore}", "")
    (line,) = [line for line in text.splitlines() if "memref.store" in line]
    index = line[line.index("[") + 1 : line.index("]")]
    moved = f"%moved = arith.addi {index}, %c0 : index\n" + line.replace(f"[{index}]", "[%moved]")
    assert rules(text.replace(line, moved)) == {"scalar-loop"}


@pytest.mark.parametrize("dtype", [*DTYPES, "i32", "i8"])
@pytest.mark.parametrize("name, BS", [("reversed_mask", 1024), ("flat_mask", 16)])
def test_discrete_masks_are_found(name, BS, dtype):
    findings = lint(plan_simple(name, {"BS": BS}, dtype))
    assert [(f.severity, f.rule) for f in findings] == [
        (Severity.ERROR, "read-modify-write"),
        (Severity.WARNING, "late-mask"),
    ]


@pytest.mark.parametrize("name", ["divided_index", "running_sum"])
def test_scalar_loops_are_found(name):
    assert rules(plan_simple(name, {"BS": 1024})) == {"scalar-loop"}


@pytest.mark.parametrize(
    "expression, dtype, scalar",
    [
        ("x // 3", "i32", False),
        ("x * 3", "i64", True),
        ("x * 3", "i32", False),
        ("x % 7", "i32", True),
        ("x & 3", "i64", False),
    ],
)
def test_integer_arithmetic(expression, dtype, scalar):
    sizes = {"BS": 256, "EXPRESSION": expression}
    planned = plan_simple("integers", sizes, dtype)
    assert rules(planned) == ({"scalar-loop"} if scalar else set())
    x = torch.randint(-100, 100, (500,), generator=torch.Generator().manual_seed(0))
    x = x.to(torch.int64 if dtype == "i64" else torch.int32)
    out = torch.full_like(x, -7)
    interpret(planned, None, [x, out, 500], (2,))
    # Triton divides as C does, towards zero.
    expected = {
        "x // 3": torch.div(x, 3, rounding_mode="trunc"),
        "x % 7": torch.fmod(x, 7),
        "x * 3": x * 3,
        "x & 3": x & 3,
    }[expression]
    assert torch.equal(out, expected)


def test_row_loops_are_warned_about():
    findings = lint(plan_simple("divided_rows", {"BS": 8}))
    assert not errors(findings) and "row-loop" in {finding.rule for finding in findings}


def test_findings_read_well():
    (finding, *_) = lint(plan_simple("reversed_mask", {"BS": 1024}))
    assert str(finding).startswith("error: reversed_mask: a masked store became")


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ToolchainError):
        lint(plan_layer_norm("bf16", BS=256))
    with pytest.raises(ValueError, match="A5"):
        lint("")
