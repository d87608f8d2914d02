"""Chains without a graph: their text, their ways and their gradients."""

import pytest
import torch
from chain_cases import K, N, ffn, ffn_inputs, norm, packed, packed_inputs, plain, plain_packed
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice, Question, agree
from ascend_ln_fuse.kernels.chain_ops import _Chain
from ascend_ln_fuse.kernels.chain_products import LinearStage
from ascend_ln_fuse.kernels.chain_segments import segments
from ascend_ln_fuse.kernels.chain_ways import ChainRunner


def test_text_and_checks():
    chain = ffn()
    assert "z = linear(h, w1, b1)" in chain.text and chain.text.startswith("chain x, w, b, w1")
    assert chain.words == "linear -> gelu -> linear"
    assert chain.kept == ("z",)  # neither the norm's nor the activation's result
    assert chain == ffn() and hash(chain) == hash(ffn())
    with pytest.raises(ValueError, match="'q', read by 'z'"):
        Chain(("x",), (), (LinearStage("z", "q", "x"),), ("z",))
    with pytest.raises(ValueError, match="defined twice"):
        Chain(("x", "w"), (), (LinearStage("x", "x", "w"),), ("x",))
    with pytest.raises(ValueError, match="outputs"):
        Chain(("x", "w"), (), (LinearStage("z", "x", "w"),), ("x",))
    with pytest.raises(ValueError, match="as many as"):
        RegionStage(("h",), norm(), ("x",))


def test_meaning():
    inputs = ffn_inputs()
    assert torch.equal(evaluate(ffn(), inputs, (1e-5,))["y"], plain(*inputs))


def test_values_are_dropped_when_nothing_reads_them():
    assert ffn().spent == ((), ("h",), ("z",), ("a",))
    assert packed().spent == ((), (), ("z",), ("a",))  # h is an output


def test_segments():
    first, second = segments(ffn())
    assert first.norm.names == ("h",) and first.pointwise.names == ("a",)
    assert second.norm is None and [p.name for p in second.products] == ["y"] and second.pointwise is None


def test_other_products_are_the_librarys():
    """Only linear layers are asked about: convolutions and scores run as they are, whatever is chosen."""
    from test_chain_backward import EPS, PATCHES, SCORES, tensors

    for chain, how, parts in ((PATCHES, {"x": (2, 8, K), "w1": (128, K, 2, 2), "w2": (K, K)}, ["q", "z"]),
                              (*SCORES["score"], ["qk", "s"])):
        asked = []
        runner = ChainRunner(chain, decide=lambda question, asked=asked: asked.append(question) or
                             Choice(LIBRARY))
        assert ["".join(p.name for p in segment.products) for segment in runner.segments] == parts
        assert runner.segments[1].pointwise is chain.stages[-1]
        inputs = tensors(chain, **how)
        wanted = evaluate(chain, inputs, EPS)
        assert all(map(torch.equal, runner(inputs, EPS), wanted.values()))
        assert len(asked) == 1 and "score" not in asked[0].text


def test_the_activation_is_written_over_its_product(monkeypatch):
    """By kernels only: PyTorch's own activations make a tensor anyway."""
    runner = ChainRunner(ffn())
    written = []
    for names, run in runner._runners.items():
        monkeypatch.setattr(run, "over", lambda args, scalars, number, names=names: written.append(
            (names, number)) or args[number].copy_(F.gelu(args[0])))
    inputs = ffn_inputs()
    assert torch.equal(runner(inputs, (1e-5,))[0], plain(*inputs))
    assert written == [(("a",), 0)]
    assert torch.equal(runner.values(inputs, (1e-5,), keep=("z",))["z"],
                       F.linear(F.layer_norm(inputs[0], (K,), inputs[1], inputs[2], 1e-5), *inputs[3:5]))
    assert len(written) == 1  # not over what is kept


# One kernel, through Triton's interpreter


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")


@pytest.mark.parametrize("make, inputs", [
    (lambda: ffn("bf16"), lambda: ffn_inputs(torch.bfloat16)),
    (lambda: ffn("f16"), lambda: ffn_inputs(torch.float16)),
    (packed, packed_inputs),
    (lambda: packed(True), lambda: packed_inputs(True)),
], ids=["bf16", "f16", "packed", "packed, transposed"])
def test_one_kernel_agrees_with_the_library(make, inputs, interpreted):
    asked = []

    def decide(question: Question) -> Choice:
        assert question.unsupported is None
        asked.append(question)
        return Choice(ONE_KERNEL, question.configs()[0])

    chain, inputs = make(), inputs()
    ours = ChainRunner(chain, "off", decide)(inputs, (1e-5,))
    assert len(asked) == 2
    wanted = tuple(evaluate(chain, inputs, (1e-5,)).values())
    assert agree(ours, wanted)
    for question in asked:
        assert agree(question.by_kernel(question.configs()[0]), question.by_library())


def test_fp32_stays_with_the_library(interpreted):
    reasons = []

    def decide(question):
        reasons.append(question.unsupported)
        return Choice(LIBRARY)

    ChainRunner(ffn(), "off", decide)(ffn_inputs(), (1e-5,))
    assert len(reasons) == 2 and all(reasons)


def test_many_rows_are_not_asked_about():
    def decide(question):
        raise AssertionError("asked")

    inputs = ffn_inputs(torch.bfloat16)
    inputs[0] = torch.randn(2, 200, K).bfloat16()
    ChainRunner(ffn("bf16"), "off", decide)(inputs, (1e-5,))
    inputs[0] = torch.randn(0, 3, K).bfloat16()
    assert ChainRunner(ffn("bf16"), "off", decide)(inputs, (1e-5,))[0].shape == (0, 3, K)


@pytest.mark.parametrize("make, inputs", [(lambda: ffn("bf16"), lambda: ffn_inputs(torch.bfloat16)),
                                          (plain_packed, packed_inputs)], ids=["ffn", "packed"])
def test_later_calls_run_bound(make, inputs, interpreted, monkeypatch):
    """With the layouts of an earlier call nothing is looked up again, and values are the call's own."""
    chain = make()
    runner = ChainRunner(chain, "off", lambda question: Choice(ONE_KERNEL, question.configs()[0]))
    runner(inputs(), (1e-5,))
    assert len(runner._bound) == 1
    monkeypatch.setattr(ChainRunner, "_choice", None)
    others = inputs()
    assert agree(runner(others, (1e-3,)), tuple(evaluate(chain, others, (1e-3,)).values()))


def test_sizes_of_weights_are_part_of_the_question(interpreted):
    """The second segment's text names no sizes: what was measured for one model is no answer for another."""
    asked = []

    def decide(question):
        asked.append(question.text)
        return Choice(LIBRARY)

    ChainRunner(ffn("bf16"), "off", decide)(ffn_inputs(torch.bfloat16), (1e-5,))
    wide = Chain(("x", "w"), (), (LinearStage("y", "x", "w"),), ("y",))
    for size in (K, 2 * K):
        ChainRunner(wide, "off", decide)((torch.randn(2, size).bfloat16(), torch.randn(8, size).bfloat16()))
    assert len(set(asked)) == 4


# Gradients


def run(chain, inputs):
    return _Chain.apply(ChainRunner(chain), (1e-5,), *inputs)


def test_gradients_and_their_gradients():
    inputs = ffn_inputs(torch.float64, requires_grad=True)
    assert gradcheck(lambda *x: run(ffn("f64"), x), inputs)
    assert gradgradcheck(lambda *x: run(ffn("f64"), x), inputs)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (3, 4, 5, 6), (5, 6)])
def test_gradients_of_some(frozen):
    inputs = ffn_inputs(requires_grad=True)
    for i in frozen:
        inputs[i].requires_grad_(False)
    found = []
    for call in (plain, lambda *x: run(ffn(), x)[0]):
        call(*inputs).square().sum().backward()
        found.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    for eager, ours in zip(*found):
        assert (eager is None) == (ours is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_two_outputs(transposed):
    chain = packed(transposed)
    inputs = [x.requires_grad_() for x in packed_inputs(transposed)]
    wanted = torch.autograd.grad(sum(t.sum() for t in evaluate(chain, inputs, (1e-5,)).values()), inputs)
    found = torch.autograd.grad(sum(t.sum() for t in run(chain, inputs)), inputs)
    for ours, eager in zip(found, wanted):
        torch.testing.assert_close(ours, eager)
    only_y = torch.autograd.grad(run(chain, inputs)[1].sum(), inputs)
    for ours, eager in zip(only_y, torch.autograd.grad(evaluate(chain, inputs, (1e-5,))["y"].sum(), inputs)):
        torch.testing.assert_close(ours, eager)


def saved_bytes(call, inputs) -> int:
    """Bytes that `call` keeps for backward, its inputs not counted."""
    held = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call(*inputs)
    del result
    return sum(kept.values())


def test_what_is_kept_for_backward():
    """The product that the activation reads, and nothing else: neither the norm's result nor the
    activation's, which eager keeps."""
    inputs = ffn_inputs(requires_grad=True)
    rows = 2 * 3
    assert saved_bytes(lambda *x: run(ffn(), x)[0], inputs) == rows * N * 4
    assert saved_bytes(plain, inputs) >= rows * (2 * N + K) * 4


def test_forward_mode():
    from ascend_ln_fuse.kernels.chain_ops import chain_call

    inputs = ffn_inputs(torch.float64)
    tangent = torch.randn_like(inputs[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], tangent)
        found = [forward_ad.unpack_dual(f(dual, *inputs[1:])).tangent
                 for f in (plain, lambda *x: chain_call(ffn("f64"))(*x, 1e-5))]
    torch.testing.assert_close(found[1], found[0])


def test_equal_chains_share_a_runner():
    """So that the layers of a model share one choice."""
    from ascend_ln_fuse.kernels.chain_ops import chain_call

    assert chain_call(ffn()).runner is chain_call(ffn()).runner
