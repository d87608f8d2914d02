"""What leaving out cats of all pieces is for, on models; and programs drawn at random."""

import random

import pytest
import torch
from cat_pieces import BATCH, NOTE, TEXT, TOKENS, WIDTH, check, compiled, example
from checks import assert_within_bound
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.loading import Example
from ascend_ln_fuse.trace import trace


class Single(nn.Module):
    """A block of diffusers' FLUX with one stream (transformer_flux.py), with text and image apart between
    blocks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.emb, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, text, image, temb):
        length = text.shape[1]
        hidden = torch.cat([text, image], dim=1)
        shift, scale, gate = self.emb(temb).chunk(3, dim=1)
        residual = hidden
        hidden = self.norm(hidden) * (1 + scale[:, None]) + shift[:, None]
        hidden = gate.unsqueeze(1) * self.proj(hidden)
        hidden = residual + hidden
        return hidden[:, :length], hidden[:, length:]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Single() for _ in range(3))

    def forward(self, text, image, temb):
        for block in self.blocks:
            text, image = block(text, image, temb)
        return image


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_the_add_above_the_cat_joins_the_norm(inner):
    torch.manual_seed(0)
    model = Blocks()
    inputs = example(1, (BATCH, TEXT, WIDTH)), example(2), example(3, (BATCH, WIDTH))
    with torch.no_grad():
        ours, eager = compiled(model, inner=inner)(*inputs), model(*inputs)
        assert_within_bound(ours, eager, model.double()(*(x.double() for x in inputs)))
    report = last_reports()[-1]
    assert report.notes == (NOTE.replace("1 cat", "2 cats").replace("tensor is", "tensor are"),)
    assert [site.pattern.startswith("modulate -> layer_norm") for site in report.sites] == [False, True, True]


def test_explain_leaves_them_out_too():
    """It has no values, but it needs none."""
    inputs = example(1, (BATCH, TEXT, WIDTH)), example(2), example(3, (BATCH, WIDTH))
    report, = trace(Example(Blocks(), inputs, {}))
    assert report.notes == (NOTE.replace("1 cat", "2 cats").replace("tensor is", "tensor are"),)
    assert [site.pattern.startswith("modulate -> layer_norm") for site in report.sites] == [False, True, True]


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "HunyuanVideoTransformer3DModel"])
def test_diffusers(name):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    build, inputs, left_out = MODELS[name]
    model = getattr(diffusers, name)(**build).eval().requires_grad_(False)
    given = {key: make() if callable(make) else make for key, make in inputs.items()}
    with torch.no_grad():
        ours = compiled(model, inner="eager")(**given, return_dict=False)[0]
        eager = model(**given, return_dict=False)[0]
        model = model.double()
        exact = model(**{key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
                         for key, x in given.items()}, return_dict=False)[0]
    assert_within_bound(ours, eager, exact)
    assert sum(f"{left_out} cats of all pieces" in note for report in last_reports()
               for note in report.notes) == 1


MODELS = {
    "FluxTransformer2DModel": (
        dict(patch_size=1, in_channels=4, num_layers=1, num_single_layers=3, attention_head_dim=16,
             num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
             axes_dims_rope=(4, 4, 8)),
        dict(hidden_states=lambda: torch.randn(1, 16, 4), encoder_hidden_states=lambda: torch.randn(1, 5, 32),
             pooled_projections=lambda: torch.randn(1, 32), timestep=torch.tensor([1.0]),
             img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(5, 3)), 2),
    # In each single block: what its attention joins of the norm's result, and takes apart at its end.
    "HunyuanVideoTransformer3DModel": (
        dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
             num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
             text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8)),
        dict(hidden_states=lambda: torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([1]),
             encoder_hidden_states=lambda: torch.randn(1, 5, 16),
             encoder_attention_mask=torch.ones(1, 5), pooled_projections=lambda: torch.randn(1, 8),
             guidance=torch.tensor([1.0])), 5),
}


# -- programs drawn at random


def program(draw: random.Random) -> str:
    """A function of three tensors in which pieces are cut, joined, written and returned."""
    lines = ["def f(x, y, z):", "    h = x * 2"]
    names, small = ["x", "y", "h"], []
    for number in range(draw.randint(3, 8)):
        one = draw.choice(names)
        cut = draw.randint(1, TOKENS - 1)
        apart = f"t{number}, u{number} = {one}[:, :{cut}], {one}[:, {cut}:]; "
        lines.append("    " + draw.choice([
            apart + f"c{number} = torch.cat([t{number}, u{number}], 1)",
            f"c{number} = torch.cat({one}.split({cut}, 1), 1)",
            f"c{number} = torch.cat([{one}[:, :{cut}], {draw.choice(names)}[:, {cut}:]], 1)",
            f"c{number} = {one}.view({BATCH}, {TOKENS}, {WIDTH})",
            f"c{number} = {one} + {draw.choice(names)}",
            f"c{number} = {one}.add_({draw.choice(names)})",
            f"c{number} = {one}; {one}[:, :{cut}].mul_(2)",
            f"c{number} = {one}; {one}[:, {cut}:] = {draw.choice(names)}[:, {cut}:]",
            f"c{number} = F.layer_norm({one}, ({WIDTH},))",
            f"c{number} = F.dropout({one}, 0.5, False)",
        ]))
        names.append(f"c{number}")
        if apart in lines[-1]:
            small = [f"t{number}", f"u{number}"]
    results = [f"{name} * 2" if draw.random() < 0.6 else name
               for name in draw.sample(names, 2) + draw.sample(small, min(1, len(small)))]
    return "\n".join([*lines, f"    return {', '.join(results)}"])


@pytest.mark.parametrize("seed", range(60))
def test_programs_at_random(seed):
    text = program(random.Random(seed))
    scope = {"torch": torch, "F": F}
    exec(text, scope)
    print(text)
    check(scope["f"], example(), example(1), example(2))


def test_that_programs_have_something_to_leave_out():
    left_out = 0
    for seed in range(60):
        scope = {"torch": torch, "F": F}
        exec(program(random.Random(seed)), scope)
        with torch.no_grad():
            compiled(scope["f"])(example(), example(1), example(2))
        left_out += bool(last_reports()[-1].notes)
    assert left_out > 10
