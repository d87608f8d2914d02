"""docs/fusions.md is complete: every pattern, pointwise op and reason to decline stands there."""

import ast
from pathlib import Path

import pytest

from ascend_ln_fuse.inner_choice import LEFT_SLOWER, LEFT_UNKNOWN
from ascend_ln_fuse.kernels.pointwise import POINTWISE
from ascend_ln_fuse.patterns import BUILT_IN
from ascend_ln_fuse.patterns.grow import REACHES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fusions.md").read_text()


def _pieces(node) -> list[str]:
    """The constant pieces of a string or f-string, joined where Python joins them."""
    if isinstance(node, ast.Constant):
        return [node.value]
    return [value.value for value in node.values if isinstance(value, ast.Constant)]


def _reasons() -> list[str]:
    """The longest constant piece of each Decline raised anywhere."""
    found = set()
    for folder in ("fusion_pass", "patterns"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Decline" and \
                        isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
                    found.add(max(_pieces(node.args[0]), key=len).strip(" ,:("))
    return sorted(found)


@pytest.mark.parametrize("reason", _reasons())
def test_reason_is_explained(reason):
    assert reason.removesuffix(" (its stride is") in PAGE


@pytest.mark.parametrize("reason", [LEFT_SLOWER, LEFT_UNKNOWN])
def test_reason_of_a_graph_is_explained(reason):
    assert f"| {reason} |" in PAGE


def test_there_are_reasons():
    assert len(_reasons()) > 25


@pytest.mark.parametrize("word", POINTWISE)
def test_pointwise_op_is_listed(word):
    assert f"`{word}`" in PAGE


@pytest.mark.parametrize("pattern", BUILT_IN, ids=lambda p: p.name)
def test_pattern_is_in_the_table(pattern):
    assert f"patterns/{pattern.name}.py" in PAGE


def test_every_kind_of_growth_is_in_the_table():
    fields = set(vars(REACHES[0])) - {"name"}
    rows = {"pointwise_up": "pointwise above", "store_up": "add above",
            "pointwise_down": "pointwise, cast below", "copies": "copy above",
            "rotary": "rotary below"}
    assert fields == set(rows)
    for row in rows.values():
        assert f"| {row} |" in PAGE


def test_files_named_exist():
    for word in PAGE.replace("`", " ").split():
        if word.endswith(".py") and "/" in word:
            assert (ROOT / word).is_file(), word
