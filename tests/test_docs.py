"""The README says what is so: its code runs, its report is what is printed, its tables are complete."""

import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from ascend_ln_fuse import FusionReport
from ascend_ln_fuse.options import _CHOICES, Options
from ascend_ln_fuse.report import SiteReport

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def after(mark: str) -> str:
    """The block or table that follows the comment `<!-- mark -->`."""
    text = README.split(f"<!-- {mark} -->\n", 1)[1]
    if text.startswith("```"):
        return text.split("\n", 1)[1].split("\n```", 1)[0] + "\n"
    return text.split("\n\n", 1)[0]


def run(path: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "ASCEND_LN_FUSE_STRICT": "1"}
    environment.pop("ASCEND_LN_FUSE_INTERPRET", None)
    done = subprocess.run([sys.executable, path.name], cwd=path.parent, env=environment, timeout=300,
                          capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done


def timeless(report: str) -> str:
    """Without the time that the pass took, and so without where the headline breaks."""
    headline, rest = report.split("  site, ", 1)
    return re.sub(r"\s+", " ", re.sub(r"\(\d+\.\d\s+ms\)", "(time)", headline)) + rest.rstrip()


def test_the_report_is_what_the_example_prints(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(after("attention.py"))
    assert timeless(run(path).stderr) == timeless(after("report of attention.py"))


def test_the_code_runs(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text("\n".join(blocks("python")))
    printed = run(path).stdout
    assert "fused norm_q, attention.py" in printed and '"sites": [' in printed


def test_the_demo_ends_well():
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    done = run(ROOT / "examples" / "demo.py")
    assert "3 of 3 models as they should be" in done.stdout
    assert "left out" not in done.stdout and "Left alone" not in done.stdout


def test_the_options_are_all_there_with_their_values():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", after("options"), re.MULTILINE)
    assert [name for name, _, _ in rows] == [field.name for field in fields(Options)]
    for field, (_, default, text) in zip(fields(Options), rows):
        assert field.default is not MISSING and default == repr(field.default).replace("'", '"')
        for choice in _CHOICES.get(field.name, ()):
            assert f'`"{choice}"`' in text


def test_the_versions_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project and "| Python | 3.10 and later |" in README
    assert '"torch>=2.7"' in project and "| torch | 2.7 and later |" in README
    pinned = (ROOT / "requirements.txt").read_text()
    assert "triton-ascend==3.2.0" in pinned and "triton-ascend==3.2.0" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (page.parent / target).exists(), target
    folders = "fusion_pass|patterns|kernels|tests|benchmarks|examples|docs"
    for path in re.findall(rf"`((?:{folders})/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_ascend_time_is_claimed(page):
    """Nothing of this ran on an NPU: no sentence about it may hold a time or a speed-up."""
    for sentence in re.split(r"(?<=[.:])\s|\n\n|\n- ", page.read_text(encoding="utf-8")):
        if re.search(r"ascend|npu", sentence, re.IGNORECASE):
            assert not re.search(r"\d\s*(us|ms|TB/s|x faster)\b", sentence), sentence


def test_make_has_the_commands_that_are_named():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)\b", README, re.MULTILINE))
    assert {"demo", "test", "test-gpu", "bench"} <= named
    for command in named:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("kind, json_only", [(FusionReport, {"graph"}), (SiteReport, set())])
def test_the_attributes_of_reports(kind, json_only):
    """Each attribute is in the table, and each key of the JSON is one, but for those that the table names."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- {kind.__name__} -->\n", 1)[1].split("\n\n", 1)[0]
    rows = [row.strip("| ").split(" | ", 1) for row in table.splitlines()[2:]]
    listed = [name for first, _ in rows for name in re.findall(r"`(\w+)`", first)]
    properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
    assert sorted(listed) == sorted([*(field.name for field in fields(kind)), *properties])
    made = FusionReport() if kind is FusionReport else SiteReport("fused", "layer_norm", "here")
    words = {name: what for first, what in rows for name in re.findall(r"`(\w+)`", first)}
    missing = {name for name, what in words.items() if "not in JSON" in what or "in JSON `" in what}
    assert set(made.to_dict()) == set(listed) - missing | json_only
    assert all(f"`{name}`" in table for name in json_only)


def test_the_methods_of_sites_are_there():
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\(\)`", page.split("<!-- SiteReport -->", 1)[1]):
        assert callable(getattr(SiteReport, name)), name
