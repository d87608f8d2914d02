"""Warm calls of a chain: one function, which settles nothing again and is right for every change of its
tensors."""

import threading
import weakref

import pytest
import torch
from chain_cases import K, ffn, ffn_inputs, packed, packed_inputs, plain_packed
from test_chain_backward import CHAINS, tensors
from torch.overrides import TorchFunctionMode

from ascend_ln_fuse.kernels import chain_ways
from ascend_ln_fuse.kernels.chain import Chain, evaluate
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice, agree
from ascend_ln_fuse.kernels.chain_ops import chain_call
from ascend_ln_fuse.kernels.chain_products import LinearStage
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.fused_linear import FusedLinear
from ascend_ln_fuse.kernels.fused_linear_plan import Plan
from ascend_ln_fuse.kernels.launch import Runner

EPS = (1e-5,)
WAYS = [(a, b) for a in (LIBRARY, ONE_KERNEL) for b in (LIBRARY, ONE_KERNEL)]
CASES = {
    "ffn": (lambda: ffn("bf16"), lambda: ffn_inputs(torch.bfloat16)),
    "packed": (plain_packed, packed_inputs),
    "norm read elsewhere": (packed, packed_inputs),
    "transposed": (lambda: packed(True), lambda: packed_inputs(True)),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")


def runner_by(chain, ways):
    """A ChainRunner whose segments take these ways, by their number."""
    runner = ChainRunner(chain, "off")
    number = {fused.run.segment.text: i for i, fused in enumerate(runner._fused)}
    assert len(number) == len(ways)

    def decide(question):
        way = next(ways[i] for text, i in number.items() if question.text.startswith(text))
        return Choice(way, question.configs()[0] if way == ONE_KERNEL else None)

    runner._decide = decide
    return runner


def is_right(runner, inputs, scalars=EPS):
    return agree(runner(inputs, scalars), tuple(evaluate(runner.chain, inputs, scalars).values()))


def settle_nothing(monkeypatch):
    """From here on every look-up, choice and key is an error."""
    def never(*args):
        raise AssertionError("looked up again")

    monkeypatch.setattr(chain_ways, "layouts", never)
    for owner, name in ((ChainRunner, "_first"), (Runner, "_first"), (Runner, "_remember"), (Plan, "prepare"),
                        (FusedLinear, "_make"), (FusedLinear, "plan")):
        monkeypatch.setattr(owner, name, never)


@pytest.mark.parametrize("ways", WAYS, ids=" + ".join)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_warm_call_settles_nothing(name, ways, monkeypatch):
    make, inputs = CASES[name]
    runner = runner_by(make(), ways)
    for _ in range(4):  # the first binds; the next ones find the plans of what the products gave
        assert is_right(runner, inputs())
    settle_nothing(monkeypatch)
    assert is_right(runner, inputs(), (1e-3,))


@pytest.mark.parametrize("name", [name for name in CHAINS if name.startswith(("score", "patches"))])
def test_products_that_only_the_library_runs(name, monkeypatch):
    """Patch convolutions and scores, of whole values, columns and heads."""
    chain, how = CHAINS[name]
    runner = ChainRunner(chain, "off", lambda question: Choice(LIBRARY))

    def check(scalars):
        inputs = tensors(chain, **how)  # fp32, in which a norm sums in another order than the reference
        torch.testing.assert_close(runner(inputs, scalars), tuple(evaluate(chain, inputs, scalars).values()))

    for _ in range(4):
        check(EPS)
    settle_nothing(monkeypatch)
    check((1e-3,))


class Wide(TorchFunctionMode):
    """Inside, the rows of products lie twice as far apart."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is not torch.nn.functional.linear:
            return found
        return torch.cat((found, found + 1), -1)[..., :found.shape[-1]]


@pytest.mark.parametrize("ways", WAYS, ids=" + ".join)
@pytest.mark.parametrize("name", ["ffn", "two products"])
def test_a_kernel_behind_a_product_that_is_laid_out_otherwise(name, ways):
    if name == "ffn":
        chain, inputs, scalars = ffn("bf16"), ffn_inputs(torch.bfloat16), EPS
    else:
        chain = Chain(("x", "w1", "w2", "b2"), (), (
            LinearStage("z", "x", "w1"), LinearStage("y", "z", "w2", "b2")), ("y",))
        inputs = [torch.randn(s).mul(0.3).bfloat16() for s in ((5, K), (64, K), (K, 64), (K,))]
        scalars = ()
    runner, wanted = runner_by(chain, ways), tuple(evaluate(chain, inputs, scalars).values())
    for _ in range(3):
        assert agree(runner(inputs, scalars), wanted)
    for _ in range(2):
        with Wide():
            ours = runner(inputs, scalars)
        assert agree(ours, wanted)


@pytest.mark.parametrize("ways", WAYS, ids=" + ".join)
def test_tensors_that_change_between_calls(ways):
    inputs, runner = ffn_inputs(torch.bfloat16), runner_by(ffn("bf16"), ways)
    for _ in range(3):
        assert is_right(runner, inputs)
    weight = inputs[3]
    buffer = torch.randn(2 * 3 * K + 1).mul(0.3).bfloat16()
    for change in (
            lambda: inputs.__setitem__(0, buffer[:-1].view(2, 3, K)),
            lambda: inputs.__setitem__(0, buffer[1:].view(2, 3, K)),  # another address modulo 16
            lambda: inputs.__setitem__(0, torch.randn(3, 2, K).bfloat16().transpose(0, 1)),
            lambda: inputs.__setitem__(0, torch.randn(1, 5, K).bfloat16()),
            lambda: weight.set_(torch.randn(weight.shape).mul(0.3).bfloat16()),
            lambda: setattr(weight, "data", torch.randn(weight.shape[::-1]).mul(0.3).bfloat16().t())):
        change()
        for _ in range(2):
            assert is_right(runner, inputs)


def test_gradients_are_recorded_from_the_call_on_that_asks_for_them():
    runner, inputs = runner_by(ffn("bf16"), (ONE_KERNEL, LIBRARY)), ffn_inputs(torch.bfloat16)
    call = chain_call(runner.chain, runner=runner)
    assert not any(call(*inputs, *EPS).requires_grad for _ in range(3))
    inputs[5].requires_grad_(True)
    for _ in range(2):
        call(*inputs, *EPS).sum().backward()
    assert inputs[5].grad is not None
    with torch.no_grad():
        assert not call(*inputs, *EPS).requires_grad


def test_nothing_is_bound_where_the_next_call_asks_again():
    runner = ChainRunner(ffn("bf16"), "off", lambda question: Choice(LIBRARY, final=False))
    assert is_right(runner, ffn_inputs(torch.bfloat16)) and not runner._bound


def test_more_rows_than_kernels_are_for():
    """Nothing is chosen there; the library is bound all the same."""
    runner, inputs = runner_by(ffn("bf16"), (ONE_KERNEL, ONE_KERNEL)), ffn_inputs(torch.bfloat16)
    inputs[0] = torch.randn(2, 200, K).bfloat16()
    assert is_right(runner, inputs)
    assert [bound.kernels for bound in runner._bound.values()] == [[]] and not runner.choices


def test_a_chain_without_regions_or_scalars():
    chain = Chain(("x", "w"), (), (LinearStage("y", "x", "w"),), ("y",))
    for way in (LIBRARY, ONE_KERNEL):
        runner = runner_by(chain, (way,))
        for _ in range(3):
            assert is_right(runner, (torch.randn(2, K).bfloat16(), torch.randn(32, K).bfloat16()), ())


def test_intermediates_go_when_nothing_reads_them(monkeypatch):
    runner, inputs = runner_by(ffn("bf16"), (LIBRARY, LIBRARY)), ffn_inputs(torch.bfloat16)
    for _ in range(3):
        runner(inputs, EPS)
    norms, alive, run = [], [], Runner.__call__

    def called(self, args, scalars=()):
        results = run(self, args, scalars)
        norms.append(weakref.ref(results[0]))
        return results

    monkeypatch.setattr(Runner, "__call__", called)
    monkeypatch.setattr(Runner, "over", lambda *args: alive.append(norms[0]() is not None))
    runner(inputs, EPS)
    assert alive == [False]  # the norm's result, when the activation runs


def test_threads_with_different_rows():
    runner, errors = runner_by(ffn("bf16"), (ONE_KERNEL, LIBRARY)), []
    weights = ffn_inputs(torch.bfloat16)[1:]

    def work(rows):
        try:
            for _ in range(4):
                assert is_right(runner, [torch.randn(1, rows, K).bfloat16(), *weights])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
