"""Options: one dataclass, errors that name what is valid."""

import pytest
import torch
from torch import nn

from ascend_ln_fuse import Options, auto_fusion
from ascend_ln_fuse.options import parse_options, strict

WRONG = [
    ({"reprot": "off"}, ValueError, ["'reprot'", "did you mean 'report'", "valid options: report"]),
    ({"zzz": 1}, ValueError, ["'zzz'", "valid options: report"]),
    ({"report": "loud"}, ValueError, ["'report'", "'off' or 'table' or 'full'", "'loud'"]),
    ({"report": True}, TypeError, ["'report'", "str", "bool True"]),
    ({"training": None}, TypeError, ["'training'", "'fuse' or 'decline'", "NoneType"]),
    ({"inner": print}, TypeError, ["'inner'", "name of a Dynamo backend"]),
    ({"inner": "ascend_ln_fuse"}, ValueError, ["'inner'", "another backend"]),
]


@pytest.mark.parametrize("options, error, words", WRONG, ids=[str(o) for o, _, _ in WRONG])
@pytest.mark.parametrize("way", ["parse", "auto_fusion", "torch.compile"])
def test_errors_name_what_is_valid(way, options, error, words):
    with pytest.raises(Exception) as raised:
        if way == "parse":
            parse_options(options)
        elif way == "auto_fusion":
            auto_fusion(nn.LayerNorm(4), **options)
        else:
            torch.compile(nn.LayerNorm(4), backend="ascend_ln_fuse", options=options)(torch.ones(4))
    # Dynamo wraps what a backend raises, message included.
    assert raised.type is error or (way == "torch.compile" and error.__name__ in str(raised.value))
    for word in words:
        assert word in str(raised.value)


def test_a_wrong_option_leaves_the_model_as_it_was():
    model = nn.LayerNorm(4)
    with pytest.raises(ValueError):
        auto_fusion(model, inner="no such thing")
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("options", [3, "report", [("report", "off")]])
def test_options_that_are_no_mapping(options):
    with pytest.raises(TypeError, match="must be a dict"):
        parse_options(options)


def test_valid_options():
    assert parse_options(None) == parse_options({}) == Options()
    chosen = Options(report="off", inner="inductor", training="decline")
    assert parse_options(chosen) is chosen
    assert parse_options({"report": "off", "inner": "inductor", "training": "decline"}) == chosen
    assert hash(chosen) == hash(Options(**vars(chosen)))


@pytest.mark.parametrize("value, expected", [("1", True), ("yes", True), ("0", False), ("", False)])
def test_strict(value, expected, monkeypatch):
    monkeypatch.setenv("ASCEND_LN_FUSE_STRICT", value)
    assert strict() is expected
    monkeypatch.delenv("ASCEND_LN_FUSE_STRICT")
    assert strict() is False
