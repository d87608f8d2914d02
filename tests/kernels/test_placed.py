"""Results written to their place in a longer tensor, and what copies the rest of it."""

import pytest
import torch
from chain_cases import K, N, ffn, gate, norm, pointwise
from test_chain_program import settle_nothing

from ascend_ln_fuse.kernels import launch, ops
from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, Choice
from ascend_ln_fuse.kernels.chain_ops import chain_call, chain_runner
from ascend_ln_fuse.kernels.chain_products import LinearStage
from ascend_ln_fuse.kernels.chain_text import parse_chain
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.likeness import Likeness
from ascend_ln_fuse.kernels.placed import Place, PlacedRunner, Rest, rest_call
from ascend_ln_fuse.kernels.region import one_line, parse

EPS = (1e-5,)
PLACES = [Place(2, 0, N + 7), Place(2, 7, N + 7), Place(2, 16, N + 32), Place(1, 2, 9), Place(0, 1, 3)]


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    ops.runner.cache_clear()
    chain_runner.cache_clear()
    yield
    ops.runner.cache_clear()
    chain_runner.cache_clear()


def branch(dtype="f32"):
    """Two products on one norm; behind the second is what has a place."""
    return Chain(("x", "w", "b", "w1", "b1", "w2", "b2"), ("eps",), (
        RegionStage(("h",), norm(dtype), ("x", "w", "b"), ("eps",)),
        LinearStage("q", "h", "w1", "b1"),
        LinearStage("z", "h", "w2", "b2"),
        RegionStage(("a",), pointwise("gelu", dtype), ("z",))), ("q", "a"))


def branch_inputs(dtype=torch.float32, tokens=3, requires_grad=False):
    shapes = (2, tokens, K), (K,), (K,), (K, K), (K,), (N, K), (N,)
    return [torch.randn(s).mul(0.3).to(dtype).requires_grad_(requires_grad) for s in shapes]


# Places


def test_a_place_in_sizes_and_strides():
    place = Place(1, 2, 9)
    assert place.whole((4, 5, 6)) == (4, 9, 6)
    assert place.strides((4, 5, 6)) == torch.empty(4, 9, 6).narrow(1, 2, 5).stride()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_only_the_place_is_written(place, dtype, kernels, monkeypatch):
    region = pointwise("silu", dtype)
    run, x = Runner(region), torch.randn(2, 3, N).to(torch.float32 if dtype == "f32" else torch.bfloat16)
    wanted, = run([x])
    monkeypatch.setattr(torch, "empty", lambda sizes, **more: torch.full(sizes, 5.0, **more))
    for _ in range(3):
        whole, = PlacedRunner(run, [place])([x])
        assert whole.shape == place.whole(x.shape) and whole.is_contiguous() and whole.dtype == x.dtype
        written = whole.narrow(place.dim, place.start, x.shape[place.dim])
        assert torch.equal(written, wanted)
        written.fill_(5.0)
        assert bool((whole == 5.0).all())
    assert not run.record.reasons


def test_one_of_two_results(kernels):
    region = parse(f"space [*, {K}]\nin x: f32[*, {K}]\nin y: f32[*, {K}]\nv0: f32 = add(x, y)\n"
                   "v1: f32 = silu(v0)\nout v0: f32 order(0, 1)\nout v1: f32 order(0, 1)")
    run, (x, y) = Runner(region), torch.randn(2, 5, K)
    total, whole = PlacedRunner(run, [None, Place(1, 3, K + 4)])([x, y])
    for ours, wanted in zip((total, whole[:, 3:K + 3]), run([x, y]), strict=True):
        assert torch.equal(ours, wanted)
    assert total.is_contiguous() and whole.shape == (5, K + 4)


def test_what_is_expected_is_what_a_call_runs(kernels, monkeypatch):
    """At an odd address, and with a result of its own besides."""
    begun, waited = [], []
    monkeypatch.setattr(launch, "ahead", lambda key, work: begun.append(key))
    monkeypatch.setattr(launch, "within_limit", lambda key, work: (waited.append(key), work())[1])
    region = parse(f"space [*, {K}]\nin x: f32[*, {K}]\nv0: f32 = silu(x)\nv1: f32 = neg(x)\n"
                   "out v0: f32 order(0, 1)\nout v1: f32 order(0, 1)")
    placed = PlacedRunner(Runner(region, self_check="off"), [Place(1, 3, K + 5), None])
    placed.expect([Likeness.dense((5, K), torch.float32, torch.device("cpu"))])
    assert len(begun) == 1
    placed([torch.randn(5, K)])
    assert waited == begun


# Chains


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_text(place):
    chain = branch().in_places({"a": place})
    for text in (chain.text, one_line(chain.text)):
        assert parse_chain(text) == chain
    assert chain.text.endswith(f"out q, a at {place.start} of {place.total} along {place.dim}")
    assert branch().text.endswith("out q, a")


@pytest.mark.parametrize("word", ["a at 1 of 2", "a at x of 2 along 1", "a along 1", "a at 1 of 2 along 1 2"])
def test_text_that_is_no_place(word):
    with pytest.raises(ValueError, match="place"):
        parse_chain(branch().text + word.removeprefix("a"))


def test_what_it_is_made_of_comes_first():
    chain = branch().in_places({"a": PLACES[0]})
    assert [stage.names for stage in chain.stages] == [("h",), ("z",), ("a",), ("q",)]
    assert chain.outputs == branch().outputs and chain.placed == {"a": PLACES[0]}


@pytest.mark.parametrize("chain, name", [
    (branch(), "q"), (branch(), "z"), (ffn(), "a"), (ffn(), "y"),
    (Chain(("x",), (), (RegionStage(("a",), parse(
        f"space [*, *, {N}]\nin x: f32[*, *, {N}]\nv0: f32 = silu(x)\nout v0: f32 order(1, 0, 2)"), ("x",)),),
        ("a",)), "a"),
], ids=["a product", "no output", "read", "a product, last", "not contiguous"])
def test_what_can_have_no_place(chain, name):
    assert name not in chain.placeable
    with pytest.raises(ValueError, match="place"):
        chain.in_places({name: PLACES[0]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_runner_yields_the_whole(place, dtype, kernels, monkeypatch):
    """Of few rows too, for which one kernel might hold product and gelu: that writes a tensor of its own."""
    asked = []

    def by_library(question):
        asked.append("gelu" in question.text)
        return Choice(LIBRARY, None)

    plain = branch("f32" if dtype == torch.float32 else "bf16")
    inputs = branch_inputs(dtype)
    q, a = ChainRunner(plain, decide=by_library)(inputs, EPS)
    run = ChainRunner(plain.in_places({"a": place}), decide=by_library)
    asked.clear()
    for number in range(4):
        if number == 3:
            settle_nothing(monkeypatch)
        ours, whole = run(inputs, EPS)
        assert torch.equal(ours, q)
        assert whole.shape == place.whole(a.shape)
        assert torch.equal(whole.narrow(place.dim, place.start, a.shape[place.dim]), a)
    assert asked and not any(asked)


def test_the_product_is_not_written_over(kernels):
    """It is too short for the whole."""
    run = ChainRunner(branch().in_places({"a": PLACES[0]}))
    assert run._over[("a",)] is None and ChainRunner(branch())._over[("a",)] == "z"


def test_gradients_come_from_the_plain_chain(kernels):
    place = PLACES[1]
    call = chain_call(branch().in_places({"a": place}))
    inputs = branch_inputs(requires_grad=True)
    q, a = call(*inputs, *EPS)
    wanted = evaluate(branch(), inputs, EPS)
    assert a.shape == wanted["a"].shape
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum() + z.square().sum(), inputs)
                              for y, z in ((q, a), (wanted["q"], wanted["a"]))), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert call(*inputs, *EPS)[1].shape == place.whole(a.shape)


def test_plain_torch_yields_the_value():
    inputs = branch_inputs()
    with torch.no_grad():
        _, a = chain_call(branch().in_places({"a": PLACES[0]}))(*inputs, *EPS)
    assert torch.equal(a, evaluate(branch(), inputs, EPS)["a"])


def test_a_gate_in_its_place(kernels):
    """Behind two products, of which neither is written over."""
    stages = LinearStage("y", "x", "g"), LinearStage("z", "x", "u"), RegionStage(("a",), gate(), ("y", "z"))
    chain = Chain(("x", "g", "u"), (), stages, ("a",))
    inputs = [torch.randn(2, 3, K), torch.randn(N, K), torch.randn(N, K)]
    wanted, = evaluate(chain, inputs, ()).values()
    whole, = ChainRunner(chain.in_places({"a": Place(2, 8, N + 8)}))(inputs)
    torch.testing.assert_close(whole[..., 8:], wanted)


# The rest


PARTS = [(2, (3, 4, 5), 1), (2, (3, 4), 0), (0, (1, 2, 1), 2), (1, (2, 6), 1)]


def parts_of(dim, lengths, **more):
    return [torch.randn([n if d == dim else 3 for d in range(3)], **more) for n in lengths]


@pytest.mark.parametrize("dim, lengths, number", PARTS)
def test_the_rest_is_copied(dim, lengths, number):
    rest, parts = Rest(dim, lengths, number), parts_of(dim, lengths)
    wanted = torch.cat(parts, dim)
    whole = torch.full(rest.place.whole(parts[number].shape), 7.0)
    whole.narrow(dim, rest.place.start, lengths[number]).copy_(parts[number])
    given = [*parts[:number], whole, *parts[number + 1:]]
    result = rest_call(rest)(*given)
    assert result is whole and torch.equal(result, wanted)
    assert torch.equal(rest_call(rest)(*parts), wanted)


def test_heads_are_copied_as_one_lane():
    """Of a part whose last dim is given as several, as attention yields it."""
    rest, (a, b) = Rest(2, (6, 5), 1), (torch.randn(2, 3, 6), torch.randn(2, 3, 5))
    heads, whole = a.view(2, 3, 2, 3).transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(2, 3, 11)
    whole[..., 6:] = b
    assert torch.equal(rest_call(rest)(heads, whole), torch.cat([a, b], 2))
    assert torch.equal(rest_call(rest)(heads, b), torch.cat([a, b], 2))
    assert torch.equal(rest_call(rest)(heads.requires_grad_(), whole), torch.cat([a, b], 2))


@pytest.mark.parametrize("dim, lengths, number", PARTS)
def test_the_rest_with_gradients(dim, lengths, number):
    rest, parts = Rest(dim, lengths, number), parts_of(dim, lengths)
    other = next(i for i in range(len(parts)) if i != number)
    parts[other].requires_grad_()
    whole = torch.full(rest.place.whole(parts[number].shape), 7.0)
    whole.narrow(dim, rest.place.start, lengths[number]).copy_(parts[number])
    result = rest_call(rest)(*parts[:number], whole, *parts[number + 1:])
    assert result is not whole and torch.equal(result, torch.cat(parts, dim))
    result.sum().backward()
    assert torch.equal(parts[other].grad, torch.ones_like(parts[other]))
