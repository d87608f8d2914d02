"""benchmarks/models: every model builds and agrees, results are kept, failures stay in a cell.

Nothing here takes a time: on a CPU the benchmark only runs, and where tables need times they are made up.
"""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # `benchmarks` is run from there

from benchmarks.models import clock, columns, measure, peers, results, specs, tables

cli = importlib.import_module("benchmarks.models.__main__")

CPU = torch.device("cpu")
SMALL = next(spec for spec in specs.SPECS if not spec.library)
#: keys of a cell that hold what a clock, or a GPU, says
MEASURED = {"device_ms", "wall_ms", "busy_ms", "first_call_s", "kernels", "peak_mib"}


def run(path, *more, model=SMALL.name):
    return cli.main(["--device", "cpu", "--tiny", "--rounds", "2", "--json", str(path), "--models", model,
                     *more])


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_every_model(spec, tmp_path, capsys):
    if spec.library:
        pytest.importorskip(spec.library)
    path = tmp_path / "models.json"
    assert run(path, model=spec.name) == 0
    row, = rows_of(path)
    assert row["smoke"] and "failure" not in row
    assert set(row["columns"]) == {"eager", "ours"}
    for cell in row["columns"].values():
        assert cell["rounds"] == 2 and not MEASURED & set(cell)
        assert cell["error"]["share_of_bound"] <= 1
    assert 0 < row["eager_error"] < 0.05, "the reference computes something else"
    sites = row["columns"]["ours"]["sites"]
    assert sites["found"] > 0 and not sites["errors"] and not sites["fallbacks"]
    assert sites["fused"] + sum(sites["declined"].values()) == sites["found"]
    assert all(sites["declined"])  # a reason each
    assert "SMOKE RUN" in capsys.readouterr().out


def test_published_sizes():
    """The configurations build at full size, on one device, without memory."""
    from benchmarks.models.builders import _BUILDERS

    for spec in specs.SPECS:
        if spec.library and not importlib.util.find_spec(spec.library):
            continue
        with torch.device("meta"):
            model, inputs = _BUILDERS[spec.builder](spec.config(1, False), **spec.inputs(False))
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [x for x in inputs.values() if isinstance(x, torch.Tensor)]
        assert {t.device.type for t in tensors} == {"meta"}, spec.name


def test_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = tmp_path / "models.json"
    run(path, "--columns", "eager")
    seen = []
    original = cli.measure
    monkeypatch.setattr(cli, "measure", lambda *args: (seen.append(args[4]), original(*args)))
    run(path, "--columns", "eager")
    assert not seen
    run(path)
    assert seen == [["eager", "ours"]]  # the row is one measurement: all of it again
    before = path.read_text()
    run(path)
    assert len(seen) == 1 and path.read_text() == before
    run(tmp_path / "other.json", "--from", str(path))  # a machine that starts bare
    assert len(seen) == 1 and rows_of(tmp_path / "other.json") == rows_of(path)
    run(path, "--layers", "2")
    run(path, "--again")
    assert len(seen) == 3
    monkeypatch.setattr(results, "source_digest", lambda: "changed")
    run(path)
    assert len(seen) == 4  # what was measured before a change of the sources is not shown for after it


def test_without_time_no_model_is_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "measure", lambda *args: pytest.fail("begun"))
    run(tmp_path / "models.json", "--seconds", "10")
    assert SMALL.name in capsys.readouterr().out


def test_a_cut_off_row_is_measured_again(tmp_path):
    """Cells that were compiled and not timed beside the others count as missing."""
    path = tmp_path / "models.json"
    run(path)
    row, = rows_of(path)
    assert not results.missing(row, ["eager", "ours"])
    del row["columns"]["ours"]["rounds"]
    assert results.missing(row, ["eager", "ours"]) == ["ours"]
    assert results.missing(None, ["eager"]) == ["eager"]


def failing(gm, inputs):
    raise RuntimeError("no such compiler")


def test_a_column_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(columns.COLUMNS, "compile", columns.Column("torch.compile", {"backend": failing}))
    path = tmp_path / "models.json"
    assert run(path, "--columns", "eager", "compile", "ours") == 0
    row, = rows_of(path)
    assert "no such compiler" in row["columns"]["compile"]["failure"]
    assert row["columns"]["ours"]["rounds"] == 2
    assert not results.missing(row, row["columns"])  # a failure is a result
    assert "no such compiler" in capsys.readouterr().out


def test_a_model_that_is_not_built(tmp_path, monkeypatch):
    def build(*args):
        raise ImportError("no such library")

    monkeypatch.setattr(measure, "build", build)
    path = tmp_path / "models.json"
    assert run(path) == 0
    assert "no such library" in rows_of(path)[0]["failure"]


def test_a_lost_device_ends_the_process(tmp_path, monkeypatch):
    """... and the next one leaves that column alone."""
    monkeypatch.setitem(columns.COLUMNS, "compile", columns.Column("torch.compile", {"backend": failing}))
    kept = results.Results(tmp_path / "models.json").rows
    original = measure._Cells._free

    def free(self):
        if "compile" in self.row["columns"]:
            raise RuntimeError("an illegal memory access was encountered")
        original(self)

    wanted = ("eager", "compile", "ours")
    with monkeypatch.context() as patch:
        patch.setattr(measure._Cells, "_free", free)
        with pytest.raises(measure.DeviceLost):
            measure.measure(SMALL, 1, True, CPU, wanted, kept, measure.Limits(2, timed=False))
    kept = results.Results(tmp_path / "models.json").rows
    assert results.missing(kept.latest()[0], wanted) == ["eager", "ours"]
    measure.measure(SMALL, 1, True, CPU, wanted, kept, measure.Limits(2, timed=False))
    row, = kept
    assert not results.missing(row, wanted) and row["columns"]["compile"]["lost"]


class Processes:
    """Stands for subprocess.run: the worker runs here; where told so, it dies at a column."""

    def __init__(self, dies_at=None, seconds_over=False):
        self.dies_at, self.seconds_over, self.count = dies_at, seconds_over, 0

    def __call__(self, command, cwd, timeout):
        self.count += 1
        assert command[1:4] == ["-m", "benchmarks.models", "--worker"] and (Path(cwd) / "benchmarks").is_dir()
        kept = results.Results(Path(command[command.index("--json") + 1])).rows
        row = results.new_row(SMALL, 1, True, CPU)
        if self.dies_at:
            kept.put({**row, "trying": self.dies_at})
            self.dies_at = None
            return subprocess.CompletedProcess(command, -11)
        if self.seconds_over:
            kept.put({**row, "trying": "ours"})
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, cli.main(command[3:]))


@pytest.mark.parametrize("dies_at", [None, "ours"])
def test_a_process_a_model(dies_at, tmp_path, monkeypatch):
    processes = Processes(dies_at)
    monkeypatch.setattr(cli.subprocess, "run", processes)
    path = tmp_path / "models.json"
    assert run(path, "--isolate") == 0
    row, = rows_of(path)
    assert "trying" not in row and row["columns"]["eager"]["rounds"] == 2
    assert processes.count == (2 if dies_at else 1)
    if dies_at:
        assert "ended with -11" in row["columns"]["ours"]["failure"]
    else:
        assert row["command"] == "python -m benchmarks.models --device cpu --tiny --rounds 2"


def test_a_process_that_is_stopped_for_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.subprocess, "run", Processes(seconds_over=True))
    path = tmp_path / "models.json"
    assert run(path, "--isolate", "--seconds", "100") == 0
    assert f"not done in 100 s: {SMALL.name}" in capsys.readouterr().out
    row, = rows_of(path)
    assert not row["columns"] and "trying" not in row  # nobody is to blame: it is tried again


# -- the timed way, with made-up times


@pytest.fixture
def made_up(monkeypatch):
    def times(calls, rounds, seconds, seed):
        for call in calls.values():
            call()
        return {name: {"device_ms": [10.0 - i] * rounds, "wall_ms": [10.0] * rounds, "rounds": rounds}
                for i, name in enumerate(calls)}

    monkeypatch.setattr(clock, "times", times)
    monkeypatch.setattr(clock, "peak_mib", lambda call: 5.0)
    monkeypatch.setattr(clock, "kernels", lambda call: {"kernels": 7, "copies": 0, "busy_ms": 1.0})


def test_the_timed_way(tmp_path, monkeypatch, made_up, capsys):
    path, on_disk = tmp_path / "models.json", []

    def slow(gm, inputs):
        on_disk.extend(rows_of(path))
        return gm.forward

    for name, title, options, late in (("compile", "torch.compile", {"backend": "eager"}, False),
                                       ("autotune", "max-autotune", {"backend": slow}, True)):
        monkeypatch.setitem(columns.COLUMNS, name, columns.Column(title, options, slow=late))
    wanted = ["eager", "compile", "ours", "autotune"]
    measure.measure(SMALL, 1, True, CPU, wanted, results.Results(path).rows,
                    measure.Limits(3, compile_seconds=0))
    row, = rows_of(path)
    assert not results.missing(row, wanted) and "trying" not in row
    for cell in row["columns"].values():
        assert MEASURED <= set(cell)
    assert [len(row["compile_times"][name]) for name in ("backend_eager_s", "ours_s")] == [2, 2]
    # While the slow column was compiled, a full row of the others was there already.
    assert on_disk and results.missing(on_disk[0], wanted) == ["autotune"]
    assert on_disk[0]["columns"]["ours"]["kernels"] == 7

    with pytest.raises(ValueError):
        tables.markdown([row])  # a smoke run is never written
    row["smoke"] = False
    page = tables.markdown([row])
    assert "| 10.00 (10.00-10.00) |" in page and "1.25 / 1.00" in page  # eager 10, ours 8
    tables.show([row])
    assert "ours never below 1.0x eager: 1 of 1 rows" in capsys.readouterr().out
    goal = next(text for text in tables.goals([row]) if text.startswith("ours at least 1.3x"))
    assert goal.endswith(f"0 of 1 rows; not {SMALL.name} 1.25")
    assert "plot" in tables.plot([row], tmp_path / "plot.svg")


@pytest.fixture
def turns(monkeypatch):
    """What ran, as it was timed: the names of the calls, in capitals where not timed."""
    order = []
    monkeypatch.setattr(clock, "_host_seconds", lambda call: 0.0)
    monkeypatch.setattr(clock, "_wall_ms", lambda call: 1.0)
    monkeypatch.setattr(clock, "_device_ms", lambda call, host: order.append(order.pop().lower()) or 2.0)
    return order


def test_contenders_take_turns(turns):
    calls = {name.lower(): lambda name=name: turns.append(name) for name in "ABC"}
    found = clock.times(calls, 40, 60, seed=1)
    assert found["a"] == {"device_ms": [2.0] * 40, "wall_ms": [1.0] * 40, "places": found["a"]["places"],
                          "rounds": 40}
    rounds = ["".join(turns[i:i + 3]) for i in range(0, 120, 3)]
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}  # whoever ran before
    for name in calls:
        assert [order.index(name) for order in rounds] == found[name]["places"]
    assert clock.times(calls, 40, 60, seed=1) == found != clock.times(calls, 40, 60, seed=2)
    assert clock.times(calls, 9, 0)["b"]["rounds"] == 3  # no time left: as few as count


def test_a_contender_runs_before_it_is_timed(monkeypatch):
    """What ran before it would show in its time."""
    seen = []
    monkeypatch.setattr(clock, "_host_seconds", lambda call: 0.0)
    for name in ("_device_ms", "_wall_ms"):
        monkeypatch.setattr(clock, name, lambda call, *_, name=name: seen.append(name) or 1.0)
    clock.times({"a": lambda: seen.append("a")}, 1, 60)
    assert seen == ["a", "_device_ms", "_wall_ms"]


def timed(places=True, **device_ms):
    """A row with those times a round."""
    cells = {}
    for name, times in device_ms.items():
        cell = {"device_ms": times, "wall_ms": [2 * ms for ms in times], "rounds": len(times)}
        cells[name.replace("_", "-")] = {**cell, "places": [0] * len(times)} if places else cell
    return {"model": "m", "kind": specs.OTHER, "columns": cells}


DRIFTING = {"compile": [10.0, 11.0, 12.0, 13.0, 20.0], "ours_inductor": [10.0, 10.0, 11.0, 13.0, 25.0]}


def test_columns_are_compared_round_by_round():
    """The device slows down from round to round; what is left is the columns' difference."""
    row = timed(**DRIFTING)
    assert tables.by_round(row, "compile", "ours-inductor") == [1.0, 1.1, 12 / 11, 1.0, 0.8]
    assert tables.ratio(row, "compile", "ours-inductor") == 1.0
    assert tables.speed(row, "compile", "ours-inductor") == "1.00 (1.00-1.09)"
    _, (line,) = tables.ratios([row])
    assert line[-1] == "1.00 (1.00-1.09) / 1.00 (1.00-1.09)"
    slower = timed(compile=[10.0, 9.0], ours_inductor=[11.0, 10.0])
    assert tables.goals([slower])[0].endswith("0 of 1 rows; not m 0.90 (0.90-0.91)")


def test_rows_of_before_are_compared_by_their_medians():
    row = timed(places=False, **DRIFTING)
    assert not tables.by_round(row, "compile", "ours-inductor")
    assert tables.ratio(row, "compile", "ours-inductor") == 12 / 11
    assert tables.ratios([row])[1][0][-1] == "1.09 / 1.09"


def test_one_round_has_no_quartiles():
    assert tables.speed(timed(compile=[2.0], ours_inductor=[1.0]), "compile", "ours-inductor") == "2.00"


@pytest.mark.parametrize("cell", [{}, {"failure": "no such compiler"}, {"rounds": 2}])
def test_a_column_that_was_not_timed_is_not_compared(cell):
    row = timed(compile=[2.0, 2.0])
    row["columns"]["ours-inductor"] = cell
    assert tables.ratio(row, "compile", "ours-inductor") is None
    assert tables.speed(row, "compile", "ours-inductor") == ""


def test_time_limit():
    with pytest.raises(columns.OutOfTime), columns.time_limit(0.05):
        time.sleep(5)
    with columns.time_limit(0):
        pass


def test_separate_functions():
    """Contenders must not share what Dynamo keeps by code object."""
    model = torch.nn.Identity()
    one, other = columns.separate(model), columns.separate(model)
    assert one.__code__ is not other.__code__
    assert one(input=3) == 3


# -- single ops


@pytest.mark.parametrize("op", peers.OPS)
def test_single_ops(op):
    with torch.no_grad():
        buffers = peers.tensors_of(op, 16, 64, CPU)
        eager, exact = peers.OPS[op][0](*buffers), peers._exact(op, buffers)
        calls = peers.contenders(op)
        ours = calls["ours"](*buffers)
        assert peers.errors(ours, eager, exact) <= 1
        wrong = tuple(2 * x for x in ours) if isinstance(ours, tuple) else 2 * ours
        assert peers.errors(wrong, eager, exact) > 1
    for name, version in peers.installed().items():
        assert (name in calls) == (version != "not installed")


def test_the_notes_say_what_was_left_to_inductor():
    from ascend_ln_fuse import FusionReport

    reports = [FusionReport(choice="left to inductor: plain 1.000 ms, fused 2.000 ms")] * 2
    row = {"model": "m", "columns": {"ours-inductor": {"sites": measure._sites(reports)}}}
    assert tables.notes([row]) == [
        "m, ours, inductor: 2 x left to inductor: plain 1.000 ms, fused 2.000 ms"]
