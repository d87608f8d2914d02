"""What a warm call finds again: nothing that was made for tensors of another kind, layout or alignment."""

import gc
import threading
import weakref

import pytest
import torch
from norm_cases import assert_right, inputs_for, region
from torch import nn
from torch._subclasses import FakeTensorMode

from ascend_ln_fuse.kernels import launch, recent
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.ops import python_call
from ascend_ln_fuse.kernels.recent import MOST, Recent, alike

EPS = [1e-5]


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


def set_data(make):
    def change(p):
        p.data = make(p.data)
    return change


#: What may happen to a tensor that stays the same object; most of it at the same address.
CHANGES = {
    "strides": set_data(torch.t), "dtype": set_data(torch.Tensor.half), "size": set_data(lambda x: x[:2]),
    "shape": set_data(lambda x: x.view(2, 8)),
    "transposed in place": lambda p: p.t_(), "resized in place": lambda p: p.resize_(2, 4),
    "requires_grad": lambda p: p.requires_grad_(True),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_the_same_object_that_has_changed_is_not_alike(name):
    x, p = torch.randn(3, 4), parameter(4, 4)
    same = alike([x, p])
    assert same(x, p) and same(torch.randn(3, 4), parameter(4, 4))
    CHANGES[name](p)
    assert not same(x, p)


def test_other_kinds_of_tensors_are_not_alike():
    x = torch.randn(3, 4)
    same = alike([x])
    assert not same(nn.Parameter(x)) and not same(FakeTensorMode().from_tensor(x))
    with torch.inference_mode():
        assert not same(torch.randn(3, 4))
    with torch.no_grad():
        assert same(x)
    assert not same(torch.randn(3, 4, device="meta"))
    assert not alike([x, x.clone()])(x, x)


def test_an_address_modulo_16_is_part_of_it():
    buffer = torch.randn(64)
    at = [buffer[i:i + 8] for i in (0, 1, 4)]
    found = Recent()
    found.add([at[0]], [at[0].data_ptr()], "aligned")
    assert found.find([at[2]], [at[2].data_ptr()]) == "aligned"
    assert found.find([at[1]], [at[1].data_ptr()]) is None
    found.add([at[1]], [at[1].data_ptr()], "by 4")
    assert [found.find([x], [x.data_ptr()]) for x in at] == ["aligned", "by 4", "aligned"]


def test_a_few_are_kept_and_no_tensor_with_them():
    found, tensors = Recent(), [torch.randn(n) for n in range(1, MOST + 2)]
    for x in tensors:
        found.add([x], [x.data_ptr()], x.shape)
    assert [found.find([x], [x.data_ptr()]) for x in tensors] == [None, *[x.shape for x in tensors[1:]]]
    assert found.find(tensors[:2], [0, 0]) is None
    seen = weakref.ref(tensors.pop())
    del x
    gc.collect()
    assert seen() is None


# -- Runner


@pytest.fixture
def interpret(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(launch.INTERPRET, "1")


def warm(r, inputs, times=2, **options):
    """A Runner that has seen `inputs`."""
    run = Runner(r, **options)
    for _ in range(times):
        assert_right(r, inputs, EPS, run(inputs, EPS))
    return run


def no_keys(monkeypatch):
    def layouts(tensors):
        raise AssertionError("a key was made")

    monkeypatch.setattr(launch, "layouts", layouts)


def test_a_warm_call_makes_no_key(interpret, monkeypatch):
    r = region("layer_norm", 8, "f32")
    inputs = inputs_for(r, (2, 5), strided=False)
    run = warm(r, inputs)
    no_keys(monkeypatch)
    assert_right(r, inputs, [0.5], run(inputs, [0.5]))
    others = inputs_for(r, (2, 5), strided=False, seed=1)
    assert_right(r, others, EPS, run(others, EPS))


def test_without_dynamos_check_keys_are_made(interpret, monkeypatch):
    monkeypatch.setattr(recent, "_Guards", None)
    r = region("layer_norm", 8, "f32")
    run = warm(r, inputs_for(r, (2, 5)), times=3)
    assert len(run._plans) == 1
    no_keys(monkeypatch)
    with pytest.raises(AssertionError, match="a key was made"):
        run(inputs_for(r, (2, 5)), EPS)


def test_a_changed_tensor_gets_a_plan_of_its_own(interpret):
    r = region("layer_norm", 8, "f32")
    buffer = torch.randn(2 * 5 * 8 + 1)
    x, w, b = buffer[:80].view(2, 5, 8), parameter(8), parameter(8)
    run = warm(r, [x, w, b])
    for number, change in enumerate((
            lambda: buffer[1:].view(2, 5, 8),  # another address modulo 16
            lambda: torch.randn(5, 2, 8).transpose(0, 1),  # other strides
            lambda: torch.randn(3, 5, 8)), 2):  # another size
        for _ in range(2):
            moved = change()
            assert_right(r, [moved, w, b], EPS, run([moved, w, b], EPS))
        assert len(run._plans) == number
    w.data = torch.randn(16)[::2]
    assert_right(r, [x, w, b], EPS, run([x, w, b], EPS))
    assert run.reasons == {"lane stride of w is 2, not 1": 1}
    w.data = torch.randn(8).half()
    with pytest.raises(ValueError, match="got torch.float16"):
        run([x, w, b], EPS)
    with pytest.raises(ValueError, match="3 inputs, got 2"):
        run([x, w], EPS)


def test_over_is_into_the_input(interpret, monkeypatch):
    r = region("layer_norm", 8, "f32")
    _, w, b = inputs_for(r, (2, 5))
    run = Runner(r)
    for call in range(3):
        if call == 2:
            no_keys(monkeypatch)
        x = torch.randn(2, 5, 8)
        want = torch.nn.functional.layer_norm(x, (8,), w, b)
        run.over([x, w, b], EPS, 0)
        torch.testing.assert_close(x, want)


def test_a_rejected_kernel_is_not_found_again(interpret, monkeypatch):
    r = region("layer_norm", 8, "f32")
    inputs = inputs_for(r, (2, 5))
    run = warm(r, inputs, times=3)
    monkeypatch.setattr(launch._Interpreted, "__call__", None)
    run.reject(inputs[0].device, "it is wrong")
    assert_right(r, inputs, EPS, run(inputs, EPS))


def test_always_checks_warm_calls_too(interpret):
    r = region("layer_norm", 8, "f32")
    run = warm(r, inputs_for(r, (2, 5)), times=4, self_check="always")
    assert run.record.checks == 4


def test_gradients_are_recorded_from_the_call_on_that_asks_for_them(interpret):
    r = region("layer_norm", 8, "f32")
    call, (x, w, b) = python_call(r), inputs_for(r, (2, 5), strided=False)
    assert not any(call(x, w, b, *EPS).requires_grad for _ in range(3))
    w.requires_grad_(True)
    y = call(x, w, b, *EPS)
    y.sum().backward()
    assert y.requires_grad and w.grad is not None
    with torch.no_grad():
        assert not call(x, w, b, *EPS).requires_grad
    w.requires_grad_(False)
    assert not call(x, w, b, *EPS).requires_grad


def test_threads_with_different_layouts(interpret):
    r = region("rms_norm", 16, "f32")
    run, errors = Runner(r), []

    def work(rows):
        try:
            for seed in range(12):
                inputs = inputs_for(r, (2, rows), seed=seed, strided=False)
                assert_right(r, inputs, EPS, run(inputs, EPS))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, MOST + 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
