"""The environment variables: what they mean, and that the README lists them all."""

import re
from pathlib import Path

import pytest

from ascend_ln_fuse.kernels import settings

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_lists_every_variable():
    table = README.read_text(encoding="utf-8").split("<!-- environment -->\n", 1)[1].split("\n\n", 1)[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    known = {value for name, value in vars(settings).items()
             if name.isupper() and isinstance(value, str) and value.startswith("ASCEND_LN_FUSE_")}
    assert len(named) == len(set(named)) and set(named) == known
    assert f"({settings.DEFAULT_COMPILE_SECONDS:g})" in table


@pytest.mark.parametrize("text, seconds", [("", 600.0), ("1.5", 1.5), ("0", None), ("inf", float("inf"))])
def test_the_time_limit(text, seconds, monkeypatch):
    monkeypatch.setenv(settings.COMPILE_SECONDS, text)
    assert settings.compile_seconds() == seconds
