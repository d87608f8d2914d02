"""Lowering and compiling: every outcome, with its figures."""

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ascend_kernels import layer_norm_pointers, make, plan_for, plan_layer_norm, signature

from ascend_ln_fuse.kernels.ascend import toolchain, tools
from ascend_ln_fuse.kernels.ascend.toolchain import (
    Outcome,
    ToolchainError,
    compile_planned,
    lower,
    plan,
)

UB_BYTES = 192 * 1024


def lower_layer_norm(dtype="bf16", BS=64, soc="Ascend910B3"):
    return lower(
        make("layer_norm", BS=BS, LANES=128),
        signature("layer_norm", **layer_norm_pointers(dtype)),
        soc=soc,
    )


def test_lowering_outlasts_a_parser_that_another_thread_disturbs(monkeypatch):
    from triton.runtime.jit import JITFunction

    parse, calls = JITFunction.parse, []

    def disturbed(self):
        calls.append(self)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=57)")
        return parse(self)

    monkeypatch.setattr(JITFunction, "parse", disturbed)
    assert lower_layer_norm().name == "layer_norm" and len(calls) >= 2


def test_lower_gives_both_texts():
    lowered = lower_layer_norm()
    assert lowered.name == "layer_norm" and lowered.mix_mode == "aiv"
    assert "tt.load" in lowered.ttir and "linalg" in lowered.linalg


@pytest.mark.parametrize("dtype, peak", [("fp32", 137024), ("fp16", 170304), ("bf16", 170304)])
def test_layer_norm_fits_with_double_buffering(dtype, peak):
    planned = plan_layer_norm(dtype)
    assert planned.outcome is Outcome.PASSED and planned.ok
    assert planned.double_buffered
    assert planned.peak_bytes == {"ub": peak} and peak <= UB_BYTES
    assert "hivm.hir.pointer_cast" in planned.text


def test_without_double_buffering_when_not_asked_for():
    planned = plan_layer_norm("bf16", multibuffer=False)
    assert planned.outcome is Outcome.PASSED and not planned.double_buffered
    assert planned.peak_bytes["ub"] < plan_layer_norm("bf16").peak_bytes["ub"]


@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend910B2", "Ascend910B4", "910_93xx"])
def test_a2_and_a3_plan_memory_alike(soc):
    planned = plan_layer_norm("bf16", soc=soc)
    assert planned.outcome is Outcome.PASSED
    assert planned.peak_bytes == plan_layer_norm("bf16").peak_bytes


def test_degraded_when_the_compiler_drops_double_buffering():
    planned = plan_layer_norm("bf16", BS=128)
    assert planned.outcome is Outcome.DEGRADED and planned.ok
    assert not planned.double_buffered
    assert "auto-multi-buffer to false" in planned.message


def test_overflow_says_what_is_needed():
    planned = plan_layer_norm("bf16", BS=256)
    assert planned.outcome is Outcome.OVERFLOW and not planned.ok
    assert planned.overflow.space == "ub"
    assert planned.overflow.bits_available == UB_BYTES * 8 < planned.overflow.bits_needed
    assert str(planned.overflow.bits_needed) in planned.message
    with pytest.raises(ToolchainError, match="ub overflow"):
        planned.require()


def test_overflow_of_a_cube_memory():
    pointers = {n: "*bf16" for n in ("x_ptr", "x2_ptr", "w_ptr", "o_ptr")}
    planned = plan_for("linear_sound", pointers, {"BM": 256, "BN": 256, "BK": 64})
    assert planned.outcome is Outcome.OVERFLOW and planned.overflow.space == "cc"
    assert planned.overflow.bits_available == 128 * 1024 * 8


def test_a5_memory_only():
    planned = plan(
        make("layer_norm", BS=64, LANES=128),
        signature("layer_norm", **layer_norm_pointers("bf16")),
        soc="950PR",
    )
    assert planned.outcome is Outcome.PASSED and planned.text == ""
    assert 0 < planned.peak_bytes["ub"] <= 248 * 1024


def test_a5_degrades_by_a_second_try():
    planned = plan(
        make("layer_norm", BS=128, LANES=128),
        signature("layer_norm", **layer_norm_pointers("bf16")),
        soc="950PR",
    )
    assert planned.outcome is Outcome.DEGRADED and not planned.double_buffered
    assert planned.overflow.bits_available == 248 * 1024 * 8


def test_front_end_refusal_is_unsupported():
    planned = plan(make("undefined_name", BS=64), {"x_ptr": "*fp32", "n": "i32"})
    assert planned.outcome is Outcome.UNSUPPORTED and "nothing_of_that_name" in planned.message


def test_adapter_crash_is_told_apart():
    # One row of stride-2 loads aborts triton-adapter-opt 3.2.0.
    pointers = {"x_ptr": "*bf16", "c_ptr": "*fp32", "s_ptr": "*fp32", "o_ptr": "*bf16"}
    planned = plan(make("rotate_pairs", BS=1, HALF=64), signature("rotate_pairs", **pointers))
    assert planned.outcome is Outcome.CRASH and "SIGABRT" in planned.message


def test_timeout():
    planned = compile_planned(lower_layer_norm(), timeout=0.001)
    assert planned.outcome is Outcome.TIMEOUT


def test_missing_compiler_says_what_to_install(monkeypatch):
    lowered = lower_layer_norm()
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    tools.find_tool.cache_clear()
    try:
        planned = compile_planned(lowered)
        assert planned.outcome is Outcome.MISSING_TOOL and "pip install ascendnpu-ir" in planned.message
        with pytest.raises(tools.MissingTool, match="pip install triton-ascend"):
            lower_layer_norm()
    finally:
        tools.find_tool.cache_clear()


def test_upstream_triton_is_not_taken_for_triton_ascend(monkeypatch):
    real = tools.importlib.util.find_spec
    monkeypatch.setattr(
        tools.importlib.util, "find_spec", lambda name: None if "ascend" in name else real(name)
    )
    with pytest.raises(tools.MissingTool, match="no Ascend backend"):
        tools.require_triton_ascend()


def test_bad_targets_are_refused():
    with pytest.raises(ValueError, match="unknown SoC 'H100'"):
        lower_layer_norm(soc="H100")
    with pytest.raises(ValueError, match="lower it again"):
        compile_planned(lower_layer_norm(), soc="950PR")


def test_the_stub_answers_as_the_compiler_wants():
    path = tools.compiler_environment()["PATH"].split(os.pathsep)[0]
    answer = subprocess.run([os.path.join(path, "hivmc"), "--version"], capture_output=True, text=True)
    assert answer.stdout.startswith("hivmc ") and os.stat(path).st_mode & 0o077 == 0


def test_threads_share_the_stub():
    """Two directories would mean that one is removed while a compiler runs with it."""
    tools._stub_directory.cache_clear()
    start = threading.Barrier(8)

    def path(_):
        start.wait()
        return tools.compiler_environment()["PATH"].split(os.pathsep)[0]

    with ThreadPoolExecutor(8) as pool:
        (only,) = set(pool.map(path, range(8)))
    assert os.path.exists(os.path.join(only, "hivmc"))


def test_the_last_overflow_counts():
    output = (
        "error: ub overflow, requires 9 bits while 8 bits available!\n"
        "error: cc overflow, requires 99 bits while 8 bits available!"
    )
    result = toolchain._failure(
        lambda *args, **kw: toolchain.Planned("k", "Ascend910B3", *args, **kw), 1, output
    )
    assert (result.overflow.space, result.overflow.bits_needed) == ("cc", 99)


def test_the_last_module_counts():
    dump = "// -----// IR Dump Before Pass //----- //\nmodule {{\n  {0}\n}}\n"
    output = dump.format("first") + "[NOTE] again\n" + dump.format("second") + "[NOTE] done\n"
    assert toolchain._last_module(output) == "module {\n  second\n}\n"
    assert toolchain._last_module("error: nothing") == ""


def test_mixed_kernels_report_all_memories():
    planned = plan_for(
        "linear_sound",
        {n: "*bf16" for n in ("x_ptr", "x2_ptr", "w_ptr", "o_ptr")},
        {"BM": 64, "BN": 64, "BK": 64},
    )
    assert planned.outcome is Outcome.PASSED
    assert set(planned.peak_bytes) == {"ub", "cbuf", "cc"}
