"""Rotary embeddings that stand below no norm: fused by themselves, however models spell them."""

import json
from importlib import import_module

import pytest
import torch
from checks import fresh
from rotary_forms import (
    DTYPES,
    DYNAMIC,
    FORMS,
    HALVES,
    PAIRS,
    B,
    D,
    H,
    L,
    Rotary,
    Written,
    chunks,
    inputs,
    plain,
    reshaped_pairs,
    rotary,
    slices,
    swapped,
    wan,
    wide,
    written,
)
from torch import nn

from ascend_ln_fuse import FusionReport, kernel_info, last_reports
from ascend_ln_fuse.backend import RUN_AS_WRITTEN, fuse
from ascend_ln_fuse.options import Options

grow = import_module("ascend_ln_fuse.patterns.grow")  # the package has a function of that name

# As models spell them


@DYNAMIC
@pytest.mark.parametrize("rotate", [*HALVES, *PAIRS], ids=lambda f: f.__name__)
def test_spellings(rotate, dynamic):
    for dtype in DTYPES:
        for joined in (False, True):
            torch._dynamo.reset()
            if rotate in (reshaped_pairs,) or not joined or dtype == torch.bfloat16:
                site, = rotary(Rotary(rotate, joined=joined), *inputs(dtype), dynamic=dynamic)
                assert ("rotate_half" if rotate in HALVES else "rotate_pairs") in site.region
                assert site.region.count("\nin ") == 3 and site.region.count("\nout ") == 1
                assert {"neg", "mul", "add"} <= set(site.kernels_removed)


@DYNAMIC
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rotate", [slices, reshaped_pairs], ids=lambda f: f.__name__)
def test_forms(form, rotate, dynamic):
    for dtype in DTYPES:
        for tables in {dtype, torch.float32}:
            torch._dynamo.reset()
            if form not in (plain, swapped) or tables == dtype:
                site, = rotary(Rotary(rotate, form), *inputs(dtype, tables), dynamic=dynamic)
                assert site.region.count("\nin ") == 3, site.region


@pytest.mark.parametrize("shape", [(B, 1, L, D), (L, D), (B, H, L, D), (B, 1, L, 1), (D,)], ids=str)
def test_shapes_of_cos(shape):
    rotary(Rotary(), *inputs(shape=shape))


def partly(x, cos, sin, rotate):
    """GPT-NeoX, Phi: the first part of each head."""
    turned, passed = x[..., :D // 2], x[..., D // 2:]
    return torch.cat((plain(turned, cos[..., :D // 2], sin[..., :D // 2], rotate), passed), -1)


def scaled(x, cos, sin, rotate):
    return plain(x * 0.5, cos, sin, rotate) * 2 + 1


def read_too(x, cos, sin, rotate):
    """The value itself has another reader, as have the tables."""
    return plain(x, cos, sin, rotate), x.cumsum(-1), cos.cumsum(-1)


def product_above(x, cos, sin, rotate):
    """Of two values that are read nowhere else."""
    return plain(x.cumsum(-1) * x.flip(1), cos, sin, rotate)


@pytest.mark.parametrize("form", [partly, scaled, read_too, product_above], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_surroundings(form, dtype):
    site, = rotary(Rotary(form=form), *inputs(dtype))
    assert site.region.count("mul(") == {scaled: 4, product_above: 3}.get(form, 2)


def test_a_vector_above_a_view():
    """With as many tokens as heads a transpose keeps the shape; it cannot be taken of a vector."""
    def form(x, cos, sin, rotate):
        return plain(((x + cos[0, 0, 0]) * x.cumsum(1)).transpose(1, 2), cos, sin, rotate)

    angle = torch.randn(1, 1, H, D)
    site, = rotary(Rotary(form=form), torch.randn(B, H, H * D), angle.cos(), angle.sin())
    assert site.region.count("mul(") == 2  # what is above the view stays there


# Whole attentions


def shares_launches(sites):
    return all(site.note.startswith("shares one kernel launch with ") for site in sites)


@DYNAMIC
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", ""])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama_attention(dtype, kv_heads, dynamic):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=kv_heads)
    config._attn_implementation = "sdpa"

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = modeling.LlamaAttention(config, 0)
            self.rotary = modeling.LlamaRotaryEmbedding(config)

        def forward(self, x):
            places = torch.arange(x.shape[1]).unsqueeze(0)
            return self.attention(x, self.rotary(x, places), None)[0]

    sites = rotary(Attention().to(dtype), torch.randn(B, L, 64).to(dtype), count=2, dynamic=dynamic)
    assert shares_launches(sites) == (kv_heads == 4)
    for site in sites:
        assert site.where.startswith("attention, modeling_llama.py") and "rotate_half" in site.region


@DYNAMIC
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flux_attention_of_text_and_image(dtype, dynamic):
    """The cat of both is between the norms and the rotation."""
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = flux.FluxAttention(64, heads=H, dim_head=D, added_kv_proj_dim=64, eps=1e-6)

        def forward(self, x, text, cos, sin):
            return self.attention(x, text, image_rotary_emb=(cos, sin))

    x, text = torch.randn(B, L, 64).to(dtype), torch.randn(B, 3, 64).to(dtype)
    angle = torch.randn(L + 3, D)
    sites = rotary(Attention().to(dtype), x, text, angle.cos(), angle.sin(), count=2, fused=4,
                   dynamic=dynamic)
    assert shares_launches(sites) and sites[0].region == sites[1].region
    assert sites[0].region.count("\nin ") == 4 and sites[0].region.count("rotate_pairs") == 2


@DYNAMIC
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hunyuan_video_attention(dtype, dynamic):
    """The rotation is of a slice of the norm's result."""
    hunyuan = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = hunyuan.HunyuanVideoSingleTransformerBlock(H, D)

        def forward(self, x, text, temb, cos, sin):
            return self.block(x, text, temb, None, (cos, sin))

    x, text, temb = (torch.randn(B, *n, 64).to(dtype) for n in ((L,), (3,), ()))
    angle = torch.randn(L, D)
    sites = rotary(Block().to(dtype), x, text, temb, angle.cos(), angle.sin(), count=2, fused=3,
                   dynamic=dynamic)
    assert shares_launches(sites)


@DYNAMIC
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wan_attention(dtype, dynamic, monkeypatch):
    """Rotated head by head and written into a buffer, where the norm over all heads cannot take that along
    (test_heads.py has the model as it is)."""
    monkeypatch.setattr(grow, "ELEMENTWISE", {"cpu"})
    wan_model = pytest.importorskip("diffusers.models.transformers.transformer_wan")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = wan_model.WanAttention(64, heads=H, dim_head=D,
                                                    processor=wan_model.WanAttnProcessor())
            self.rotary = wan_model.WanRotaryPosEmbed(D, (1, 2, 2), 32)

        def forward(self, x, latents):
            return self.attention(x, rotary_emb=self.rotary(latents))

    x, latents = torch.randn(B, 12, 64).to(dtype), torch.randn(B, 4, 2, 4, 6).to(dtype)
    sites = rotary(Attention().to(dtype), x, latents, count=2, fused=2, dynamic=dynamic)
    assert shares_launches(sites)
    region = sites[0].region
    assert region.count("repeat_even") == region.count("repeat_odd") == 1 and region.count("\nin ") == 4
    assert not {"empty_like", "repeat_interleave"} & set(sites[0].kernels_removed)


# Which share a launch


class Two(Written):
    """Two embeddings in one graph."""

    def __init__(self, form, lane=D):
        super().__init__(None, lane)
        self.both = form

    def forward(self, x, cos, sin):
        x, cos, sin = self.heads(x, cos, sin)
        return self.both(x.transpose(1, 2), cos, sin)


def of_other_tables(x, cos, sin):
    return plain(x, cos, sin, slices), plain(x.flip(1), cos.cumsum(1), sin.cumsum(1), slices)


def of_other_heads(x, cos, sin):
    return plain(x, cos, sin, slices), plain(x[:, :1], cos, sin, slices)


def one_after_the_other(x, cos, sin):
    return plain(plain(x, cos, sin, slices).cumsum(-1), cos, sin, slices)


@pytest.mark.parametrize("form", [of_other_tables, of_other_heads, one_after_the_other],
                         ids=lambda f: f.__name__)
def test_two_launches(form):
    for site in rotary(Two(form), *inputs(), count=2):
        assert not site.note and site.region.count("rotate_half") == 1


def test_the_other_one_of_a_launch_is_named():
    """By its line; where both are of one, as that."""
    def on_two_lines(x, cos, sin):
        q = x * cos + slices(x) * sin
        y = x.flip(1)
        return q, y * cos + slices(y) * sin

    first, second = rotary(Two(on_two_lines), *inputs(), count=2)
    line = int(first.where.rpartition(":")[2])
    assert [site.note for site in (first, second)] == [
        f"shares one kernel launch with the rotary embedding at test_rotary_site.py:{line + n}"
        for n in (2, 0)]
    for site in rotary(Two(lambda x, cos, sin: tuple(plain(y, cos, sin, slices) for y in (x, x.flip(1)))),
                       *inputs(), count=2):
        assert site.note == "shares one kernel launch with the other rotary embedding on this source line"


def test_layers_are_fused_one_by_one():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Two(lambda x, cos, sin: tuple(
                plain(y, cos, sin, chunks) for y in (x, x.flip(1)))) for _ in range(3))

        def forward(self, x, cos, sin):
            for layer in self.layers:
                q, k = layer(x, cos, sin)
                x = (q.cumsum(-1) + k.cumsum(-1)).transpose(1, 2).flatten(2)
            return x

    sites = rotary(Layers(), *inputs(), count=6)
    assert shares_launches(sites)


# What is left alone


def read_rotated(x, cos, sin, rotate):
    rotated = rotate(x)
    return x * cos + rotated * sin, rotated


def read_product(x, cos, sin, rotate):
    product = x * cos
    return product + rotate(x) * sin, product


def only_rotated(x, cos, sin, rotate):
    return rotate(x) * sin + cos


def of_another(x, cos, sin, rotate):
    return x.flip(-1) * cos + rotate(x) * sin


def written_half(x, cos, sin, rotate):
    """The value is no longer what was rotated."""
    x = x.clone()
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    x[..., half:].mul_(2)
    return x * cos + rotated * sin


def no_sign(x):
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


def without_grad(x, cos, sin, rotate):
    """A mode is switched between the negative and the cat."""
    half = x.shape[-1] // 2
    negative = -x[..., half:]
    with torch.no_grad():
        rotated = torch.cat((negative, x[..., :half]), -1)
    return x * cos + rotated * sin


def refused(model, *given, **options):
    """The reasons of the rotary embeddings of a model that are left alone; it has no others."""
    rotary(model, *given, count=0, **options)
    sites = last_reports()[-1].rotary
    assert all((site.status, site.pattern, site.remedy) == ("declined", "rotary", "") for site in sites)
    return [site.reason for site in sites]


BETWEEN = "one kernel cannot take all from the rotation to the sum"
WRITTEN = "what the rotary embedding reads is written in place"


@DYNAMIC
@pytest.mark.parametrize("form, reasons", [
    (read_rotated, [BETWEEN]), (read_product, [BETWEEN]), (written_half, [WRITTEN]),
    (only_rotated, []), (of_another, [])],  # no rotary embedding
    ids=lambda x: getattr(x, "__name__", ""))
def test_left_alone(form, reasons, dynamic):
    assert refused(Rotary(form=form), *inputs(torch.bfloat16), dynamic=dynamic) == reasons


def test_left_alone_where_a_mode_is_switched():
    given = [t.requires_grad_() for t in inputs()]
    report = fuse(graph_of(Rotary(form=without_grad), *given, grad=True), Options())
    assert [site.reason for site in report.rotary] == ["a mode is switched inside the rotary embedding"]


def test_other_rotations_are_left_alone():
    assert refused(Rotary(no_sign), *inputs()) == []


def test_the_report_of_one_left_alone():
    refused(Rotary(form=read_rotated), *inputs())
    report = last_reports()[-1]
    assert report.headline().split(": ")[2].startswith(
        "no LayerNorm, RMSNorm or l2 norm was found; 1 rotary embedding, 0 fused, 1 declined (")
    row = " ".join(str(report).split("✗")[1].split())
    assert row.startswith("rotary_forms.py:") and f"rotary: {BETWEEN} (node rotated)" in row


def test_one_that_a_norm_takes_along_is_no_row():
    class Normed(Rotary):
        def forward(self, x, cos, sin):
            x, cos, sin = self.heads(x, cos, sin)
            return self.form(nn.functional.rms_norm(x, (D,)).transpose(1, 2), cos, sin, self.rotate)

    assert rotary(Normed(), *inputs(), count=0, fused=1) == [] == list(last_reports()[-1].rotary)


def graph_of(model, *given, grad=False):
    """The Dynamo graph of a call."""
    seen = []
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=lambda gm, _: seen.append(gm) or gm.forward)(*given)
    return seen[0].graph


def test_inner_compilers():
    """Those that fuse by themselves keep what they can fuse."""
    graph = graph_of(Rotary(), *inputs())
    for inner in (*RUN_AS_WRITTEN, "inductor"):
        assert len(fuse(graph, Options(inner=inner)).rotary) == (inner in RUN_AS_WRITTEN)
    assert fuse(graph, Options(inner="inductor")).graph is None
    rotary(Rotary(), *inputs(), backend_options={"inner": "aot_eager"})


ASCEND = "Ascend's compiler moves numbers within the last dim one at a time, so it runs as it is written; " \
    "no other spelling changes that"


def test_not_on_devices_that_permute_element_by_element(monkeypatch):
    from ascend_ln_fuse.patterns import rotary_site

    assert "npu" in rotary_site.ELEMENTWISE
    monkeypatch.setattr(rotary_site, "ELEMENTWISE", {"cpu"})
    for model, given in ((Rotary(), inputs()), (Written(lambda *g: wan(*g, None)), written())):
        assert refused(model, *given) == [ASCEND]


# Gradients


@pytest.mark.parametrize("model, given", [(Rotary(), inputs), (Rotary(reshaped_pairs, wide), inputs),
                                          (Written(lambda *g: wan(*g, None)), written)],
                         ids=["halves", "pairs", "written"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients(model, given, inner):
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", "inner": inner})
    for dtype in (torch.float64, torch.bfloat16):
        tensors, found = given(dtype, dtype), []
        for run in (model, compiled):
            leaves = [fresh(t).requires_grad_() for t in tensors]
            run(*leaves).sin().sum().backward()
            found.append([t.grad for t in leaves])
        for eager, ours in zip(*found):
            torch.testing.assert_close(ours, eager)


def test_training_declined():
    given = [t.requires_grad_() for t in inputs()]
    graph = graph_of(Rotary(), *given, grad=True)
    assert len(fuse(graph, Options()).rotary) == 1
    declined = fuse(graph, Options(training="decline"))
    assert declined.graph is None
    assert [site.reason for site in declined.rotary] == [
        "gradients are recorded here, and the option training is 'decline'"]
    graph = graph_of(Rotary(), *given)  # nothing is recorded
    assert len(fuse(graph, Options(training="decline")).rotary) == 1


# Through kernels, and in reports


@pytest.mark.parametrize("lane", [2, 6, 16, 80, 130])
def test_through_the_kernel(monkeypatch, lane):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    for dtype, tables in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        angle = torch.randn(1, L, 1, lane)
        given = torch.randn(B, L, H * lane).to(dtype), angle.cos().to(tables), angle.sin().to(tables)
        over_heads = [t.transpose(1, 2) for t in given[1:]]
        for model, tables_of_it in ((Rotary(slices, wide, lane=lane), over_heads),
                                    (Rotary(reshaped_pairs, wide, lane=lane), over_heads),
                                    (Written(lambda *g: wan(*g, None), lane), given[1:])):
            torch._dynamo.reset()
            site, = rotary(model, given[0], *tables_of_it)
            assert site.self_check_words() or not site.fallback_words()


def test_one_that_nobody_reads_is_no_site():
    """In q's launch it would bring its operands into q's backward pass, which has nothing to do with them."""
    def f(x, cos, sin):
        plain(x.flip(1).relu(), cos, sin, slices)
        return plain(x, cos, sin, slices),

    rotary(Two(f), *inputs(torch.bfloat16), count=1)


def test_the_report(monkeypatch):
    model = Two(lambda x, cos, sin: tuple(plain(y, cos, sin, slices) for y in (x, x.flip(1))))
    given = inputs(torch.bfloat16)
    rotary(model, *given, count=2)
    report = last_reports()[-1]
    assert (report.found, report.fused, report.declined) == (0, 0, 0)
    assert "norm was found; 2 rotary embeddings fused (" in report.headline()
    again = FusionReport.from_dict(json.loads(report.to_json()))
    assert again.rotary == report.rotary and again.entries == report.rotary
    assert "rotary replaces mul x2, neg, cat, add" in str(report) and "x2" in str(report)
    assert kernel_info(model, given).kernels == ()  # on a CPU the list is an NPU's, which gets none
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    kernel, = kernel_info(model, given).kernels
    assert kernel.region == report.rotary[0].region and kernel.target.endswith("(interpreter)")


def test_an_npu_gets_none():
    from ascend_ln_fuse.loading import Example
    from ascend_ln_fuse.trace import trace

    for model, given in ((Rotary(), inputs()), (Written(lambda *g: wan(*g, None)), written())):
        report, = trace(Example(model, given, {}))
        assert report.error is None and report.sites == ()
        left, = report.rotary
        assert (left.status, left.reason, left.remedy) == ("declined", ASCEND, "")
