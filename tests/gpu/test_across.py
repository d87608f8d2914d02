"""Lanes that lie across memory, on an NVIDIA GPU: norms over the channels of contiguous images and videos."""

import pytest
import torch
from checks import assert_within_bound, check
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse.kernels.ops import runner

WORDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = pytest.mark.parametrize("dtype", WORDS, ids=list(WORDS.values()))

#: [N, P, C] normalised over C, with an affine of its own lines and SiLU; "{order}" says where results lie.
CHANNELS = """\
space [*, *, {D}]
in x: {t}[*, *, {D}]
in w: {t}[{D}]
in b: {t}[{D}]
scalar eps
v0: {t} = {op}(x, {missing}, eps)
v1: {t} = mul(w, v0)
v2: {t} = add(v1, b)
v3: {t} = silu(v2)
out v3: {t} order({order})"""

ORDERS = {"NCP": "0, 2, 1", "NPC": "0, 1, 2"}
EPS = 1e-5


def written_out(x, w, b, op):
    """What the region says, of [N, P, C]; fp64 stays fp64."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True) if op == "layer_norm" else wide
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return F.silu(y * w + b)


def run(x, w, b, op="layer_norm", order="NCP"):
    text = CHANNELS.format(D=x.shape[-1], t=WORDS[x.dtype], op=op, order=ORDERS[order],
                           missing="none, none" if op == "layer_norm" else "none")
    (ours,) = runner(text)([x, w, b], [EPS])
    assert not runner(text).reasons, "the reference ran instead of a kernel"
    return ours


def channels_behind(n, c, p, dtype, device, mean=0.0):
    """[N, P, C] that lies in memory as [N, C, P]."""
    return (torch.randn(n, c, p, device=device) + mean).to(dtype).transpose(1, 2)


def vectors(c, dtype, device):
    return [torch.randn(c, device=device).to(dtype) for _ in range(2)]


def check_numbers(x, w, b, op="layer_norm", order="NCP"):
    ours = run(x, w, b, op, order)
    eager = written_out(x, w, b, op)
    laid = torch.empty_like(ours).copy_(eager)  # where the region says that results lie
    assert_within_bound(ours, laid, written_out(x.double(), w.double(), b.double(), op))
    return ours


@DTYPES
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("c, p", [(2, 4096), (3, 700), (17, 33), (96, 1024), (96, 1028), (256, 1030),
                                  (384, 1031), (513, 64), (1024, 196), (2048, 49), (3000, 130)])
def test_numbers(c, p, op, order, dtype, device):
    """Vectors of 8 pixels, 4, 2 and 1; whole lanes in registers, and a lane in pieces."""
    check_numbers(channels_behind(2, c, p, dtype, device), *vectors(c, dtype, device), op, order)


@DTYPES
@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_means(mean, dtype, device):
    check_numbers(channels_behind(1, 96, 300, dtype, device, mean), *vectors(96, dtype, device))


VIEWS = {
    "misaligned": lambda x: x[:, 1:],
    "cut": lambda x: x[:, 8:-24],
    "every other channel": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "two pixels": lambda x: x[:, 7:9],
    "no pixel": lambda x: x[:, :0],
}


@DTYPES
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, dtype, device):
    x = VIEWS[name](channels_behind(3, 96, 320, dtype, device))
    ours = run(x, *(vectors(x.shape[-1], dtype, device)))
    assert ours.shape == x.shape
    if x.numel():
        check_numbers(x, *vectors(x.shape[-1], dtype, device))


@DTYPES
@pytest.mark.parametrize("c", [17, 96, 384, 3000])
def test_a_pixel_does_not_depend_on_its_batch(c, dtype, device):
    x, (w, b) = channels_behind(40, c, 260, dtype, device), vectors(c, dtype, device)
    whole = run(x, w, b)
    for count in (1, 2, 7):
        assert torch.equal(run(x[3:3 + count], w, b), whole[3:3 + count])


@pytest.mark.real_gpu
def test_beyond_two_to_the_31(device):
    """A lane whose last channel lies more than 2^31 elements after the first."""
    c, p = 96, 2**31 // 96 + 4096
    if torch.cuda.mem_get_info()[0] < 3 * c * p * 2:
        pytest.skip("needs 13 GB of GPU memory")
    x = torch.zeros(1, c, p, dtype=torch.bfloat16, device=device)
    x[..., -999:] = torch.randn(1, c, 999, device=device)
    w, b = vectors(c, torch.bfloat16, device)
    ours = run(x.transpose(1, 2), w, b)[:, -999:]
    tail = x[..., -999:].transpose(1, 2)
    eager, exact = written_out(tail, w, b, "layer_norm"), written_out(tail.double(), w.double(), b.double(),
                                                                      "layer_norm")
    assert_within_bound(ours.contiguous(), eager.contiguous(), exact)


class Decoder(nn.Module):
    """Norms of a VAE's decoder and of an image encoder's neck: each result lies as eager's does."""

    def __init__(self, channels):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.randn(channels))
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, residual):
        gamma, beta = self.gamma[:, None, None], self.beta[:, None, None]
        x = x + residual
        y = F.silu(x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * gamma)
        y = self.conv(y)
        centred = y - y.mean(1, keepdim=True)
        y = gamma * (centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)) + beta
        z = F.layer_norm(y.permute(0, 2, 3, 1), self.gamma.shape, self.gamma, self.beta).permute(0, 3, 1, 2)
        return x, y, z


@DTYPES
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_model(channels_last, dtype, device):
    shape = (2, 96, 24, 40)
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    if channels_last:
        residual = residual.to(memory_format=torch.channels_last)
    check(Decoder(96).to(device, dtype), x, residual, fused=3)
