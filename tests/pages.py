"""Sections of the pages in docs/ that commands write: from `<!-- name -->` to `<!-- end of name -->`."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def read_section(page: str, name: str) -> str:
    """The text (Markdown) of section `name` of docs/`page`.

    Raises:
        ValueError: the page has no such section, or more than one.
    """
    found = _section(name).findall((DOCS / page).read_text(encoding="utf-8"))
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} sections {name!r}, not one")
    return found[0]


def write_section(page: str, name: str, text: str) -> None:
    """Put `text` (Markdown) in the place of section `name` of docs/`page`.

    Raises:
        ValueError: as `read_section`.
    """
    read_section(page, name)
    path = DOCS / page
    text = text.strip("\n") + "\n" if text else ""
    new = _section(name).sub(lambda _: text, path.read_text(encoding="utf-8"))
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(new, encoding="utf-8")
    partial.replace(path)  # somebody may be reading the page


def _section(name: str) -> re.Pattern:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    return re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)


def made_with(*packages: str) -> str:
    """`torch 2.13.0, transformers 5.24.0; 1 December 2026`: what a section was made with, and when."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    today = datetime.date.today()
    return f"{versions}; {today.day} {today:%B %Y}"
