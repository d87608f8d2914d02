"""A chain's gradients stage by stage: autograd's numbers, in less memory."""

import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_backward import _DERIVATIVES, _activation, chain_gradients
from ascend_ln_fuse.kernels.chain_products import Heads, LinearStage, Part, PatchStage, ScoreStage
from ascend_ln_fuse.kernels.pointwise import torch_function
from ascend_ln_fuse.kernels.region import parse

K, N, EPS = 32, 128, (1e-5,)


def region(lane, inputs, *body, outer=2):
    """A region of f32: `inputs` are names of full tensors, the last line of `body` is its output."""
    space = f"[{'*, ' * outer}{lane}]"
    wide = [f"in {name}: f32[{lane}]" if name in "wb" else f"in {name}: f32{space}" for name in inputs]
    lines = [f"v{i}: f32 = {text}" for i, text in enumerate(body)]
    order = ", ".join(map(str, range(outer + 1)))
    return parse("\n".join((f"space {space}", *wide, *(("scalar eps",) if "norm" in body[0] else ()),
                            *lines, f"out v{len(body) - 1}: f32 order({order})")))


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


#: sums and multiples only: of a product, of the chain's input, and of a vector
SUMS = Chain(FFN, ("eps",), (
    NORM, LinearStage("z", "h", "w1", "b1"), RegionStage(("a",), region(N, "x", "gelu(x)"), ("z",)),
    LinearStage("y", "a", "w2", "b2"),
    RegionStage(("s",), region(K, "xrb", "mul(x, 0.5)", "sub(v0, r)", "add(v1, b)", "div(v2, 3.0)", "neg(v3)",
                               "add(v4, v0)"), ("y", "x", "b"))), ("s",))

#: sums between two products: the second's weight needs the first
BETWEEN = Chain(FFN, ("eps",), (
    NORM, LinearStage("z", "h", "w1", "b1"), RegionStage(("a",), region(N, "x", "mul(x, 0.5)"), ("z",)),
    LinearStage("y", "a", "w2", "b2")), ("y",))

#: a patch convolution of an image of 2 x 4 pixels, and what reads it
PATCHES = Chain(FFN, ("eps",), (
    NORM, LinearStage("q", "h", "w2", "b2"), PatchStage("z", "h", "w1", "b1", (2, 4)),
    RegionStage(("a",), region(N, "x", "gelu(x)", outer=3), ("z",))), ("q", "a"))


def scores(*operands, flat=False, outputs=("t",), scale=("mul(x, 0.25)",)):
    """q and k in two products, the scores of them, scaled."""
    outer = 3 if isinstance(operands[0], Heads) and not flat else 2
    return Chain((*FFN[:5], "w3"), ("eps",), (
        NORM, LinearStage("q", "h", "w1", "b1"), LinearStage("k", "h", "w3"),
        ScoreStage("s", *operands, flat=flat),
        RegionStage(("t",), region(3, "x", *scale, outer=outer), ("s",)),
    ), outputs)


HEADS = {"w1": (K, K), "b1": (K,), "w3": (K, K)}
SCORES = {
    "score": (scores(Heads("q", 0, 8, 4, 8), Heads("k", 0, 8, 4, 8)), HEADS),
    "score, all returned": (scores(Heads("q", 0, 8, 4, 8), Heads("k", 0, 8, 4, 8),
                                   outputs=("q", "k", "s", "t")), HEADS),
    "score, flat": (scores(Heads("q", 0, 8, 4, 8), Heads("k", 0, 8, 4, 8), flat=True), HEADS),
    "score, packed": (scores(Heads("q", 0, 8, 4, 8), Heads("q", K, 8, 4, 8), outputs=("t", "q", "k")),
                      {**HEADS, "w1": (3 * K, K), "b1": (3 * K,)}),
    "score, interleaved": (scores(Heads("q", 0, 8, 4, 24), Heads("q", 8, 8, 4, 24), outputs=("q", "t")),
                           {**HEADS, "w1": (3 * K, K), "b1": (3 * K,)}),
    "score, one head": (scores("q", "k"), HEADS),
    "score, columns": (scores(Part("q", 0, 8), Part("q", 8, 8)), HEADS),
    "score, tanh": (scores(Heads("q", 0, 8, 4, 8), Heads("k", 0, 8, 4, 8), scale=("tanh(x)",)), HEADS),
}


def tensors(chain, packed=False, transposed=False, **more):
    sizes = {"x": (2, 3, K), "w": (K,), "b": (K,), "w1": (2 * N if packed else N, K),
             "b1": (2 * N if packed else N,), "w2": (K, N), "b2": (K,), "w3": (N, K), **more}
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
    "sums": (SUMS, {}),
    "sums between products": (BETWEEN, {}),
    "patches": (PATCHES, {"x": (2, 8, K), "w1": (N, K, 2, 2), "w2": (K, K)}),
    **SCORES,
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


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_gradients(name):
    """create_graph=True: by autograd, with the products that are known."""
    from ascend_ln_fuse.kernels.chain_ops import _Chain
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner

    chain, how = CHAINS[name]
    inputs = [x.requires_grad_() for x in tensors(chain, **how)]
    found = []
    for run in (lambda *x: tuple(evaluate(chain, x, EPS).values()),
                lambda *x: _Chain.apply(ChainRunner(chain), EPS, *x)):
        out = sum(t.tanh().sum() for t in run(*inputs))
        first = torch.autograd.grad(out, inputs, create_graph=True, allow_unused=True)
        norm = sum(g.square().sum() for g in first if g is not None)
        found.append([*first, *torch.autograd.grad(norm, inputs, allow_unused=True)])
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            assert (ours - wanted).norm() <= 1e-5 * wanted.norm()


def test_which_products_are_kept():
    """Not what is only scaled or added to, unless a product behind it is made of it."""
    assert SUMS.kept == ("z",) and BETWEEN.kept == ("z",) and PATCHES.kept == ("z",)
    assert SCORES["score"][0].kept == ("q", "k")
    assert SCORES["score, tanh"][0].kept == ("q", "k", "s")
    assert ffn("gelu(x)").kept == ("z",)


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


@pytest.mark.parametrize("rows", [16, 32, 64, 256])
def test_peak_memory_of_scores(rows):
    """Never above eager's, in training and without gradients."""
    from ascend_ln_fuse.kernels.chain_ops import _Chain
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner

    chain, how = SCORES["score"]
    # (the region's lane is the number of keys)
    chain = Chain(chain.inputs, chain.scalars, (*chain.stages[:-1], RegionStage(
        ("t",), region(rows, "x", "mul(x, 0.25)", outer=3), ("s",))), chain.outputs)
    inputs = [torch.randn(2, rows, K), *tensors(chain, **how)[1:]]

    def eager(x, w, b, w1, b1, w3):
        h = F.layer_norm(x, (K,), w, b)
        q, k = (F.linear(h, *p).view(2, rows, 4, 8).transpose(1, 2) for p in ((w1, b1), (w3,)))
        del h
        return torch.matmul(q, k.transpose(2, 3)) * 0.25

    def ours(*args):
        return _Chain.apply(ChainRunner(chain), EPS, *args)[0]

    torch.testing.assert_close(ours(*inputs), eager(*inputs))
    for training in (True, False):
        peaks = []
        for step in (eager, ours):
            leaves = [x.detach().requires_grad_(training) for x in inputs]
            grad = torch.ones(2, 4, rows, rows)
            live, given = Live(), [t.untyped_storage() for t in (*leaves, grad)]
            live.seen.update(given)
            with live, torch.set_grad_enabled(training):
                out = step(*leaves)
                if training:
                    out.backward(grad)
            peaks.append(live.peak)
            del out
        assert peaks[1] <= peaks[0], (training, peaks)


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
