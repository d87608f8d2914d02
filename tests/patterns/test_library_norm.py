"""LayerNorm on any view, spelled as models spell it (facts: rows of the models' own code)."""

import pytest
import torch
from checks import check
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse.kernels.targets import interpreter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Norm(nn.Module):
    """A LayerNorm of `size` applied to `view(x)`."""

    def __init__(self, view, size=16, dtype=torch.float32, affine=True, bias=True, eps=1e-5):
        super().__init__()
        self.view = view
        self.norm = nn.LayerNorm(size, eps=eps, elementwise_affine=affine, bias=bias, dtype=dtype)
        if affine:
            nn.init.normal_(self.norm.weight)
            if bias:
                nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.norm(self.view(x))


VIEWS = {
    "contiguous": lambda x: x.view(72, 16),
    "unbind": lambda x: x.view(6, 3, 4, 16).unbind(1)[1],
    "unbind default dim": lambda x: x.view(6, 3, 4, 16).unbind()[1],
    "torch.unbind": lambda x: torch.unbind(x.view(6, 3, 4, 16), dim=1)[2],
    "select": lambda x: x.view(6, 3, 4, 16).select(1, 2),
    "index": lambda x: x.view(6, 3, 4, 16)[:, 1],
    "ellipsis": lambda x: x.view(6, 3, 4, 16)[..., 1, :],
    "split": lambda x: x.view(6, 12, 16).split(4, dim=1)[1],
    "split sizes": lambda x: torch.split(x, [32, 160], dim=-1)[1].unflatten(-1, (-1, 16)),
    "chunk": lambda x: x.chunk(3, -1)[1].unflatten(-1, (4, 16)),
    "tensor_split": lambda x: x.view(6, 12, 16).tensor_split(3, dim=1)[2],
    "slice": lambda x: x.view(6, 12, 16)[:, 3:7],
    "slice with step": lambda x: x.view(6, 12, 16)[1::2, ::3],
    "narrow": lambda x: x.view(6, 12, 16).narrow(1, 2, 5),
    "permute": lambda x: x.view(6, 3, 4, 16).permute(1, 0, 2, 3),
    "permute four": lambda x: x.view(2, 3, 3, 4, 16).permute(2, 0, 3, 1, 4)[0],
    "transpose": lambda x: x.view(6, 12, 16).transpose(0, 1),
    "movedim": lambda x: x.view(6, 12, 16).movedim(1, 0),
    "T": lambda x: x.view(6, 12, 16).mT.mT,
    "swapaxes": lambda x: x.view(6, 12, 16).swapaxes(0, 1),
    "reshape": lambda x: x.reshape(6, 12, 16),
    "flatten": lambda x: x.view(6, 12, 16).flatten(0, 1),
    "unflatten": lambda x: x.unflatten(-1, (3, 4, 16))[:, 1],
    "expand": lambda x: x.view(6, 12, 16)[:, :1].expand(6, 5, 16),
    "einops packed": lambda x: rearrange(x, "l (o h d) -> o l h d", o=3, h=4)[1],
    "einops heads": lambda x: rearrange(x, "(b l) (k h d) -> k b h l d", b=2, k=3, h=4)[2],
    "contiguous copy": lambda x: x.view(6, 3, 4, 16)[:, 1].contiguous(),
    "permuted copy": lambda x: x.view(6, 12, 16).transpose(0, 1).contiguous(),
    "copying reshape": lambda x: x.view(6, 12, 16).transpose(0, 1).reshape(-1, 16),
    "copying flatten": lambda x: x.view(6, 3, 4, 16)[:, 1].permute(1, 0, 2).flatten(0, 1),
    "clone": lambda x: x.view(6, 3, 4, 16)[:, 1].clone(),
    "offset": lambda x: x[1:].view(5, 12, 16)[:, 5],
    "one row": lambda x: x.view(6, 12, 16)[2, 3],
    "size one": lambda x: x.view(6, 12, 1, 16)[:, :, 0:1],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, dynamic):
    model = Norm(VIEWS[name], dtype=torch.bfloat16)
    check(model, torch.randn(6, 192).bfloat16(), fused=1, dynamic=dynamic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine, bias", [(True, True), (True, False), (False, False)])
def test_affine(affine, bias, dtype):
    check(Norm(VIEWS["unbind"], dtype=dtype, affine=affine, bias=bias),
          torch.randn(6, 192).to(dtype), fused=1)


class BiasAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return F.layer_norm(x, (16,), None, self.bias), F.layer_norm(x, [16], bias=self.bias)


def test_bias_without_weight():
    check(BiasAlone(), torch.randn(5, 16), fused=2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_normalised_dims(dynamic):
    model = Norm(lambda x: x.view(6, 3, 4, 16), size=(3, 4, 16))
    check(model, torch.randn(6, 192), fused=1, dynamic=dynamic)
    model = Norm(lambda x: x.view(6, 3, 4, 16)[:, 1], size=(4, 16), dtype=torch.bfloat16)
    report = check(model, torch.randn(6, 192).bfloat16(), fused=1, dynamic=dynamic)
    assert report.sites[-1].region.startswith("space [*, 64]")


def test_normalised_dims_in_pieces_are_declined():
    model = Norm(lambda x: x.view(6, 12, 16)[:, :4], size=(4, 16))
    check(model, torch.randn(6, 192), fused=1)  # 4 rows in a run
    model = Norm(lambda x: x.view(6, 3, 4, 16)[:, :, 1], size=(3, 16))
    report = check(model, torch.randn(6, 192), fused=0, declined=1)
    assert "not one run of memory" in report.sites[0].reason


def test_lane_across_is_read_where_it_lies():
    """Twelve rows side by side in memory: nothing is copied, the model's own copy neither."""
    for view in (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2).contiguous()):
        model = Norm(lambda x, view=view: view(x.view(6, 16, 12)))
        report = check(model, torch.randn(6, 192), fused=1)
        assert report.sites[0].bytes_after < report.sites[0].bytes_before


def test_lane_that_is_not_innermost_is_copied_as_in_eager():
    """Four rows side by side are less than a sector."""
    model = Norm(lambda x: x.view(18, 16, 4).transpose(1, 2))
    report = check(model, torch.randn(6, 192), fused=1)
    assert report.sites[0].bytes_after == report.sites[0].bytes_before  # the copy counts on both sides
    assert "Transpose" not in report.sites[0].hidden_kernels  # it is still launched
    model = Norm(lambda x: x.view(18, 16, 4).transpose(1, 2).contiguous())
    check(model, torch.randn(6, 192), fused=1)  # the model's own copy stays


@pytest.mark.parametrize("rows, fused", [(4, 0), (12, 2)])
def test_a_copy_is_not_taken_of_what_is_written(rows, fused):
    class Model(nn.Module):
        def forward(self, x):
            x = x.view(-1, 16, rows).transpose(1, 2).sin()
            first = F.layer_norm(x, (16,))
            x.mul_(2).add_(1)
            return first, F.layer_norm(x, (16,))

    report = check(Model(), torch.randn(6, 192), fused=fused, declined=2 - fused)
    assert fused or "not the innermost" in report.sites[0].reason


# The models' own spellings; numbers are the rows of the project's table of model patterns.


class SeedVR(nn.Module):
    """1. SeedVR: packed qkv, unbind, norms over the head dim."""

    def __init__(self, dtype, heads=3, dim=16):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.proj = nn.Linear(heads * dim, 3 * heads * dim, dtype=dtype)
        self.norm_q, self.norm_k = (nn.LayerNorm(dim, dtype=dtype) for _ in range(2))

    def forward(self, vid):
        vid_qkv = rearrange(self.proj(vid), "l (o h d) -> l o h d", o=3, h=self.heads)
        vid_q, vid_k, vid_v = vid_qkv.unbind(1)
        return torch.cat([self.norm_q(vid_q), self.norm_k(vid_k), vid_v], dim=1)


class Timm(nn.Module):
    """3. timm attention with qk-norm."""

    def __init__(self, dtype, heads=4, dim=16):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim, dtype=dtype)
        self.q_norm, self.k_norm = (nn.LayerNorm(dim, dtype=dtype) for _ in range(2))

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return x.transpose(1, 2).reshape(B, N, C)


class Hunyuan(nn.Module):
    """4 and 5. HunyuanVideo: einops to K B L H D, also after a split of a wider projection."""

    def __init__(self, dtype, heads=4, dim=16, mlp=24):
        super().__init__()
        self.heads, self.hidden, self.mlp = heads, heads * dim, mlp
        self.linear1 = nn.Linear(self.hidden, 3 * self.hidden + mlp, dtype=dtype)
        self.norm_q, self.norm_k = (nn.LayerNorm(dim, dtype=dtype) for _ in range(2))

    def forward(self, x):
        qkv, mlp = torch.split(self.linear1(x), [3 * self.hidden, self.mlp], dim=-1)
        q, k, v = rearrange(qkv, "B L (K H D) -> K B L H D", K=3, H=self.heads)
        q = self.norm_q(q).to(v)
        k = self.norm_k(k).to(v)
        return q, k, v, F.gelu(mlp, approximate="tanh")


class FluxFused(nn.Module):
    """6. diffusers FLUX with fused projections."""

    def __init__(self, dtype, heads=4, dim=16):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(heads * dim, 3 * heads * dim, dtype=dtype)
        self.norm_q, self.norm_k = (nn.LayerNorm(dim, dtype=dtype) for _ in range(2))

    def forward(self, x):
        query, key, value = self.to_qkv(x).chunk(3, dim=-1)
        query = query.unflatten(-1, (self.heads, -1))
        key = key.unflatten(-1, (self.heads, -1))
        return self.norm_q(query), self.norm_k(key), value


class FP32LayerNorm(nn.LayerNorm):
    """10. diffusers FP32LayerNorm."""

    def forward(self, inputs):
        origin_dtype = inputs.dtype
        return F.layer_norm(
            inputs.float(), self.normalized_shape,
            self.weight.float() if self.weight is not None else None,
            self.bias.float() if self.bias is not None else None, self.eps).to(origin_dtype)


class CLIPLayerNorm(nn.LayerNorm):
    """13. CLIP's LayerNorm subclass, here on the class token of a sequence."""

    def forward(self, x):
        orig_type = x.dtype
        ret = super().forward(x[:, 0, :].float())
        return ret.type(orig_type)


class CastSliceNorm(nn.Module):
    """14. cast, slice, norm, cast back; and the slice before the cast."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.bias = nn.Parameter(torch.randn(16))
        self.dtype = dtype

    def forward(self, x):
        w, b = self.weight.float(), self.bias.float()
        first = F.layer_norm(x.float()[:, 8:], (16,), w, b, 1e-6).to(self.dtype)
        second = F.layer_norm(x[:, 8:].float(), (16,), w, b, 1e-6).to(self.dtype)
        return first, second


ROWS = {
    "1 SeedVR": (SeedVR, (7, 48), 2),
    "3 timm": (Timm, (2, 7, 64), 2),
    "4, 5 HunyuanVideo": (Hunyuan, (2, 7, 64), 2),
    "6 FLUX fused": (FluxFused, (2, 7, 64), 2),
    "10 FP32LayerNorm": (lambda dtype: FP32LayerNorm(16, dtype=dtype), (2, 7, 16), 1),
    "10 without affine": (lambda dtype: FP32LayerNorm(16, elementwise_affine=False), (2, 7, 16), 1),
    "13 CLIP": (lambda dtype: CLIPLayerNorm(16), (2, 7, 16), 1),
    "14 cast slice norm": (CastSliceNorm, (3, 12, 16), 2),
}


@pytest.mark.parametrize("run", ["static", "dynamic", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_model_rows(monkeypatch, row, dtype, run):
    """As plain torch with static and dynamic sizes, and through Triton's interpreter."""
    launches = []
    if run == "kernel":
        monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
        launch = interpreter.run
        monkeypatch.setattr(interpreter, "run", lambda *args: launches.append(1) or launch(*args))
    make, shape, fused = ROWS[row]
    dynamic = run == "dynamic"
    check(make(dtype), torch.randn(shape).to(dtype), fused=fused, dynamic=dynamic)
    assert bool(launches) == (run == "kernel")


def test_cast_slice_norm_reads_the_low_precision_input():
    report = check(CastSliceNorm(torch.bfloat16), torch.randn(3, 12, 16).bfloat16(), fused=2)
    for site in report.sites:
        assert site.region.splitlines()[1] == "in x0: bf16[*, *, 16]"
        assert "to(float32)" in site.kernels_removed and "to(bfloat16)" in site.kernels_removed


class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 0.5

    def forward(self, x):
        return F.layer_norm(x, (16,), eps=self.eps), F.layer_norm(x, (16,), eps=1e-12)


def test_two_eps_in_one_graph_and_a_later_change():
    """With dynamic=True Dynamo passes a module's float as a 0-dim tensor and its item()."""
    model = Eps()
    x = torch.randn(5, 16)
    check(model, x, fused=2, dynamic=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True,
                             options={"report": "off"})
    for eps in (0.5, 2.0, 3.0):
        model.eps = eps
        for ours, eager in zip(compiled(x), model(x)):
            torch.testing.assert_close(ours, eager)


def test_more_outer_dims_than_a_kernel_walks_are_declined():
    def windows(x):
        return x.view(2, 3, 4, 2, 4, 3, 4, 16)[:, ::2, ::2, ::2, ::2, ::2, ::2]

    report = check(Norm(windows), torch.randn(2, 3 * 4 * 2 * 4 * 3 * 4 * 16), fused=0, declined=1)
    assert "no kernel walks these tensors" in report.sites[0].reason


def test_swin_windows_are_fused():
    def windows(x):
        x = x.view(2, 4, 2, 3, 2, 16).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, 16)

    check(Norm(windows), torch.randn(2, 4 * 2 * 3 * 2 * 16), fused=1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [lambda x: x.shape[-1:], lambda x: (x.size(-1),),
                                   lambda x: [x.shape[-1]]], ids=["slice", "size", "list"])
def test_normalised_shape_taken_from_the_input(shape, dynamic):
    """Under dynamic=True these are nodes; weights of a fixed size make them constant."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16))

        def forward(self, x):
            x = x * self.weight
            return F.layer_norm(x, shape(x), self.weight)

    check(Model(), torch.randn(4, 3, 16), fused=1, dynamic=dynamic)

    class Symbolic(nn.Module):
        def forward(self, x):
            return F.layer_norm(x, shape(x))

    fused = 0 if dynamic else 1
    report = check(Symbolic(), torch.randn(4, 3, 16), fused=fused, declined=1 - fused,
                   dynamic=dynamic)
    assert dynamic == ("symbolic" in report.sites[0].reason)


def test_the_fast_path_of_an_encoder_layer_is_named():
    """In inference nn.TransformerEncoderLayer is one call with both norms in it; without it, two norms."""
    layer, x = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), torch.randn(2, 5, 64)
    report = check(layer, x, fused=0, declined=1, exact=False)
    assert "nn.TransformerEncoderLayer" in report.sites[0].reason
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        check(layer, x, fused=2)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
