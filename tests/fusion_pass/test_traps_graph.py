"""The traps of graphs, each seen in the field: fused and right, or declined with that reason."""

import pytest
import torch
from checks import check, tensors
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_ln_fuse import auto_fusion, last_reports

OFF = {"report": "off"}
BF16 = torch.bfloat16


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


class Layer(nn.Module):
    """A residual block: linear, dropout, add, norm."""

    def __init__(self, p=0.5):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(p)

    def forward(self, x):
        return self.norm(x + self.dropout(self.linear(x)))


def compiled(f, **kwargs):
    return torch.compile(f, backend="ascend_ln_fuse", options=OFF, **kwargs)


def same_as_eager(f, *args, fused=None, exact=True, **kwargs):
    """Run both from the same seed; the sites of all graphs."""
    results = []
    for run in (f, compiled(f, **kwargs)):
        torch.manual_seed(7)
        results.append(run(*args))
    for eager, ours in zip(*map(tensors, results), strict=True):
        assert ours.dtype == eager.dtype and ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, **({"rtol": 0, "atol": 0} if exact else {}))
    sites = [site for report in last_reports() for site in report.sites]
    if fused is not None:
        assert sum(s.status == "fused" for s in sites) == fused, [s.reason for s in sites]
    return sites


# Autocast.


def norm_of_linear(model):
    return lambda x: model.norm(model.linear(x))


def inside(model):
    def f(x):
        y = model.norm(x)
        with torch.autocast("cpu", BF16):
            y = model.norm(model.linear(y))
            with torch.autocast("cpu", enabled=False):
                y = model.norm(y.float())
            y = model.linear(y)
        return model.norm(y.float() + x)

    return f


@pytest.mark.parametrize("low, dtype", [(BF16, torch.float32), (torch.float16, torch.float32),
                                        (BF16, BF16)], ids=["bf16", "fp16", "bf16 weights"])
def test_ambient_autocast(low, dtype):
    """It leaves no node: only the fakes' dtypes show what it did."""
    model = Layer().eval()
    model.norm.to(dtype)
    f, x = norm_of_linear(model), torch.randn(4, 16)
    with torch.autocast("cpu", low), torch.no_grad():
        sites = same_as_eager(f, x, exact=False)
    assert all(s.status == "fused" or "dtypes" in s.reason for s in sites) and sites


def test_autocast_inside():
    sites = same_as_eager(inside(Layer().eval()), torch.randn(4, 16), exact=False)
    assert len(sites) == 4 and all(s.status == "fused" for s in sites)


def test_autocast_changed_between_calls():
    model = Layer().eval()
    f, x = norm_of_linear(model), torch.randn(4, 16)
    run = compiled(f)
    for enabled in (False, True, False):
        with torch.autocast("cpu", BF16, enabled=enabled):
            ours, eager = run(x), f(x)
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours, eager)


# The random stream.


def dropout_between_reads(x):
    """The second dropout reads the sum that the norm's kernel could store: still it draws second."""
    s = x + 1
    a = F.dropout(x, 0.5)
    y = F.layer_norm(s + a, (16,))
    b = F.dropout(s, 0.5)
    return y, b, F.dropout(y, 0.5), torch.rand_like(x)


def dropout_that_waits_for_a_late_norm(x):
    s = x * 2 + 1
    a = F.dropout(s, 0.5)
    b = F.dropout(x, 0.5)
    return F.layer_norm(s, (16,)), a, b


@pytest.mark.parametrize("f, fused", [
    (lambda x: Layer.forward(TRAINING, x), 1), (dropout_between_reads, 1),
    (dropout_that_waits_for_a_late_norm, 1),
    (lambda x: F.layer_norm(F.dropout(x, 0.3, training=False), (16,)), 1),
    (lambda x: F.layer_norm(F.alpha_dropout(x + torch.randn_like(x), 0.3, True), (16,)), 1),
], ids=["add -> norm", "between reads", "late norm", "off", "alpha"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_dropout_draws_as_in_eager(f, fused, dynamic):
    same_as_eager(f, torch.randn(4, 16), fused=fused, dynamic=dynamic)


TRAINING = Layer().train()


# Higher-order ops, custom ops, transforms.


def test_cond():
    def f(x):
        y = F.layer_norm(x + 1, (16,))
        z = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,))
        return F.layer_norm(z, (16,)), z

    for sign in (1, -1):
        same_as_eager(f, sign * torch.rand(4, 16), fused=2)


def test_checkpoint():
    model = Layer(p=0.0).train()

    def f(x):
        return model.norm(checkpoint(model, x, use_reentrant=False))

    x = torch.randn(4, 16, requires_grad=True)
    results = []
    for run in (f, compiled(f)):
        results.append((run(x), *torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert sum(r.fused for r in last_reports()) >= 1


def test_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    model = nn.LayerNorm(16)

    def f(qkv):
        q, k, v = qkv.unbind(2)
        q, k = model(q), model(k)
        return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)))

    with torch.no_grad():
        same_as_eager(f, torch.randn(2, 8, 3, 4, 16), fused=2, exact=False)


@pytest.fixture
def library():
    made = torch.library.Library("aln_traps", "DEF")
    calls = []
    made.define("log(Tensor x, str name) -> Tensor")
    made.define("bump(Tensor(a!) x) -> ()")
    made.impl("log", lambda x, name: calls.append(name) or x + torch.rand(1), "CPU")
    made.impl("bump", lambda x: (x.add_(1), None)[1], "CPU")
    torch.library.register_fake("aln_traps::log", lambda x, name: torch.empty_like(x), lib=made)
    torch.library.register_fake("aln_traps::bump", lambda x: None, lib=made)
    yield torch.ops.aln_traps, calls
    made._destroy()


def test_custom_ops_keep_their_order(library):
    """They may draw random numbers, communicate, print."""
    ops, calls = library

    def f(x):
        s = x * 2
        a = ops.log(s, "of the sum")
        b = ops.log(x, "of the input")
        return F.layer_norm(s, (16,)), a, b

    same_as_eager(f, torch.randn(4, 16), fused=1)
    assert calls == ["of the sum", "of the input"] * 2


def test_custom_ops_that_write(library):
    ops, _ = library

    def f(x):
        s = x * 2
        y = F.layer_norm(s, (16,))
        ops.bump(s)
        return y, F.layer_norm(s, (16,)), s

    same_as_eager(f, torch.randn(4, 16), fused=2)


def test_vmap_is_declined_with_the_reason_and_the_rest_is_fused():
    def f(x):
        y = F.layer_norm(x, (16,))
        return torch.vmap(lambda row: F.layer_norm(row * 2, (16,)))(y)

    sites = same_as_eager(f, torch.randn(4, 16), fused=1, exact=False)
    assert [s.reason for s in sites if s.reason] == ["inside a functorch transform"]


def test_grad_transforms_are_declined_with_the_reason():
    def f(x):
        return torch.func.grad(lambda t: F.layer_norm(t, (16,)).square().sum())(x), x

    sites = same_as_eager(f, torch.randn(4, 16), fused=0, exact=False)
    assert all(s.reason == "inside a functorch transform" for s in sites) and sites


def test_functional_call():
    model = Layer(0.0).eval()
    weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    same_as_eager(lambda x, w: torch.func.functional_call(model, w, (x,)), torch.randn(4, 16), weights,
                  fused=1)


# Subclasses.


def two(x):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x.clone())


@pytest.mark.parametrize("where", ["input", "weight", "beside"])
def test_wrapper_subclasses_pass_through(where):
    def f(x, w, other):
        return F.layer_norm(x, (16,), w) + 1, F.layer_norm(other, (16,)), w * 2

    x, w, other = torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)
    args = {"input": (two(x), w, other), "weight": (x, two(w), other), "beside": (x, w, other)}[where]
    if where == "beside":
        plain = f
        f = lambda x, w, other: (*plain(x, w, other), two(x) + two(x))  # noqa: E731
    results = [run(*args) for run in (f, compiled(f))]
    for eager, ours in zip(*results):
        assert type(ours) is type(eager)
        for a, b in zip(tensors([getattr(ours, "a", ours)]), tensors([getattr(eager, "a", eager)])):
            assert torch.equal(a, b)
    sites = last_reports()[-1].sites
    assert sites[1].status == "fused"
    assert (sites[0].status == "fused") is (where == "beside")


class Tagged(torch.Tensor):
    """A subclass without memory of its own behaviour: every op comes back tagged."""


def test_torch_function_subclasses():
    def f(x):
        return F.layer_norm(x * 2, (16,))

    x = torch.randn(4, 16).as_subclass(Tagged)
    eager, ours = f(x), compiled(f)(x)
    assert type(ours) is type(eager)
    torch.testing.assert_close(ours.as_subclass(torch.Tensor), eager.as_subclass(torch.Tensor))


def test_nested_tensors():
    def f(x):
        return F.layer_norm(x, (16,))

    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    for ours, eager in zip(compiled(f)(x).unbind(), f(x).unbind(), strict=True):
        torch.testing.assert_close(ours, eager)


def test_sparse_tensors_beside():
    def f(x, m):
        return F.layer_norm(torch.sparse.mm(m, x), (16,))

    same_as_eager(f, torch.randn(4, 16), torch.eye(4).to_sparse(), exact=False)


# Views of numbers with another meaning.


@pytest.mark.parametrize("f", [
    lambda z: F.layer_norm(torch.view_as_real(z).flatten(-2)[..., 1::2] * 1, (16,)),
    lambda z: F.layer_norm(z.conj().imag, (16,)), lambda z: F.layer_norm(z.abs(), (16,)),
], ids=["view_as_real", "negative view", "abs"])
def test_complex_inputs(f):
    same_as_eager(f, torch.randn(4, 16, dtype=torch.complex64), exact=False)


def test_a_sparse_operand_of_an_absorbed_add():
    def f(x, m):
        return F.layer_norm(x + m, (16,))

    sites = same_as_eager(f, torch.randn(4, 16), torch.randn(4, 16).relu().to_sparse(), exact=False)
    assert not any("add" in site.pattern for site in sites)  # Dynamo may not even compile it


@pytest.mark.parametrize("f", [
    lambda x: F.layer_norm(x, (16,)), lambda x: F.layer_norm(x.bfloat16(), (16,)),
    lambda x: F.layer_norm(x[1:] + 1, (16,)), lambda x: F.layer_norm(x.neg(), (16,)) + x,
], ids=["norm", "cast", "add", "after"])
def test_a_kernel_never_reads_a_negative_view(f, monkeypatch):
    """Its memory holds the numbers with the other sign."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    x = torch._neg_view(torch.randn(4, 16))
    assert x.is_neg()
    same_as_eager(f, x, exact=False)


# Memory.


@pytest.mark.parametrize("view", [
    lambda b: b[1:], lambda b: b[:, 1:17], lambda b: b.view(-1)[3:51].view(3, 16),
    lambda b: b.as_strided((2, 16), (20, 1), 5)], ids=["rows", "columns", "odd", "as_strided"])
def test_storage_offset(view):
    check(Function(lambda b: F.layer_norm(view(b)[..., :16], (16,))), torch.randn(5, 20), fused=1)
    base = torch.randn(6, 21)[1:, 1:]  # the input itself lies at an odd offset
    same_as_eager(lambda b: F.layer_norm(b[..., :16], (16,)), base, exact=False)


# Other readers of a value.


def post_norm(x):
    y = F.layer_norm(x, (16,))
    return y + x


def norm_with_two_modulates(x):
    y = F.layer_norm(x, (16,))
    return y * 2 + 1, y * 3 - 1


def norm_that_is_also_returned(x):
    y = F.layer_norm(x.float(), (16,))
    return y.to(x.dtype) * 2, y


def hidden_states(x):
    states = []
    for _ in range(3):
        x = x + F.gelu(F.layer_norm(x, (16,)))
        states.append(x)
    return states


def sum_of_norms(x):
    q, k, v = x.view(-1, 4, 16).split([1, 1, 2], 1)
    return F.layer_norm(q, (16,)) + F.layer_norm(k, (16,)), v


def norm_read_by_size_only(x):
    y = F.layer_norm(x, (16,))
    return x.new_zeros(y.shape[0] * 2)


def empty_rows(x):
    return F.layer_norm(x[:0], (16,)), F.layer_norm(x[:, None][:, :0], (16,))


READERS = {post_norm: 1, norm_with_two_modulates: 1, norm_that_is_also_returned: 1, hidden_states: 3,
           sum_of_norms: 2, norm_read_by_size_only: None, empty_rows: 2}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("f", READERS, ids=lambda f: f.__name__)
def test_other_readers(f, dtype, dynamic):
    check(Function(f), torch.randn(8, 16).to(dtype), fused=READERS[f], dynamic=dynamic, exact=False)


def test_a_hook_reads_the_norm():
    model, seen = Layer().eval(), []
    model.norm.register_forward_hook(lambda m, args, out: seen.append((args[0] * 1, out * 1)))
    x = torch.randn(4, 16)
    eager = model(x)
    torch.testing.assert_close(auto_fusion(model, report="off")(x), eager)
    for a, b in zip(*seen):
        torch.testing.assert_close(a, b)


def test_float_power_is_no_pow():
    """It computes in double, which a region in float32 would not."""
    def f(x):
        return F.layer_norm(torch.float_power(x, 2), (16,))

    check(Function(f), torch.randn(4, 16) + 100, fused=1)
