"""Chains without a graph: their text, their ways, their gradients, and how a way is chosen."""

import weakref
from dataclasses import replace

import pytest
import torch
from chain_cases import K, N, ffn, ffn_inputs, norm, packed, packed_inputs, plain, plain_packed
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

from ascend_ln_fuse.kernels import chain_choice
from ascend_ln_fuse.kernels.chain import Chain, RegionStage, evaluate
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice, Question, agree, choose
from ascend_ln_fuse.kernels.chain_ops import _Chain
from ascend_ln_fuse.kernels.chain_products import LinearStage
from ascend_ln_fuse.kernels.chain_ways import ChainRunner, segments
from ascend_ln_fuse.kernels.compiling import CompileTimeout
from ascend_ln_fuse.kernels.layout import Unsupported


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


# The choice


def question(rows=4, unsupported=None, kernel=None):
    wanted = [torch.ones(3)]
    return Question("text", torch.device("cpu"), rows, lambda: wanted, kernel or (lambda config: wanted),
                    unsupported, lambda: ("slow", "fast", "wrong"))


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Times by the way that is called; and a store of this test's own."""
    from ascend_ln_fuse.kernels.store import Store

    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chain_choice, "_store", Store("chains"))
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)
    monkeypatch.setattr(chain_choice, "host_microseconds", lambda call, device: 1.0)
    times = {LIBRARY: 10.0, "slow": 9.9, "fast": 5.0, "wrong": 1.0}
    monkeypatch.setattr(chain_choice, "device_microseconds",
                        lambda call, device: times[call.args[0] if hasattr(call, "args") else LIBRARY])
    return times


def by_kernel(config):
    return [torch.full((3,), 1.1 if config == "wrong" else 1.0)]


def test_the_fastest_right_way_is_taken(clock):
    choice = choose(question(kernel=by_kernel))
    assert (choice.way, choice.config) == (ONE_KERNEL, "fast")
    assert choice.times == {LIBRARY: 10.0, "slow": 9.9, "fast": 5.0}
    assert "wrong: other results" in choice.reason
    assert "fast 5.0 us" in str(choice)


def test_a_kernel_that_keeps_the_host_longer_is_not_taken(clock, monkeypatch):
    monkeypatch.setattr(chain_choice, "host_microseconds",
                        lambda call, device: 30.0 if hasattr(call, "args") else 20.0)
    choice = choose(question(kernel=by_kernel))
    assert choice.way == LIBRARY and "keeps the host busy for 30.0 us" in choice.reason


def test_noise_is_no_reason(clock):
    clock.update(fast=9.95)
    assert choose(question(kernel=by_kernel)).way == LIBRARY  # 9.9 is within the margin


def test_a_choice_is_kept_and_read_again(clock):
    choose(question(kernel=by_kernel))
    clock.clear()  # nothing can be measured any more
    again = choose(question(kernel=by_kernel))
    assert (again.way, again.config, again.times["fast"]) == (ONE_KERNEL, "fast", 5.0)
    with pytest.raises(KeyError):
        choose(question(rows=8, kernel=by_kernel))  # another bucket is measured


@pytest.mark.parametrize("entry", [
    {}, {"way": "sudo", "config": "fast", "times": {}, "reason": ""},
    {"way": ONE_KERNEL, "config": "__import__('os')", "times": {}, "reason": ""},
    {"way": ONE_KERNEL, "config": ["fast"], "times": {}, "reason": ""},
    {"way": ONE_KERNEL, "config": "fast", "times": {"fast": "1"}, "reason": ""},
    {"way": LIBRARY, "config": "None", "times": [], "reason": ""},
    {"way": LIBRARY, "config": "None", "times": {}, "reason": 3},
])
def test_a_strange_entry_is_measured_again(clock, entry):
    chain_choice._store.put(chain_choice._key("text", torch.device("cpu"), 4), entry)
    assert choose(question(kernel=by_kernel)).config == "fast"


def test_where_nothing_can_be_measured_the_library_runs_and_is_asked_again(clock, monkeypatch):
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: False)
    choice = choose(question(kernel=by_kernel))
    assert choice.way == LIBRARY and not choice.final
    assert chain_choice._store.get(chain_choice._key("text", torch.device("cpu"), 4)) is None
    assert choose(question(unsupported="no kernel")).reason == "no kernel"


def test_a_kernel_without_memory_is_passed_over(clock):
    def kernel(config):
        if config == "fast":
            raise torch.OutOfMemoryError("no memory")
        return by_kernel(config)

    clock.update(slow=3.0)
    choice = choose(question(kernel=kernel))
    assert choice.config == "slow" and "fast: no memory" in choice.reason


class CompilationError(Exception):
    """Triton's has this name; it needs no Triton to be told from others."""


FAILURES = [CompilationError("at 3:4: no such thing\nmore"), RuntimeError("PTXAS error: too many registers"),
            TypeError("launcher() takes 3 arguments"), CompileTimeout("compiling took longer than 600 s"),
            AssertionError(), Unsupported("out of resource: shared memory")]


def failing(error, *which):
    def kernel(config):
        if config in which:
            raise error
        return by_kernel(config)

    return kernel


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_kernel_that_fails_is_dropped_and_the_report_says_why(clock, error):
    clock.update(slow=3.0)
    choice = choose(question(kernel=failing(error, "fast")))
    word = str(error).split("\n")[0] or type(error).__name__
    assert (choice.way, choice.config) == (ONE_KERNEL, "slow")
    assert "fast: " in choice.reason and word in choice.reason and word in str(choice)
    assert "\n" not in choice.reason
    # Another process asks again, but where the device has not enough memory on chip for good.
    known = chain_choice._store.get(chain_choice._key("text", torch.device("cpu"), 4))
    assert (known is not None) is isinstance(error, Unsupported)


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_the_library_runs_where_every_kernel_fails(clock, error):
    choice = choose(question(kernel=failing(error, "slow", "fast", "wrong")))
    assert choice.way == LIBRARY and choice.config is None and choice.times == {LIBRARY: 10.0}
    assert choice.final  # not measured at every call


def test_one_compiler_that_hangs_is_waited_for(clock):
    tried = []

    def kernel(config):
        tried.append(config)
        raise CompileTimeout("compiling took longer than 600 s")

    assert "no other kernel was tried" in choose(question(kernel=kernel)).reason
    assert tried == ["slow"]


def test_kernels_begin_to_compile_together(clock):
    """Before the first is waited for; one that cannot be begun fails where it is tried."""
    told = []

    def begin(config):
        told.append(config)
        raise CompilationError("no")

    choice = choose(replace(question(kernel=lambda config: told.append("called") or by_kernel(config)),
                            begin=begin))
    assert told[:4] == ["slow", "fast", "wrong", "called"] and choice.config == "fast"


@pytest.mark.parametrize("word, lasting", [("compiling", False), ("measuring", True)])
def test_one_segment_does_not_take_all_the_time(word, lasting, clock, monkeypatch):
    """What is left is not tried, and the report says so. Where a compiler was slow, another process measures
    again, and finds the kernels compiled."""
    monkeypatch.setattr(chain_choice, f"{'COMPILE' if word == 'compiling' else 'MEASURE'}_SECONDS", 1e-9)
    choice = choose(question(kernel=by_kernel))
    assert list(choice.times) == [LIBRARY, "slow"]
    assert f"2 more not tried: {word} the others took too long" in str(choice)
    assert choice.lasting == lasting
    kept = chain_choice._store.get(chain_choice._key("text", torch.device("cpu"), 4))
    assert (kept is not None) == lasting


def test_a_kernel_that_fails_when_the_host_is_timed(clock, monkeypatch):
    def host(call, device):
        if hasattr(call, "args"):
            raise RuntimeError("launch failed")
        return 1.0

    monkeypatch.setattr(chain_choice, "host_microseconds", host)
    choice = choose(question(kernel=by_kernel))
    assert choice.way == LIBRARY and "fast: RuntimeError: launch failed" in choice.reason


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1),
                                   RuntimeError("CUDA error: an illegal memory access was encountered")],
                         ids=repr)
def test_what_ends_a_program_is_not_swallowed(clock, error):
    with pytest.raises(type(error)):
        choose(question(kernel=failing(error, "fast")))


def test_what_the_library_raises_is_raised(clock):
    def by_library():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        choose(replace(question(kernel=by_kernel), by_library=by_library))


@pytest.mark.parametrize("where", ["library", "timing"])
def test_out_of_memory_while_measuring(clock, monkeypatch, where):
    """The call in hand is the library's, nothing that was measured stays, and nothing is written."""
    held, released = [], []

    def by_library():
        results = [torch.ones(3)]
        held.append(weakref.ref(results[0]))
        if where == "library":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return results

    def no_memory(call, device):
        kept = call()  # noqa: F841 - in the frames of the exception
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(chain_choice, "device_microseconds", no_memory)
    monkeypatch.setattr(chain_choice, "_release", lambda device: released.append([x() for x in held]))
    choice = choose(replace(question(kernel=by_kernel), by_library=by_library))
    assert choice.way == LIBRARY and "out of memory" in choice.reason and choice.final
    assert released == [[None] * len(held)] and held
    assert chain_choice._store.get(chain_choice._key("text", torch.device("cpu"), 4)) is None


@pytest.mark.parametrize("ours, same", [
    ([1.0, 2.0, 3.0], True), ([1.0, 2.0, 3.02], True), ([1.1, 2.2, 3.3], False),
    ([1.0, 2.0, float("nan")], False), ([1.0, 2.0], False)])
def test_agree(ours, same):
    wanted = [torch.tensor([1.0, 2.0, 3.0]).bfloat16()]
    assert agree([torch.tensor(ours).bfloat16()], wanted) is same
    nan = [torch.tensor([1.0, float("nan")])]
    assert agree(nan, nan)


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
