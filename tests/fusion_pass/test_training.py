"""Gradients through fused sites, where they are recorded and where not."""

import copy

import pytest
import torch
from checks import assert_within_bound, fresh, tensors
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import auto_fusion, last_reports

OFF = {"report": "off"}


class Site(nn.Module):
    """A norm of `size` over `view(x)`, then `after`."""

    def __init__(self, view, norm=None, after=lambda y: y, dtype=torch.float32):
        super().__init__()
        self.view, self.after = view, after
        self.norm = norm or nn.LayerNorm(16)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)
        self.norm.to(dtype)

    def forward(self, x):
        return self.after(self.norm(self.view(x)))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        s = x + self.linear(x)
        return self.norm(s) * 2, s


class Shared(nn.Module):
    """q and k by one norm, whose weights collect both gradients."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = x.unbind(1)
        return self.norm(q) * 2, self.norm(k), v


SITES = {
    "plain": lambda: Site(lambda x: x),
    "strided": lambda: Site(lambda x: x.unbind(1)[1]),
    "permuted": lambda: Site(lambda x: x.transpose(0, 1)),
    "expanded": lambda: Site(lambda x: x[:, :1].expand(-1, 4, -1)),
    "copy": lambda: Site(lambda x: x.transpose(0, 1).reshape(-1, 16)),
    "no affine": lambda: Site(lambda x: x[:, 1], nn.LayerNorm(16, elementwise_affine=False)),
    "no bias": lambda: Site(lambda x: x[:, 1], nn.LayerNorm(16, bias=False)),
    "rms": lambda: Site(lambda x: x[:, 1], nn.RMSNorm(16)),
    "cast": lambda: Site(lambda x: x[:, 1].bfloat16().float(), after=lambda y: y.bfloat16()),
    "low precision": lambda: Site(lambda x: x[:, 1].bfloat16(), dtype=torch.bfloat16),
    "several dims": lambda: Site(lambda x: x, nn.LayerNorm((3, 16))),
    "activation": lambda: Site(lambda x: x[:, 1] * 2, after=lambda y: F.gelu(y) + 1),
    "add before": Sum,
    "shared weights": Shared,
}


def gradients(run, model, x):
    """Gradients of a random projection of the outputs, by input and parameters."""
    torch.manual_seed(3)
    loss = sum((out.float() * torch.randn(out.shape)).sum() for out in tensors(run(x)))
    return torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)


@pytest.mark.parametrize("inner, dynamic", [("eager", None), ("eager", True), ("aot_eager", None)],
                         ids=["eager", "eager dynamic", "aot_eager"])
@pytest.mark.parametrize("name", SITES)
def test_gradients_are_those_of_eager(name, inner, dynamic):
    model = SITES[name]().train()
    x = torch.randn(6, 3, 16, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic,
                             options={**OFF, "inner": inner})
    ours, eager = gradients(compiled, model, x), gradients(model, model, x)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
    assert all(r.fused == r.found > 0 for r in last_reports())


@pytest.mark.parametrize("frozen", ["input", "weights"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_only_what_requires_grad_gets_one(frozen, inner):
    model = Sum().train()
    x = torch.randn(6, 16, requires_grad=frozen != "input")
    if frozen == "weights":
        model.requires_grad_(False)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": inner})
    leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
    results = [torch.autograd.grad(sum(o.square().sum() for o in run(x)), leaves)
               for run in (compiled, model)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("interpret", [False, True], ids=["reference", "kernel"])
def test_the_sum_alone_or_the_norm_alone(which, interpret, monkeypatch):
    """One of a site's two outputs is not used. With the interpreter, forward is the kernel and
    backward our autograd function."""
    if interpret:
        pytest.importorskip("triton")
        monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    model = Sum().train()
    x = torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF)
    results = []
    for run in (compiled, model):
        results.append(torch.autograd.grad(run(x)[which].square().sum(), [x, *model.parameters()],
                                           allow_unused=True))
    for ours, eager in zip(*results, strict=True):
        eager = torch.zeros_like(ours) if eager is None and ours is not None else eager
        torch.testing.assert_close(ours, eager)
    assert last_reports()[-1].fused == 1


class Head(nn.Module):
    """A weight behind a norm that has none: only what is behind the weight is trained."""

    def __init__(self, act):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 8), act

    def forward(self, x):
        h = self.norm(x)
        return h, self.act(self.fc(h))


def frozen_sum():
    model = Sum()
    model.linear.requires_grad_(False)
    return model


@pytest.mark.parametrize("model", [frozen_sum, lambda: Head(nn.Identity()), lambda: Head(nn.Tanh())],
                         ids=["sum", "product", "activation"])
@pytest.mark.parametrize("interpret", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_which_results_require_grad(model, interpret, inner, monkeypatch):
    """Not all that a site yields is made of what does: the user may want such a result as NumPy's."""
    if interpret:
        pytest.importorskip("triton")
        monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    model, x = model().train(), torch.randn(6, 16)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": inner})
    ours, eager = compiled(x), model(x)
    assert last_reports()[-1].fused == 1
    assert sorted(y.requires_grad for y in eager) == [False, True]
    for a, b in zip(ours, eager, strict=True):
        assert a.requires_grad == b.requires_grad and a.is_leaf == b.is_leaf
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(sum(y.square().sum() for y in results), trained)
             for results in (ours, eager)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_an_input_that_is_written_before_backward_is_an_error(monkeypatch):
    """Eager keeps the sum, a fused site what it is made of: no wrong gradient, but PyTorch's own error."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    norm = nn.LayerNorm(16)
    compiled = torch.compile(lambda x, y: norm(x + y), backend="ascend_ln_fuse", options=OFF)
    x, y = torch.randn(6, 16), torch.randn(6, 16)
    result = compiled(x, y)
    assert last_reports()[-1].fused == 1
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("written", ["x", "y"])
def test_an_input_that_is_written_on_a_cpu(written, inner):
    """With the default inner, autograd records the plain form there, and keeps what eager keeps."""
    x, y, grad = torch.randn(6, 16, requires_grad=True), torch.randn(6, 16), torch.randn(6, 16)

    def norm(x, y):
        return F.layer_norm(x + y, (16,))

    wanted, = torch.autograd.grad(norm(x, y), x, grad)
    compiled = torch.compile(norm, backend="ascend_ln_fuse", options={**OFF, "inner": inner})
    given = {"x": x * 1, "y": y.clone()}
    result = compiled(**given)
    assert last_reports()[-1].fused == 1
    with torch.no_grad():
        given[written].zero_()
    if inner == "eager":
        torch.testing.assert_close(torch.autograd.grad(result, x, grad)[0], wanted)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result, x, grad)


def test_the_option_to_decline():
    model, x = Shared(), torch.randn(6, 3, 16)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "training": "decline"})
    torch.testing.assert_close(compiled(x), model(x))
    assert [s.reason for s in last_reports()[-1].sites] == \
        ["gradients are recorded here, and the option training is 'decline'"] * 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert last_reports()[-1].fused == 2


class Regions(nn.Module):
    """Norms with and without grad in one graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.LayerNorm(16) for _ in range(3))

    def forward(self, x):
        y = self.a(x.bfloat16().float())
        with torch.no_grad():
            z = self.b(y * 2)
        with torch.enable_grad():
            w = self.c(z + y)
        return y, z, w


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_no_grad_within_a_graph(inner):
    model, x = Regions(), torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": inner})
    for run in (compiled, model):
        assert [t.requires_grad for t in run(x)] == [True, False, True]
    ours, eager = gradients(compiled, model, x), gradients(model, model, x)
    for a, b in zip(ours, eager, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b)
    assert sum(r.fused for r in last_reports()) == 3


def test_a_view_under_no_grad_is_not_read_elsewhere():
    """Both sites read `scale` through one view; made under no_grad, it would give the second no gradient."""
    def f(x, scale):
        with torch.no_grad():
            y = F.rms_norm(x, (16,)) * scale.float().transpose(0, 1)
        return y + F.rms_norm(x * 2, (16,)) * scale.float().transpose(0, 1)

    x, scale = torch.randn(4, 5, 16), torch.randn(5, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options=OFF)
    ours, eager = (torch.autograd.grad(run(x, scale).square().sum(), scale) for run in (compiled, f))
    torch.testing.assert_close(ours, eager)
    assert last_reports()[-1].fused == 2


@pytest.mark.parametrize("spell", [lambda w: w.unsqueeze(0), lambda w: w.view_as(w), lambda w: w[None, :]])
def test_a_view_under_no_grad_is_no_equal_view(spell):
    """Two views of one tensor in one site, one of them without a gradient."""
    def f(x, w):
        with torch.no_grad():
            c = spell(w)
        return F.rms_norm(x, (16,)) * c + spell(w)

    x, w = torch.randn(4, 16), torch.randn(16, requires_grad=True)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options=OFF)
    ours, eager = (torch.autograd.grad(run(x, w).square().sum(), w) for run in (compiled, f))
    torch.testing.assert_close(ours, eager)
    assert last_reports()[-1].fused == 1


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
def test_the_gradient_of_a_handwritten_norm_keeps_its_digits(offset):
    """Rows whose mean is far larger than their deviation. PyTorch's backward for the CPU is out of bound."""
    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)

    x, weights = offset + torch.randn(64, 48) / 10, torch.randn(64, 48)

    def gradient(run, dtype):
        leaf = x.to(dtype, copy=True).requires_grad_()
        return torch.autograd.grad((run(leaf) * weights.to(dtype)).sum(), leaf)[0]

    compiled = torch.compile(norm, backend="ascend_ln_fuse", options=OFF)
    assert_within_bound(gradient(compiled, torch.float32), gradient(norm, torch.float32),
                        gradient(norm, torch.float64))
    assert last_reports()[-1].fused == 1


@pytest.mark.parametrize("first", ["grad", "no grad"])
def test_one_module_with_and_without_grad(first):
    model, x = Shared(), torch.randn(6, 3, 16, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF)
    for grad in (first == "grad", first != "grad", first == "grad"):
        with torch.set_grad_enabled(grad):
            ours, eager = compiled(x), model(x)
        assert [t.requires_grad for t in ours] == [t.requires_grad for t in eager]
        assert ours[0].requires_grad is grad
        torch.testing.assert_close(ours, eager)
    for a, b in zip(gradients(compiled, model, x), gradients(model, model, x)):
        torch.testing.assert_close(a, b)


def test_inference_mode():
    model, x = Shared().eval(), torch.randn(6, 3, 16)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    assert last_reports()[-1].fused == 2


def test_detached_values_stay_detached():
    def f(x):
        return F.layer_norm(x.detach(), (16,)), F.layer_norm(x, (16,)).detach(), F.layer_norm(x, (16,))

    x = torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options=OFF)
    assert [t.requires_grad for t in compiled(x)] == [False, False, True]


def test_differentiating_twice_on_the_cpu_is_right():
    model = SITES["strided"]()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF)
    x = torch.randn(6, 3, 16, requires_grad=True)
    results = []
    for run in (compiled, model):
        first, = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad((first * x).sum(), [x, *model.parameters()], allow_unused=True))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_differentiating_twice_through_another_compiler_is_an_error():
    """Through kernels it is right: tests/test_once_wrong.py."""
    model = SITES["strided"]()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": "aot_eager"})
    x = torch.randn(6, 3, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiated twice|does not currently support double backward"):
        first, = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        (first * x).sum().backward()


def test_a_fused_site_keeps_no_intermediate_for_backward(monkeypatch):
    """As on an accelerator: eager keeps the sum, the cast and the statistics; we keep inputs alone."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    model = SITES["activation"]()
    x = torch.randn(6, 3, 16, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF)
    compiled(x)
    inputs = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}

    def kept(run):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            run(x)
        return [t for t in found if t.untyped_storage().data_ptr() not in inputs]

    assert kept(model) and not kept(compiled)


def test_training_steps_follow_eager():
    models = [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))]
    models.append(copy.deepcopy(models[0]))
    auto_fusion(models[0], **OFF)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(fresh(x)), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    assert last_reports()[-1].fused == 1


def test_declined_also_where_only_an_absorbed_weight_has_a_gradient():
    weight = torch.ones(16, requires_grad=True)

    def f(x):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    torch._dynamo.reset()
    call = torch.compile(f, backend="ascend_ln_fuse", options={"training": "decline", "report": "off"})
    assert call(torch.randn(3, 16)).requires_grad
    site, = last_reports()[-1].sites
    assert site.pattern == "rms_norm"  # the part without gradients is fused, the product is not
