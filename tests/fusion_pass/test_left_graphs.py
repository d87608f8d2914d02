"""A graph that is left to Inductor reaches it as it would without us: the same nodes, inputs and settings.

What Inductor generates follows from these, but for what it decides by timing (whether to pad a product).
"""

import functools
import sys
import types
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx as inductor
from torch._inductor import config

sys.path.append(str(Path(__file__).parents[2]))  # `benchmarks` is run from there

from ascend_ln_fuse import backend, inner_choice, last_reports
from benchmarks.models.builders import build
from benchmarks.models.specs import chosen

#: of what Inductor is told of a graph
TOLD = ("cudagraphs", "static_input_idxs", "is_backward", "is_inference", "layout_opt", "aot_mode")
#: the models, and options that keep what is left out for every compiler
MODELS = {"SD3.5": {}, "FLUX": {"cats": "keep"}, "Wan": {}, "Llama": {"masks": "keep"}}


@pytest.fixture
def received(monkeypatch):
    """What Inductor would lower, in order; it runs as it is."""
    found = []

    def lower(gm, inputs, **told):
        nodes = "\n".join(f"{node.format_node()} {inner_choice._fakes(node)}" for node in gm.graph.nodes)
        ways = {name: getattr(told.get(name), "value", told.get(name)) for name in TOLD}
        given = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else str(x) for x in inputs]
        found.append((nodes, ways, given, config.save_config_portable()))
        return make_boxed_func(gm.forward)

    compile_fx = functools.partial(inductor.compile_fx, inner_compile=lower)
    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    monkeypatch.setattr(backend, "device_type", lambda inputs: "cuda")
    with config.patch(force_disable_caches=True):
        yield found


@pytest.fixture
def all_forms(monkeypatch):
    """The forms of a graph are all compiled, as for their times, before the plain one is."""
    compiled = []

    def choose(question):
        for name, form in question.forms.items():
            question.compile(form)
            compiled.append(name)
        return question.compile(question.forms[backend.PLAIN]), inner_choice.Choice(backend.PLAIN)

    monkeypatch.setattr(backend, "choose", choose)
    return compiled


def result_of(model, inputs, training, **options):
    """What the model returns, and of which its gradients are then."""
    torch._dynamo.reset()

    def forward(**inputs):
        return model(**inputs)

    # Of its own, as Dynamo sees it.
    forward = types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None,
                                 forward.__closure__)
    model.zero_grad()
    with torch.set_grad_enabled(training):
        result = torch.compile(forward, **options)(**inputs)
    result = result if isinstance(result, torch.Tensor) else result[0]
    if not training:
        return [result]
    result.float().square().sum().backward()
    return [result, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def left(**options):
    return {"backend": "ascend_ln_fuse", "options": {"report": "off", "inner": "inductor", **options}}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_as_without_us(name, training, received):
    check(name, training, received, MODELS[name])


def test_behind_a_form_that_was_tried(received, all_forms):
    check("SD3.5", False, received, {}, forms=2)
    assert all_forms == [backend.FUSED, backend.PLAIN]  # all of its rows are short


def check(name, training, received, options, forms=0):
    spec, = chosen([name])
    if spec.library:
        pytest.importorskip(spec.library)
    with torch.no_grad():
        model, inputs = build(spec, 1, True, torch.device("cpu"))
    model.requires_grad_(training)
    results = result_of(model, inputs, training)
    alone = received[:]
    received.clear()
    for ours, theirs in zip(result_of(model, inputs, training, **left(**options)), results, strict=True):
        assert torch.equal(ours, theirs)
    assert len(alone) == 1 + training and received[forms:] == alone
    report = last_reports()[-1]
    assert report.sites and not report.fused and not report.notes


def test_a_difference_would_be_seen(received):
    """FLUX has cats that are left out."""
    with pytest.raises(AssertionError):
        check("FLUX", False, received, {})
    assert "1 cat of all pieces" in last_reports()[-1].notes[0]
