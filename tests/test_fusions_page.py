"""docs/fusions.md is complete: every pattern, pointwise op and reason to decline stands there."""

import ast
import re
from pathlib import Path

import pytest

from ascend_ln_fuse.across import NOT_INNERMOST
from ascend_ln_fuse.inner_choice import LEFT_SLOWER, LEFT_UNKNOWN
from ascend_ln_fuse.kernels.pointwise import POINTWISE
from ascend_ln_fuse.patterns import BUILT_IN
from ascend_ln_fuse.patterns.grow import REACHES
from ascend_ln_fuse.remedies import REMEDIES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fusions.md").read_text()


def _pieces(node) -> list[str]:
    """The constant pieces of a string or f-string, joined where Python joins them."""
    if isinstance(node, ast.Constant):
        return [node.value]
    return [value.value for value in node.values if isinstance(value, ast.Constant)]


def _reasons() -> list[str]:
    """The longest constant piece of each Decline raised anywhere; of `across.why_not`, how it begins."""
    found = {NOT_INNERMOST}
    for folder in ("fusion_pass", "patterns"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Decline" and \
                        isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
                    found.add(max(_pieces(node.args[0]), key=len).strip(" ,:("))
    return sorted(found)


@pytest.mark.parametrize("reason", _reasons())
def test_reason_is_explained(reason):
    assert reason in PAGE


@pytest.mark.parametrize("reason", [LEFT_SLOWER, LEFT_UNKNOWN])
def test_reason_of_a_graph_is_explained(reason):
    assert f"| {reason} |" in PAGE


def _what_helps() -> dict[str, str]:
    """For each row of the tables of reasons that says what helps: the reasons, what helps (without links)."""
    tables = [part.split("\n\n", 1)[0] for part in PAGE.split("| reason | what it means | what helps |")[1:]]
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()[2:]]
    return {row[0]: re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[2]) for row in rows if len(row) == 3}


def test_what_helps_is_what_the_report_says():
    page = _what_helps()
    for reasons, helps in page.items():
        assert [text for start, text in REMEDIES.items() if start in reasons] == [helps], reasons
    assert len(page) == len(REMEDIES)


@pytest.mark.parametrize("start", REMEDIES)
def test_a_remedy_is_of_some_reason(start):
    assert any(reason.startswith(start) for reason in (*_reasons(), LEFT_SLOWER, LEFT_UNKNOWN))


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
