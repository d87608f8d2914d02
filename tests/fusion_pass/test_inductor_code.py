"""What Inductor generates around a fused op: nothing is copied for it, and the rest is still fused."""

import re
import shutil

import pytest
import torch
from checks import tensors
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from ascend_ln_fuse import backend, inner_choice, last_reports
from ascend_ln_fuse.kernels import measure
from ascend_ln_fuse.kernels.ops import TAGS

pytestmark = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler")

OFF = {"report": "off", "inner": "inductor"}
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.fixture(autouse=True)
def quick():
    with inductor.patch(cpp_cache_precompile_headers=False, fx_graph_cache=False):
        yield


class Packed(nn.Module):
    """q and k of a packed qkv are normalised; v goes its own way."""

    def __init__(self, project=True):
        super().__init__()
        self.qkv = nn.Linear(48, 144) if project else nn.Identity()
        self.norm_q, self.norm_k = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 3, 3, 16).unbind(1)
        return self.norm_q(q).sin() * 2, self.norm_k(k), (v.cos() + 1).relu()


def code_of(model, x, dynamic) -> str:
    """The one wrapper that Inductor writes for the model, which is right."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        result, codes = run_and_get_code(compiled, x)
        torch.testing.assert_close(tensors(result), tensors(model(x)))
    assert last_reports()[-1].fused == 2
    code, = (code for code in codes if "ascend_ln_fuse.region" in code)
    return code


def body(code: str) -> list[str]:
    """The statements of the wrapper's call."""
    lines = code.split("def call(")[1].split("\nrunner")[0].splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def place_of_the_op(lines: list[str]) -> int:
    place, = (i for i, line in enumerate(lines) if "= torch.ops.ascend_ln_fuse.region" in line)
    return place


@DYNAMIC
def test_strided_operands_and_results_are_not_copied(dynamic):
    lines = body(code_of(Packed(), torch.randn(8, 48), dynamic))
    place = place_of_the_op(lines)
    buffer = re.search(r"extern_kernels\.addmm\(.*out=(buf\d+)\)", "\n".join(lines[:place])).group(1)
    assert not [line for line in lines[:place] if line.startswith("cpp_fused")]  # nothing runs before it
    operands = re.findall(rf"reinterpret_tensor\({buffer}, \(\w+, 3, 16\), \(144, 16, 1\), (\d+)\)",
                          lines[place])
    assert operands == ["0", "48"]
    behind = "\n".join(lines[place + 1:])
    result = lines[place].split(" = ")[0]
    names = re.findall(rf"(buf\d+) = {result}\[\d\]", behind)
    assert len(names) == 2 and names[1] in behind.rpartition("return")[2]  # k's is returned as it is
    kernels = [line for line in lines if line.startswith("cpp_fused")]
    assert len(kernels) <= 2 and any("cos" in line and "relu" in line for line in kernels)


@DYNAMIC
def test_views_of_an_input(dynamic):
    lines = body(code_of(Packed(project=False), torch.randn(8, 144), dynamic))
    place = place_of_the_op(lines)
    assert lines[place].count("reinterpret_tensor(arg") == 2
    assert not [line for line in lines[:place] if line.startswith("cpp_fused")]


@DYNAMIC
@pytest.mark.parametrize("fused", [1.0, 3.0])
def test_both_forms_compile_in_one_go(fused, dynamic, monkeypatch):
    """Inductor compiles a graph twice within one compilation of Dynamo's; the clock alone is made up."""
    def by_turns(calls, device, seconds):
        assert all(len(call()) == 3 for call in calls)
        return [[fused], [2.0]]

    monkeypatch.setattr(backend, "device_type", lambda inputs: "cuda")
    monkeypatch.setattr(inner_choice, "_accelerator", lambda inputs: (torch.device("cpu"), ""))
    monkeypatch.setattr(measure, "is_capturing", lambda device: False)
    monkeypatch.setattr(measure, "by_turns", by_turns)
    monkeypatch.setattr(inner_choice, "_stored", lambda key, forms: None)
    model = Packed()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF, dynamic=dynamic)
    with torch.no_grad():
        for rows in (8, 8, 5):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(tensors(compiled(x)), tensors(model(x)))
    assert {report.fused for report in last_reports()} == {2 if fused < 2 else 0}
    assert len(last_reports()) == (1 if dynamic else 2)


def test_the_tags_are_said():
    tags = torch.ops.ascend_ln_fuse.region.default.tags
    assert TAGS and set(TAGS) <= set(tags)


def test_a_graph_that_dynamo_comes_with_again_has_one_report():
    """Inductor has Dynamo trace anew where a float of the graph may vary: eps, here."""
    code_of(Packed(), torch.randn(8, 48), dynamic=True)
    assert len(last_reports()) == 1
