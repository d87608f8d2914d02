"""Inputs of the commands that end the program, or that no parser likes: one line, exit code 2."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from ascend_ln_fuse.cli import main

MODEL = """
import sys, torch
def exits(): sys.exit(0)
class Exits(torch.nn.Module):
    def forward(self, x): sys.exit(0)
def forward_exits(): return Exits(), torch.randn(2, 4)
"""


@pytest.mark.parametrize("function", ["exits", "forward_exits"])
def test_sys_exit_in_a_model_is_no_success(function, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    # In a process of its own: `explain` names a device that later tests must not meet.
    result = subprocess.run([sys.executable, "-m", "ascend_ln_fuse", "explain", f"{file}:{function}"],
                            capture_output=True, text=True)
    assert result.returncode == 2 and "SystemExit" in result.stderr, result


@pytest.mark.parametrize("name, text, said", [
    ("kernel_details.csv", "Name,Type\nA," + "x" * 200_000 + "\n", "is no CSV"),
    ("report.json", "[" * 100_000, "is no JSON"),
])
def test_files_that_no_parser_likes(name, text, said, tmp_path):
    profile = tmp_path / "kernel_details.csv"
    profile.write_text("Name,Type\nA,B\n")
    (tmp_path / name).write_text(text)
    report = ["--report", str(tmp_path / name)] if name == "report.json" else []
    result = CliRunner().invoke(main, ["profile", str(profile), *report])
    assert result.exit_code == 2 and said in result.output
