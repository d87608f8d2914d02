"""The pass inside other compilers: Inductor's custom pass, and the function that npugraph_ex takes."""

import copy
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from small_models import Projected
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor

from ascend_ln_fuse import inductor_pass, last_reports, npugraph_ex_pass

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
REGION = torch.ops.ascend_ln_fuse.region.default


@pytest.fixture
def quick():
    with inductor.patch(cpp_cache_precompile_headers=False, fx_graph_cache=False):
        yield


def test_inductors_custom_pass(quick):
    model = Projected()
    compiled = torch.compile(model, dynamic=True,
                             options={"pre_grad_custom_pass": inductor_pass(report="off")})
    with torch.no_grad():
        for rows in (2, 3):
            x = torch.randn(rows, 3, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert {(r.found, r.fused) for r in last_reports()} == {(1, 1)}


def test_inductors_custom_pass_trains(quick):
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    model = Projected()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 16)
    compiled = torch.compile(model, options={"pre_grad_custom_pass": inductor_pass(report="off")})
    for run in (compiled, twin):
        run(x).square().sum().backward()
    assert last_reports()[-1].fused == 1
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_key_of_inductors_caches():
    """Same sources and options, same key; Inductor pickles it."""
    one = inductor_pass()
    assert one.uuid() == inductor_pass(report="off").uuid() != inductor_pass(training="decline").uuid()
    assert pickle.loads(pickle.dumps(one)).uuid() == one.uuid()


def aot(graphs):
    def compile_forward(gm, inputs):
        npugraph_ex_pass(gm, inputs, None)
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compile_forward)


@pytest.mark.parametrize("dynamic", [False, True])
def test_on_an_aten_graph(dynamic):
    """As npugraph_ex calls it: the forward's ATen graph, behind AOTAutograd."""
    model, graphs = Projected(), []
    compiled = torch.compile(model, backend=aot(graphs), dynamic=dynamic)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert sum(node.target is REGION for node in graphs[0].graph.nodes) == 1
    assert last_reports()[-1].fused == 1


def test_a_forward_whose_statistics_a_backward_reads_is_left_alone():
    """AOTAutograd keeps mean and rstd for the backward: right, and said."""
    model, graphs = Projected(), []
    compiled = torch.compile(model, backend=aot(graphs))
    x = torch.randn(2, 3, 16, requires_grad=True)
    compiled(x).sum().backward()
    got, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    site, = (site for report in last_reports() for site in report.sites)
    assert site.status == "declined" and "statistics are read too" in site.reason


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="unknown option 'inner' of a pass .*report, training, self_check"):
        inductor_pass(inner="eager")
    with pytest.raises(ValueError, match="option 'training'"):
        inductor_pass(training="yes")
    with pytest.raises(TypeError, match="graph must be a torch.fx.Graph that belongs"):
        inductor_pass()(torch.fx.Graph())
    with pytest.raises(TypeError, match="gm must be a torch.fx.GraphModule, not Linear"):
        npugraph_ex_pass(nn.Linear(2, 2))


def test_the_example_of_the_page(quick):
    code = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8").split(
        "## Inside another compiler", 1)[1], re.MULTILINE | re.DOTALL).group(1)
    exec(compile(code, str(PAGE), "exec"), {"model": Projected(), "x": torch.randn(2, 3, 16)})
    assert last_reports()[-1].fused == 1
