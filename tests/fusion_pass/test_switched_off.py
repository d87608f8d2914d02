"""How fusing is switched off, as the README says: for a while, or for one module."""

import pytest
import torch
from torch import nn

from ascend_ln_fuse import auto_fusion, last_reports

OFF = {"report": "off"}


class Model(nn.Module):
    """Returns whether it runs compiled, too."""

    def __init__(self):
        super().__init__()
        self.first, self.linear, self.last = nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.last(self.linear(self.first(x)).relu()), torch.compiler.is_compiling()


ENTRIES = {
    "torch.compile": lambda model: torch.compile(model, backend="ascend_ln_fuse", options=OFF),
    "auto_fusion": lambda model: auto_fusion(model, **OFF),
    "auto_fusion, PyTorch's own forward": lambda model: auto_fusion(nn.Sequential(model), **OFF)}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_force_eager(entry):
    """Before the first call and after it: neither compiles, nor runs what is compiled."""
    torch._dynamo.reset()
    model, x, before = Model(), torch.randn(3, 16), len(last_reports())
    wanted, _ = model(x)
    made = entry(model)
    for reports in (0, 1):
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            result, compiled = made(x)
        assert not compiled and torch.equal(result, wanted) and len(last_reports()) - before == reports
        with torch.no_grad():
            assert made(x)[1] and len(last_reports()) - before == 1


def test_one_module_is_left_out():
    torch._dynamo.reset()
    model, before = Model(), len(last_reports())
    keys = list(model.state_dict())
    model.first.forward = torch.compiler.disable(model.first.forward)
    auto_fusion(model, **OFF)
    with torch.no_grad():
        model(torch.randn(3, 16))
    sites = [site for report in last_reports()[before:] for site in report.sites]
    assert [site.pattern for site in sites] == ["relu -> layer_norm"] and list(model.state_dict()) == keys
    with pytest.raises(Exception, match="disable"), torch.no_grad():
        torch._dynamo.reset()
        auto_fusion(model, fullgraph=True, **OFF)(torch.randn(3, 16))
