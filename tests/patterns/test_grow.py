"""How far a site grows: the region's text in key cases, and what stops it."""

import pytest
import torch
from reasons import check_reasons
from torch import nn
from torch.nn import functional as F

D = 16
BATCH, TOKENS = 3, 5


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, D).to(dtype)


def site(function, *inputs, **kwargs):
    """The one site of `function`."""
    result, = check_reasons(Model(function), *inputs, **kwargs).sites
    return result


def ln(x):
    return F.layer_norm(x, (D,))


def rms(x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def body(site) -> str:
    """The region without its head."""
    return "\n".join(line for line in site.region.splitlines() if line[0] in "vo")


def outputs(site) -> int:
    return body(site).count("out ")


full, again = randn(BATCH, TOKENS), randn(BATCH, TOKENS)
gate, shift = randn(BATCH, 1), randn(BATCH, 1)


def test_add_and_its_sum():
    def block(x, h):
        x = x + h
        return rms(x), x

    found = site(block, full, again)
    assert body(found) == """v0: bf16 = add(x0, x1)
v1: f32 = cast(v0)
v2: f32 = rms_norm(v1, none, s0)
v3: bf16 = cast(v2)
out v3: bf16 order(0, 1, 2)
out v0: bf16 order(0, 1, 2)"""


def test_sum_that_nobody_else_reads_is_not_written():
    found = site(lambda x, h: ln(x + h), full, again)
    assert outputs(found) == 1 and "add" in found.pattern


def test_gated_residual_with_a_second_output():
    def block(x, h, gate):
        x = x + gate * h
        return ln(x), x

    found = site(block, full, again, gate)
    assert f"bf16[*, 1, {D}]" in found.region  # the gate, one row per batch
    assert body(found) == """v0: bf16 = mul(x1, x2)
v1: bf16 = add(x0, v0)
v2: bf16 = layer_norm(v1, none, none, s0)
out v2: bf16 order(0, 1, 2)
out v1: bf16 order(0, 1, 2)"""


def test_gated_residual_in_fp32_rounded_once():
    """Wan: the sum is formed in fp32 and rounded; both the norm and the next residual read it."""
    def block(x, h, gate):
        x = (x.float() + h * gate.float()).type_as(x)
        return ln(x.float()).type_as(x), x

    found = site(block, full, again, gate)
    assert outputs(found) == 2 and found.pattern.startswith("cast -> modulate -> cast -> layer_norm")


def test_two_modulates_of_one_norm():
    def block(x, a, b):
        h = ln(x)
        return h * (1 + a) + b, h * (1 + b) + a

    found = site(block, full, gate, shift)
    assert body(found).count("layer_norm") == 1 and outputs(found) == 2
    assert body(found).count("mul") == 2


@pytest.mark.parametrize("scale", [
    lambda n, s: n * (1 + s[:, None]), lambda n, s: n * (s[:, None] + 1),
    lambda n, s: (1 + s).unsqueeze(1) * n,
    lambda n, s: torch.mul(n, 1 + s.unsqueeze(1)), lambda n, s: n * (1 + s.view(BATCH, 1, D)),
    lambda n, s: n + n * s[:, None],
])
def test_spellings_of_a_modulate(scale):
    found = site(lambda x, s, b: scale(ln(x), s) + b[:, None], full, randn(BATCH), randn(BATCH))
    assert outputs(found) == 1 and "mul" in body(found) and "add" in body(found)


def test_modulate_by_chunks_of_one_projection():
    def block(x, emb):
        shift, scale, gate = emb.chunk(3, dim=1)
        return gate.unsqueeze(1) * (ln(x) * (1 + scale[:, None]) + shift[:, None])

    found = site(block, full, torch.randn(BATCH, 3 * D).bfloat16())
    assert outputs(found) == 1 and body(found).count("mul") == 2


def test_cast_that_changes_nothing_below_the_norm():
    """diffusers FP32LayerNorm casts back to the input's dtype, which here is fp32 already."""
    found = site(lambda x, s: (ln(x.float()).to(torch.float32) * (1 + s.float())).type_as(x), full, gate)
    assert "mul" in body(found) and outputs(found) == 1


def test_norm_of_a_norm():
    assert check_reasons(Model(lambda x: rms(rms(x))), full, fused=2)
    assert check_reasons(Model(lambda x: ln(ln(x))), full, fused=2)


def test_norm_on_top_of_a_low_precision_norm():
    """The tail of the first norm is pointwise, but belongs to it."""
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    check_reasons(Model(lambda x: norm(norm(x))), full, fused=2)


def test_sandwich_of_norms():
    """Gemma 2: norm, residual add, norm."""
    def block(x, h):
        x = x + rms(h)
        return rms(x), x

    check_reasons(Model(block), full, again, fused=2)


def test_post_norm_that_is_added():
    """The norm has two readers, of which one is no pointwise op: it is written itself."""
    w = torch.eye(D, dtype=torch.bfloat16)

    def block(x):
        h = ln(x)
        return h + h @ w.to(x)

    assert outputs(site(block, full)) == 1


def test_value_read_elsewhere_stays():
    def block(x, h):
        x = x + h
        return ln(x).sum(), x.exp(), x * 2

    found = site(block, full, again)
    assert outputs(found) <= 2


def test_dropout_stops_growth_and_keeps_the_random_stream():
    def block(x, h):
        return ln(x + F.dropout(h, 0.5, training=True)), torch.rand(3)

    compiled = torch.compile(Model(block), backend="ascend_ln_fuse", options={"report": "off"})
    torch.manual_seed(1)
    eager = block(full, again)
    torch.manual_seed(1)
    ours = compiled(full, again)
    assert all(torch.equal(a, b) for a, b in zip(ours, eager))


def test_sum_written_in_place_later():
    """The kernel writes the sum; `+=` goes on to write there."""
    def block(x, h):
        x = x + h
        y = ln(x)
        x += 1
        return y, x

    found = site(block, full, again)
    assert outputs(found) == 2 and body(found).count("add") == 1


def test_part_of_a_sum_written_in_place_later_is_left_alone():
    def block(x, h):
        x = x + h
        y = ln(x)
        x[:, 0] += 1
        return y, x

    assert "add" not in site(block, full, again).pattern


def test_operand_written_between_its_use_and_the_norm():
    def block(x, h):
        h = h.clone()
        total = x + h
        h.zero_()
        return ln(total), h

    check_reasons(Model(block), full, again)


def test_output_view_written_later():
    def block(x, s):
        y = ln(x) * (1 + s)
        y[:, 0] = 0
        return y

    check_reasons(Model(block), full, gate)


def test_broadcast_residual():
    """x is smaller than the sum."""
    check_reasons(Model(lambda x, h: ln(x + h)), gate, full)
    check_reasons(Model(lambda x, h: ln(x + h)), full, randn())
    check_reasons(Model(lambda x, h: (ln(x + h), x + h)), randn(1, TOKENS), gate)


def test_result_that_is_broadcast_larger():
    """The modulate has more rows than the norm: it stays outside."""
    check_reasons(Model(lambda x, s: ln(x) * (1 + s)), gate, full)
    check_reasons(Model(lambda x, s: ln(x) * s), randn(TOKENS), full)


def test_mixed_dtypes_promote_as_eager_does():
    check_reasons(Model(lambda x, h: ln(x + h)), full, again.float())
    check_reasons(Model(lambda x, s: ln(x) * (1 + s)), full, gate.float())
    check_reasons(Model(lambda x, s: ln(x) * s), full, torch.tensor(3.0))
    check_reasons(Model(lambda x, s: ln(x) * s), full, torch.tensor([3.0]))


def test_integer_and_bool_operands_are_left_outside():
    check_reasons(Model(lambda x, m: ln(x) * m), full, torch.arange(TOKENS)[:, None])
    check_reasons(Model(lambda x, m: ln(x * m)), full, torch.rand(BATCH, TOKENS, 1) > 0.5)


def test_scalars_of_any_kind():
    check_reasons(Model(lambda x, h: ln(0.5 * x + h * 2 - 1)), full, again)
    check_reasons(Model(lambda x: ln(x / 3) ** 2), full)
    check_reasons(Model(lambda x: 1 / (ln(x) + 20)), full)
    check_reasons(Model(lambda x: 1 - ln(x)), full)
    check_reasons(Model(lambda x: torch.add(ln(x), x, alpha=2)), full)
    check_reasons(Model(lambda x: torch.sub(ln(x), x, alpha=2)), full)


def test_scalar_that_is_rounded_to_the_dtype():
    """A python number is not rounded to bf16 before the op; a 0-dim tensor is rounded by its own dtype."""
    check_reasons(Model(lambda x: ln(x) * 1.00390625), full)
    check_reasons(Model(lambda x: ln(x * 1.00390625)), full)


@pytest.mark.parametrize("act", [F.silu, F.gelu, F.relu, torch.tanh, torch.sigmoid, torch.exp, torch.abs,
                                 lambda x: F.gelu(x, approximate="tanh"), torch.neg, torch.square],
                         ids=lambda f: f.__name__)
def test_activations(act):
    assert outputs(site(lambda x: act(ln(x)), full)) == 1
    assert outputs(site(lambda x: ln(act(x)), full)) == 1


def test_unused_and_doubly_returned_results():
    check_reasons(Model(lambda x, h: (ln(x + h), (x + h) * 2)), full, again)

    def twice(x, h):
        y = ln(x + h)
        return y, y

    check_reasons(Model(twice), full, again)


def test_identity_of_outputs_and_inputs():
    """A tensor that eager returns twice, or that is an input, is still that one."""
    def block(x):
        y = ln(x)
        return y, y, x

    compiled = torch.compile(Model(block), backend="ascend_ln_fuse", options={"report": "off"})
    a, b, c = compiled(full)
    assert a is b and c is full


def test_transposed_residual_keeps_eagers_strides():
    def block(x, h):
        x = x.transpose(0, 1) + h.transpose(0, 1)
        return ln(x), x

    check_reasons(Model(block), full, again)
