"""benchmarks/models --first-calls: rows of their own, at the published depth, in a table of their own.

Where tables need times they are made up.
"""

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # `benchmarks` is run from there

from benchmarks.models import measure, results, specs, tables

cli = importlib.import_module("benchmarks.models.__main__")

CPU = torch.device("cpu")
SMALL, FLUX = specs.SPECS[:2]
DEPTHS = {"SeedVR-like MMDiT": "36", "FLUX.1-dev": "19 double + 38 single", "SD3.5-large": "38",
          "Wan2.1-1.3B": "30", "HunyuanVideo": "20 double + 40 single", "ViT-L/16": "24", "BERT-large": "24",
          "GPT-2 XL": "48", "Llama-3-8B": "32"}


def run(path, *more, model=SMALL.name):
    return cli.main(["--device", "cpu", "--tiny", "--json", str(path), "--models", model, *more])


def held(path):
    """(rows, rows of first calls)."""
    found = json.loads(path.read_text())
    return found["rows"], found["first_calls"]


def deep_row(spec=FLUX, layers=None, **more):
    """A row of first calls as a GPU would give it."""
    row = results.new_row(spec, layers or spec.published, False, CPU, "the command")
    return {**row, "smoke": False, **more}


SECONDS = {"compile_times": {"rounds": 2, "backend_eager_s": [5.0, 4.0], "ours_s": [6.0, 4.4]}}


def test_the_published_depth():
    assert {spec.name: spec.depth_words(spec.published) for spec in specs.SPECS} == DEPTHS
    assert FLUX.depth_words(2) == "2 of 19 double + 38 single"
    config = FLUX.config(FLUX.published, tiny=False)
    assert (config["num_layers"], config["num_single_layers"]) == (19, 38)
    args = cli.arguments().parse_args(["--first-calls", "--rounds", "2"])
    deep = cli.FirstCalls(args, specs.SPECS, results.Results(None))
    assert [deep.layers(spec) for spec in specs.SPECS] == [spec.published for spec in specs.SPECS]


def test_rows_of_their_own(tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "models.json", []
    original = cli.measure_first_calls
    monkeypatch.setattr(cli, "measure_first_calls", lambda *args: (seen.append(args[0]), original(*args)))
    assert run(path, "--first-calls") == 0
    rows, (row,) = held(path)
    assert not rows and row["compile_times"] == {"rounds": 2} and not row["columns"]  # smoke: no times
    assert row["command"] == "python -m benchmarks.models --first-calls --device cpu --tiny --rounds 2"
    shown = capsys.readouterr().out  # --tiny, which is no published depth
    assert "First calls of small models" in shown and "published depth" not in shown
    run(path, "--columns", "eager", "--rounds", "2")
    run(path, "--first-calls")
    assert len(seen) == 1
    (other,), (same,) = held(path)
    assert set(other["columns"]) == {"eager"} and same == row
    run(tmp_path / "other.json", "--first-calls", "--from", str(path))  # a machine that starts bare
    assert len(seen) == 1 and held(tmp_path / "other.json") == held(path)
    run(path, "--first-calls", "--again")
    assert len(seen) == 2
    monkeypatch.setattr(results, "source_digest", lambda: "changed")
    run(path, "--first-calls")
    assert len(seen) == 3


def test_files_of_before_have_no_first_calls(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"smoke": False, "rows": [deep_row(layers=2)]}))
    kept = results.Results(path)
    assert len(kept.rows.latest()) == 1 and not kept.first_calls.latest()


def test_a_process_a_model(tmp_path, monkeypatch):
    started = []

    def worker(command, cwd, timeout):
        started.append(command)
        return subprocess.CompletedProcess(command, cli.main(command[3:]))

    monkeypatch.setattr(cli.subprocess, "run", worker)
    path = tmp_path / "models.json"
    assert run(path, "--first-calls", "--isolate") == 0
    command, = started
    assert "--first-calls" in command and not {"--columns", "--layers"} & set(command)
    _, (row,) = held(path)
    assert row["compile_times"] == {"rounds": 2} and "--worker" not in row["command"]


def test_a_process_that_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -11))
    path = tmp_path / "models.json"
    assert run(path, "--first-calls", "--isolate") == 0
    _, (row,) = held(path)
    assert row["failure"] == "the process ended with -11"


@pytest.mark.parametrize("wrong", [["--layers", "2"], ["--columns", "eager"], ["--rounds", "1"]])
def test_what_does_not_go_together(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "models.json", "--first-calls", *wrong)
    assert "--first-calls" in capsys.readouterr().err.splitlines()[-1]


class Alone:
    """Stands for `Turns`: says whether it is held alone."""

    def __init__(self):
        self.is_alone = False

    def together(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def alone(self):
        self.is_alone = True
        yield
        self.is_alone = False


def test_measured_alone_and_nothing_besides(tmp_path, monkeypatch):
    turns, compiled = Alone(), []

    def compile(function, **options):
        def call(**inputs):
            compiled.append((options["backend"], turns.is_alone))
            return function(**inputs)
        return call

    def unwanted(*args):
        raise AssertionError("not needed for first calls")

    monkeypatch.setattr(measure, "_warm_up", lambda device, limits, inductor: compiled.append(inductor))
    for name in ("reference", "add", "time", "profile"):
        monkeypatch.setattr(measure._Cells, name, unwanted)
    monkeypatch.setattr(torch, "compile", compile)
    path = tmp_path / "models.json"
    measure.measure_first_calls(SMALL, 2, True, CPU, results.Results(path).first_calls,
                                measure.Limits(3, compile_seconds=0, turns=turns))
    ours = "ascend_ln_fuse"
    assert compiled == [False, ("eager", True), *[("eager", True), (ours, True)] * 3]
    _, (row,) = held(path)
    assert row["identity"]["layers"] == 2
    assert [len(row["compile_times"][name]) for name in ("backend_eager_s", "ours_s")] == [3, 3]


def test_the_table():
    header, lines = tables.first_calls([deep_row(**SECONDS), deep_row(SMALL, failure="too large")])
    assert [len(line) for line in lines] == [len(header)] * 2
    assert lines[0] == ["FLUX.1-dev", "19 double + 38 single", "4.00", "6.00", "4.40", "1.50", "1.10"]
    assert lines[1] == [SMALL.name, "36", "failed", "failed", "failed", "", ""]


def test_the_page():
    few = deep_row(layers=2, compile_times={"backend_eager_s": [1.0, 1.0], "ours_s": [1.2, 1.0]})
    failed = deep_row(SMALL, compile_times={"failure": "OutOfTime: took more than 240 s"})
    title = "First calls at the published depth, seconds."
    page = tables.markdown([few], [{**deep_row(**SECONDS), "date": "2026-12-24"}, failed])
    before, after = page.split(title)
    assert "2026-12-24" in before.splitlines()[-2] and "`the command`" in before.splitlines()[-2]
    assert "| FLUX.1-dev | 19 double + 38 single | 4.00 | 6.00 | 4.40 | 1.50 | 1.10 |" in after
    assert "- compile time of ours at most 1.3x backend=eager, kernels compiled: 1 of 1 rows\n" in after
    assert ("- compile time of ours at most 1.3x backend=eager at the published depth, kernels compiled: "
            "0 of 1 rows; not FLUX.1-dev 1.50\n") in after
    assert f"- {SMALL.name} at the published depth, compile times: OutOfTime: took more than 240 s" in after
    assert title not in tables.markdown([few]) and "published depth" not in tables.markdown([few])
    with pytest.raises(ValueError):
        tables.markdown([few], [{**deep_row(**SECONDS), "smoke": True}])


def test_shown_where_nothing_else_was_measured(capsys):
    tables.show([], [deep_row(**SECONDS)])
    out = capsys.readouterr().out
    assert "0 of 1 rows; not FLUX.1-dev 1.50" in out and "0 of 0" not in out


def test_a_failure_is_a_result(tmp_path, monkeypatch, capsys):
    def failing(self, compiled):
        raise measure.OutOfTime("took more than 240 s")

    monkeypatch.setattr(measure._Cells, "_first", failing)
    path = tmp_path / "models.json"
    assert run(path, "--first-calls") == 0
    _, (row,) = held(path)
    assert "took more than 240 s" in row["compile_times"]["failure"]
    assert "took more than 240 s" in capsys.readouterr().out
    monkeypatch.setattr(cli, "measure_first_calls", lambda *args: pytest.fail("measured again"))
    assert run(path, "--first-calls") == 0


@pytest.mark.parametrize("there, words", [
    (["triton-ascend"], {"triton-ascend": "3.2"}), (["triton"], {"triton": "3.2"}),
    (["triton", "triton-ascend"], {"triton": "3.2"}), ([], {"triton": "not installed"})])
def test_the_triton_that_is_there(there, words, monkeypatch):
    def version(name):
        if name.startswith("triton") and name not in there:
            raise results.importlib.metadata.PackageNotFoundError
        return "3.2"

    monkeypatch.setattr(results.importlib.metadata, "version", version)
    monkeypatch.setattr(results.importlib.metadata, "distributions", lambda name: [name] * (name in there))
    assert {k: v for k, v in results.versions("").items() if k.startswith("triton")} == words
