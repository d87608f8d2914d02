"""What the report of a fused norm says of what was not done: a copy that it reads, a chain that it does not
begin."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.across import MAX_ACROSS
from ascend_ln_fuse.loading import Example
from ascend_ln_fuse.remedies import remedy
from ascend_ln_fuse.trace import trace

#: features of the tests' norms
C = 16


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


FEW = "the normalised dim lies across memory, with too few rows side by side"
LONG = f"the normalised dim lies across memory, and is longer than {MAX_ACROSS}"


@pytest.mark.parametrize("features, rows, why", [(C, 3, FEW), (MAX_ACROSS + 1, 16, LONG), (C, 16, "")])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_copy_and_why(features, rows, why, dynamic):
    site = on_cpu(across, torch.randn(2, features, rows), features, dynamic=dynamic)
    assert site.note == (f"reads a contiguous copy of its input: {why}" if why else "")


def test_a_copy_on_ascend():
    site = on_npu(Of(across), torch.randn(2, C, 16))
    assert site.status == "fused"
    assert site.note == "reads a contiguous copy of its input: " \
        "Ascend's compiler wants the normalised dim innermost in memory"
    assert on_npu(Of(lambda m, x: m.norm(x).relu()), torch.randn(2, 16, C)).note == ""


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


TOKENS, IMAGE = torch.randn(2, 8, C), torch.randn(2, C, 8, 8)


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
    assert copied.startswith("reads a contiguous copy of its input: Ascend's compiler")
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
