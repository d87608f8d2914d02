"""Fixtures of the command line's tests."""

import json
import os
import subprocess
import sys

import pytest
from cli_cases import MODELS, SERVER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    (path / "models.py").write_text(MODELS)
    (path / "broken.py").write_text("import torch\nimport not_there\n")
    (path / "exits.py").write_text("raise SystemExit(3)\n")
    (path / "words.txt").write_text("words")
    (path / "report.json").write_text(json.dumps({"sites": [
        {"status": "fused", "pattern": "p", "where": "norm, m.py:1",
         "kernel": "aln_layer_norm_0123456789"}]}))
    (path / "declined.json").write_text(json.dumps({"sites": [
        {"status": "declined", "pattern": "p", "where": "norm, m.py:1", "reason": "r"}]}))
    name = "aclnnLayerNorm_{0}AiCore_{0}"
    rows = [name.format("Slice"), name.format("LayerNormV3"), "aln_layer_norm_0123456789"]
    (path / "kernel_details.csv").write_text("\n".join(["Name", *rows[:2]]))
    (path / "fused.csv").write_text("\n".join(["Name", *rows]))
    return path


@pytest.fixture(scope="module")
def server(folder):
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=folder, env=environment, text=True,
                          encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def cli(server):
    def run(*arguments, code=0):
        """(stdout, stderr) of `ascend-ln-fuse`, which must end with that exit code."""
        server.stdin.write(json.dumps(arguments) + "\n")
        server.stdin.flush()
        exit_code, out, err, error = json.loads(server.stdout.readline())
        assert exit_code == code, out + err + error
        return out, err

    return run
