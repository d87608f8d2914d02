"""A chain's text says all of it: it can be read back."""

import pytest
import torch
from test_chain_backward import CHAINS, EPS, tensors

from ascend_ln_fuse.kernels.chain import evaluate
from ascend_ln_fuse.kernels.chain_ops import chain_runner
from ascend_ln_fuse.kernels.chain_text import parse_chain
from ascend_ln_fuse.kernels.region import one_line


@pytest.mark.parametrize("name", CHAINS)
def test_it_is_read_back(name):
    chain, _ = CHAINS[name]
    assert parse_chain(chain.text) == parse_chain(one_line(chain.text)) == chain
    assert "\n" not in one_line(chain.text)
    assert chain_runner(parse_chain(chain.text)) is chain_runner(chain)


@pytest.mark.parametrize("change, message", [
    (("chain ", "chian "), "begins with 'chain '"), (("\nout y", "\nyield y"), "ends with 'out '"),
    (("z = linear(", "z = lineal("), "'z = lineal.*not a stage"),
    (("z = linear(h, w1, b1)", "z = linear(h)"), "'z = linear.h.': a product has one name"),
    (("z = linear(h, w1, b1)", "z = linear(h, w1, b1; eps)"), "a product has one name"),
    (("region(z)", "region(z[1:])"), "'z.1:.' is no value"),
    (("    v0: f32 = gelu(x)", "    v0: f32 = jelly(x)"), "jelly"),
    (("linear(h, w1", "linear(q, w1"), "'q', read by 'z'"),
    (("\n    space [*, *, 128]", ""), "expected 'space")])
def test_what_is_no_chain_is_refused(change, message):
    text = CHAINS["ffn, gelu"][0].text
    assert change[0] in text
    with pytest.raises(ValueError, match=message):
        parse_chain(text.replace(*change, 1))


@pytest.mark.parametrize("name, change, message", [
    ("patches", ("; 2, 4)", "; 2)"), "a grid is a height and a width"),
    ("patches", ("; 2, 4)", "; two, 4)"), "a grid is a height and a width"),
    ("patches", ("patch_conv(h, w1, b1;", "patch_conv(h;"), "a product has one name"),
    ("score", ("score(q[0:8 x 4 by 8], k[0:8", "score(k[0:8"), "a score has one name, a query and a key"),
    ("score", ("score(q[0:8 x 4 by 8],", "score(q[0:8 x 4 by 4],"), "heads that overlap"),
    ("score", ("score(q[0:8 x 4 by 8],", "score(q[0:8 x 0 by 8],"), "heads that overlap, or none"),
    ("score", ("score(q[0:8 x 4 by 8],", "score(q[0:8 x 4],"), "is no value"),
    ("score", ("region(s)", "region(s[0:8 x 4 by 8])"), "is no value and no columns"),
    ("score", ("score(q[", "score(p["), "'p', read by 's'")])
def test_other_products_that_are_none(name, change, message):
    text = CHAINS[name][0].text
    assert change[0] in text
    with pytest.raises(ValueError, match=message):
        parse_chain(text.replace(*change, 1))


@pytest.mark.parametrize("name", CHAINS)
def test_the_op(name):
    """`torch.ops.ascend_ln_fuse.chain`: the same values; its fake has the same shapes and strides."""
    chain, how = CHAINS[name]
    inputs = tensors(chain, **how)
    call = torch.ops.ascend_ln_fuse.chain
    wanted = list(evaluate(chain, inputs, EPS).values())
    assert all(map(torch.equal, call(chain.text, inputs, EPS), wanted))
    fakes = call(chain.text, [x.to("meta") for x in inputs], EPS)
    assert [(f.shape, f.stride(), f.dtype) for f in fakes] == [(w.shape, w.stride(), w.dtype) for w in wanted]


def test_the_op_has_no_gradient():
    chain, _ = CHAINS["ffn, gelu"]
    inputs = [x.requires_grad_() for x in tensors(chain)]
    out, = torch.ops.ascend_ln_fuse.chain(chain.text, inputs, EPS)
    with pytest.raises(RuntimeError, match="without gradients cannot be differentiated"):
        out.sum().backward()
