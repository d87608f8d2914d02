"""Inputs of the commands that end the program, or that no parser likes: one line, exit code 2."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from ascend_ln_fuse import trace, tuning
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


def ran(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "ascend_ln_fuse", *map(str, arguments)], text=True,
                          capture_output=True, env={**os.environ, **environment})


def test_output_that_takes_ascii_only(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef norm(): return torch.nn.LayerNorm(64), torch.randn(2, 64)\n")
    result = ran("explain", f"{file}:norm", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.returncode == 0 and "1 norm site, 1 fused" in result.stdout, result.stderr
    assert "\\u2713" in result.stdout and "Unicode" not in result.stderr


def test_no_temporary_directory(tmp_path):
    """No verdict on a kernel: the compilers could not even begin."""
    result = ran("check", "model.py:norm", TMPDIR=str(tmp_path / "nowhere"))
    assert result.returncode == 2 and result.stdout == "" and result.stderr.startswith("Error: "), result
    assert f"in TMPDIR={tmp_path / 'nowhere'}: No such file" in result.stderr


def test_a_model_in_a_package(tmp_path):
    """It is imported as a member, with what it imports from there."""
    inner = tmp_path / "models_of_test" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("")
    (inner.parent / "sizes.py").write_text("WIDTH = 64\n")
    (inner / "model.py").write_text("import torch\nfrom ..sizes import WIDTH\n"
                                    "def norm(): return torch.nn.LayerNorm(WIDTH), torch.randn(2, WIDTH)\n")
    result = ran("explain", f"{inner / 'model.py'}:norm")
    assert result.returncode == 0 and "1 norm site, 1 fused" in result.stdout, result.stderr


@pytest.mark.parametrize("name", ["json", "csv", "click"])
def test_a_model_file_named_as_a_module(name, tmp_path):
    """Imported already, or not, or of another package: the command still has its own."""
    file = tmp_path / f"{name}.py"
    file.write_text("import torch\ndef norm(): return torch.nn.LayerNorm(64), torch.randn(2, 64)\n")
    result = ran("explain", f"{file}:norm", "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["reports"][0]["fused"] == 1, result.stderr
    code = f"import {name}; from ascend_ln_fuse.loading import load_example; " \
           f"load_example({f'{file}:norm'!r}); import sys; assert sys.modules[{name!r}] is {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FILE = "FILE of FILE:FUNCTION is the path of one that ends in .py, as in model.py:build"


@pytest.mark.parametrize("target, said", [
    ("missing.py:build", f"no such file: missing.py; {FILE}"),
    ("words.txt:build", f"words.txt is no Python file; {FILE}"),
    ("model.py", "'model.py' is not FILE:FUNCTION, as in model.py:build"),
    ("model.py:builds", "model.py has no function 'builds': it has build"),
    ("broken.py:build", "broken.py cannot be imported: ModuleNotFoundError: No module named 'not_there' "
                        "(broken.py:2)"),
    ("syntax.py:build", "syntax.py cannot be imported: SyntaxError: "),
])
@pytest.mark.parametrize("command", ["explain", "check", "tune"])
def test_targets_that_are_none(command, target, said, tmp_path, monkeypatch):
    """What is wrong with the argument, and what would be right, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace, "ensure_npu", lambda: None)  # later tests must not meet it
    monkeypatch.setattr(tuning, "device_for_tuning", lambda name: torch.device("cpu"))
    (tmp_path / "model.py").write_text("def build(): return None\n")
    (tmp_path / "broken.py").write_text("import torch\nimport not_there\n")
    (tmp_path / "syntax.py").write_text("def build(: pass\n")
    (tmp_path / "words.txt").write_text("words")
    result = CliRunner().invoke(main, [command, target])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {said}") and result.stderr.count("\n") == 1


CSV = "CSV is kernel_details.csv of torch_npu.profiler, op_summary_*.csv of msprof, or a folder that " \
      "holds one of them"
JSON = "wanted is what FusionReport.to_json() or `ascend-ln-fuse explain --json` gives"


@pytest.mark.parametrize("arguments, said", [
    (["model.py:build"], f"no such file: model.py:build; {CSV}"),
    (["model.py"], f"model.py has no column 'Name' or 'Op Name'; it has def build(): return None; {CSV}"),
    (["profile.csv", "--report", "missing.json"], f"no such file: missing.json; {JSON}"),
    (["profile.csv", "--report", "model.py"],
     f"model.py is no JSON: Expecting value: line 1 column 1 (char 0); {JSON}"),
    (["profile.csv", "--report", "number.json"], f"number.json is no report; {JSON}"),
])
def test_profiles_that_are_none(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("def build(): return None\n")
    (tmp_path / "profile.csv").write_text("Name,Type\nA,B\n")
    (tmp_path / "number.json").write_text("3")
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {said}\n")


@pytest.mark.parametrize("name, text, said", [
    ("kernel_details.csv", "Name,Type\n\0" + "x" * 5000 + "\n", "is not a text file"),
    ("report.json", "[" * 100_000, "is no JSON"),
])
def test_files_that_no_parser_likes(name, text, said, tmp_path):
    profile = tmp_path / "kernel_details.csv"
    profile.write_text("Name,Type\nA,B\n")
    (tmp_path / name).write_text(text)
    report = ["--report", str(tmp_path / name)] if name == "report.json" else []
    result = CliRunner().invoke(main, ["profile", str(profile), *report])
    assert result.exit_code == 2 and said in result.output
