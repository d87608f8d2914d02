"""Random programs against eager, a fixed set of them; `make fuzz` runs any number."""

from dataclasses import replace

import pytest
import torch
from checks import assert_within_bound

from fuzz.check import Call, Mismatch, _Session, check
from fuzz.mutants import MUTANTS, programs_until_found
from fuzz.program import CALLS, Parameter, Program, Step
from fuzz.reduce import reduced
from fuzz.run import fuzz

PARTS, GRAPHS = 4, 30


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


@pytest.mark.parametrize("name", CALLS)
def test_further_calls(name):
    settings = {"grad": "grad"} if name == "requires grad" else {}
    assert check(replace(PROGRAM, calls=(name,), **settings)).fused >= 1


def test_it_sees_what_is_wrong_in_a_further_call_alone(monkeypatch):
    """A compiled form that yields what it yielded first; and one that later calls write over."""
    def keep_first(session, made, arguments):
        kept = vars(session).setdefault("kept", [])
        return lambda *args: kept.append(made(*args)) or kept[0]

    def write_over(session, made, arguments):
        kept = vars(session).setdefault("kept", made(*arguments))
        return lambda *args: [a.copy_(b) for a, b in zip(kept, made(*args))]

    compile_as(monkeypatch, keep_first)
    check(PROGRAM)
    with pytest.raises(Mismatch):
        check(replace(PROGRAM, calls=("other strides",)))
    compile_as(monkeypatch, write_over)
    with pytest.raises(Mismatch):
        check(replace(PROGRAM, calls=("written between",)))


def compile_as(monkeypatch, make):
    """`make(session, made, arguments)` gives the compiled form of `made`; without our backend it is right."""
    def compile_(session, made, arguments):
        ours = session._given["backend"] == "ascend_ln_fuse"
        return made, make(session, made, arguments) if ours else made

    monkeypatch.setattr(_Session, "_compile", compile_)


def _program(*texts: str, route: str = "dynamo", calls: tuple[str, ...] = ()) -> Program:
    parameters = (Parameter("x0", ("n", 2, 6, 64), "bfloat16"), Parameter("x1", (6, 64), "bfloat16"),
                  Parameter("w2", (64, 64), "bfloat16", weight=True))
    return Program(parameters, tuple(Step(text, "") for text in texts), (texts[-1].partition(" ")[0],),
                   route=route, calls=calls)


NORM = "v1 = F.rms_norm(x0, (64,))"
ROTATION = "v1 = torch.cat((-x0[..., 32:], x0[..., :32]), -1)"
STREAM = ("v1 = x0.flatten(1, 2).transpose(1, 2).contiguous()", "v2 = v1.transpose(1, 2)",
          *(f"v{i + 1} = v{i} + F.layer_norm(v{i}, (64,))" for i in range(2, 6)),
          "v7 = F.layer_norm(v6, (64,))")
LAYER = (NORM, "v2 = F.linear(v1, w2)")
HITS = {
    "mask dropped: causal": _program(
        "v1 = torch.ones(6, 6, dtype=torch.bool).tril()",
        "v2 = F.scaled_dot_product_attention(x0, x0, x0, v1)"),
    "stream laid out": _program(*STREAM),
    "private update": _program(NORM, "v1.mul_(0.5)", "v3 = v1.view(-1, 64)"),
    "rotary site": _program(ROTATION, "v2 = x0 * x1 + v1 * x1"),
    "rotary by halves": _program(ROTATION, "v2 = x0 * x1 + v1 * x1"),
    "joined cat": _program(NORM, "v2 = torch.cat((v1, x0), 1)"),
    "joined cat: a part is copied": _program(NORM, "v2 = torch.cat((v1, x0), 1)"),
    "chain: linear": _program(*LAYER),
    "chain: pointwise": _program(*LAYER, "v3 = F.gelu(v2)"),
    "chain: one kernel": _program(*LAYER, route="kernel"),
    "warm call of a kernel": _program(NORM, route="kernel", calls=("again",)),
    "warm call of a chain": _program(*LAYER, route="kernel", calls=("again",)),
}


@pytest.mark.parametrize("hit", HITS)
def test_what_the_pass_had_to_do_is_counted(hit, monkeypatch):
    if HITS[hit].route == "kernel":
        pytest.importorskip("triton")
    monkeypatch.setattr("fuzz.check.crc32", lambda key: 0)  # one kernel, by the first block shapes
    assert hit in check(HITS[hit]).hits


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
    compile_as(monkeypatch, lambda session, made, arguments: lambda *args: WRONG[what](made(*args), args[0]))
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
    """Two of the pass and one of the kernels, which are found soon."""
    pytest.importorskip("triton")
    some = {name: MUTANTS[name] for name in ("no rounding by a cast", "pairs rotated as halves",
                                             "recent calls found whatever their layout")}
    assert programs_until_found(some, 40).keys() == some.keys()


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
