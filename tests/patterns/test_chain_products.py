"""Chains whose products are no linear layers: patch and 1x1 convolutions, and attention scores."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from checks import NoRounding, assert_within_bound, check, tensors
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import kernel_info, last_reports
from ascend_ln_fuse.kernels.chain_text import parse_chain

B, T, C, H = 2, 16, 32, 4


def chains() -> list[str]:
    """The chains of the last graph, in order; "" for a norm without one."""
    return [site.chain for site in last_reports()[-1].sites]


def texts() -> list[str]:
    return [site.chain_runner.chain.text for site in last_reports()[-1].sites if site.chain]


# Convolutions


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's: over the channels of NCHW, by permute."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """Written out over dim 1."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Convolutions(nn.Module):
    def __init__(self, forward, norm=LayerNorm2d, patch=2, **options):
        super().__init__()
        self.norm, self.run = norm(C), forward
        self.down = nn.Conv2d(C, 2 * C, patch, **{"stride": patch, **options})
        self.one, self.packed = nn.Conv2d(C, 2 * C, 1), nn.Conv2d(C, 4 * C, 1)
        self.two = nn.Conv2d(2 * C, C, 1)
        self.gamma = nn.Parameter(torch.randn(C, 1, 1))
        self.linear = nn.Linear(C, C)

    def forward(self, x):
        return self.run(self, x)


class Tokens(nn.Module):
    """Segformer: the tokens of an image, read by a linear layer and, as an image, by a patch convolution."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.sr = nn.LayerNorm(C), nn.Linear(C, C), nn.Conv2d(C, C, 2, stride=2)

    def forward(self, x):
        h = self.norm(x)
        image = h.permute(0, 2, 1).reshape(x.shape[0], C, 4, 6)
        return self.query(h), self.sr(image).reshape(x.shape[0], C, -1).permute(0, 2, 1)


def glu(m, x):
    a, b = m.packed(m.norm(x)).chunk(2, 1)
    return m.two(F.silu(a) * b)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    chain: str
    shape: tuple[int, ...] = (B, C, 6, 8)


CONVOLUTIONS = {
    "patch": Case(lambda: Convolutions(lambda m, x: m.down(m.norm(x))), "patch conv"),
    "patch, act": Case(lambda: Convolutions(lambda m, x: F.gelu(m.down(m.norm(x)))), "patch conv -> gelu"),
    "patch, act, 1x1": Case(lambda: Convolutions(lambda m, x: m.two(F.gelu(m.down(m.norm(x))))),
                            "patch conv -> gelu -> linear"),
    "patch of 3, no bias": Case(lambda: Convolutions(lambda m, x: m.down(m.norm(x)), patch=3, bias=False),
                                "patch conv"),
    "patch 2 x 4": Case(lambda: Convolutions(lambda m, x: m.down(m.norm(x)), patch=(2, 4), padding="valid"),
                        "patch conv"),
    "pixels that are left over": Case(lambda: Convolutions(lambda m, x: m.down(m.norm(x)), patch=4),
                                      "patch conv"),
    "1x1, act, 1x1": Case(lambda: Convolutions(lambda m, x: m.two(F.gelu(m.one(m.norm(x))))),
                          "linear -> gelu -> linear"),
    "1x1, act, 1x1, residual": Case(
        lambda: Convolutions(lambda m, x: x + m.gamma * m.two(F.hardswish(m.one(m.norm(x))))),
        "linear -> hardswish -> linear -> mul add"),
    "1x1 packed": Case(lambda: Convolutions(glu), "linear -> silu mul -> linear"),
    "1x1, the norm's result": Case(
        lambda: Convolutions(lambda m, x: (lambda h: m.two(F.gelu(m.one(h))) + h)(m.norm(x))),
        "linear -> gelu -> linear -> add"),
    "several": Case(
        lambda: Convolutions(lambda m, x: (lambda h: (m.one(h), m.packed(h), m.down(h)))(m.norm(x))),
        "linear x2, patch conv"),
    "tokens": Case(Tokens, "patch conv, linear", (B, 24, C)),
}


def image(shape, channels_last):
    x = torch.randn(shape)
    return x.to(memory_format=torch.channels_last) if channels_last and x.dim() == 4 else x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, channels_last, dtype):
    case = CONVOLUTIONS[name]
    model = case.make().to(dtype).eval()
    x = image(case.shape, channels_last).to(dtype)
    # A sum with a contiguous image is no region over channels.
    wanted = case.chain.removesuffix(" add") if not channels_last and "residual" in name else case.chain
    check(model, x, fused=1)
    assert chains() == [wanted]
    with torch.no_grad():
        eager, ours = (tensors(run(x)) for run in (
            model, torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})))
    assert [t.stride() for t in ours] == [t.stride() for t in eager]
    assert all(parse_chain(text).text == text for text in texts())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_dynamic_convolutions(name):
    case = CONVOLUTIONS[name]
    model = case.make()
    check(model, image(case.shape, True), fused=1, dynamic=True)
    assert chains() == [case.chain]


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "contiguous"])
def test_norm_written_out(channels_last):
    """In channels_last memory as F.layer_norm; in contiguous NCHW no product reads its result as rows."""
    model = Convolutions(lambda m, x: m.two(F.gelu(m.down(m.norm(x)))), ChannelNorm)
    x = image((B, C, 6, 8), channels_last)
    check(model, x, fused=1)
    assert chains() == ["patch conv -> gelu -> linear" if channels_last else ""]


@pytest.mark.parametrize("options, how", [
    ({"patch": 3, "stride": 2}, "overlaps"), ({"patch": 2, "stride": 3}, "leaves out"),
    ({"padding": 1}, "padding"), ({"dilation": 2}, "dilation"), ({"groups": 2}, "groups"),
    ({"patch": 3, "stride": 1, "padding": "same"}, "same"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_other_convolutions_are_none(options, how):
    check(Convolutions(lambda m, x: m.down(m.norm(x)), **options), image((B, C, 6, 8), True), fused=1)
    assert chains() == [""]


@pytest.mark.parametrize("run, chain", [
    (lambda m, x: F.gelu(m.one(m.norm(x)).flatten(2)), "linear"),
    (lambda m, x: m.two(F.gelu(m.one(m.norm(x)))[:, :, 1:]), "linear -> gelu"),
    (lambda m, x: F.leaky_relu_(m.one(m.norm(x))), ""),
], ids=["view", "slice", "written"])
def test_what_ends_a_chain_of_convolutions(run, chain):
    check(Convolutions(run), image((B, C, 6, 8), True), fused=1)
    assert chains() == [chain]


@pytest.mark.parametrize("run, chain", [
    (lambda m, x: m.two(F.gelu(m.one(m.norm(x)).mul_(2))), "linear -> mul gelu -> linear"),
    (lambda m, x: F.relu(m.down(m.norm(x)), inplace=True), "patch conv -> relu"),
], ids=["1x1", "patch"])
def test_what_is_pointwise_in_place(run, chain):
    check(Convolutions(run), image((B, C, 6, 8), True), fused=1)
    assert chains() == [chain]


# Attention scores


class Scores(nn.Module):
    def __init__(self, score, packed=False):
        super().__init__()
        self.norm, self.score = nn.LayerNorm(C), score
        self.q, self.k, self.v = (nn.Linear(C, C, bias=i != 1) for i in range(3))
        self.qkv = nn.Linear(C, 3 * C) if packed else None
        self.register_buffer("mask", torch.randn(T, T).triu(1))

    def forward(self, x):
        h = self.norm(x)
        if self.qkv is None:
            weights, v = self.score(self.q(h), self.k(h), self.mask), heads(self.v(h))
        else:
            weights, v = self.score(self.qkv(h), self.mask)
        weights = F.softmax(weights, -1)
        if weights.dim() == 3:  # heads and batch in one dim, or one head
            v = v.reshape(-1, *v.shape[-2:]) if weights.shape[0] == B * H else v.transpose(1, 2).flatten(2)
        return weights @ v


def heads(z):
    """`[B, T, C]` as `[B, H, T, C / H]`."""
    return z.view(*z.shape[:-1], H, -1).transpose(1, 2)


def rows(z):
    return z.unflatten(-1, (H, -1))


def flat(z):
    """As models that call bmm have it."""
    return heads(z).contiguous().view(-1, z.shape[1], C // H)


def reshaped(z):
    return z.reshape(*z.shape[:-1], H, -1).permute(0, 2, 1, 3).reshape(-1, z.shape[1], C // H)


def split(z):
    q, k, v = z.split(C, dim=2)
    return heads(q), heads(k), heads(v)


def unbind(z):
    return z.reshape(*z.shape[:2], 3, H, C // H).permute(2, 0, 3, 1, 4).unbind(0)


def interleaved(z):
    return z.view(*z.shape[:2], H, -1).transpose(1, 2).chunk(3, dim=-1)


def packed(views, scale=lambda s: s * 0.25):
    def score(z, mask):
        q, k, v = views(z)
        return scale(q @ k.transpose(-2, -1)), v

    return lambda: Scores(score, packed=True)


def plain(score):
    return lambda: Scores(score)


SCORES = {
    "matmul": (plain(lambda q, k, m: torch.matmul(heads(q), heads(k).transpose(-1, -2)) * 0.25), " -> mul"),
    "operator": (plain(lambda q, k, m: heads(q) @ heads(k).mT / 8**0.5), " -> div"),
    "no scale": (plain(lambda q, k, m: heads(q) @ heads(k).transpose(2, 3)), ""),
    "mask": (plain(lambda q, k, m: heads(q) @ heads(k).transpose(2, 3) * 0.25 + m), " -> mul add"),
    "scaled query": (plain(lambda q, k, m: heads(q * 0.25) @ heads(k).mT), "linear x3 -> mul -> score"),
    "in place": (plain(lambda q, k, m: (heads(q) @ heads(k).mT).mul_(0.25).add_(m)), " -> mul add"),
    "query scaled in place": (plain(lambda q, k, m: heads(q.mul_(0.25)) @ heads(k).mT),
                              "linear x3 -> mul -> score"),
    "copied query": (plain(lambda q, k, m: heads(q).contiguous() @ heads(k).transpose(2, 3)), ""),
    "cast": (plain(lambda q, k, m: (heads(q) @ heads(k).mT).float().mul(0.25).to(q.dtype)),
             " -> mul"),
    "bmm": (plain(lambda q, k, m: torch.bmm(flat(q), flat(k).transpose(1, 2)) * 0.25), " -> mul"),
    "bmm by reshape": (plain(lambda q, k, m: reshaped(q).bmm(reshaped(k).mT) * 0.25), " -> mul"),
    "einsum": (plain(lambda q, k, m: torch.einsum("bhid,bhjd->bhij", heads(q), heads(k)) * 0.25), " -> mul"),
    "einsum of rows": (plain(lambda q, k, m: torch.einsum("bihd,bjhd->bhij", rows(q), rows(k)) / 3),
                       " -> div"),
    "einsum, k first": (plain(lambda q, k, m: torch.einsum("bhjd,bhid->bhij", heads(k), heads(q))), None),
    "one head": (plain(lambda q, k, m: torch.bmm(q, k.transpose(1, 2)) * 0.25), " -> mul"),
    "split": (packed(split), "linear -> score -> mul"),
    "unbind": (packed(unbind), "linear -> score -> mul"),
    "interleaved": (packed(interleaved), "linear -> score -> mul"),
}
SCORES = {name: (make, chain if chain is None or "score" in chain else f"linear x3 -> score{chain}")
          for name, (make, chain) in SCORES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, dtype):
    make, chain = SCORES[name]
    check(make().to(dtype), torch.randn(B, T, C).to(dtype), fused=1)
    assert chain is None or chains() == [chain]
    assert "score" in chains()[0]
    assert all(parse_chain(text).text == text for text in texts())


@pytest.mark.parametrize("name", SCORES)
def test_dynamic_scores(name):
    """A region has a lane of fixed size: where the number of keys is none, the chain ends with the score."""
    make, chain = SCORES[name]
    check(make(), torch.randn(B, T, C), fused=1, dynamic=True)
    assert "score" in chains()[0]


def test_rounding_is_eagers():
    """The product is rounded, then the scaled one, then the sum."""
    model = SCORES["mask"][0]().bfloat16().eval()
    x = torch.randn(B, T, C, dtype=torch.bfloat16) * 3
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert chains() == [SCORES["mask"][1]]


@pytest.mark.parametrize("score", [
    lambda q, k, m: heads(q) @ heads(k).repeat_interleave(2, 2).transpose(2, 3),
    lambda q, k, m: heads(q).relu() @ heads(k).transpose(2, 3),
    lambda q, k, m: (heads(q) @ heads(k).transpose(2, 3)).clamp_(0),
    lambda q, k, m: heads(q).transpose(2, 3) @ heads(k),
    lambda q, k, m: torch.einsum("bhid,bgjd->bhij", heads(q), heads(k)),
    lambda q, k, m: heads(q) @ heads(k.flip(1)).transpose(2, 3),
    lambda q, k, m: heads(q) @ heads(k).transpose(2, 3).clone(),
    lambda q, k, m: heads(q) @ (k + 1).view(B, T, H, -1).permute(0, 2, 3, 1).flip(3),
], ids=["more keys", "act", "written", "features", "heads summed", "flipped", "copied", "other order"])
def test_what_is_no_score(score):
    class Model(Scores):
        def forward(self, x):
            h = self.norm(x)
            return self.score(self.q(h), self.k(h), self.mask), self.v(h)

    check(Model(score), torch.randn(B, T, C), fused=1)
    assert chains() in (["linear x3"], ["linear x3 -> add"])


def test_a_feed_forward_layer_beside_a_score():
    """Its activation belongs to the chain, as it would without the score."""
    class Model(Scores):
        def forward(self, x):
            h = self.norm(x)
            return heads(self.q(h)) @ heads(self.k(h)).transpose(2, 3) * 0.5, torch.relu(self.v(h))

    check(Model(None), torch.randn(B, T, C), fused=1)
    assert chains() == ["linear x3 -> relu -> score -> mul"]


def test_columns_of_heads_are_a_score():
    class Model(Scores):
        def forward(self, x):
            q, k = heads(self.q(h := self.norm(x))), heads(self.k(h))
            return q[..., :4] @ k[..., 4:].transpose(2, 3), self.v(h)

    check(Model(None), torch.randn(B, T, C), fused=1)
    assert chains() == ["linear x3 -> score"]
    assert "v1[0:4 x 4 by 8], v2[4:8 x 4 by 8]" in texts()[0]


def test_values_that_others_read_too():
    """q, k and what is made of them: the op yields the products, and their views are taken again."""
    def score(z, mask):
        q, k, v = split(z)
        return q @ k.transpose(-2, -1) * 0.25, v + q + k

    model = Scores(score, packed=True)
    check(model, torch.randn(B, T, C), fused=1)
    assert chains() == ["linear -> score -> mul"]


def test_views_that_are_written_after_the_score():
    """In place on what the op yields: the score reads what was there before."""
    class Model(Scores):
        def forward(self, x):
            h = self.norm(x)
            q, k = heads(self.q(h)), heads(self.k(h))
            return q @ k.mT * 0.25, q.mul_(2), self.v(h)

    check(Model(None), torch.randn(B, T, C), fused=1)
    assert chains() == ["linear x3 -> score -> mul"]


def test_a_mask_whose_gradient_is_wanted(monkeypatch):
    """A position bias [1, H, T, T]; and a scale that is a parameter, behind which a score would be kept."""
    class Model(Scores):
        def __init__(self, scale):
            super().__init__(None)
            self.bias, self.scale = nn.Parameter(torch.randn(1, H, T, T)), nn.Parameter(torch.tensor(0.3))
            self.by = (lambda s: s * self.scale + self.bias) if scale else (lambda s: s * 0.3 + self.bias)

        def forward(self, x):
            h = self.norm(x)
            return F.softmax(self.by(heads(self.q(h)) @ heads(self.k(h)).mT), -1) @ heads(self.v(h))

    for scale, chain in ((False, "linear x3 -> score -> mul add"), (True, "linear x3 -> score")):
        model = Model(scale)
        assert_equal_gradients(model, torch.randn(B, T, C), monkeypatch)
        assert chains() == [chain]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["patch, act, 1x1", "pixels that are left over", "tokens", "bmm", "unbind"])
def test_another_compiler(name, dynamic):
    """It gets the chain as one op, whose result has the sizes and strides that it is told."""
    case = CONVOLUTIONS.get(name)
    make, x = (case.make, image(case.shape, True)) if case else (SCORES[name][0], torch.randn(B, T, C))
    check(make(), x, dynamic=dynamic, backend_options={"inner": "aot_eager"})
    assert any(word in chains()[0] for word in ("patch conv", "score"))


# Gradients


def assert_equal_gradients(model, x, monkeypatch):
    """By the kernels (in Triton's interpreter), so that the chain's own backward runs."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    compiled = torch.compile(model.eval(), backend="ascend_ln_fuse", options={"report": "off"})
    found = []
    for run in (model, compiled):
        torch.manual_seed(1)
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        out = tensors(run(leaf))
        sum((t * torch.randn(t.shape)).sum() for t in out).backward()
        found.append([*out, leaf.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    for ours, eager in zip(found[1], found[0], strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions(name, monkeypatch):
    case = CONVOLUTIONS[name]
    assert_equal_gradients(case.make(), image(case.shape, True), monkeypatch)
    assert chains() == [case.chain]


@pytest.mark.parametrize("name", ["mask", "in place", "scaled query", "query scaled in place", "bmm",
                                  "einsum of rows", "split", "unbind", "interleaved"])
def test_gradients_of_scores(name, monkeypatch):
    """Of a packed qkv, the score stays outside in training: its gradient would be made twice."""
    make, chain = SCORES[name]
    assert_equal_gradients(make(), torch.randn(B, T, C), monkeypatch)
    assert chains() == [chain if chain.startswith("linear x3") else "linear"]


def test_short_scores_stay_outside_in_training(monkeypatch):
    """Where q and k are larger than their score, copies of them would cost more than is spared."""
    assert_equal_gradients(SCORES["matmul"][0](), torch.randn(B, T // 4, C), monkeypatch)
    assert chains() == ["linear x3"]


# What is said of them


def test_kernel_info_names_the_stages():
    model, x = CONVOLUTIONS["patch, act"].make().eval(), image((B, C, 6, 8), True)
    with torch.no_grad():
        words = [kernel.region for kernel in kernel_info(model, x).kernels]
    assert any(word.startswith("patch_conv(f32[2, 6, 8, 32], f32[64, 32, 2, 2]") for word in words), words
    with torch.no_grad():
        info = kernel_info(SCORES["mask"][0]().eval(), torch.randn(B, T, C))
    words = [kernel.region for kernel in info.kernels]
    assert "score(f32[2, 4, 16, 8], f32[2, 4, 16, 8])" in words, words


# Models from transformers


def _vision(config, **more):
    return config(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=128,
                  image_size=64, patch_size=16, **more)


def _transformers(name):
    transformers = pytest.importorskip("transformers")
    ids, pixels = {"input_ids": torch.randint(0, 100, (2, 12))}, {"pixel_values": torch.randn(2, 3, 64, 64)}
    sizes = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
    mlp = "linear -> gelu -> linear"
    if name == "convnext":
        return transformers.ConvNextModel(transformers.ConvNextConfig(**sizes)), pixels, [
            "", *[f"{mlp} -> mul", "patch conv"] * 3, f"{mlp} -> mul", ""]
    if name == "convnextv2":
        return transformers.ConvNextV2Model(transformers.ConvNextV2Config(**sizes)), pixels, [
            "", *["linear -> gelu", "patch conv"] * 3, "linear -> gelu", ""]
    if name == "segformer":
        config = transformers.SegformerConfig(**sizes, num_attention_heads=[1, 2, 4, 4],
                                              decoder_hidden_size=32)
        return transformers.SegformerModel(config), pixels, [
            *["", "linear, patch conv", "linear x2", "linear", ""] * 3,
            "", "linear x3 -> score -> mul", "linear", ""]
    if name == "mobilevit":
        config = transformers.MobileViTConfig(image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=4,
                                              neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32])
        layer = ["linear x3 -> score -> div", "linear -> silu -> linear"]
        return transformers.MobileViTModel(config), pixels, [*layer * 2, "", *layer * 4, "", *layer * 3, ""]
    if name == "vit":
        return transformers.ViTModel(_vision(transformers.ViTConfig)), pixels, [
            *["linear x3 -> score -> mul", mlp] * 2, ""]
    if name == "bert":
        config = transformers.BertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
                                         intermediate_size=128, vocab_size=100)
        return transformers.BertModel(config), ids, [
            *["linear x3 -> score -> mul", mlp] * 2, ""]
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=100, bos_token_id=0,
                                         eos_token_id=0, use_cache=False)
        return transformers.GPT2Model(config), ids, [
            *["linear -> score -> mul add", "linear -> gelu_new -> linear"] * 2, ""]
    # rotary embedding stands between the projections and the score
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
                                      intermediate_size=128, vocab_size=100, use_cache=False)
    return transformers.LlamaModel(config), ids, [
        *["linear x3", "linear x2 -> silu mul -> linear"] * 2, ""]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["convnext", "convnextv2", "segformer", "mobilevit", "vit", "bert", "gpt2",
                                  "llama"])
def test_transformers(name, dynamic):
    """With attention written out."""
    model, inputs, wanted = _transformers(name)
    model = model.eval().bfloat16()
    if name not in ("convnext", "convnextv2"):
        model.set_attn_implementation("eager")
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic or None,
                             options={"report": "off"})
    before = len(last_reports())
    with torch.no_grad():
        eager, ours = (tensors(run(**inputs, return_dict=False)) for run in (model, compiled))
        found = [site.chain for report in last_reports()[before:] for site in report.sites]
        with NoRounding():
            exact = tensors(model.double()(**{k: v.double() if v.is_floating_point() else v
                                              for k, v in inputs.items()}, return_dict=False))
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert_within_bound(a, b, c)
    if not dynamic:
        assert found == wanted
    elif name in ("segformer", "mobilevit"):
        # An image whose height and width vary has no grid; and sizes that are read off q or k must be known
        # before the views of them, so that not all scores are in a chain.
        assert len(found) == len(wanted)
    else:
        assert [("score" in f, "patch" in f) for f in found] == [("score" in w, "patch" in w) for w in wanted]
