"""A chain's gradients stage by stage: autograd's numbers, in less memory."""

import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_backward import _DERIVATIVES, _activation, chain_gradients
from ascend_ln_fuse.kernels.chain_products import LinearStage, Part
from ascend_ln_fuse.kernels.pointwise import torch_function
from ascend_ln_fuse.kernels.region import parse

K, N, EPS = 32, 128, (1e-5,)


def region(lane, inputs, *body):
    """A region of f32: `inputs` are names of full tensors, the last line of `body` is its output."""
    wide = [f"in {name}: f32[{lane}]" if name in "wb" else f"in {name}: f32[*, *, {lane}]" for name in inputs]
    lines = [f"v{i}: f32 = {text}" for i, text in enumerate(body)]
    return parse("\n".join((f"space [*, *, {lane}]", *wide, *(("scalar eps",) if "norm" in body[0] else ()),
                            *lines, f"out v{len(body) - 1}: f32 order(0, 1, 2)")))


NORM = RegionStage(("h",), region(K, "xwb", "layer_norm(x, w, b, eps)"), ("x", "w", "b"), ("eps",))
FFN = ("x", "w", "b", "w1", "b1", "w2", "b2")


def ffn(*activation, outputs=("y",), transposed=False):
    return Chain(FFN, ("eps",), (
        NORM, LinearStage("z", "h", "w1", "b1", transposed),
        RegionStage(("a",), region(N, "x", *activation), ("z",)),
        LinearStage("y", "a", "w2", "b2", transposed)), outputs)


def gated(packed):
    gate = region(N, "gu", "silu(g)", "mul(v0, u)")
    products = (LinearStage("z", "h", "w1", "b1"),) if packed else \
        (LinearStage("g", "h", "w1", "b1"), LinearStage("u", "h", "w3"))
    args = (Part("z", 0, N), Part("z", N, N)) if packed else ("g", "u")
    residual = region(K, "xr", "add(x, r)")
    return Chain((*FFN, "w3"), ("eps",), (
        NORM, *products, RegionStage(("a",), gate, args), LinearStage("y", "a", "w2", "b2"),
        RegionStage(("s",), residual, ("y", "x"))), ("s",))


#: an activation of the packed halves of one product, added to itself: gradients that meet
MEET = Chain(FFN, ("eps",), (
    NORM, LinearStage("z", "h", "w1", "b1"),
    RegionStage(("a",), region(N, "x", "gelu(x)"), (Part("z", 0, N),)),
    RegionStage(("c",), region(N, "gu", "mul(g, u)"), ("a", Part("z", 0, N))),
    RegionStage(("d",), region(N, "gu", "add(g, u)"), ("c", "a")),
    LinearStage("y", "d", "w2", "b2")), ("y", "h"))


def tensors(chain, packed=False, transposed=False):
    sizes = {"x": (2, 3, K), "w": (K,), "b": (K,), "w1": (2 * N if packed else N, K),
             "b1": (2 * N if packed else N,), "w2": (K, N), "b2": (K,), "w3": (N, K)}
    made = [torch.randn(sizes[name]) * 0.3 for name in chain.inputs]
    return [x.t().contiguous() if transposed and x.dim() == 2 else x for x in made]


CHAINS = {
    **{f"ffn, {word}": (ffn(f"{word}(x)"), {}) for word in _DERIVATIVES},
    "ffn, sigmoid": (ffn("sigmoid(x)"), {}),
    "ffn, quick_gelu": (ffn("mul(x, 1.702)", "sigmoid(v0)", "mul(x, v1)"), {}),
    "ffn, Conv1D": (ffn("gelu_tanh(x)", transposed=True), {"transposed": True}),
    "ffn, all returned": (ffn("gelu(x)", outputs=("h", "z", "a", "y")), {}),
    "gated": (gated(False), {}),
    "gated, packed": (gated(True), {"packed": True}),
    "gradients that meet": (MEET, {}),
    "q, k, v": (Chain(("x", "w", "b", "w1", "b1", "w3"), ("eps",), (
        NORM, LinearStage("q", "h", "w1", "b1"), LinearStage("k", "h", "w3")), ("q", "k")), {}),
}


def by_autograd(chain, inputs, grads, needs):
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs)]
    with torch.enable_grad():
        outputs = list(evaluate(chain, leaves, EPS).values())
    pairs = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None and out.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs],
                                     allow_unused=True)) if pairs and wanted else iter([None] * len(wanted))
    return [next(found) if need else None for need in needs]


def in_reverse(chain, inputs, grads, needs):
    with torch.no_grad():
        kept = {name: value for name, value in evaluate(chain, inputs, EPS, keep=chain.kept).items()
                if name in chain.kept}
        return chain_gradients(chain, inputs, EPS, kept, grads, needs)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_autograds(name, seed):
    """Of every input or some, from every output or some; gradients and inputs stay as they are."""
    chain, how = CHAINS[name]
    torch.manual_seed(seed)
    inputs = tensors(chain, **how)
    grads = [torch.randn_like(out) for out in evaluate(chain, inputs, EPS).values()]
    needs = [seed == 0 or bool(torch.rand(()) < 0.6) for _ in inputs]
    if seed:
        grads = [None if torch.rand(()) < 0.3 else grad for grad in grads]
    before = [x.clone() for x in (*inputs, *filter(lambda g: g is not None, grads))]
    found = in_reverse(chain, inputs, grads, needs)
    for ours, wanted in zip(found, by_autograd(chain, inputs, grads, needs)):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(ours, wanted)
            assert ours.dtype == wanted.dtype
    after = [*inputs, *(grad for grad in grads if grad is not None)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("word", _DERIVATIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_derivatives_are_autograds(word, dtype):
    x = torch.cat((torch.linspace(-6, 6, 255), torch.tensor([0.0, -3.0, 3.0, float("nan")]))).to(dtype)
    grad = torch.randn(x.shape).to(dtype)
    leaf = x.clone().requires_grad_()
    wanted, = torch.autograd.grad(torch_function(word)(leaf), leaf, grad)
    got = _DERIVATIVES[word](grad, x, grad)
    assert got.data_ptr() == grad.data_ptr()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_which_regions_are_a_lone_activation():
    assert _activation(ffn("gelu(x)").stages[2]) == "gelu"
    assert _activation(ffn("mul(x, 1.702)", "sigmoid(v0)", "mul(x, v1)").stages[2]) == ""
    assert _activation(NORM) == ""


@pytest.mark.parametrize("expanded", [True, False])
def test_a_gradient_that_is_not_ours_is_not_written(expanded):
    """`a` is returned: what comes in for it belongs to the caller, and may be an expanded number."""
    chain = ffn("gelu(x)", outputs=("a",))
    inputs = tensors(chain)
    grad = torch.ones(()).expand(2, 3, N) if expanded else torch.ones(2, 3, N)
    needs = [True] * len(inputs)
    for ours, wanted in zip(in_reverse(chain, inputs, [grad], needs),
                            by_autograd(chain, inputs, [grad], needs)):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(ours, wanted)
    assert grad.eq(1).all()


class Live(TorchDispatchMode):
    """Bytes of the storages that ops make while it is on: now, and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage not in self.seen:
                    self.seen.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def freed(self, size):
        self.now -= size


def peak_of_training(step, inputs) -> int:
    with Live() as live:
        step(*inputs).backward(torch.ones(1, 512, K))
    return live.peak


def test_peak_memory_of_a_training_step():
    """Two tensors of the wide size at a time, where eager has three."""
    from ascend_ln_fuse.kernels.chain_ops import _Chain
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner

    chain = ffn("gelu(x)")
    inputs = [torch.randn(1, 512, K), *tensors(chain)[1:]]

    def eager(x, w, b, w1, b1, w2, b2):
        return F.linear(F.gelu(F.linear(F.layer_norm(x, (K,), w, b), w1, b1)), w2, b2)

    def ours(*args):
        return _Chain.apply(ChainRunner(chain), EPS, *args)[0]

    peaks = []
    for step in (eager, ours):
        leaves = [x.detach().requires_grad_() for x in inputs]
        peaks.append(peak_of_training(step, leaves))
    assert peaks[1] <= 0.86 * peaks[0], peaks  # 14% less


def test_a_graph_that_is_kept_is_differentiated_again():
    from ascend_ln_fuse.kernels.chain_ops import _Chain
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner

    chain = ffn("gelu(x)")
    inputs = [x.requires_grad_() for x in tensors(chain)]
    out = _Chain.apply(ChainRunner(chain), EPS, *inputs)[0].square().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs)
