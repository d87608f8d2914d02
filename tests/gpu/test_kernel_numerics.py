"""Every kernel shape on a GPU, against float64; launching, capture, devices."""

import threading

import pytest
import torch
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for

from ascend_ln_fuse.kernels.launch import Runner

DTYPES = ["bf16", "f16", "f32"]
LANES = [1, 3, 17, 64, 80, 96, 128, 513, 1024, 3072, 8192]


def check(name, lane, dtype, outer, ratio=1.0):
    r = region(name, lane, dtype)
    inputs = [_cuda(x) for x in inputs_for(r, outer, ratio)]
    run = Runner(r)
    for _ in range(2):  # compiles, then launches directly
        assert_right(r, inputs, scalars_for(r), run(inputs, scalars_for(r)))
    assert not run.reasons, run.reasons


def _cuda(x):
    """The same strides and offset on the GPU: the storage moves, not the view."""
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "normalize", "l2_norm"])
def test_norms(name, dtype, lane):
    for ratio in (1.0, 1000.0):
        check(name, lane, dtype, (3, 37), ratio)
    check(name, lane, dtype, (1, 1))


@pytest.mark.parametrize("lane", [1, 17, 128, 513, 1024, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"layer_norm", "rms_norm", "normalize", "l2_norm"}))
def test_regions(name, dtype, lane):
    check(name, lane, dtype, (3, 37))


@pytest.mark.parametrize("name", sorted(n for n, text in TEXTS.items() if "f32" not in text))
def test_float64(name):
    check(name, 80, "f64", (2, 9))


@pytest.mark.parametrize("lane", [64, 4096, 40000])
def test_many_rows(lane):
    check("layer_norm", lane, "bf16", (5, 2**21 // lane))


def test_rows_past_32_bits():
    """Row stride times rows above 2^31 elements, and a base beyond them."""
    r = region("layer_norm", 64, "bf16")
    rows = 2**31 // 1024 + 512
    full = torch.empty(rows * 1024, dtype=torch.bfloat16, device="cuda")
    x = full.as_strided((1, rows, 64), (rows * 1024, 1024, 1))
    x.copy_(torch.randn(1, rows, 64, device="cuda"))
    inputs = [x, *(torch.randn(64, device="cuda").bfloat16() for _ in range(2))]
    assert_right(r, inputs, [1e-5], Runner(r)(inputs, [1e-5]))


def test_misaligned_base():
    r = region("layer_norm", 128, "bf16")
    buffer = torch.randn(40 * 128 + 1, device="cuda").bfloat16()
    w, b = torch.randn(2, 128, device="cuda").bfloat16().unbind(0)
    run = Runner(r)
    for offset in (0, 1, 0):
        x = buffer[offset:offset + 40 * 128].view(4, 10, 128)
        assert_right(r, [x, w, b], [1e-5], run([x, w, b], [1e-5]))


def test_a_graph_can_be_captured():
    r = region("add_norm", 256, "bf16")
    inputs = [_cuda(x) for x in inputs_for(r, (4, 33))]
    run = Runner(r)
    run(inputs, [1e-5])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(inputs, [1e-5])
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    assert_right(r, inputs, [1e-5], outputs)


def test_runs_on_the_current_stream():
    r = region("layer_norm", 1024, "f32")
    inputs = [_cuda(x) for x in inputs_for(r, (64, 512))]
    run = Runner(r)
    run(inputs, [1e-5])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs[0].mul_(2.0)
        outputs = run(inputs, [1e-5])
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(r, inputs, [1e-5], outputs)


def test_threads():
    r = region("rms_norm", 96, "f32")
    run, errors = Runner(r), []

    def work(seed):
        try:
            for rows in (5, 50, 500):
                inputs = [_cuda(x) for x in inputs_for(r, (2, rows + seed), seed=seed)]
                assert_right(r, inputs, [1e-5], run(inputs, [1e-5]))
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def test_in_place():
    r = region("layer_norm", 128, "bf16")
    packed = torch.randn(300, 9, 128, device="cuda").bfloat16()
    untouched = packed.clone()
    x = packed.view(300, 3, 3, 128).unbind(1)[1]
    w, b = torch.randn(2, 128, device="cuda").bfloat16().unbind(0)
    want = torch.nn.functional.layer_norm(x, (128,), w, b)
    Runner(r).into([x, w, b], [1e-5], [x])
    torch.testing.assert_close(x, want)
    rest = [0, 1, 2, 6, 7, 8]
    assert torch.equal(packed[:, rest], untouched[:, rest])


@pytest.mark.parametrize("lane", [17, 128, 513, 1024, 4096, 20000])
def test_a_row_does_not_depend_on_its_batch(lane):
    r = region("layer_norm", lane, "bf16")
    inputs = [_cuda(x) for x in inputs_for(r, (3, 2**22 // lane // 3), strided=False)]
    run = Runner(r)
    whole, = run(inputs, [1e-5])
    for rows in (1, 2, 7, 60):
        for first in (0, 8):
            part, = run([inputs[0][1:2, first:first + rows], *inputs[1:]], [1e-5])
            assert torch.equal(part[0], whole[1, first:first + rows])
