"""Every kernel shape on an NVIDIA GPU, by the design's bound: error against float64 at most twice
eager's own plus one ulp of the output dtype. `make test-gpu` runs it."""

import half_precision_cases as cases
import pytest
import torch
from checks import assert_within_bound
from torch.nn import functional as F

from ascend_ln_fuse.kernels.half_precision import FORMS
from ascend_ln_fuse.kernels.ops import python_call, runner
from ascend_ln_fuse.kernels.region import parse

WORDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = pytest.mark.parametrize("dtype", WORDS, ids=list(WORDS.values()))
LANES = [1, 3, 17, 64, 80, 96, 128, 513, 1024, 3072, 8192, 12288]
EPS = 1e-5

LAYER_NORM = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in w: {t}[{D}]
in b: {t}[{D}]
scalar eps
v0: {t} = layer_norm(x, w, b, eps)
out v0: {t} order(0, 1, 2)"""

PLAIN = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
scalar eps
v0: {t} = layer_norm(x, none, none, eps)
out v0: {t} order(0, 1, 2)"""

RMS_NORM = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in w: {t}[{D}]
scalar eps
v0: {t} = rms_norm(x, w, eps)
out v0: {t} order(0, 1, 2)"""

# What F.normalize is, and x * rsqrt(sum(x * x) + eps).
L2_NORM = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
scalar eps
v0: {t} = {op}(x, none, eps)
out v0: {t} order(0, 1, 2)"""

# A residual before the norm; the sum is written too, for its other readers.
ADD_NORM = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in r: {t}[*, *, {D}]
in w: {t}[{D}]
in b: {t}[{D}]
scalar eps
v0: {t} = add(x, r)
v1: {t} = layer_norm(v0, w, b, eps)
out v0: {t} order(0, 1, 2)
out v1: {t} order(0, 1, 2)"""

# The chain that users write by hand because Ascend's LayerNorm wants fp32 weights with fp32 input.
CAST_CHAIN = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in w: f32[{D}]
in b: f32[{D}]
scalar eps
v0: f32 = cast(x)
v1: f32 = layer_norm(v0, w, b, eps)
v2: {t} = cast(v1)
out v2: {t} order(0, 1, 2)"""

# adaLN: one scale and shift a sample.
MODULATE = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in s: {t}[*, 1, {D}]
in h: {t}[*, 1, {D}]
scalar eps
v0: {t} = layer_norm(x, none, none, eps)
v1: {t} = add(s, 1.0)
v2: {t} = mul(v0, v1)
v3: {t} = add(v2, h)
out v3: {t} order(0, 1, 2)"""


def run(text: str, inputs, scalars=(EPS,)):
    """The region's outputs, from its kernel and not from the reference."""
    text = text if "{D}" not in text else region(text, inputs[0])
    outputs = runner(text)(inputs, scalars)
    assert not runner(text).reasons, "the reference ran instead of a kernel"
    return outputs


def region(text: str, x: torch.Tensor) -> str:
    return text.format(D=x.shape[-1], t=WORDS[x.dtype])


def randn(*shape, dtype, device, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device) + mean).to(dtype)


def weights(lane: int, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(lane, dtype=dtype, device=device, mean=1.0), randn(lane, dtype=dtype, device=device)


def check_layer_norm(x: torch.Tensor, w=None, b=None) -> torch.Tensor:
    lane = x.shape[-1]
    if w is None:
        (ours,) = run(PLAIN, [x])
    else:
        (ours,) = run(LAYER_NORM, [x, w, b])
    eager = F.layer_norm(x, (lane,), w, b, EPS)
    wide = (None, None) if w is None else (w.double(), b.double())
    assert_within_bound(ours, eager, F.layer_norm(x.double(), (lane,), *wide, EPS))
    return ours


def rows_of(lane: int) -> int:
    """Enough rows for several tiles and a ragged last one."""
    return 1003 if lane <= 128 else 157 if lane <= 3072 else 37


def packed(lane: int, dtype, device, mean=0.0, heads=3) -> torch.Tensor:
    """q inside a packed qkv: [rows, heads, lane] with rows 3 * heads * lane apart."""
    return randn(rows_of(lane), 3, heads, lane, dtype=dtype, device=device, mean=mean)[:, 1]


# -- numbers


@DTYPES
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0])
def test_layer_norm_of_a_strided_view(lane, dtype, mean, device):
    check_layer_norm(packed(lane, dtype, device, mean), *weights(lane, dtype, device))


@DTYPES
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_rms_norm(lane, dtype, mean, device):
    x, (w, _) = packed(lane, dtype, device, mean), weights(lane, dtype, device)
    (ours,) = run(RMS_NORM, [x, w])
    exact = F.rms_norm(x.double(), (lane,), w.double(), EPS)
    assert_within_bound(ours, F.rms_norm(x, (lane,), w, EPS), exact)


@DTYPES
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_normalize(lane, dtype, eps, device):
    """Rows of zeros (NaN in fp16, where 1e-12 is 0), below eps and not finite are as eager has them here."""
    x = packed(lane, dtype, device)
    x[0], x[1], x[2, :, -1], x[3, :, 0] = 0, x[1] * 1e-2, float("nan"), float("inf")
    (ours,) = run(L2_NORM.replace("{op}", "normalize"), [x], (eps,))
    assert_within_bound(ours, F.normalize(x, dim=-1, eps=eps), F.normalize(x.double(), dim=-1, eps=eps))


@DTYPES
@pytest.mark.parametrize("lane", LANES)
def test_l2_norm(lane, dtype, device):
    x = packed(lane, dtype, device)
    x[0], x[1], x[2, :, -1], x[3, :, 0] = 0, x[1] * 1e-3, float("nan"), float("inf")
    (ours,) = run(L2_NORM.replace("{op}", "l2_norm"), [x], (1e-6,))

    def eager(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    assert_within_bound(ours, eager(x.float()).to(dtype), eager(x.double()))


@DTYPES
@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_lengths_whose_squares_are_out_of_range(dtype, scale, device):
    """As eager has them here: squares that are 0, and that are infinite."""
    x = torch.randn(64, 2, 96, device=device).mul(scale).to(dtype)
    (ours,) = run(L2_NORM.replace("{op}", "normalize"), [x], (1e-12,))
    eager = F.normalize(x, dim=-1)
    torch.testing.assert_close(ours, eager, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("lane", LANES)
def test_add_before_and_two_outputs(lane, dtype, device):
    x, r = packed(lane, dtype, device), randn(rows_of(lane), 3, lane, dtype=dtype, device=device)
    w, b = weights(lane, dtype, device)
    total, ours = run(ADD_NORM, [x, r, w, b])
    assert torch.equal(total, x + r)
    exact = F.layer_norm(x.double() + r.double(), (lane,), w.double(), b.double(), EPS)
    assert_within_bound(ours, F.layer_norm(x + r, (lane,), w, b, EPS), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("lane", [17, 80, 128, 1024, 12288])
def test_cast_chain(lane, dtype, device):
    x, (w, b) = packed(lane, dtype, device), weights(lane, torch.float32, device)
    (ours,) = run(CAST_CHAIN, [x, w, b])
    eager = F.layer_norm(x.float(), (lane,), w, b, EPS).to(dtype)
    exact = F.layer_norm(x.double(), (lane,), w.double(), b.double(), EPS)
    assert_within_bound(ours, eager, exact)


@DTYPES
@pytest.mark.parametrize("lane", [64, 513, 3072, 12288])
def test_modulate(lane, dtype, device):
    x = randn(3, rows_of(lane), lane, dtype=dtype, device=device)
    s, h = (randn(3, 1, lane, dtype=dtype, device=device) for _ in range(2))
    (ours,) = run(MODULATE, [x, s, h])

    def model(x, s, h):
        return F.layer_norm(x, (lane,), None, None, EPS) * (1 + s) + h

    assert_within_bound(ours, model(x, s, h), model(x.double(), s.double(), h.double()))


# -- where the rows lie

VIEWS = {
    "contiguous": lambda x: x.contiguous(),
    "permuted": lambda x: x.transpose(0, 1),
    "expanded rows": lambda x: x[:1].expand(29, *x.shape[1:]),
    "expanded heads": lambda x: x[:, :1].expand(-1, 5, -1),
    "every other row": lambda x: x[1::2],
    "misaligned": lambda x: x.contiguous().view(-1)[1:-x.shape[-1] + 1].view(-1, 1, x.shape[-1]),
    "odd pitch": lambda x: F.pad(x, (3, 4))[..., 3:-4],
    "one row": lambda x: x[7:8, :1],
    "seven rows": lambda x: x[3:10, :1],
    "zero rows": lambda x: x[:0],
    "zero heads": lambda x: x[:, :0],
}


@DTYPES
@pytest.mark.parametrize("lane", [80, 128, 3072])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, lane, dtype, device):
    x = VIEWS[name](packed(lane, dtype, device))
    assert check_layer_norm(x, *weights(lane, dtype, device)).shape == x.shape


def test_misaligned_weights(device):
    x = packed(128, torch.bfloat16, device)
    w, b = (randn(131, dtype=torch.bfloat16, device=device)[n:n + 128] for n in (1, 3))
    check_layer_norm(x, w, b)


def test_an_aligned_and_then_a_misaligned_call(device):
    """The kernel compiled for the first must not be launched for the second."""
    flat = randn(128 * 40 + 8, dtype=torch.bfloat16, device=device)
    for offset in (0, 8, 1, 3, 2, 0):
        check_layer_norm(flat[offset:offset + 128 * 40].view(40, 1, 128))


@pytest.mark.real_gpu
def test_rows_beyond_two_to_the_31(device):
    """Offsets of more than 31 bits, in elements and in rows times stride."""
    pitch, rows = 1152, 2**31 // 1152 + 5000
    if torch.cuda.mem_get_info()[0] < 3 * pitch * rows * 2:
        pytest.skip("needs 15 GB of GPU memory")
    big = torch.zeros(rows, 9, 128, dtype=torch.bfloat16, device=device)
    big[-4000:] = torch.randn(4000, 9, 128, device=device)
    (ours,) = run(PLAIN, [big[:, 3:6]])
    tail = big[-4000:, 3:6]
    exact = F.layer_norm(tail.double(), (128,), eps=EPS)
    assert_within_bound(ours[-4000:], F.layer_norm(tail, (128,), eps=EPS), exact)


# -- what a row may not depend on


@DTYPES
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("text", [LAYER_NORM, RMS_NORM], ids=["layer_norm", "rms_norm"])
def test_a_row_does_not_depend_on_its_batch(text, lane, dtype, device):
    """Nor on how many rows there are: block shapes are chosen by that."""
    rows = 2**21 // lane if device.type == "cuda" else rows_of(lane)
    x = randn(rows, 3, 3, lane, dtype=dtype, device=device)[:, 1]
    w, b = weights(lane, dtype, device)
    parameters = [w, b] if text is LAYER_NORM else [w]
    (whole,) = run(text, [x, *parameters])
    for count in (1, 2, 7, 33, 300):
        (part,) = run(text, [x[5:5 + count], *parameters])
        assert torch.equal(part, whole[5:5 + count]), f"{count} rows alone"
    (again,) = run(text, [x.contiguous(), *parameters])
    assert torch.equal(again, whole), "contiguous"


@pytest.mark.parametrize("lane", [4096, 6144, 8192])
@pytest.mark.parametrize("text", [LAYER_NORM, RMS_NORM, ADD_NORM], ids=["plain", "rms", "add"])
def test_a_row_of_a_call_that_is_read_again(text, lane, device):
    """Large calls read long rows twice (`tiling.CUDA_AGAIN_BYTES`), small ones keep them: the same bits."""
    rows, dtype = 2**28 // (2 * lane), torch.bfloat16
    operands = [randn(rows, 1, lane, dtype=dtype, device=device) for _ in range(1 + (text is ADD_NORM))]
    w, b = weights(lane, dtype, device)
    parameters = [w] if text is RMS_NORM else [w, b]
    whole = run(text, [*operands, *parameters])
    for count in (1, 33, 300):
        part = run(text, [x[5:5 + count] for x in operands] + parameters)
        for few, all_rows in zip(part, whole, strict=True):
            assert torch.equal(few, all_rows[5:5 + count]), f"{count} rows alone"


@DTYPES
@pytest.mark.parametrize("lane", [17, 128, 513, 12288])
def test_inf_and_nan_stay_in_their_row(lane, dtype, device):
    x, (w, b) = packed(lane, dtype, device), weights(lane, dtype, device)
    (clean,) = run(LAYER_NORM, [x, w, b])
    x[3, 1, 0], x[5, 2, lane - 1], x[6, 0, 1] = float("nan"), float("inf"), float("-inf")
    (ours,) = run(LAYER_NORM, [x, w, b])
    eager = F.layer_norm(x, (lane,), w, b, EPS)
    assert torch.equal(ours.isnan(), eager.isnan())
    hit = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
    hit[3, 1] = hit[5, 2] = hit[6, 0] = True
    assert torch.equal(ours[~hit], clean[~hit])


def test_eps_is_an_argument(device):
    x, (w, b) = packed(64, torch.float32, device) * 1e-3, weights(64, torch.float32, device)
    for eps in (1e-12, 1e-5, 0.1):
        (ours,) = run(LAYER_NORM, [x, w, b], [eps])
        exact = F.layer_norm(x.double(), (64,), w.double(), b.double(), eps)
        assert_within_bound(ours, F.layer_norm(x, (64,), w, b, eps), exact)


# -- graphs, streams, devices


@pytest.mark.real_gpu
@pytest.mark.parametrize("lane", [128, 3072, 12288])
def test_cuda_graph(lane, device):
    x, (w, b) = packed(lane, torch.bfloat16, device), weights(lane, torch.bfloat16, device)
    run(LAYER_NORM, [x, w, b])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (ours,) = run(LAYER_NORM, [x, w, b])
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        ours.fill_(float("nan"))
        graph.replay()
        exact = F.layer_norm(x.double(), (lane,), w.double(), b.double(), EPS)
        assert_within_bound(ours, F.layer_norm(x, (lane,), w, b, EPS), exact)


@pytest.mark.real_gpu
def test_runs_on_the_current_stream(device):
    """The input is still being written, late, by the same side stream when the kernel is launched."""
    x, (w, b) = packed(128, torch.bfloat16, device), weights(128, torch.bfloat16, device)
    run(LAYER_NORM, [x, w, b])
    fresh = torch.randn_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(fresh)
        (ours,) = run(LAYER_NORM, [x, w, b])
    side.synchronize()
    exact = F.layer_norm(fresh.double(), (128,), w.double(), b.double(), EPS)
    assert_within_bound(ours, F.layer_norm(fresh, (128,), w, b, EPS).view_as(ours), exact)


@pytest.mark.real_gpu
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1, 0):
        where = torch.device("cuda", index)
        x, (w, b) = packed(128, torch.bfloat16, where), weights(128, torch.bfloat16, where)
        for current in (0, 1):
            with torch.cuda.device(current):
                assert check_layer_norm(x, w, b).device == where
                assert torch.cuda.current_device() == current


# -- gradients


@DTYPES
@pytest.mark.parametrize("lane", [17, 128, 3072])
def test_gradients(lane, dtype, device):
    x, (w, b) = packed(lane, dtype, device), weights(lane, dtype, device)
    gradient = torch.randn(x.shape, device=device).to(dtype)
    fused = python_call(parse(region(LAYER_NORM, x)))

    def gradients(function, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, gradient.to(tensors[0].dtype))

    def eager(x, w, b):
        return F.layer_norm(x, (lane,), w, b, EPS)

    ours = gradients(lambda *leaves: fused(*leaves, EPS), x, w, b)
    low, exact = gradients(eager, x, w, b), gradients(eager, x.double(), w.double(), b.double())
    for a, e, f in zip(ours, low, exact):
        assert_within_bound(a.contiguous(), e.contiguous(), f)


@pytest.mark.real_gpu  # PyTorch's gelu of inf is NaN on some CPUs
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("op", sorted(FORMS))
def test_every_value_of_an_activation(op, dtype, device):
    x = cases.every_value(dtype, device)
    (ours,) = run(str(cases.region(op, dtype)), [x], ())
    cases.assert_every_value_right(op, x, ours)
