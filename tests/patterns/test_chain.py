"""Chains in models: a norm, the linear layers behind it, and what is pointwise between them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from checks import NoRounding, assert_within_bound, check, tensors
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports

C, T = 32, 5


def chains() -> list[str]:
    """The chains of the last graph, in order; "" for a norm without one."""
    return [site.chain for site in last_reports()[-1].sites]


class Attention(nn.Module):
    """Row 23: separate q, k and v on one norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))


class PreNorm(nn.Module):
    """Row 15: the pre-norm block."""

    def __init__(self, act=F.gelu):
        super().__init__()
        self.attn, self.norm2 = Attention(), nn.LayerNorm(C)
        self.fc1, self.fc2, self.act = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), act
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attn(x)
        h = self.norm2(x)
        return x + self.drop(self.fc2(self.drop(self.act(self.fc1(h)))))


class Conv1D(nn.Module):
    """Row 21: GPT-2's linear layer."""

    def __init__(self, out_features, in_features):
        super().__init__()
        self.nf = out_features
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * 0.2)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_2, self.c_fc, self.c_proj = nn.LayerNorm(C), Conv1D(4 * C, C), Conv1D(C, 4 * C)

    def forward(self, x):
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.c_proj(h)


class Gated(nn.Module):
    """Row 22: gate and up, separate."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(C)
        self.gate, self.up = nn.Linear(C, 2 * C, bias=False), nn.Linear(C, 2 * C, bias=False)
        self.down = nn.Linear(2 * C, C, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Packed(nn.Module):
    """Row 22: gate and up in one weight."""

    def __init__(self, split):
        super().__init__()
        self.norm, self.gate_up, self.down = nn.RMSNorm(C), nn.Linear(C, 4 * C), nn.Linear(2 * C, C)
        self.split = split

    def forward(self, x):
        gate, up = self.split(self.gate_up(self.norm(x)))
        return self.down(F.silu(gate) * up)


class ConvNeXt(nn.Module):
    """Norm over channels, a 1x1 convolution, an activation."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(C), nn.Conv2d(C, 2 * C, 1)

    def forward(self, x):
        h = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.gelu(self.conv(h))


class Two(nn.Module):
    """norm -> linear -> linear."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(C), nn.Linear(C, 8), nn.Linear(8, C)

    def forward(self, x):
        return self.b(self.a(self.norm(x)))


class MatMul(nn.Module):
    """norm -> x @ w."""

    def __init__(self):
        super().__init__()
        self.norm, self.w = nn.LayerNorm(C), nn.Parameter(torch.randn(C, 2 * C) * 0.2)

    def forward(self, x):
        return torch.relu(self.norm(x) @ self.w)


class PostNorm(nn.Module):
    """BERT: the norm's result is also the residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(C), nn.LayerNorm(C)
        self.fc1, self.fc2 = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x, y):
        h = self.norm(x + y)
        return self.last(self.fc2(F.gelu(self.fc1(h))) + h)


class Parallel(nn.Module):
    """GPT-J's and PaLM's: attention and feed-forward read one norm."""

    def __init__(self, gated=False, before=False):
        super().__init__()
        self.attn, self.gated, self.before = Attention(), gated, before
        self.fc1, self.up, self.fc2 = nn.Linear(C, 2 * C), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def feed_forward(self, h):
        return self.fc2(self.up(h) * F.silu(self.fc1(h)) if self.gated else F.gelu(self.fc1(h)))

    def forward(self, x):
        attn = self.attn
        h = attn.norm(x)
        first = self.feed_forward(h) if self.before else None
        a = F.scaled_dot_product_attention(attn.q(h), attn.k(h), attn.v(h))
        return x + a + (first if self.before else self.feed_forward(h))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
               "silu": F.silu, "quick_gelu": quick_gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
               "mish": F.mish, "hardswish": F.hardswish}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    chains: tuple[str, ...]
    shape: tuple[int, ...] = (2, T, C)
    inputs: int = 1


CASES = {
    "row 15": Case(PreNorm, ("linear x3", "linear -> gelu -> linear -> add")),
    "row 21": Case(Gpt2, ("linear -> gelu_new -> linear -> add",)),
    "row 22, separate": Case(Gated, ("linear x2 -> silu mul -> linear -> add",)),
    "row 22, chunk": Case(lambda: Packed(lambda z: z.chunk(2, -1)), ("linear -> silu mul -> linear",)),
    "row 22, split": Case(lambda: Packed(lambda z: z.split(2 * C, -1)), ("linear -> silu mul -> linear",)),
    "row 22, slices": Case(lambda: Packed(lambda z: (z[..., :2 * C], z[..., 2 * C:])),
                           ("linear -> silu mul -> linear",)),
    "row 23": Case(Attention, ("linear x3",)),
    "parallel": Case(Parallel, ("linear x4 -> gelu -> linear",)),
    "parallel, feed-forward first": Case(lambda: Parallel(before=True), ("linear x4 -> gelu -> linear",)),
    "parallel, gated": Case(lambda: Parallel(gated=True), ("linear x5 -> silu mul -> linear",)),
    "two linears": Case(Two, ("linear -> linear",)),
    "matmul": Case(MatMul, ("linear -> relu",)),
    "post-norm": Case(PostNorm, ("linear -> gelu -> linear", ""), inputs=2),
    **{name: Case(lambda act=act: PreNorm(act), ("linear x3", f"linear -> {name} -> linear -> add"))
       for name, act in ACTIVATIONS.items()},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_chains_of_models(name, dtype):
    case = CASES[name]
    model = case.make().to(dtype)
    inputs = [torch.randn(case.shape).to(dtype) for _ in range(case.inputs)]
    check(model, *inputs, fused=len(case.chains))
    assert tuple(chains()) == case.chains


@pytest.mark.parametrize("name", [name for name in CASES if name not in ACTIVATIONS])
def test_dynamic(name):
    case = CASES[name]
    model = case.make()
    check(model, *[torch.randn(case.shape) for _ in range(case.inputs)], fused=len(case.chains), dynamic=True)
    assert tuple(chains()) == case.chains


def test_convolution_of_channels_last():
    x = torch.randn(2, C, 4, 4).to(memory_format=torch.channels_last)
    check(ConvNeXt(), x, fused=1)
    assert chains() == ["linear -> gelu"]


# What ends a chain, or keeps one from beginning


class Ends(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.norm, self.between = nn.LayerNorm(C), between
        self.fc1, self.fc2 = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x):
        return self.between(self.fc1(self.norm(x)), self.fc2)


class TwoBehindOne(nn.Module):
    """Each of two products on one norm is read by something pointwise."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x):
        h = self.norm(x)
        return self.first(self.fc1(h)), self.second(self.fc2(h))


@pytest.mark.parametrize("first, second, chain", [
    (F.silu, F.gelu, "linear x2 -> silu -> gelu"),
    (torch.sin, F.gelu, "linear x2 -> gelu"),
    (lambda z: z.double(), F.gelu, "linear x2 -> gelu"),  # a cast alone
    (lambda z: F.silu(z).sin() + z, F.gelu, "linear x2 -> gelu"),  # silu is not all that reads the product
], ids=["both", "one", "cast", "read twice"])
def test_pointwise_behind_one_of_two(first, second, chain):
    check(TwoBehindOne(first, second), torch.randn(2, T, C), fused=1)
    assert chains() == [chain]


@pytest.mark.parametrize("between, chain", [
    (lambda z, f: f(F.softmax(z, -1)), "linear"),
    (lambda z, f: (f(F.gelu(z)), z), "linear"),  # the product is read elsewhere
    (lambda z, f: f(F.leaky_relu_(z)), ""),  # the product is written
    (lambda z, f: (f(F.relu(z[0], inplace=True)), z), ""),
    (lambda z, f: (f(F.gelu(z)), F.gelu(z).mul_(2)), "linear"),
    (lambda z, f: f(F.gelu(z)[:, 1:]), "linear -> gelu"),
    (lambda z, f: f(F.gelu(z).transpose(0, 1)), "linear -> gelu"),
    (lambda z, f: F.gelu(z) * z.mean(), "linear"),
    (lambda z, f: f(F.gelu(z)).clamp_(0), "linear -> gelu"),  # the result is written: it stays outside
], ids=lambda value: "" if callable(value) else value)
def test_what_ends_a_chain(between, chain):
    check(Ends(between), torch.randn(2, T, C), fused=1)
    assert chains() == [chain]


def test_dropout_ends_a_chain_in_training():
    """And draws what eager draws."""
    model = PreNorm().train()
    x = torch.randn(2, T, C)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    torch.manual_seed(3)
    wanted = model(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), wanted)
    assert chains() == ["linear x3", "linear -> gelu"]


def test_autocast_is_no_chain():
    """Its casts belong to no region."""
    model = PreNorm().eval()
    x = torch.randn(2, T, C)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), model(x))
    assert chains() == ["", ""]


def test_another_compiler_that_runs_products_as_they_are():
    """It gets a chain as one op; see tests/fusion_pass/test_inner_chains.py for the others."""
    check(PreNorm(), torch.randn(2, T, C), fused=2, backend_options={"inner": "aot_eager"})
    assert chains() == ["linear x3", "linear -> gelu -> linear -> add"]


def test_a_weight_made_of_the_input_is_read_in_time():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(C)

        def forward(self, x):
            h = self.norm(x)
            return F.linear(F.gelu(F.linear(h, h[0].t() @ h[0])), h[0].t() @ h[1])

    check(Model().eval(), torch.randn(2, T, C), fused=1)


def by_addmm(h, w, b):
    return torch.addmm(b, h.view(-1, C), w.t()).view(h.shape)


@pytest.mark.parametrize("product, bias", [
    (F.linear, (1,)), (F.linear, ()), (F.linear, (T, C)), (F.linear, (1, C)), (by_addmm, (1,))],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_bias_that_broadcasts_ends_a_chain(product, bias):
    """PyTorch adds it to each row; a kernel, which reads a number for each feature, refuses it."""
    def model(x, w, b):
        return product(F.rms_norm(x, (C,)), w, b)

    given = [torch.randn(shape) for shape in ((1, T, C), (C, C), bias)]
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    assert torch.equal(compiled(*given), model(*given))
    assert chains() == [""]


def test_weight_written_in_between():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(C)
            self.register_buffer("w", torch.randn(C, C))

        def forward(self, x):
            h = F.gelu(F.linear(self.norm(x), self.w))
            self.w.mul_(0.5)
            return F.linear(h, self.w)

    model = Model().eval()
    before = model.w.clone()
    x = torch.randn(2, T, C)
    with torch.no_grad():
        wanted = model(x)
        model.w.copy_(before)
        ours = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})(x)
    assert torch.equal(ours, wanted) and torch.equal(model.w, before * 0.5)


# Gradients


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", ["row 15", "row 21", "row 22, separate", "row 22, chunk", "post-norm",
                                  "matmul"])
def test_gradients(name, interpret, monkeypatch):
    if interpret:
        pytest.importorskip("triton")
        monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    case = CASES[name]
    model = case.make().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    found = []
    for run in (model, compiled):
        torch.manual_seed(1)
        inputs = [torch.randn(case.shape, requires_grad=True) for _ in range(case.inputs)]
        sum(t.square().sum() for t in tensors(run(*inputs))).backward()
        found.append([p.grad for p in (*inputs, *model.parameters())])
        model.zero_grad()
    assert tuple(chains()) == case.chains
    for ours, eager in zip(found[1], found[0]):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, T, C), (T, C)], ids=str)
@pytest.mark.parametrize("both", [False, True], ids=["one result", "two results"])
def test_a_product_that_is_written_behind_the_chain(shape, both, monkeypatch):
    """In training: products of rows are views, which a Function of autograd may not return to be written."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")

    def model(x, w, b, residual):
        h = F.layer_norm(x, (C,))
        y = F.linear(h, w, b).add_(residual.transpose(-1, -2))  # whose layout keeps it out of the chain
        return (y, h) if both else (y,)

    inputs = [torch.randn(size, requires_grad=True) for size in (shape, (C, C), (C,), (*shape[:-2], C, T))]
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    found = [torch.autograd.grad(sum(t.sin().sum() for t in run(*inputs)), inputs)
             for run in (compiled, model)]
    assert chains() == ["linear"]
    for ours, eager in zip(*found):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


# Models from transformers


def _config(config, **more):
    return config(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=128,
                  **more)


def _transformers(name):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 100, (2, 12))
    if name == "bert":
        model = transformers.BertModel(_config(transformers.BertConfig, vocab_size=100))
        return model, {"input_ids": ids}, [*["linear x3", "linear -> gelu -> linear"] * 2, ""]
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=100, bos_token_id=0,
                                         eos_token_id=0)
        return transformers.GPT2Model(config), {"input_ids": ids}, [
            *["linear", "linear -> gelu_new -> linear"] * 2, ""]
    if name == "vit":
        config = _config(transformers.ViTConfig, image_size=32, patch_size=8)
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}, [
            *["linear x3", "linear -> gelu -> linear"] * 2, ""]
    if name == "llama":
        model = transformers.LlamaModel(_config(transformers.LlamaConfig, vocab_size=100))
        return model, {"input_ids": ids}, [*["linear x3", "linear x2 -> silu mul -> linear"] * 2, ""]
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4,
                                        encoder_ffn_dim=128, max_source_positions=50, num_mel_bins=16)
    return WhisperEncoder(config), {"input_features": torch.randn(1, 16, 100)}, [
        *["linear x3 -> mul", "linear -> gelu -> linear"] * 2, ""]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama", "whisper"])
def test_transformers(name, dynamic):
    model, inputs, wanted = _transformers(name)
    model = model.eval().bfloat16()
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic or None,
                             options={"report": "off"})
    with torch.no_grad():
        eager, ours = (tensors(run(**inputs, return_dict=False)) for run in (model, compiled))
        with NoRounding():
            exact = tensors(model.double()(**{k: v.double() if v.is_floating_point() else v
                                              for k, v in inputs.items()}, return_dict=False))
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert_within_bound(a, b, c)
    assert [site.chain for report in last_reports() for site in report.sites] == wanted
