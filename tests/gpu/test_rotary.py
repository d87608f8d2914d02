"""Rotary embedding on an NVIDIA GPU, below a norm and by itself: kernels by the design's bound, and whole
models."""

import pytest
import rotary_forms as forms
import torch
from checks import check
from norm_cases import assert_right, inputs_for, scalars_for
from torch import nn

from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import LANE_OPS, parse

ROTARY = """\
space [*, *, {D}]
in q: {dt}[*, *, {D}]
in w: {dt}[{D}]
in cos: {cs}[*, 1, {D}]
in sin: {cs}[*, 1, {D}]
scalar eps
n: {dt} = layer_norm(q, w, none, eps)
r: {dt} = {op}(n)
a: {cs} = mul(n, cos)
b: {cs} = mul(r, sin)
y: {cs} = add(a, b)
z: {dt} = cast(y)
out z: {dt} order(1, 0, 2)"""


def runs_right(r, outer, ratio, device):
    """Check the kernel of a region on inputs of these outer sizes."""
    inputs = [x.to(device) for x in inputs_for(r, outer, ratio)]
    run = Runner(r)
    outputs = run(inputs, scalars_for(r))
    assert_right(r, inputs, scalars_for(r), outputs)
    assert not run.reasons


@pytest.mark.parametrize("lane", [2, 6, 16, 64, 80, 96, 128, 130, 256, 1024, 2048, 5120, 12288])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("op", LANE_OPS)
def test_rotary(op, dtype, lane, device):
    if dtype == "f64" and lane > 8192:
        pytest.skip("no tile holds the lane; the reference runs")
    for wide in (False, True):
        r = parse(ROTARY.format(D=lane, dt=dtype, cs="f32" if wide and dtype != "f64" else dtype, op=op))
        for outer, ratio in (((3, 7), 1.0), ((64, 130), 30.0), ((1, 1), 1.0)):
            if outer[0] * outer[1] * lane > 2**24:
                continue
            runs_right(r, outer, ratio, device)


@pytest.mark.parametrize("lane", [16, 80, 128, 4096])
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_moves_are_exact(dtype, lane, device):
    r = parse(f"space [*, {lane}]\nin x: {dtype}[*, {lane}]\nh: {dtype} = rotate_half(x)\n"
              f"p: {dtype} = rotate_pairs(h)\ne: {dtype} = repeat_even(p)\no: {dtype} = repeat_odd(p)\n"
              + "\n".join(f"out {name}: {dtype} order(0, 1)" for name in "hpeo"))
    x = inputs_for(r, (333,))[0].to(device)
    x[3, 5], x[4, 2] = float("nan"), 0.0
    run = Runner(r)
    for ours, want in zip(run([x]), reference(r, [x], [])):
        assert torch.equal(ours.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(ours.signbit() & ~ours.isnan(), want.signbit() & ~want.isnan())
    assert not run.reasons


class Packed(nn.Module):
    def __init__(self, pairs, heads=8, lane=64):
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(lane), nn.RMSNorm(lane)
        self.pairs, self.shape = pairs, (3, heads, lane)

    def forward(self, qkv, cos, sin):
        q, k, v = qkv.unflatten(-1, self.shape).unbind(2)
        return self.turn(self.norm_q(q), cos, sin), self.turn(self.norm_k(k), cos, sin), v

    def turn(self, x, cos, sin):
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        if self.pairs:
            real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
            turned = torch.stack([-imag, real], dim=-1).flatten(3)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        return (x.float() * cos + turned.float() * sin).to(x.dtype)


@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
def test_packed_q_and_k(pairs, dtype, device):
    angle = torch.randn(300, 64, device=device)
    qkv = torch.randn(2, 300, 3 * 8 * 64, device=device).to(dtype)
    report = check(Packed(pairs).to(device, dtype), qkv, angle.cos(), angle.sin(), fused=2)
    q, k = report.sites
    assert q.note and "rotary" in q.pattern and q.region == k.region


class Alone(nn.Module):
    """Rotary embeddings of q and k on no norm, spelled as diffusers and transformers do."""

    def __init__(self, form, heads=8, lane=64):
        super().__init__()
        self.form, self.shape = form, (heads, lane)

    def forward(self, q, k, cos, sin):
        q, k = (x.unflatten(-1, self.shape).transpose(1, 2) for x in (q, k))
        cos, sin = (x.view(*x.shape[:-1], self.shape[1]) for x in (cos, sin))  # static, as from a buffer
        return self.form(q, cos, sin), self.form(k, cos, sin)


ALONE = {"halves": lambda *given: forms.plain(*given, forms.slices),
         "pairs": lambda *given: forms.wide(*given, forms.reshaped_pairs),
         "written": lambda *given: forms.wan(*given, None)}


@pytest.mark.real_gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ALONE)
def test_alone(form, dtype, dynamic, device):
    angle = torch.randn(300, 64, device=device)
    tables = dtype if form == "halves" else torch.float32
    q, k = torch.randn(2, 2, 300, 8 * 64, device=device).to(dtype)
    model = Alone(ALONE[form])
    report = check(model, q, k, angle.cos().to(tables), angle.sin().to(tables), fused=0, dynamic=dynamic)
    first, second = report.rotary
    assert first.note and first.region == second.region
    assert first.self_check_words() and not first.fallback_words()


HEADS = """\
space [*, *, {H} x {P}]
in q: {dt}[*, *, {D}]
in k: {dt}[*, *, {D}]
in w: {dt}[{D}]
in cos: f32[*, 1, {P}]
in sin: f32[*, {P}]
scalar eps
n: {dt} = rms_norm(q, w, eps)
m: {dt} = layer_norm(k, w, none, eps)
c: f32 = repeat_even(cos)
s: f32 = repeat_odd(sin)
r: {dt} = {op}(n)
t: {dt} = {op}(m)
a: f32 = mul(n, c)
b: f32 = mul(r, s)
y: f32 = add(a, b)
z: {dt} = cast(y)
d: f32 = mul(t, cos)
u: {dt} = cast(d)
out z: {dt} order(0, 1, 2)
out u: {dt} order(1, 0, 2)"""


@pytest.mark.parametrize("heads, head", [(12, 128), (40, 128), (24, 64), (16, 16), (3, 12), (5, 80), (12, 96),
                                         (2, 2), (63, 128)])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", LANE_OPS)
def test_heads(op, dtype, heads, head, device):
    """A lane of heads, with tables that they share."""
    r = parse(HEADS.format(H=heads, P=head, D=heads * head, dt=dtype, op=op))
    for outer, ratio in (((3, 7), 1.0), ((64, 130), 30.0)):
        if outer[0] * outer[1] * r.lane > 2**24:
            continue
        runs_right(r, outer, ratio, device)


class OverHeads(nn.Module):
    """q and k of a norm over all heads: Wan's tokens by heads, OLMo 2's heads by tokens."""

    def __init__(self, form, in_front, heads=12, lane=128):
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(heads * lane), nn.RMSNorm(heads * lane)
        self.form, self.in_front, self.lane = form, in_front, lane

    def forward(self, q, k, cos, sin):
        q, k = (x.unflatten(-1, (-1, self.lane)) for x in (self.norm_q(q), self.norm_k(k)))
        cos, sin = (x.view(*x.shape[:-1], 1, self.lane) for x in (cos, sin))
        if self.in_front:
            q, k, cos, sin = (x.transpose(-2, -3) for x in (q, k, cos, sin))
        return self.form(q, cos, sin), self.form(k, cos, sin)


@pytest.mark.real_gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("in_front", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("form", ALONE)
def test_over_all_heads(form, in_front, dtype, dynamic, device):
    angle = torch.randn(300, 128, device=device)
    tables = dtype if form == "halves" else torch.float32
    q, k = torch.randn(2, 2, 300, 12 * 128, device=device).to(dtype)
    model = OverHeads(ALONE[form], in_front).to(device, dtype)
    report = check(model, q, k, angle.cos().to(tables), angle.sin().to(tables), fused=2, dynamic=dynamic)
    first, second = report.entries
    assert first.note and first.region == second.region and "12 x 128" in first.region
    assert first.self_check_words() and not first.fallback_words()
