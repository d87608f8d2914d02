"""`inplace_layer_norm_`: the article's function, on a view of a larger tensor."""

import pytest
import torch
from checks import assert_within_bound
from torch.nn import functional as F

from ascend_ln_fuse import inplace_layer_norm_


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same weights", "fp32 weights"])
def test_writes_the_view_and_nothing_else(monkeypatch, dtype, wide, interpret):
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", interpret)
    qkv = torch.randn(37, 9, 128).to(dtype)
    before, version = qkv.clone(), qkv._version
    q = qkv.view(37, 3, 3, 128).unbind(1)[1]
    weight, bias = (torch.randn(128).to(torch.float32 if wide else dtype) for _ in range(2))
    eager = F.layer_norm(q, (128,), weight, bias, 1e-5).clone()
    exact = F.layer_norm(q.double(), (128,), weight.double(), bias.double(), 1e-5)
    result = inplace_layer_norm_(q, weight, bias, 1e-5)
    assert result is q and qkv._version > version
    assert_within_bound(q.contiguous(), eager, exact)
    rest = torch.ones(9, dtype=torch.bool)
    rest[3:6] = False
    assert torch.equal(qkv[:, rest], before[:, rest])


def test_no_weights_and_no_rows():
    x = torch.randn(4, 16)
    eager = F.layer_norm(x, (16,))
    torch.testing.assert_close(inplace_layer_norm_(x), eager)
    inplace_layer_norm_(torch.empty(0, 16))


def test_inside_a_compiled_function():
    weight, bias = torch.randn(16), torch.randn(16)

    def model(x):
        y = x.clone()
        inplace_layer_norm_(y[:, 1], weight, bias)
        return y * 2

    x = torch.randn(4, 3, 16)
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True,
                             options={"report": "off"})
    torch.testing.assert_close(compiled(x), model(x))


ONE, W = torch.ones(16), torch.ones(16)
WRONG = {
    "overlap": (lambda: (torch.randn(16).expand(4, 16), W, W), ValueError, "overlap"),
    "partial overlap": (lambda: (torch.randn(64).as_strided((4, 16), (8, 1)), W, W), ValueError,
                        "overlap"),
    "lane stride": (lambda: (torch.randn(16, 4).T, W, W), ValueError, "lane stride"),
    "weight shape": (lambda: (torch.randn(4, 16), torch.ones(8), W), ValueError, "weight"),
    "bias shape": (lambda: (torch.randn(4, 16), W, torch.ones(1, 16)), ValueError, "bias"),
    "int": (lambda: (torch.ones(4, 16, dtype=torch.int32), W, W), TypeError, "x must be bf16"),
    "weight dtype": (lambda: (torch.randn(4, 16), W.bfloat16(), W), TypeError, "weight"),
    "not a tensor": (lambda: ([1.0], W, W), TypeError, "x must be a tensor"),
    "scalar": (lambda: (torch.tensor(1.0), W, W), ValueError, "x must be"),
    "x needs grad": (lambda: (torch.randn(4, 16, requires_grad=True), W, W), RuntimeError, "x"),
    "weight needs grad": (lambda: (torch.randn(4, 16), W.clone().requires_grad_(), W),
                          RuntimeError, "weight requires grad"),
    "two dtypes": (lambda: (torch.randn(4, 16).bfloat16(), W, W.bfloat16()), TypeError, "one dtype"),
    "eps": (lambda: (torch.randn(4, 16), W, W, "a"), TypeError, "eps must be a number"),
    "weight inside x": (lambda: (lambda x: (x[1:], x[0], W))(torch.randn(4, 16)), ValueError,
                        "weight must not lie"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    make, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        inplace_layer_norm_(*make())
