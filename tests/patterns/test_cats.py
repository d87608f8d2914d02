"""Results that a cat joins are written to their place in it."""

import pytest
import torch
from checks import check
from torch import nn

from ascend_ln_fuse import kernel_info, last_reports
from ascend_ln_fuse.kernels import ops
from ascend_ln_fuse.kernels.settings import INTERPRET
from ascend_ln_fuse.patterns import cats

HEADS, LANE = 2, 16
NOTE = "written to its place in the result of torch.cat"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cats, "LEAST_BYTES", 1)


@pytest.fixture
def kernels(monkeypatch):
    """Regions run as kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv(INTERPRET, "1")
    ops.runner.cache_clear()
    yield
    ops.runner.cache_clear()


class Joint(nn.Module):
    """FLUX's and SD3's: q of the image and of the text, each through a norm, before one attention.

    heads_first: SD3's [batch, heads, tokens, lane], else FLUX's [batch, tokens, heads, lane]."""

    def __init__(self, heads_first=False, norm=nn.RMSNorm):
        super().__init__()
        self.heads_first = heads_first
        self.image, self.text = nn.Linear(32, 3 * HEADS * LANE), nn.Linear(32, 3 * HEADS * LANE)
        self.norms = nn.ModuleList(norm(LANE) for _ in range(4))

    def parts(self, projected):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in projected.chunk(3, -1))
        return [t.transpose(1, 2) for t in (q, k, v)] if self.heads_first else [q, k, v]

    def forward(self, x, y):
        (q, k, v), (tq, tk, tv) = self.parts(self.image(x)), self.parts(self.text(y))
        norm_q, norm_k, norm_tq, norm_tk = self.norms
        dim = 2 if self.heads_first else 1
        return (torch.cat([norm_q(q), norm_tq(tq)], dim), torch.cat([norm_tk(tk), norm_k(k)], dim=dim),
                torch.cat([v, tv], dim))


class Windows(nn.Module):
    """SeedVR's: q and k of a packed tensor in one launch, rotated, cut into windows; the text's, which every
    window has, is copied."""

    def __init__(self, windows=2):
        super().__init__()
        self.windows = windows
        self.qkv, self.text = nn.Linear(32, 3 * HEADS * LANE), nn.Linear(32, HEADS * LANE)
        self.norm_q, self.norm_k, self.norm_t = nn.LayerNorm(LANE), nn.LayerNorm(LANE), nn.LayerNorm(LANE)

    def rotated(self, x, cos, sin):
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    def forward(self, x, y, angles):
        q, k, _ = self.qkv(x[0]).unflatten(-1, (3, HEADS, LANE)).unbind(1)
        text = self.norm_t(self.text(y[0]).unflatten(-1, (HEADS, LANE)))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        q, k = (self.rotated(n, cos, sin) for n in (self.norm_q(q), self.norm_k(k)))
        text = text.expand(self.windows, -1, -1, -1)
        return [torch.cat([t.unflatten(0, (self.windows, -1)), text], 1) for t in (q, k)]


def data(dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    return torch.randn(batch, 6, 32, dtype=dtype), torch.randn(batch, 5, 32, dtype=dtype)


def joined() -> int:
    return sum(NOTE in site.note for site in last_reports()[-1].sites)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16],
                                 ids=["f32", "bf16", "f16"])


@DTYPES
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_text_and_image(heads_first, norm, dtype):
    check(Joint(heads_first, norm).to(dtype), *data(dtype), fused=4)
    assert joined() == 4


@pytest.mark.parametrize("heads_first", [False, True])
def test_text_and_image_as_kernels(heads_first, kernels):
    check(Joint(heads_first).bfloat16(), *data(torch.bfloat16), fused=4)
    assert joined() == 4
    assert not [site.fallback_words() for site in last_reports()[-1].sites if site.fallback_words()]


@DTYPES
def test_windows(dtype):
    check(Windows().to(dtype), *data(dtype, batch=1), torch.randn(6, LANE), fused=3)
    assert joined() == 2


def test_windows_as_kernels(kernels):
    check(Windows().bfloat16(), *data(torch.bfloat16, batch=1), torch.randn(6, LANE), fused=3)
    assert joined() == 2


def test_gradients_are_those_of_the_cat():
    """Compiled without gradients, called with them, and the other way round."""
    model = Joint()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    with torch.no_grad():
        compiled(*data())
    assert joined() == 4
    found = []
    for call in (model, compiled):
        loss = sum(out.square().sum() for out in call(*data()))
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert joined() == 0
    for ours, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_dynamic_sizes_stay():
    check(Joint(), *data(), fused=4, dynamic=True)
    assert joined() == 0


def test_small_cats_stay(monkeypatch):
    monkeypatch.setattr(cats, "LEAST_BYTES", 1 << 20)
    check(Joint(), *data(), fused=4)
    assert joined() == 0


class ReadTwice(Joint):
    def forward(self, x, y):
        q, tq = self.norms[0](self.parts(self.image(x))[0]), self.norms[1](self.parts(self.text(y))[0])
        return torch.cat([q, tq], 1), q


class AlongTheLane(Joint):
    def forward(self, x, y):
        return torch.cat([self.norms[0](self.parts(self.image(x))[0]), self.parts(self.image(x))[1]], -1)


class OfTwoDtypes(Joint):
    def forward(self, x, y):
        q, tq = self.parts(self.image(x))[0], self.parts(self.text(y))[0]
        return torch.cat([self.norms[0](q), tq.double()], 1)


class Twice(Joint):
    def forward(self, x, y):
        q = self.norms[0](self.parts(self.image(x))[0])
        return torch.cat([q, q], 1)


class Written(Joint):
    def forward(self, x, y):
        q = self.norms[0](self.parts(self.image(x))[0])
        both = torch.cat([q, self.parts(self.text(y))[0]], 1)
        both[:, 0] = 0
        return both


@pytest.mark.parametrize("model, sites, there", [(ReadTwice, 2, 1), (AlongTheLane, 1, 0), (OfTwoDtypes, 1, 0),
                                                 (Twice, 1, 0), (Written, 1, 0)])
def test_what_stays(model, sites, there):
    check(model(), *data(), fused=sites)
    assert joined() == there


class CatOfCats(Joint):
    def forward(self, x, y):
        q, k, v = self.parts(self.image(x))
        first = torch.cat([self.norms[0](q), v], 1)
        return torch.cat([first, self.norms[1](k)], 1)


def test_a_cat_of_a_cat():
    check(CatOfCats(), *data(), fused=2)


def test_kernel_info_names_the_kernels(kernels):
    with torch.no_grad():
        entries = kernel_info(Joint().bfloat16(), data(torch.bfloat16)).kernels
    # q and k of one projection are one launch
    assert sum(entry.launches for entry in entries if entry.name.startswith("aln_rms_norm")) == 2


class Square(nn.Module):
    """As many tokens as features, and a part that is transposed behind its norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(LANE)

    def forward(self, x, y):
        return torch.cat([self.norm(x).transpose(1, 2), y])


def test_a_part_whose_last_dim_is_another_of_the_same_length():
    report = check(Square(), torch.randn(2, LANE, LANE), torch.randn(3, LANE, LANE), fused=1)
    assert NOTE not in report.sites[0].note
