"""A fixed third of the model zoo in fp32: compiled by the backend it does what it does in eager.

All of it, and bf16: `make zoo`.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parent))
import catalogue  # noqa: E402
import measure  # noqa: E402
import torch  # noqa: E402

NAMES = [name for name in catalogue.names() if catalogue.in_test_run(name)]


@pytest.mark.parametrize("name", NAMES)
def test_as_eager(name):
    result = measure.measure(name)
    if result.skipped.startswith("Dynamo fails"):  # without us too
        pytest.skip(result.skipped)
    assert not (result.missed or result.skipped)


def test_it_is_a_third():
    assert 0.28 < len(NAMES) / len(catalogue.names()) < 0.38


def test_every_architecture_is_built_or_left_out_with_a_reason():
    known = {*catalogue.names(), *catalogue.left_out()}
    assert sorted(set(catalogue.every_name()) - known) == []
    assert all(catalogue.left_out().values())


def test_a_wrong_model_is_seen(monkeypatch):
    """The comparison itself: an output off by a little more than the bound, and another structure."""
    original, compiled = measure.run, []

    def off(model, inputs):
        output = original(model, inputs)
        if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            compiled.append(model)
            if len(compiled) == 2:  # the first is Dynamo's alone
                output.last_hidden_state.mul_(1 + 1e-4)
        return output

    monkeypatch.setattr(measure, "run", off)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        measure.measure("transformers/bert")
    with pytest.raises(measure.Mismatch, match="in eager"):
        measure.check_structure((1.0, None), (1.0, torch.ones(1)))
