"""Cost: the figures known for small kernels, per loop and for a whole launch."""

import pytest
import torch
from ascend_kernels import DTYPES, LayerNormCase, assert_one_ulp, plan_for, plan_layer_norm

from ascend_ln_fuse.kernels.ascend.cost import loop_costs
from ascend_ln_fuse.kernels.ascend.counters import Counters
from ascend_ln_fuse.kernels.ascend.interpreter import interpret


def plan_copy(source, target):
    return plan_for("copy_rows", {"x_ptr": f"*{source}", "o_ptr": f"*{target}"}, {"BS": 64, "LANES": 128})


@pytest.mark.parametrize(
    "planned, expected",
    [
        (lambda: plan_layer_norm("bf16"), (16384, 16384, 15, 74112, 13)),
        (lambda: plan_layer_norm("fp32"), (32768, 32768, 13, 57728, 11)),
        (lambda: plan_copy("bf16", "bf16"), (16384, 16384, 0, 0, 0)),
        (lambda: plan_copy("bf16", "fp32"), (16384, 32768, 1, 8192, 0)),
        (lambda: plan_copy("fp32", "bf16"), (32768, 16384, 1, 8192, 0)),
    ],
    ids=["layer_norm bf16", "layer_norm fp32", "copy", "cast to fp32", "cast to bf16"],
)
def test_per_loop(planned, expected):
    loop = loop_costs(planned())[-1]
    assert loop.loop == (0,)
    assert (
        loop.gm_to_ub,
        loop.ub_to_gm,
        loop.vector_ops,
        loop.vector_elements,
        loop.vector_barriers,
    ) == expected
    assert loop.double_buffered


def test_parameters_are_loaded_outside_of_the_loop():
    outside, loop = loop_costs(plan_layer_norm("bf16"))
    assert outside.loop == () and outside.gm_to_ub == 2 * 128 * 2 and outside.vector_ops == 2
    assert "outside of loops: GM->UB 512 B" in str(outside)


def test_nothing_is_double_buffered_without_the_option():
    assert not any(cost.double_buffered for cost in loop_costs(plan_layer_norm("bf16", multibuffer=False)))


def test_loops_in_loops():
    planned = plan_for("layer_norm_by_columns", {"x_ptr": "*fp32", "o_ptr": "*fp32"}, {"BS": 4, "BC": 1024})
    costs = {cost.loop: cost for cost in loop_costs(planned)}
    tile = 4 * 1024 * 4
    assert [costs[(0, i)].gm_to_ub for i in range(3)] == [tile] * 3
    assert [costs[(0, i)].ub_to_gm for i in range(3)] == [0, 0, tile]


def test_cube_costs():
    pointers = {n: "*bf16" for n in ("x_ptr", "x2_ptr", "w_ptr", "o_ptr")}
    costs = loop_costs(plan_for("linear_sound", pointers, {"BM": 64, "BN": 64, "BK": 64}))
    cube = [cost for cost in costs if cost.function.endswith("_mix_aic")]
    assert sum(cost.bytes["L0C->GM"] for cost in cube) == 64 * 64 * 4
    assert sum(cost.ops["mmadL1"] for cost in cube) == 1


def test_the_fused_kernel_moves_a_sixth_of_the_bytes():
    """S=300, H=3, D=128, bf16: against three copies, a cast up, an fp32 norm and a cast down."""
    case = LayerNormCase("bf16")
    fused = interpret(plan_layer_norm("bf16"), None, case.args, (4,))
    assert_one_ulp(case.out, case.reference)

    dense = torch.full((300, 3, 128), float("nan"), dtype=torch.bfloat16)
    wide, normed = (torch.full((900, 128), float("nan")) for _ in range(2))
    out = torch.full((900, 128), float("nan"), dtype=torch.bfloat16)
    chain = Counters()
    for head in range(3):
        args = [case.x[:, head], dense[:, head], 300, case.x.stride(0), dense.stride(0)]
        chain += interpret(plan_copy("bf16", "bf16"), None, args, (4,))
    chain += interpret(plan_copy("bf16", "fp32"), None, [dense, wide, 900, 128, 128], (4,))
    pointers = {"x_ptr": "*fp32", "g_ptr": "*bf16", "b_ptr": "*bf16", "o_ptr": "*fp32"}
    norm = plan_for("layer_norm", pointers, {"BS": 64, "LANES": 128})
    chain += interpret(norm, None, [wide, case.g, case.b, normed, 900, 1, 128, 128, 128, 128, 1e-5], (4,))
    chain += interpret(plan_copy("fp32", "bf16"), None, [normed, out, 900, 128, 128], (4,))

    assert_one_ulp(out.view(300, 3, 128), case.reference)
    assert (fused.gm_to_ub, fused.ub_to_gm) == (232_448, 230_400)
    assert (chain.gm_to_ub, chain.ub_to_gm) == (1_384_448, 1_382_400)
    assert DTYPES["bf16"].itemsize * case.out.numel() * 6 == chain.ub_to_gm
