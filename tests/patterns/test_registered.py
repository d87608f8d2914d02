"""Users' own patterns: the page in docs runs, and a pattern that lies is declined."""

import re
from pathlib import Path

import pytest
import torch
from checks import check

from ascend_ln_fuse import Decline, Norm, register_pattern, unregister_pattern

PAGE = Path(__file__).parents[2] / "docs" / "patterns.md"


@pytest.fixture
def registered():
    names = []

    def register(name, match):
        register_pattern(name, match)
        names.append(name)

    yield register
    for name in names:
        unregister_pattern(name)


def test_the_page_runs_and_prints_what_it_shows(capsys):
    (_, code), (_, shown) = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    try:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    finally:
        unregister_pattern("vector_norm")
    assert capsys.readouterr().out == shown


class Model(torch.nn.Module):
    def forward(self, x):
        y = torch.erf(x)
        z = y.exp()
        return z.sum(-1), torch.cos(y), z


def claim(**wrong):
    """A pattern that says of exp(erf(x)) that it is an rms_norm, with a lie on top."""
    def match(lens, node):
        if lens.kind(node) != "exp":
            return
        erf = node.args[0]
        norm = dict(op="rms_norm", value=erf.args[0], weight=None, bias=None, eps=0.0, shape=(16,),
                    out=node, interior=frozenset({node, erf}), dtype=torch.float32, spelling="lie")
        yield Norm(**{**norm, **{k: v(node) if callable(v) else v for k, v in wrong.items()}})

    return match


LIES = {
    "a value that comes later": (claim(interior=lambda n: frozenset({n}),
                                       value=lambda n: next(iter(n.users))),
                                 "reads what comes after its result"),
    "inner value read elsewhere": (claim(), "read elsewhere"),
    "dtype": (claim(interior=lambda n: frozenset({n}), value=lambda n: n.args[0],
                    dtype=torch.bfloat16), "yields torch.float32"),
    "shape": (claim(interior=lambda n: frozenset({n}), value=lambda n: n.args[0], shape=(8,)),
              "normalised shape"),
    "value inside": (claim(interior=lambda n: frozenset({n, n.args[0]}), value=lambda n: n.args[0]),
                     "must hold its result and not its input"),
    "result outside": (claim(interior=lambda n: frozenset({n.args[0]})), "must hold its result"),
    "op": (claim(op="softmax"),
           "op must be one of 'layer_norm', 'rms_norm', 'normalize', 'l2_norm', not 'softmax'"),
    "eps": (claim(eps=None), "eps must be a number"),
    "shape of no tuple": (claim(shape=16), "shape must be a tuple of ints"),
    "other shape": (claim(interior=lambda n: frozenset({n}), value=lambda n: n.args[0],
                          out=lambda n: next(u for u in n.users if u.target == "sum")),
                    "must hold its result"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_pattern_that_lies_is_declined(registered, name):
    match, reason = LIES[name]
    registered("lie", match)
    report = check(Model(), torch.randn(3, 16), fused=0, declined=1)
    assert reason in report.sites[0].reason


def test_memory_written_inside_is_declined(registered):
    class Written(torch.nn.Module):
        def forward(self, x):
            y = torch.erf(x)
            y.mul_(2)
            return y.exp()

    registered("lie", claim())
    report = check(Written(), torch.randn(3, 16), fused=0, declined=1)
    assert "written" in report.sites[0].reason


def test_a_pattern_that_raises_is_named(registered, monkeypatch):
    def match(lens, node):
        raise KeyError("oops")

    registered("broken", match)
    monkeypatch.setenv("ASCEND_LN_FUSE_STRICT", "0")
    model = torch.nn.LayerNorm(16)
    report = check(model, torch.randn(3, 16), fused=1, declined=1)
    assert "pattern broken failed: KeyError" in report.sites[0].reason


def test_a_pattern_at_fault_leaves_the_norm_to_the_others(registered):
    def match(lens, node):
        if lens.kind(node) == "layer_norm":
            yield Norm(op="batch_norm", value=node.args[0], weight=None, bias=None, eps=0.0, shape=(16,),
                       out=node, interior=frozenset({node}), dtype=torch.float32, spelling="mine")

    registered("faulty", match)
    report = check(torch.nn.LayerNorm(16), torch.randn(3, 16), fused=1, declined=1)
    reasons = {site.status: site.reason for site in report.sites}
    assert reasons["fused"] == "" and reasons["declined"].startswith("pattern faulty: op must be one of")


def test_a_pattern_that_declines_leaves_the_norm_alone(registered):
    def match(lens, node):
        if lens.kind(node) == "layer_norm":
            raise Decline("not this one")

    registered("mine", match)
    report = check(torch.nn.LayerNorm(16), torch.randn(3, 16), fused=0, declined=1)
    assert report.sites[0].reason == "pattern mine: not this one"


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="name must be a str"):
        register_pattern(3, claim())
    with pytest.raises(TypeError, match="match must be callable"):
        register_pattern("x", 3)
    with pytest.raises(ValueError, match="built-in"):
        register_pattern("library_norm", claim())
    with pytest.raises(KeyError, match="no pattern 'nothing'"):
        unregister_pattern("nothing")
