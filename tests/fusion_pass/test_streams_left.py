"""A stream that lies across memory and is left so: the report says where it begins, and why."""

import re
from pathlib import Path

import pytest
import torch
from stream_cases import BATCH, CONV, NOTE, WIDTH, image, model, notes_of, randn, twice, unknown, video
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import across, last_reports
from ascend_ln_fuse.remedies import remedy

HERE = Path(__file__).name
BLOCKS = model().requires_grad_(False).blocks


def reason(f, *inputs, grad=False):
    """The reason why the one stream of `f` is left; "" where nothing is said."""
    notes = notes_of(f, *inputs, grad=grad)
    if not notes:
        return ""
    note, = notes
    found = re.fullmatch(r"the stream that begins at \w+\.py:\d+ lies across memory and is left so: "
                         r"(.*?)(?: \((?:[\w.]+, )?\w+\.py:\d+\))?(?:; what helps: (.*))?", note)
    assert found and (found[2] or "") == remedy(found[1]), note
    return found[1]


def in_place(x):
    x = x * 2
    x += 1
    return x


DEPENDS = "its layout may matter to what reads it: "


@pytest.mark.parametrize("between, why", [
    (image, DEPENDS + "conv2d"),
    (in_place, DEPENDS + "iadd"),
    (twice, DEPENDS + "twice.default"),
    (lambda x: x + x[:, torch.arange(64)], DEPENDS + "getitem"),
    (lambda x: x + F.scaled_dot_product_attention(x, x, x), DEPENDS + "scaled_dot_product_attention"),
    (lambda x: x + x[:1, 0].contiguous(), "laid out, it would take memory elsewhere: copy"),
    (lambda x: x + F.normalize(x, dim=1), "laid out, another norm would read it across memory"),
    (unknown, "its memory may be written later"),
    (lambda x: x.contiguous(), ""),
    (lambda x: torch.cat([x[:, :1], x], 1), ""),
])
def test_what_is_done_between(between, why, monkeypatch):
    monkeypatch.setattr(across, "MAX_ACROSS", 8)  # or the costs may decide first
    assert reason(model(between), video()) == why


@pytest.mark.parametrize("behind", [lambda x: x, lambda x: (F.layer_norm(x, (WIDTH,)), x[:, :1])])
def test_what_is_returned(behind):
    assert reason(model(behind=behind), video()) == "it is returned, and would be with other strides"


def test_the_place_of_the_cause():
    """In a large model there are many convolutions."""
    note, = notes_of(model(image), video())
    code = image.__code__
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno + 1}"
    assert re.search(rf"{DEPENDS}conv2d \([\w.]+CONV, {place}\); what helps", note), note


def blocks(hidden):
    for block in BLOCKS:
        hidden = block(hidden, hidden.new_ones(BATCH, WIDTH))
    return F.layer_norm(hidden, (WIDTH,))


@pytest.mark.parametrize("f, why", [
    (lambda x: blocks(x.transpose(1, 2)), "it begins as a view of an input or a parameter"),
    (lambda x: (blocks((base := x * 2).transpose(1, 2)), base),
     "what it begins as a view of is read later too, or returned"),
    # Each of the norms says so itself.
    (lambda x: torch.vmap(lambda one: blocks((one * 2).transpose(1, 2)))(x[None]), ""),
], ids=["input", "owned", "vmap"])
def test_whose_memory_it_is(f, why):
    assert reason(f, randn(BATCH, WIDTH, 64)) == why


def test_gradients():
    """The usual mistake in inference: `eval()` without `no_grad()`."""
    assert reason(model(), video(), grad=True) == "gradients are recorded of it"


def test_costs():
    """Of one norm nothing is said: its own line tells what it reads."""
    def few(sums):
        def f(x):
            hidden = (x * 2).transpose(1, 2)
            out = F.layer_norm(hidden, (WIDTH,))
            for _ in range(sums):
                hidden = hidden + out.type_as(hidden)
                out = F.layer_norm(hidden, (WIDTH,))
            return out

        return f

    assert [reason(few(sums), randn(BATCH, WIDTH, 64)) for sums in range(3)] == [
        "", *["to lay it out would move as many bytes as it saves, or more"] * 2]


class ConvNeXt(nn.Module):
    """A norm of a view in each block, and no stream."""

    def forward(self, x):
        for _ in range(3):
            x = x + F.layer_norm(CONV(x).permute(0, 2, 3, 1), (WIDTH,)).permute(0, 3, 1, 2)
        return x


def test_views_that_begin_no_stream():
    assert not notes_of(ConvNeXt(), randn(BATCH, WIDTH, 8, 8))


def test_streams_of_one_reason_are_one_line():
    def f(x, y):
        return blocks(x.transpose(1, 2)), blocks(y.transpose(1, 2))

    note, = notes_of(f, randn(BATCH, WIDTH, 64), randn(BATCH, WIDTH, 32))
    assert note.startswith(f"2 streams that lie across memory are left so (the first begins at {HERE}:"), note


def test_beside_one_that_is_laid_out():
    made = model()

    def f(x, y):
        return made(x), blocks(y.transpose(1, 2))

    laid, left = notes_of(f, video(), randn(BATCH, WIDTH, 64))
    assert laid == NOTE.format(5) and "view of an input" in left


@pytest.mark.parametrize("options, said", [({}, True), ({"streams": "keep"}, False),
                                           ({"inner": "inductor", "inner_choice": "fuse"}, False)], ids=str)
def test_in_the_report(options, said):
    call = torch.compile(model(behind=lambda x: x), backend="ascend_ln_fuse",
                         options={"report": "off", **options})
    with torch.no_grad():
        call(video())
    text = " ".join(str(last_reports()[-1]).split())
    assert ("is left so: it is returned, and would be with other strides; what helps: `.contiguous()` behind "
            "the view with which it begins" in text) is said
