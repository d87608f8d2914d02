"""A norm over all heads of q, then the rotary embedding of each: one kernel, however models see the heads."""

from importlib import import_module

import pytest
import torch
from checks import check, fresh
from einops import rearrange
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
    plain,
    reshaped_pairs,
    slices,
    swapped,
    wan,
    wide,
)
from torch import nn

from ascend_ln_fuse import last_reports

grow = import_module("ascend_ln_fuse.patterns.grow")  # the package has a function of that name

#: `[B, L, H * D]` -> heads


def unflattened(x, lane=D):
    return x.unflatten(2, (H, -1))


def viewed(x, lane=D):
    return x.view(x.shape[0], x.shape[1], -1, lane)


def reshaped(x, lane=D):
    return x.reshape(*x.shape[:2], H, lane)


def transposed(x, lane=D):
    """OLMo 2"""
    return x.view(*x.shape[:-1], -1, lane).transpose(1, 2)


def permuted(x, lane=D):
    return x.unflatten(-1, (-1, lane)).permute(0, 2, 1, 3)


def moved(x, lane=D):
    """The heads in front."""
    return x.unflatten(-1, (H, lane)).movedim(2, 0)


def twice(x, lane=D):
    return x.view(*x.shape[:-1], H, lane).swapaxes(1, 2).transpose(0, 1)


class Model(nn.Module):
    """Norm over all heads, views, rotary embedding."""

    def __init__(self, views=unflattened, rotate=slices, form=plain, norm=nn.RMSNorm, lane=D):
        super().__init__()
        self.norm, self.views, self.rotate, self.form, self.lane = norm(H * lane), views, rotate, form, lane

    def forward(self, x, cos, sin):
        return self.form(self.views(self.norm(x), self.lane), cos, sin, self.rotate)


#: where the heads' dim lies -> shape of tables
SHAPES = {unflattened: (1, L, 1), viewed: (1, L, 1), reshaped: (1, L, 1), transposed: (1, 1, L),
          permuted: (1, 1, L), moved: (1, 1, L), twice: (1, 1, L)}


def inputs(views=unflattened, dtype=torch.float32, tables=None, lane=D, shape=None):
    angle = torch.randn((*SHAPES[views], lane) if shape is None else shape)
    x = torch.randn(B, L, 2 * H * lane).to(dtype)[..., :H * lane]  # a slice of a packed qkv
    return x, angle.cos().to(tables or dtype), angle.sin().to(tables or dtype)


def fused(model, *given, heads=f"{H} x {D}", exact=False, **options):
    """The one site: norm, views and rotary embedding."""
    report = check(model, *given, fused=1, exact=exact, **options)
    site, = report.entries
    assert "rotary" in site.pattern.split(" -> ") and heads in site.region.split("\n")[0], site.region
    return site


def apart(model, *given, **options):
    """The report of a model whose rotary embedding is not in the norm's kernel."""
    report = check(model, *given, fused=1, exact=False, **options)
    assert "rotary" not in report.sites[0].pattern and " x " not in report.sites[0].region.split("\n")[0]
    return report


# Spellings


@DYNAMIC
@pytest.mark.parametrize("views", list(SHAPES), ids=lambda f: f.__name__)
def test_views(views, dynamic):
    for dtype in DTYPES:
        torch._dynamo.reset()
        site = fused(Model(views, norm=nn.LayerNorm).to(dtype), *inputs(views, dtype), dynamic=dynamic)
        assert site.region.count("\nin ") == 5 and site.region.count(f", {D}]\n") == 2


@DYNAMIC
@pytest.mark.parametrize("rotate", [*HALVES, *PAIRS], ids=lambda f: f.__name__)
def test_rotations(rotate, dynamic):
    for views in (unflattened, transposed):
        torch._dynamo.reset()
        site = fused(Model(views, rotate).bfloat16(), *inputs(views, torch.bfloat16), dynamic=dynamic)
        assert ("rotate_half" if rotate in HALVES else "rotate_pairs") in site.region


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rotate", [slices, reshaped_pairs], ids=lambda f: f.__name__)
def test_forms(form, rotate):
    for dtype in DTYPES:
        for views, tables in ((unflattened, torch.float32), (transposed, dtype)):
            torch._dynamo.reset()
            given = inputs(views, dtype, tables)
            model = Model(views, rotate, form).to(dtype)
            (fused if lies_by_tokens(model, given) else apart)(model, *given)


def lies_by_tokens(model, given):
    """Whether eager's result lies in memory as the norm's does: of a sum, the layout is that of its first
    term, and a cat yields a contiguous one."""
    y = model(*given)
    by_tokens = (y if model.views is unflattened else y.transpose(1, 2)).is_contiguous()
    assert by_tokens or model.form is swapped and model.views is transposed
    return by_tokens


def written(q, cos, sin, rotate):
    """Wan's, with heads of static size."""
    return wan(q, *(t.view(*t.shape[:-1], D) for t in (cos, sin)), rotate)


@DYNAMIC
@pytest.mark.parametrize("tables", [None, torch.float32], ids=["", "fp32 tables"])
def test_written(tables, dynamic):
    for dtype in DTYPES:
        torch._dynamo.reset()
        site = fused(Model(form=written).to(dtype), *inputs(dtype=dtype, tables=tables), dynamic=dynamic)
        assert site.region.count("repeat_") == 2 and site.region.count("rotate_pairs") == 1
        assert "setitem" in site.kernels_removed


def test_written_to_the_bit():
    """On a CPU the region is PyTorch's own ops, rounded in eager's order."""
    for dtype in DTYPES:
        torch._dynamo.reset()
        model, given = Model(form=wan).to(dtype), inputs(dtype=dtype, tables=torch.float32)
        compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
        with torch.no_grad():
            assert torch.equal(compiled(*given), model(*given))


def test_error_against_float64():
    for dtype in DTYPES:
        for rotate in (slices, reshaped_pairs):
            torch._dynamo.reset()
            fused(Model(rotate=rotate).to(dtype), *inputs(dtype=dtype), exact=True)


# Tables and other operands


@pytest.mark.parametrize("shape, dims", [
    ((L, 1, D), f"[1, *, {D}]"), ((1, L, 1, D), f"[1, *, {D}]"), ((B, L, 1, D), f"[*, *, {D}]"),
    ((B, 1, 1, D), f"[*, 1, {D}]"), ((D,), f"[{D}]"), ((1, D), f"[1, 1, {D}]"), ((B, L, 1, 1), "[*, *, 1]"),
    ((), "[]"),
    # of each head another: the whole lane, where the heads lie one behind the other
    ((B, L, H, D), f"[*, *, {H * D}]"), ((H, D), f"[1, 1, {H * D}]"), ((L, H, D), f"[1, *, {H * D}]"),
], ids=str)
def test_shapes_of_tables(shape, dims):
    site = fused(Model(), *inputs(shape=shape))
    assert site.region.count(f": f32{dims}\n") >= 2


@pytest.mark.parametrize("shape", [(H, 1), (B, 1, H, 1)], ids=str)
def test_a_number_for_each_head(shape):
    apart(Model(), *inputs(shape=shape))


def test_tables_of_heads_that_lie_apart():
    x, cos, sin = inputs(shape=(H, L, D))
    apart(Model(), x, cos.transpose(0, 1), sin.transpose(0, 1))


def test_as_many_tokens_as_heads():
    """The dims are told apart by where they are, not by their size."""
    for views in (unflattened, transposed):
        torch._dynamo.reset()
        angle = torch.randn((1, H, 1, D) if views is unflattened else (1, 1, H, D))
        fused(Model(views), torch.randn(H, H, H * D), angle.cos(), angle.sin())
        torch._dynamo.reset()
        whole = torch.randn(H, H, H * D), torch.randn(H, H, H, D), torch.randn(D)
        (fused if views is unflattened else apart)(Model(views), *whole)


def test_what_else_is_below():
    class Scaled(Model):
        def forward(self, x, cos, sin):
            q = self.views(self.norm(x) * 1.5) * cos[0, 0, 0]
            return torch.tanh(plain(q * 0.25, cos * 2.0, sin, slices) + 1)

    site = fused(Scaled(), *inputs())
    assert site.region.count("tanh(") == 1 and site.region.count("\nin ") == 5


# q and k


class Attention(nn.Module):
    """q and k of an attention; k may have fewer heads, or tables of its own."""

    def __init__(self, views=unflattened, form=plain, kv_heads=H, other=False):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(H * D, H * D), nn.Linear(H * D, kv_heads * D)
        self.norm_q, self.norm_k = nn.RMSNorm(H * D), nn.RMSNorm(kv_heads * D)
        self.views, self.form, self.other, self.shape = views, form, other, (-1, D)

    def forward(self, x, cos, sin):
        q, k = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x))
        cos, sin = (t.view(*t.shape[:-1], *self.shape[1:]) for t in (cos, sin))  # of static size
        if self.views is unflattened:
            q, k = q.unflatten(-1, self.shape), k.unflatten(-1, self.shape)
        else:
            q, k = self.views(q), self.views(k)
        tables = (cos.flip(-1), sin.flip(-1)) if self.other else (cos, sin)
        return self.form(q, cos, sin, slices), self.form(k, *tables, slices)


@DYNAMIC
@pytest.mark.parametrize("views, form", [(unflattened, wan), (unflattened, plain), (transposed, plain)],
                         ids=["Wan", "by tokens", "by heads"])
def test_q_and_k_in_one_launch(views, form, dynamic):
    for dtype in DTYPES:
        torch._dynamo.reset()
        x, cos, sin = inputs(views, dtype)
        report = check(Attention(views, form).to(dtype), x, cos, sin, fused=2,
                       dynamic=dynamic, exact=False)
        q, k = report.entries
        assert q.region == k.region and q.note and k.note
        assert q.region.count("\nin ") == 6 and q.region.count("\nout ") == 2
        assert q.region.count("repeat_even") == (form is wan)


@pytest.mark.parametrize("given", [{"kv_heads": 2}, {"other": True}], ids=str)
def test_q_and_k_in_two_launches(given):
    for views in (unflattened, transposed):
        torch._dynamo.reset()
        report = check(Attention(views, **given), *inputs(views), fused=2, exact=False)
        q, k = report.entries
        assert not q.note and not k.note and "rotary" in q.pattern and "rotary" in k.pattern
        assert q.region.count("\nin ") == k.region.count("\nin ") == 4


def test_layers_are_joined_one_by_one():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(3))

        def forward(self, x, cos, sin):
            for layer in self.layers:
                q, k = layer(x, cos, sin)
                x = (q.cumsum(-1) + k.cumsum(-1)).flatten(2)
            return x

    report = check(Layers(), *inputs(), fused=6, exact=False)
    assert [site.note.rpartition(" ")[2] for site in report.sites] == ["norm_k", "norm_q"] * 3


# Whole models


@DYNAMIC
def test_wan(dynamic):
    wan_model = pytest.importorskip("diffusers.models.transformers.transformer_wan")

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(wan_model.WanTransformerBlock(64, 128, H, cross_attn_norm=True)
                                        for _ in range(2))
            self.rotary = wan_model.WanRotaryPosEmbed(D, (1, 2, 2), 32)

        def forward(self, x, text, temb, latents):
            table = self.rotary(latents)
            for block in self.blocks:
                x = block(x, text, temb, table)
            return x

    for dtype in DTYPES:
        torch._dynamo.reset()
        x, text, latents = torch.randn(B, 12, 64), torch.randn(B, 3, 64), torch.randn(B, 4, 2, 4, 6)
        given = x.to(dtype), text.to(dtype), torch.randn(B, 6, 64), latents.to(dtype)
        report = check(Blocks().to(dtype), *given, fused=14, exact=False, dynamic=dynamic)
        sites = [site for site in report.sites if "rotary" in site.pattern]
        assert len(sites) == 4 and not report.rotary  # q and k of two self-attentions
        for site, other in zip(sites, "kqkq"):
            assert site.note.endswith(f"norm_{other}") and "space [*, *, 4 x 16]" in site.region
            assert site.region.count("repeat_even") == site.region.count("repeat_odd") == 1


@DYNAMIC
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", ""])
@pytest.mark.parametrize("name", ["olmo2", "olmoe", "flex_olmo"])
def test_transformers(name, kv_heads, dynamic):
    """Of halves, with the heads in front of the tokens."""
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    title = {"olmo2": "Olmo2", "olmoe": "Olmoe", "flex_olmo": "FlexOlmo"}[name]
    config = getattr(modeling, f"{title}Config")(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=kv_heads, attn_implementation="sdpa")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = getattr(modeling, f"{title}Attention")(config, 0)

        def forward(self, x, cos, sin):
            return self.attention(x, position_embeddings=(cos, sin), attention_mask=None)[0]

    for dtype in DTYPES:
        torch._dynamo.reset()
        angle = torch.randn(1, 7, 16)
        given = torch.randn(B, 7, 64), angle.cos(), angle.sin()
        report = check(Attention().to(dtype), *(x.to(dtype) for x in given), fused=2, exact=False,
                       dynamic=dynamic)
        q, k = report.entries
        assert "rotate_half" in q.region and "rotate_half" in k.region
        assert bool(q.note) == bool(k.note) == (kv_heads == 4)


# Left alone, or fused in part


def two_readers(q, cos, sin, rotate):
    return plain(q, cos, sin, rotate), q.cumsum(-1)


def contiguous_heads(q, cos, sin, rotate):
    return plain(q, cos, sin, rotate).transpose(1, 2).contiguous()


def tables_of_it(q, cos, sin, rotate):
    return plain(q, cos, torch.softmax(q, -1), rotate)


def only_scaled(q, cos, sin, rotate):
    return q * cos + sin


def written_in_place(q, cos, sin, rotate):
    q.mul_(cos)
    rotated = rotate(q)
    q[..., 0] = 0
    return q * cos + rotated * sin


def part_of_a_head(q, cos, sin, rotate):
    return torch.cat((plain(q[..., :8], cos[..., :8], sin[..., :8], rotate), q[..., 8:]), -1)


def tables_made_of_it(q, cos, sin, rotate):
    return written(q, cos * q.sum(-1, keepdim=True), sin, rotate)


def tables_written(q, cos, sin, rotate):
    first = written(q, cos, sin, rotate)
    cos.mul_(2)
    return first


def buffer_written_again(q, cos, sin, rotate):
    out = written(q, cos, sin, rotate)
    out[..., 0] = 0
    return out


def buffer_of_another_dtype(q, cos, sin, rotate):
    first, second = q.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(q, dtype=torch.float64)
    out[..., 0::2] = first * cos[..., 0::2] - second * sin[..., 0::2]
    out[..., 1::2] = first * sin[..., 0::2] + second * cos[..., 0::2]
    return out.type_as(q)


@DYNAMIC
@pytest.mark.parametrize("form", [two_readers, tables_of_it, only_scaled, written_in_place, part_of_a_head,
                                  tables_made_of_it, tables_written, buffer_written_again,
                                  buffer_of_another_dtype],
                         ids=lambda f: f.__name__)
def test_apart(form, dynamic):
    for dtype in (torch.float32, torch.bfloat16):
        for views in (unflattened, transposed):
            torch._dynamo.reset()
            apart(Model(views, form=form).to(dtype), *inputs(views, dtype), dynamic=dynamic)


def test_heads_in_front_in_memory():
    """Such results are written by no kernel of the norm's rows, but they may be copied from what is."""
    fused(Model(form=contiguous_heads), *inputs())
    apart(Model(transposed, form=lambda *given: plain(*given).contiguous()), *inputs(transposed))


def other_heads(q):
    """Each consists of every fourth element."""
    return rearrange(q, "b l (d h) -> b l h d", h=H)


def heads_of_heads(q):
    return q.unflatten(-1, (2, 2, D))


def tokens_merged(q):
    return q.reshape(-1, H, D)


def some_heads(q):
    return q.unflatten(-1, (H, D))[:, :, 1:]


def two_views(q):
    return q.unflatten(-1, (H, D)) + q.unflatten(-1, (H, D)).flip(1)


@pytest.mark.parametrize("views", [other_heads, heads_of_heads, tokens_merged, some_heads, two_views],
                         ids=lambda f: f.__name__)
def test_other_views(views):
    apart(Model(lambda q, lane: views(q)), torch.randn(B, L, H * D), torch.randn(D), torch.randn(D))


def test_heads_of_odd_size():
    class Odd(Model):
        def forward(self, x, cos, sin):
            q = self.norm(x).unflatten(-1, (H, 15))
            return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin

    apart(Odd(lane=15), torch.randn(B, L, H * 15), torch.randn(15), torch.randn(15))


def test_a_lane_that_no_tile_holds(monkeypatch):
    monkeypatch.setattr(grow, "MAX_LANE", H * D - 1)
    apart(Model(), *inputs())


def test_not_on_devices_that_permute_element_by_element(monkeypatch):
    monkeypatch.setattr(grow, "ELEMENTWISE", {"cpu"})
    for form in (plain, wan):
        torch._dynamo.reset()
        apart(Model(form=form), *inputs())


# Gradients, kernels, other compilers


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("model, views", [(Attention(), unflattened), (Attention(transposed), transposed),
                                          (Attention(form=wan), unflattened)], ids=["tokens", "heads", "Wan"])
def test_gradients(model, views, inner):
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", "inner": inner})
    for dtype in (torch.float64, torch.float32):
        torch._dynamo.reset()
        model.to(dtype)
        tensors, found = inputs(views, dtype), []
        for run in (model, compiled):
            leaves = [fresh(t).requires_grad_() for t in tensors]
            sum(y.sin().sum() for y in run(*leaves)).backward()
            found.append([t.grad for t in (*leaves, model.norm_q.weight, model.norm_k.weight)])
            model.zero_grad()
        for eager, ours in zip(*found):
            torch.testing.assert_close(ours, eager)
    assert all("rotary" in site.pattern for site in last_reports()[-1].sites)


@pytest.mark.parametrize("lane", [2, 6, 16, 80])
def test_through_the_kernel(monkeypatch, lane):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    for dtype in (torch.bfloat16, torch.float32):
        for views, rotate, form in ((unflattened, slices, wide), (transposed, reshaped_pairs, plain),
                                    (unflattened, None, wan)):
            torch._dynamo.reset()
            given = inputs(views, dtype, torch.float32 if form is not plain else None, lane=lane)
            model = Model(views, rotate, form, lane=lane).to(dtype)
            site = fused(model, *given, heads=f"{H} x {lane}", exact=True)
            assert "(1 checked)" in site.self_check_words() and not site.fallback_words()


def test_the_names_of_sites():
    report = check(Attention(form=wan).bfloat16(), *inputs(dtype=torch.bfloat16), fused=2, exact=False)
    assert [site.pattern for site in report.sites] == ["rms_norm -> view -> rotary"] * 2
    assert not report.rotary and {"setitem", "rms_norm"} <= set(report.sites[0].kernels_removed)
