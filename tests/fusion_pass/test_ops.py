"""The fused op as a torch.library op, and its backward."""

import warnings

import pytest
import torch

from ascend_ln_fuse.kernels import ops
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import parse

region_op = torch.ops.ascend_ln_fuse.region

PLAIN = """space [*, *, 8]
in x: f32[*, *, 8]
in w: f32[8]
in b: f32[8]
scalar eps
v0: f32 = layer_norm(x, w, b, eps)
out v0: f32 order(0, 1, 2)"""
CAST = """space [*, *, 8]
in x: bf16[*, *, 8]
in w: bf16[8]
scalar eps
v0: f32 = cast(x)
v1: f32 = rms_norm(v0, none, eps)
v2: bf16 = cast(v1)
v3: bf16 = mul(w, v2)
out v3: bf16 order(1, 0, 2)"""
TWO = """space [*, *, 8]
in x: f32[*, *, 8]
in y: f32[*, 1, 8]
scalar eps
v0: f32 = add(x, y)
v1: f32 = layer_norm(v0, none, none, eps)
v2: f32 = mul(v1, 2.0)
out v2: f32 order(0, 1, 2)
out v0: f32 order(1, 0, 2)"""
REGIONS = {"affine": PLAIN, "cast": CAST, "two outputs": TWO}

LAYOUTS = {
    "contiguous": lambda n, m: torch.randn(n, m, 8),
    "permuted dense": lambda n, m: torch.randn(m, n, 8).transpose(0, 1),
    "sliced": lambda n, m: torch.randn(n, 3, m + 1, 8)[:, 1, 1:],
    "offset": lambda n, m: torch.randn(n, m, 9)[..., 1:],
    "expanded": lambda n, m: torch.randn(n, 1, 8).expand(n, m, 8),
    "one row": lambda n, m: torch.randn(1, 1, 8).expand(1, 1, 8),
    "no rows": lambda n, m: torch.randn(0, m, 8),
}


def arguments(text, layout="contiguous", grad=False, sizes=(4, 3)):
    """Inputs for a region: the first in the given layout, as a leaf of its own."""
    region, inputs = parse(text), []
    for operand in region.inputs:
        if not inputs:
            x = LAYOUTS[layout](*sizes)
        else:
            n, m = (1, 1) if layout == "one row" else (0, 3) if layout == "no rows" else sizes
            shape = {3: (n, m if operand.dims[-2:-1] == ("*",) else 1, 8), 1: (8,)}[len(operand.dims)]
            x = torch.randn(shape)
        x = x.to(torch.bfloat16) if operand.dtype == "bf16" else x
        inputs.append(x.detach().requires_grad_(grad))
    return region.text, inputs, [1e-5] * len(region.scalars)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", REGIONS)
def test_opcheck(text, layout, grad):
    torch.library.opcheck(region_op.default, arguments(REGIONS[text], layout, grad))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", REGIONS)
def test_the_op_is_the_reference(text, layout):
    args = arguments(REGIONS[text], layout)
    expected = reference(parse(args[0]), *args[1:])
    for ours, exact in zip(region_op(*args), expected, strict=True):
        assert torch.equal(ours, exact) and ours.stride() == exact.stride()


def gradients(run, inputs, which):
    """Gradients of a sum of the chosen outputs of `run(inputs)`, by all inputs."""
    outputs = run(inputs)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    torch.manual_seed(1)
    loss = sum((outputs[i].float() * torch.randn(outputs[i].shape)).sum() for i in which)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@pytest.mark.parametrize("spelling", ["op", "launcher", "autograd function"])
@pytest.mark.parametrize("layout", ["contiguous", "permuted dense", "sliced", "expanded", "no rows"])
@pytest.mark.parametrize("text, which", [("affine", [0]), ("cast", [0]), ("two outputs", [0, 1]),
                                         ("two outputs", [0]), ("two outputs", [1])])
def test_gradients(text, which, layout, spelling):
    args = arguments(REGIONS[text], layout, grad=True)
    region = parse(args[0])
    runs = {
        "op": lambda inputs: region_op(args[0], inputs, args[2]),
        "launcher": lambda inputs: ops.python_call(region)(*inputs, *args[2]),
        "autograd function":
            lambda inputs: ops._Region.apply(ops.runner(args[0]), region, args[2], *inputs),
    }
    expected = gradients(lambda inputs: reference(region, inputs, args[2]), args[1], which)
    for ours, exact in zip(gradients(runs[spelling], args[1], which), expected, strict=True):
        assert (ours is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(ours, exact, rtol=0, atol=0)


def test_only_the_gradients_that_are_needed_are_computed():
    text, inputs, scalars = arguments(PLAIN)
    inputs[1].requires_grad_()
    for run in (lambda: region_op(text, inputs, scalars)[0],
                lambda: ops._Region.apply(ops.runner(text), parse(text), scalars, *inputs)[0]):
        inputs[1].grad = None
        run().sum().backward()
        assert inputs[1].grad is not None and inputs[0].grad is inputs[2].grad is None


@pytest.mark.parametrize("which", [[0], [0, 1]], ids=["norm", "both"])
@pytest.mark.parametrize("spelling", ["op", "autograd function"])
def test_an_output_that_no_gradient_reaches(spelling, which):
    """The stored sum does not depend on the weight, the only one that requires grad."""
    text = TWO.replace("in y: f32[*, 1, 8]", "in y: f32[*, 1, 8]\nin w: f32[8]").replace("none", "w", 1)
    region = parse(text)
    x, y, w = torch.randn(4, 3, 8), torch.randn(4, 1, 8), torch.randn(8, requires_grad=True)
    if spelling == "op":
        outputs = region_op(text, [x, y, w], [1e-5])
    else:
        outputs = ops._Region.apply(ops.runner(text), region, [1e-5], x, y, w)
    assert [out.requires_grad for out in outputs] == [True, False]
    sum(outputs[i].sum() for i in which).backward()
    expected, = torch.autograd.grad(reference(region, [x, y, w], [1e-5])[0].sum(), w)
    torch.testing.assert_close(w.grad, expected)


@pytest.mark.parametrize("spelling", ["op", "autograd function"])
def test_nothing_but_inputs_is_kept_for_backward(spelling):
    text, inputs, scalars = arguments(TWO, grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if spelling == "op":
            outputs = region_op(text, inputs, scalars)
        else:
            outputs = ops._Region.apply(ops.runner(text), parse(text), scalars, *inputs)
    assert {t.data_ptr() for t in kept} <= {x.data_ptr() for x in inputs} and kept
    assert all(out.requires_grad for out in outputs)


def test_the_interpreter_uses_the_autograd_function(monkeypatch):
    """As on an accelerator: the kernel forward, the reference backward."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    text, inputs, scalars = arguments(PLAIN.replace("*, *, 8", "*, *, 8"), "sliced", grad=True)
    region = parse(text.replace("scalar eps", "scalar epsilon").replace(", eps)", ", epsilon)"))
    out = ops.python_call(region)(*inputs, *scalars)
    assert type(out.grad_fn).__name__ == "_RegionBackward"
    expected = gradients(lambda i: reference(region, i, scalars), inputs, [0])
    ours = gradients(lambda i: ops.python_call(region)(*i, *scalars), inputs, [0])
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b)


LOSSES = pytest.mark.parametrize("loss", [torch.sum, lambda t: t.square().sum()], ids=["sum", "squares"])


@LOSSES
def test_differentiating_the_op_twice_is_an_error_that_says_so(loss):
    """Also where the incoming gradients are constants, and another term would hide it."""
    text, inputs, scalars = arguments(PLAIN, grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, = region_op(text, inputs, scalars)
        first, = torch.autograd.grad(loss(out), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            (first * inputs[0]).sum().backward()


@LOSSES
def test_differentiating_the_autograd_function_twice_is_right(loss):
    text, inputs, scalars = arguments(PLAIN, grad=True)
    region, results = parse(text), []
    for run in (lambda: ops._Region.apply(ops.runner(text), region, scalars, *inputs),
                lambda: reference(region, inputs, scalars)):
        first = torch.autograd.grad(loss(run()[0]), inputs, create_graph=True)
        total = sum((g * g * x).sum() for g, x in zip(first, inputs))
        results.append(torch.autograd.grad(total, inputs))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


def test_differentiating_twice_is_right_where_the_reference_runs():
    text, inputs, scalars = arguments(PLAIN, grad=True)
    region = parse(text)

    def second(run):
        first, = torch.autograd.grad(run(inputs).square().sum(), inputs[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    ours = second(lambda i: ops.python_call(region)(*i, *scalars))
    for a, b in zip(ours, second(lambda i: reference(region, i, scalars)[0])):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change, message", [
    (lambda i: [i[0].double(), *i[1:]], "x: f32"),
    (lambda i: i[:2], "3 inputs"),
    (lambda i: [i[0], i[1][:5], i[2]], ""),
], ids=["dtype", "count", "shape"])
def test_inputs_that_do_not_fit(change, message):
    text, inputs, scalars = arguments(PLAIN)
    with pytest.raises((ValueError, RuntimeError), match=message):
        region_op(text, change(inputs), scalars)


def test_a_text_that_is_no_region():
    with pytest.raises(ValueError, match="space"):
        region_op("import os", [torch.ones(3)], [])


def test_one_runner_for_each_region():
    assert ops.runner(PLAIN) is ops.runner(parse(PLAIN).text)
    assert ops.python_call(parse(PLAIN)).__doc__ == PLAIN


SUM = """space [*, 8]
in x: f32[*, 8]
in y: f32[*, 8]
scalar eps
v0: f32 = add(x, y)
v1: f32 = layer_norm(v0, none, none, eps)
out v0: f32 order(0, 1)
out v1: f32 order(0, 1)"""


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_gradients_share_no_memory(given):
    """Of the two terms of a sum they are equal, but Inductor writes over one and reads the other later."""
    inputs, grads = [torch.randn(4, 8) for _ in range(2)], [torch.randn(4, 8) for _ in range(2)]
    with torch.no_grad():  # as backward runs
        found = torch.ops.ascend_ln_fuse.region_backward(SUM, inputs, [1e-5], grads, given, (True, True))
    assert torch.equal(*found)
    tensors = [*found, *inputs, *grads]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)


def test_gradients_behind_inductor():
    """Llama's down_proj: its gradient was computed from memory that had been written over."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2)).eval()
    tokens, grad = torch.randint(0, 200, (2, 24)), torch.randn(2, 24, 200)
    found = []
    for call in (model, torch.compile(model, backend="ascend_ln_fuse",
                                      options={"report": "off", "inner": "inductor"})):
        model.zero_grad()
        call(input_ids=tokens, use_cache=False).logits.backward(grad)
        found.append([p.grad.clone() for p in model.parameters()])
    for ours, eager in zip(*found[::-1], strict=True):
        assert (ours - eager).abs().max() <= 1e-4 * eager.abs().max()
