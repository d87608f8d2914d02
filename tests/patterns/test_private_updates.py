"""In-place pointwise ops on memory that nobody else sees: taken like their functional form, or left."""

import pytest
import torch
from checks import assert_within_bound, check, fresh, tensors
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import auto_fusion, last_reports
from ascend_ln_fuse.backend import fuse_graph
from ascend_ln_fuse.effects import effects_of
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.options import Options
from ascend_ln_fuse.rewrite import read_by_result
from ascend_ln_fuse.updates import update_word

D, T = 16, 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16],
                                 ids=["f32", "bf16", "f16"])
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


class Stream(nn.Module):
    """The spelling of SeedVR: modulation and gate write in place, and so does the residual add."""

    def __init__(self, activation=None):
        super().__init__()
        self.first, self.second = (nn.LayerNorm(D, elementwise_affine=False) for _ in range(2))
        self.out = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), activation or nn.GELU("tanh"), nn.Linear(2 * D, D))
        self.scale, self.shift, self.gate = (nn.Parameter(torch.randn(D) / 4) for _ in range(3))

    def modulated(self, norm, x):
        hidden = norm(x)
        hidden.mul_(1 + self.scale).add_(self.shift)
        return hidden

    def forward(self, x):
        mixed = F.softmax(self.out(self.modulated(self.first, x)), -1) * 2
        x = mixed.mul_(self.gate) + x
        out = self.mlp(self.modulated(self.second, x)).mul_(self.gate)
        out += x
        return out


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def ln(x):
    return F.layer_norm(x, (D,))


def left_in_place(function, *inputs, dynamic=False):
    """The words of the in-place pointwise ops in the fused graph, and how many sites it has."""
    left, fused = [], []

    def backend(gm, example_inputs):
        graph, sites = fuse_graph(gm.graph, Options(report="off"))
        left.extend(filter(None, map(update_word, (graph or gm.graph).nodes)))
        fused.extend(site for site in sites if site.status == "fused")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*map(fresh, inputs))
    return left, len(fused)


def lens_of(function, *inputs, dynamic=False):
    """Dynamo's graph as the pass reads it."""
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=dynamic)(*inputs)
    return Lens(read_by_result(graphs[0].graph))


@DTYPES
@DYNAMIC
def test_seedvr_block(dtype, dynamic):
    model, x = Stream().to(dtype).eval(), torch.randn(3, T, D).to(dtype)
    report = check(model, x, fused=2, dynamic=dynamic)
    assert [site.pattern for site in report.sites] == ["layer_norm -> modulate",
                                                       "modulate -> layer_norm -> modulate"]
    assert [site.chain for site in report.sites] == ["linear", "linear -> gelu_tanh -> linear -> mul add"]
    with torch.no_grad():
        assert left_in_place(model, x, dynamic=dynamic) == ([], 2)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Mish(inplace=True),
                                        nn.Hardswish(inplace=True)], ids=lambda module: type(module).__name__)
def test_activation_in_place_between_products(activation):
    report = check(Stream(activation), torch.randn(3, T, D), fused=2)
    word = type(activation).__name__.lower()
    assert report.sites[1].chain == f"linear -> {word} -> linear -> mul add"


def test_seedvr_block_in_training():
    model, x = Stream().train(), torch.randn(3, T, D, requires_grad=True)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    results = [torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])
               for run in (compiled, model)]
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
    assert [site.chain for site in last_reports()[-1].sites] == \
        ["linear", "linear -> gelu_tanh -> linear -> mul add"]


# Each spelling gives the region of its functional form.

s, b = torch.randn(D), torch.randn(3, 1, D)


def changed(x, change):
    """What `change` leaves of its argument, as a later reader sees it."""
    change(x)
    return x


def plus(h, other):
    h += other
    return h


def operators(h):
    h += s
    h *= b
    h -= 0.5
    h /= s
    h **= 2
    return h


SPELLINGS = {
    "result": (lambda x: ln(x).mul_(s).add_(b), lambda x: ln(x).mul(s).add(b)),
    "statement": (lambda x: changed(ln(x), lambda h: (h.mul_(s), h.add_(b))), lambda x: ln(x) * s + b),
    "operators": (lambda x: operators(ln(x)), lambda x: (((ln(x) + s) * b - 0.5) / s) ** 2),
    "functions": (lambda x: F.relu_(torch.sigmoid_(ln(x))), lambda x: F.relu(torch.sigmoid(ln(x)))),
    "inplace=True": (lambda x: changed(ln(x), lambda h: F.silu(h, inplace=True)), lambda x: F.silu(ln(x))),
    "inplace by position": (lambda x: F.relu(F.mish(ln(x), True), True), lambda x: F.relu(F.mish(ln(x)))),
    "unary": (lambda x: ln(x).neg_().square_().exp_().sqrt_().tanh_().abs_().reciprocal_(),
              lambda x: ln(x).neg().square().exp().sqrt().tanh().abs().reciprocal()),
    "itself": (lambda x: changed(ln(x), lambda h: h.mul_(h)), lambda x: (h := ln(x)) * h),
    "above": (lambda x: ln((x * s).add_(b)), lambda x: ln(x * s + b)),
    "above and read": (lambda x: (ln(h := (x * s).add_(b)), h), lambda x: (ln(h := x * s + b), h)),
    "above, statement": (lambda x: (ln(changed(h := x + b, lambda h: h.relu_())), h),
                         lambda x: (ln(h := (x + b).relu()), h)),
    "cast": (lambda x: ln(x.double().mul_(s)).float(), lambda x: ln(x.double() * s).float()),
    "both sides": (lambda x: plus(ln(x.clone().mul_(s)), b), lambda x: ln(x.clone() * s) + b),
    "rows under a view": (lambda x: ln(x).transpose(0, 1).mul_(s), lambda x: ln(x).transpose(0, 1) * s),
}


@DYNAMIC
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_its_functional_form(name, dynamic):
    in_place, functional = SPELLINGS[name]
    x = torch.randn(3, T, D)
    regions = [check(Of(f), x, fused=1, dynamic=dynamic, exact=False).sites[0].region
               for f in (in_place, functional)]
    assert regions[0] == regions[1]
    assert left_in_place(in_place, x, dynamic=dynamic) == ([], 1)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_a_wider_operand_is_rounded_once(low, wide):
    """In place, the sum is computed in the wider type and rounded to the target's; a functional `+` would
    yield the wider."""
    x, w = torch.randn(3, T, D).to(low), torch.randn(D, dtype=wide)

    def f(x, w):
        return ln(x).mul_(w).add_(w)

    check(Of(f), x, w, fused=1, exact=False)
    assert left_in_place(f, x, w) == ([], 1)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"})
    assert_within_bound(compiled(x, w), f(x, w), f(x.double(), w.double()))


# What is not private stays in place, and all that a caller sees is eager's.


def view_read_later(x):
    h = ln(x)
    first = h[0]
    h.mul_(s)
    return h, first


def alias_returned(x):
    h = x * 2
    rows = h.view(-1, D)
    return ln(h.mul_(s)), rows


def part_alive(x):
    return ln((x * 2)[:, 1:].mul_(s))


def part_set_later(x):
    h = x * 2
    h.mul_(s)
    h[:, 0] = 0
    return ln(h)


def read_through_a_view_later(x):
    h = x * 2
    rows = h.view(-1, D)
    h.mul_(s)
    return ln(rows)


def part_written(x):
    h = x * 2
    h[:, 0].mul_(s)
    return ln(h)


def written_through_a_view(x):
    h = x * 2
    h.view(-1, D).mul_(s)
    return ln(h)


def input_written(x):
    x.mul_(s)
    return ln(x)


def input_written_through_a_view(x):
    return ln(x.view(-1, D).add_(1))


def input_written_through_an_identity(x):
    h = x.float()
    h += 1
    return ln(h)


def input_written_through_an_idle_dropout(x):
    h = F.dropout(x, 0.5, False)
    h += 1
    return ln(h)


def detached_read_later(x):
    h = x * 2
    alias = h.detach()
    h.mul_(s)
    return ln(h), alias


def written_by_others_too(x):
    h = x * 2
    h.mul_(s)
    y = ln(h)
    h.zero_()
    return y, h


def shape_written(x):
    h = x * 2
    h.mul_(s)
    y = ln(h)
    h.unsqueeze_(0)
    return y, h


def alias_among_the_operands(x):
    h = x * 2
    h.mul_(h.view_as(h))
    return ln(h)


def other_numbers(x):
    return ln((x.to(torch.bfloat16) * 2).view(torch.float16).mul_(0.5))


def input_written_through_a_view_of_an_idle_dropout(x):
    return ln(F.dropout(x, 0.5, False).view(-1, D).mul_(s))


def input_written_through_a_dropout_of_nothing(x):
    return ln(F.dropout(x, 0.0, True).mul_(s))


def modes_mixed(x):
    h = x * 2
    with torch.no_grad():
        h.mul_(s)
    return ln(h)


def integers(x):
    h = x.long() + 1
    h.mul_(2)
    return ln(h.to(x.dtype)), h


def as_strided_later(x):
    h = x * 2
    h.mul_(s)
    return ln(h), h.as_strided((2, D), (D, 1))


def another_alpha(x):
    return ln((x * 2).add_(s, alpha=2))


#: function -> the in-place words that the fused graph keeps
LEFT = {view_read_later: ["mul"], alias_returned: ["mul"], part_alive: ["mul"], part_set_later: ["mul"],
        modes_mixed: ["mul"], read_through_a_view_later: ["mul"], part_written: ["mul"],
        written_through_a_view: ["mul"], input_written: ["mul"], input_written_through_a_view: ["add"],
        input_written_through_an_identity: ["add"], input_written_through_an_idle_dropout: ["add"],
        input_written_through_a_view_of_an_idle_dropout: ["mul"],
        input_written_through_a_dropout_of_nothing: ["mul"],
        detached_read_later: ["mul"], written_by_others_too: ["mul"], shape_written: ["mul"],
        alias_among_the_operands: ["mul"], other_numbers: ["mul"], as_strided_later: ["mul"]}
#: private, but no region computes them
UNKNOWN = {integers: ["mul"], another_alpha: ["add"]}


@DYNAMIC
@pytest.mark.parametrize("function", LEFT | UNKNOWN, ids=lambda f: f.__name__)
def test_left_in_place(function, dynamic):
    x = torch.randn(3, T, D)
    check(Of(function), x, declined=None, exact=False, dynamic=dynamic)
    assert left_in_place(function, x, dynamic=dynamic)[0] == (LEFT | UNKNOWN)[function]
    compiled = torch.compile(function, backend="ascend_ln_fuse", options={"report": "off"})
    ours, eager = fresh(x), fresh(x)
    results = compiled(ours), function(eager)
    torch.testing.assert_close(ours, eager)
    for result, wanted in zip(*map(tensors, results), strict=True):
        torch.testing.assert_close(result, wanted)


@DYNAMIC
@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_what_is_not_private(function, dynamic):
    """Growth has reasons of its own to leave most of them alone: here the lens alone is asked."""
    lens = lens_of(function, torch.randn(3, T, D), dynamic=dynamic)
    assert not lens.updates
    update = next(node for node in lens.nodes if update_word(node))
    assert lens.is_mutated(update.args[0]) and lens.kind(update) is None


def read_before_in_turn(x):
    """Each value is read before it is overwritten; all of it is private."""
    h = x * 2
    one = h.sum(-1)
    h.mul_(s)
    two = h.sum(-1)
    h.add_(b)
    return ln(h), one, two, h


def not_taken_but_private(x):
    h = (x * 2).softmax(-1) * 2
    h.mul_(s)
    return ln(x), h


def test_readers_before_see_what_was_there():
    x = torch.randn(3, T, D)
    check(Of(read_before_in_turn), x, fused=1, exact=False)
    check(Of(not_taken_but_private), x, fused=1, exact=False)
    assert left_in_place(not_taken_but_private, x) == (["mul"], 1)


@pytest.mark.parametrize("function", [lambda x: ln(x)[:, :1].mul_(b.expand(3, T, D)),
                                      lambda x: ln(x).sum().add_(x), lambda x: ln(x).long().mul_(0.5)],
                         ids=["view", "number", "dtype"])
def test_what_eager_refuses_is_refused(function):
    x = torch.randn(3, T, D)
    compiled = torch.compile(function, backend="ascend_ln_fuse", options={"report": "off"})
    with pytest.raises(RuntimeError):
        function(x)
    with pytest.raises(RuntimeError):
        compiled(x)


# Gradients

w = torch.randn(D, requires_grad=True)

#: in training: name -> (function of x and w, whether the update is taken in)
TRAINED = {
    "modulate": (lambda x, w: ln(x).mul_(1 + w).add_(w), True),
    "gate": (lambda x, w: ln(F.linear(x, w.outer(w)).mul_(w) + x), True),
    "residual": (lambda x, w: ln(plus(x * w, x)), True),
    "activation": (lambda x, w: F.silu(ln(x) * w, inplace=True), True),
    "without gradient, then read": (lambda x, w: ln(x.detach().exp().mul_(2)) * w, True),
    "read by who may need it": (lambda x, w: ((h := x * w).sum(), ln(h.mul_(2))), False),
    "of an activation": (lambda x, w: ln(F.silu(x * w).mul_(w)), True),
    "a wider operand": (lambda x, w: ln(x.bfloat16() * 2).mul_(w), False),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_eager(name):
    function, taken = TRAINED[name]
    x = torch.randn(3, T, D, requires_grad=True)
    results = []
    for run in (torch.compile(function, backend="ascend_ln_fuse", options={"report": "off"}), function):
        loss = sum(value.float().sin().sum() for value in tensors(run(x, w)))
        results.append(torch.autograd.grad(loss, [x, w], allow_unused=True))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
    left, _ = left_in_place(function, x, w)
    assert (left == []) is taken, left


@pytest.mark.parametrize("function", [
    lambda x, w: ln(torch.sigmoid(x * w).mul_(2)), lambda x, w: ln((x * w).exp_().add_(1)),
    lambda x, w: ln(changed(h := x * w, lambda h: h.mul_(2)) + F.gelu(h).relu_().add_(1)),
    lambda x, w: (F.gelu(h := x * w), ln(h.mul_(2))), lambda x, w: ln(changed(x * w, lambda h: h.mul_(h))),
], ids=["result needed", "written twice", "activation", "argument needed", "itself"])
def test_what_backward_refuses_is_refused(function):
    x = torch.randn(3, T, D, requires_grad=True)
    compiled = torch.compile(function, backend="ascend_ln_fuse", options={"report": "off"})
    for run in (function, compiled):
        loss = sum(value.sum() for value in tensors(run(x, w)))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_operand_that_is_written_later_is_not_kept_for_backward():
    """`h` has no gradient, and eager needs none of it; a site that read it would need it for backward."""
    def f(x, w):
        h = x * 2
        y = ln(h + 1) * w
        h.add_(1)
        return y, h

    x = torch.randn(3, T, D)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"})
    ours, eager = (torch.autograd.grad(run(x, w)[0].sin().sum(), w) for run in (compiled, f))
    torch.testing.assert_close(ours, eager)


# The lens


def test_the_lens_keeps_the_order_and_forgets_the_write():
    def f(x):
        h = x * 2
        read = h.exp()
        return h.mul_(s).tanh(), read

    lens = lens_of(f, torch.randn(3, D))
    update, = lens.updates
    target, = (node for node in lens.nodes if node.name == update.args[0].name)
    reader, = (node for node in lens.nodes if node.name.startswith("exp") or node.name == "read")
    assert lens.kind(update) == "mul" and not lens.is_view(update)
    assert not lens.is_mutated(target) and not lens.is_mutated(update)
    assert lens.is_overwritten(target) and not lens.is_overwritten(target, {update})
    assert not lens.is_overwritten(update)
    assert lens.position[update] in lens.order[lens.position[reader]]
    assert effects_of(update).writes == lens.storages(target)


def test_readers_of_what_is_written_are_looked_at_once():
    """A residual stream: the work grows as the graph does."""
    def counted(blocks):
        def f(x):
            h = x * 2
            for _ in range(blocks):
                h += ln(h)
            return h

        seen = 0

        class Users(dict):
            def __iter__(self):
                nonlocal seen
                for user in super().__iter__():
                    seen += 1
                    yield user

        lens = lens_of(f, torch.randn(3, D))
        assert len(lens.updates) == blocks
        for node in lens.nodes:
            node.users = Users(node.users)
        again = Lens(lens.graph)
        assert len(again.updates) == blocks
        return seen

    assert counted(40) <= 4.5 * counted(10)


def test_a_model_compiled_in_place():
    model, x = Stream().eval(), torch.randn(3, T, D)
    with torch.no_grad():
        wanted = model(x)
        torch.testing.assert_close(auto_fusion(model, report="off")(x), wanted)


def test_strides_of_a_dim_of_size_one_are_kept():
    """A new tensor has other ones there than the one that an in-place op yields: eager's, whoever asks."""
    def updated(x):
        hidden = F.rms_norm(x[:, 1:], (D,))
        return hidden.mul_(hidden)

    x = torch.randn(2, 2, D).transpose(0, 1)
    assert updated(x).shape == (2, 1, D) and updated(x).stride() == (D, 2 * D, 1)
    check(Of(updated), x, fused=1)
