"""Random programs against eager, a fixed set of them; `make fuzz` runs any number."""

from dataclasses import replace

import pytest
import torch
from checks import assert_within_bound

from fuzz.check import Call, Mismatch, _Session, check
from fuzz.mutants import MUTANTS, programs_until_found
from fuzz.program import Parameter, Program, Step
from fuzz.reduce import reduced
from fuzz.run import fuzz

PARTS, GRAPHS = 4, 50


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_agree_with_eager(part):
    tally = fuzz(GRAPHS, part)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.graphs == GRAPHS
    assert tally.fused >= GRAPHS / 2, "little is fused: it fuzzes nothing"


PROGRAM = Program(
    parameters=(Parameter("x0", ("n", 5, 16), "float32"), Parameter("w1", (16,), "float32", weight=True)),
    steps=(Step("v1 = x0 * 2", "scale"), Step("v2 = v1.relu()", "activation"),
           Step("v3 = F.layer_norm(v2, (16,), w1)", "library norm"), Step("x0.add_(1)", "write in place"),
           Step("v4 = v3[:, 1:]", "view", ("no_grad",)), Step("v5 = v3 + 1", "scale")),
    results=("v5", "v4"))


def test_a_program_is_the_source_that_it_prints(capsys):
    for program in (PROGRAM, replace(PROGRAM, module=True), replace(PROGRAM, grad="training")):
        exec(compile(program.source(), "<printed>", "exec"), {})
        eager, ours = capsys.readouterr().out.strip().split("\n(tensor")
        assert ours.partition("[")[2] == eager.partition("[")[2]


@pytest.mark.parametrize("settings", [
    {}, {"module": True, "grad": "training"}, {"dynamic": True}, {"route": "aten"}, {"route": "kernel"},
    {"route": "aot_eager"}, {"autocast": True}], ids=str)
def test_ways_to_run(settings):
    if settings.get("route") == "kernel":
        pytest.importorskip("triton")
    assert check(replace(PROGRAM, **settings)).fused >= 1


def test_the_same_error_as_in_eager():
    wrong = replace(PROGRAM, steps=(*PROGRAM.steps, Step("v6 = v5.view(7, -1)", "view")))
    outcome = check(wrong)
    assert outcome.errors == 1


WRONG = {
    "values": lambda out, x: (out[0] * 1.001, out[1]),
    "strides": lambda out, x: (out[0].transpose(0, 1).contiguous().transpose(0, 1), out[1]),
    "dtype": lambda out, x: (out[0].double(), out[1]),
    "aliasing": lambda out, x: (out[0], out[0][:, 1:]),
    "a write that is lost": lambda out, x: (x.sub_(1), out)[1],
    "gradients": lambda out, x: (out[0].detach() + 0 * out[0], out[1]),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_sees_what_is_wrong(what, monkeypatch):
    """A compiled form that differs from eager in one thing."""
    def compile_wrong(self, made, arguments):
        return made, lambda *args: WRONG[what](made(*args), args[0])

    monkeypatch.setattr(_Session, "_compile", compile_wrong)
    with pytest.raises(Mismatch):
        check(replace(PROGRAM, grad="training", route="aten"))


def test_the_bound_decides_no_tie_by_the_noise_of_its_reference():
    """A gradient that is zero: eager is off by 2**-13, ours by twice that, float64 by 3e-12."""
    eager, exact = torch.tensor([2.0 ** -13]), torch.tensor([-3e-12], dtype=torch.float64)
    assert_within_bound(-2 * eager, eager, -exact)
    assert_within_bound(2 * eager, eager, exact)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_within_bound(2.00001 * eager, eager, exact)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_within_bound(exact + 1e-20, exact, exact)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_up_to_date(name):
    with MUTANTS[name].active():
        pass


def test_it_finds_bugs_put_in_on_purpose():
    some = {name: MUTANTS[name] for name in (
        "views keyed without their arguments", "no rounding by a cast", "pairs rotated as halves")}
    assert programs_until_found(some, 100).keys() == some.keys()


def test_a_failing_program_is_made_small():
    def fails(program):
        text = " ".join(step.text for step in program.steps)
        return "layer_norm" in text and ".add_(" in text

    small = reduced(PROGRAM, fails)
    assert [step.text for step in small.steps] == ["v3 = F.layer_norm(x0, (16,), w1)", "x0.add_(1)"]
    assert small.results in (("v3",), ("x0",)) and not any(step.context for step in small.steps)
    assert not fails(replace(small, steps=small.steps[1:]))


def test_a_module_keeps_its_weights_in_the_compiled_form():
    session = _Session(replace(PROGRAM, module=True))
    for seed in (0, 1):
        eager, ours = session.run(seed, Call()), session.run(seed, Call(), compiled=True)
        assert torch.equal(eager.values[0], ours.values[0])
