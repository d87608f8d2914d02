"""What the report of a fused norm says of what was not done: a copy that it reads, a chain that it does not
begin."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.across import MAX_ACROSS, NOT_INNERMOST
from ascend_ln_fuse.loading import Example
from ascend_ln_fuse.remedies import remedy
from ascend_ln_fuse.trace import trace

#: features of the tests' norms
C = 16
TOKENS, IMAGE = torch.randn(2, 8, C), torch.randn(2, C, 8, 8)


class Of(nn.Module):
    """`form(module, x)`, with layers to make it of."""

    def __init__(self, form, features=C):
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(features)
        self.fc = nn.Linear(C, C)
        self.pixel, self.patch = nn.Conv2d(C, C, 1), nn.Conv2d(C, 2 * C, 2, stride=2)
        self.around = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x):
        return self.form(self, x)


def on_cpu(form, x, features=C, **options):
    """The report of the one norm of `form`, which is fused."""
    site, = check(Of(form, features), x, fused=1, **options).sites
    return site


def on_npu(model, x):
    """The report of the one norm of `model`, which is not run, for an NPU."""
    report, = trace(Example(model.eval(), (x,), {}))
    assert report.error is None
    site, = report.sites
    return site


# Copies


def across(m, x):
    return m.norm(x.transpose(1, 2)).relu()


FEW = f"{NOT_INNERMOST} (too few rows lie side by side)"
LONG = f"{NOT_INNERMOST} (it is longer than {MAX_ACROSS})"
ASCEND = f"{NOT_INNERMOST} (Ascend's compiler wants it there)"


@pytest.mark.parametrize("features, rows, why", [(C, 3, FEW), (MAX_ACROSS + 1, 16, LONG), (C, 16, "")])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_copy_and_why(features, rows, why, dynamic):
    site = on_cpu(across, torch.randn(2, features, rows), features, dynamic=dynamic)
    assert site.note == (f"reads a contiguous copy of its input: {why}" if why else "")


def test_a_copy_on_ascend():
    site = on_npu(Of(across), torch.randn(2, C, 16))
    assert site.status == "fused"
    assert site.note == f"reads a contiguous copy of its input: {ASCEND}"
    assert on_npu(Of(lambda m, x: m.norm(x).relu()), torch.randn(2, 16, C)).note == ""


# Handwritten, of which PyTorch makes no copy


def mean_square(x, dim):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)


def layer_norm_2d(x, dim):
    mean = x.mean(dim, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(dim, keepdim=True) + 1e-6)


def normalized(x, dim):
    return F.normalize(x, dim=dim) * 4.0


@pytest.mark.parametrize("norm", [mean_square, layer_norm_2d, normalized])
@pytest.mark.parametrize("features, pixels, why", [(C, (1, 3), FEW), (MAX_ACROSS + 1, (4, 4), LONG)])
def test_why_a_norm_over_channels_is_declined(norm, features, pixels, why):
    """For the reason for which `F.layer_norm` in its place reads a copy."""
    site, = check(Of(lambda m, x: norm(x, 1)), torch.randn(2, features, *pixels), declined=1).sites
    assert site.reason == why


class Encoder(nn.Module):
    """A norm over channels behind a convolution; as it is, or as the remedy has it."""

    def __init__(self, norm, copied):
        super().__init__()
        self.norm, self.copied = norm, copied
        self.before, self.behind = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x):
        x = self.before(x)
        y = self.norm(x.movedim(1, -1).contiguous(), -1).movedim(-1, 1) if self.copied else self.norm(x, 1)
        return self.behind(F.silu(y))


@pytest.mark.parametrize("norm", [mean_square, layer_norm_2d, normalized])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_what_helps_a_norm_over_channels_on_ascend(norm, memory):
    """What the remedy says fuses, whatever memory the model is in, and channels_last memory does not."""
    image = IMAGE.to(memory_format=memory)
    site = on_npu(Encoder(norm, copied=False).to(memory_format=memory), image)
    assert (site.status, site.reason) == ("declined", ASCEND)
    assert "`x.movedim(dim, -1).contiguous()`" in site.remedy
    assert "channels_last" not in site.remedy and "transpose" not in site.remedy
    assert on_npu(Encoder(norm, copied=True).to(memory_format=memory), image).status == "fused"


@pytest.mark.parametrize("norm", [mean_square, layer_norm_2d, normalized])
@pytest.mark.parametrize("features, pixels", [(C, (1, 3)), (MAX_ACROSS + 1, (4, 4))])
def test_what_helps_a_norm_over_channels_elsewhere(norm, features, pixels):
    helped = Of(lambda m, x: norm(x.movedim(1, -1).contiguous(), -1))
    check(helped, torch.randn(2, features, *pixels), fused=1)


# Chains


def permuted(x):
    return x.permute(0, 2, 3, 1)


def back(x):
    return x.permute(0, 3, 1, 2)


def over_channels(x):
    """RMSNorm of NCHW."""
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


def downsampled(m, x):
    """ConvNeXt: a convolution, LayerNorm2d, and one over patches."""
    return m.patch(back(m.norm(permuted(m.around(x)))))


def pixels(m, x):
    return m.pixel(over_channels(x))


def lanes(m, x):
    x = x.transpose(1, 2)
    return m.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def regrouped(m, x):
    return m.fc(m.norm(x.transpose(1, 2).reshape(2, -1, C)))


def two_dims(m, x):
    return m.fc(F.layer_norm(x, (8, C)))


def cast_to_bf16(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.fc(m.norm(x))


def written(m, x):
    y = m.fc(m.norm(x))
    y[:, 0] = 0
    return y


def both_products(m, x):
    """One that a chain may hold, and one that none may."""
    y = m.norm(x)
    z = m.fc(y)
    z[:, 0] = 0
    return z, m.fc(y)


def plain(m, x):
    return m.fc(m.norm(x))


def no_product(m, x):
    return m.around(over_channels(x)), m.norm(permuted(x)).relu()


@pytest.mark.parametrize("form, x, why", [
    (pixels, IMAGE, "the features of the norm's result are not the innermost in memory"),
    (lanes, torch.randn(2, C, 32), "the features of the norm's result are not the innermost in memory"),
    (regrouped, torch.randn(2, 4, 8, C), "the norm's result is reshaped behind its kernel"),
    (two_dims, TOKENS, "the norm's result is reshaped behind its kernel"),
    (cast_to_bf16, TOKENS, "the product and what it reads differ in dtype or device (autocast casts)"),
    (written, TOKENS, "the product is part of another site, written in place, or runs in another mode"),
], ids=lambda x: getattr(x, "__name__", ""))
def test_why_there_is_no_chain(form, x, why):
    site = on_cpu(form, x, exact=form is not cast_to_bf16)
    assert (site.chain, site.note) == ("", f"no chain behind it: {why}")


def test_a_convolution_on_ascend_returns_no_channels_last():
    """Whatever memory its input is in: so torch_npu allocates its result, and so the fake one does."""
    image = IMAGE.to(memory_format=torch.channels_last)
    model = Of(downsampled).to(memory_format=torch.channels_last)
    here, = check(model, image, fused=1).sites
    assert (here.chain, here.note) == ("patch conv", "")
    site = on_npu(model, image)
    copied, alone = site.note.split("; ")
    assert copied == f"reads a contiguous copy of its input: {ASCEND}"
    assert alone == "no chain behind it: the result of the convolution is not in channels_last memory"


def test_norms_that_share_a_launch():
    """GPT-NeoX: both of one value. Not where attention reads them, as q and k."""
    def both(m, x):
        return m.fc(m.norm(x)) + m.fc(F.layer_norm(x, (C,)))

    sites = check(Of(both), TOKENS, fused=2).sites
    assert [site.note.split("; ")[1:] for site in sites] == \
        2 * [["no chain behind it: norms that share a launch begin none"]]

    def attended(m, x):
        return F.scaled_dot_product_attention(m.norm(x), F.layer_norm(x, (C,)), x)

    sites = check(Of(attended), TOKENS, fused=2).sites
    assert [site.note for site in sites] == [
        f"shares one kernel launch with {name}" for name in ("the other norm on this source line", "norm")]


def test_norms_of_one_line_that_share_a_launch():
    def qkv(m, x):
        q, k, v = x.chunk(3, -1)
        return F.layer_norm(q, (4,)), F.layer_norm(k, (4,)), F.layer_norm(v, (4,))

    def twice(m, x):
        return F.scaled_dot_product_attention(m.norm(x[:, :4]), m.norm(x[:, 4:]), x[:, 4:])

    for form, count, name in ((qkv, 3, "the other norm on this source line x2"),
                              (twice, 2, "the other norm on this source line")):
        x = TOKENS[..., :12] if form is qkv else TOKENS
        assert {site.note for site in check(Of(form), x, fused=count).sites} == \
            {f"shares one kernel launch with {name}"}


def test_gradients_that_another_inner_compiler_records():
    options = {"grad": True, "backend_options": {"inner": "aot_eager"}}
    for form in (plain, both_products):
        assert on_cpu(form, TOKENS, **options).note == \
            'no chain behind it: gradients are recorded, and inner is not "eager"'


def test_where_all_is_well_nothing_is_said():
    site = on_cpu(plain, TOKENS)
    assert (site.chain, site.note) == ("linear", "")
    for site in check(Of(no_product), IMAGE, fused=2).sites:
        assert (site.chain, site.note) == ("", "")


def test_a_size_is_marked_static_as_the_remedy_says():
    reason = "the normalised size is symbolic"
    assert "mark_static(x, x.ndim - 1)" in remedy(reason)

    def norm(x):
        return F.rms_norm(x, x.shape[-1:])

    for marked in (False, True):
        torch._dynamo.reset()
        x = torch.randn(2, 16, 64)
        if marked:
            torch._dynamo.mark_static(x, x.ndim - 1)
        torch.compile(norm, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})(x)
        site = last_reports()[-1].sites[0]
        assert site.status == "fused" if marked else site.reason.startswith(reason)
