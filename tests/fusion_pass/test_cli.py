"""The command line, as a process: a fake device npu stays in the process that names it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"
compilers = pytest.mark.skipif(
    importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("triton") is None,
    reason="needs triton-ascend and ascendnpu-ir")

MODELS = '''
import functools
import warnings
import torch
from torch import nn

class Strided(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.register_buffer("offset", torch.zeros(dim))
        self.norm, self.table = nn.LayerNorm(dim), torch.ones(1)

    def forward(self, qkv, scale=1.0):
        q, _, _ = qkv.view(-1, 3, 4, 128).unbind(1)
        return self.norm(q) * scale + self.offset.to(q.dtype)

def positional():
    print("a word from the model")
    return Strided().bfloat16(), [torch.randn(50, 1536, dtype=torch.bfloat16)]
def keywords(): return Strided(), {"qkv": torch.randn(50, 1536), "scale": 2.0}
def tensor(): return Strided(), torch.randn(50, 1536)
def function(): return torch.nn.functional.layer_norm, (torch.randn(4, 8), (8,))
def huge():  # 86 GB of weights
    pairs = [nn.Sequential(nn.Linear(4096, 65536), nn.Linear(65536, 4096)) for _ in range(40)]
    return nn.Sequential(*pairs, nn.LayerNorm(4096)), torch.randn(3, 4096)
def breaks():
    def model(x):
        y = nn.functional.layer_norm(x, (8,))
        torch._dynamo.graph_break()
        return nn.functional.rms_norm(y.relu(), (8,))
    return model, torch.randn(4, 8)
def wide(): return nn.LayerNorm(64).double(), torch.randn(3, 64, dtype=torch.double)
def plain(): return nn.ReLU(), torch.randn(3)
def values():
    class Model(nn.Module):
        def forward(self, x): return x * int(x.sum().item())
    return Model(), torch.randn(3)
def mismatch(): return nn.Linear(8, 8), torch.randn(3, 7)
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x): return self.linear(x)  # the line to blame
def inside(): return Wrong(), torch.randn(3, 7)
class Resumed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        x = self.norm(x * cached(3))
        torch._dynamo.graph_break()
        x = self.norm(x * cached(4))
        torch._dynamo.graph_break()
        warnings.warn("the model's own word")
        return self.norm(x)
@functools.lru_cache
def cached(number): return number
def resumed(): return Resumed(), torch.randn(3, 8)
def long_rows():
    return nn.Sequential(nn.LayerNorm(12288), nn.ReLU(), nn.RMSNorm(12288)).bfloat16(), \
        torch.randn(64, 1024, 12288, dtype=torch.bfloat16)
class Left(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = torch.compiler.disable(first), second
    def forward(self, x): return self.second(self.first(x))
def long_rows_left():
    (first, _, second), x = long_rows()
    return Left(first, second), x
def tensor_once(): return nn.LayerNorm(128), torch.randn(4096, 128)
def ragged(): return nn.LayerNorm(128).bfloat16(), torch.randn(211, 128).bfloat16()
class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
def ffn(): return Ffn().bfloat16(), torch.randn(2, 33, 64).bfloat16()
class Channels(nn.Module):
    def forward(self, x):
        mean = x.pow(2).mean(1, keepdim=True)
        written = x * torch.rsqrt(mean + 1e-6)
        return written, nn.functional.layer_norm(x.permute(0, 2, 3, 1), (24,))
def channels(): return Channels(), torch.randn(2, 24, 8, 8)
class Tokens(nn.Module):
    """A stream that lies across memory, and a cat of all pieces of it."""
    def forward(self, x):
        x = (x * 2).transpose(1, 2)
        for _ in range(3):
            x = x + nn.functional.layer_norm(x, (64,))
        whole = x + nn.functional.layer_norm(x, (64,))
        y = (whole * 2).contiguous()
        return nn.functional.layer_norm(torch.cat([y[:, :5], y[:, 5:]], 1), (64,))
def tokens(): return Tokens(), torch.randn(2, 64, 32)
class Cast(nn.Module):
    def __init__(self, *devices, enabled=True):
        super().__init__()
        self.norm, self.devices, self.enabled = nn.LayerNorm(8), devices, enabled
    def forward(self, x):
        for device in self.devices:
            with torch.autocast(device, torch.bfloat16, enabled=self.enabled):
                x = self.norm(x)
        return x
def cast_npu(): return Cast("npu"), torch.randn(3, 8)
def cast_elsewhere(): return Cast("cuda", "cpu", "cuda"), torch.randn(3, 8)
def cast_nowhere(): return Cast("npu", "cuda", enabled=False), torch.randn(3, 8)
class Holder:
    def __init__(self, module): self.held = [module]
    def run(self, x): return self.held[0](x)
    def __call__(self, x): return self.run(x)
in_this_file = nn.LayerNorm(8)
def closure():
    norm = nn.LayerNorm(8)
    inner = lambda x: norm(x)
    return (lambda x: inner(x)), torch.randn(3, 8)
def of_the_file(): return (lambda x: in_this_file(x)), torch.randn(3, 8)
def bound(): return Holder(nn.LayerNorm(8)).run, torch.randn(3, 8)
def callable_object(): return Holder(nn.LayerNorm(8)), torch.randn(3, 8)
def partial():
    apply = lambda module, x: module(x)
    return functools.partial(apply, nn.Sequential(nn.LayerNorm(8))), torch.randn(3, 8)
class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(8.0)
    def forward(self, x): return x + self.table
def constant(): return Constant(), torch.randn(3, 8)
def fails(): raise KeyError("no such config")
def takes(size): return None
def nothing(): return None
def number(): return 3, torch.randn(3)
def text(): return nn.ReLU(), "x"
a_number = 3
a_model = nn.ReLU()
'''


LINE_TO_BLAME = 1 + MODELS[:MODELS.index("# the line to blame")].count("\n")


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


#: Answers commands, one a line, in one process: importing torch costs more than most of them.
SERVER = """
import json, sys, warnings
from click.testing import CliRunner
from ascend_ln_fuse.cli import main
for line in sys.stdin:
    done = CliRunner().invoke(main, json.loads(line), prog_name="ascend-ln-fuse")
    print(json.dumps([done.exit_code, done.stdout, done.stderr, repr(done.exception)]), flush=True)
"""


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


def explained(cli, name, *more):
    return json.loads(cli("explain", f"models.py:{name}", "--json", *more)[0])["reports"]


# -- explain


def test_explain_prints_the_report(cli):
    out, err = cli("explain", "models.py:positional")
    assert "1 norm site, 1 fused, 0 declined" in " ".join(out.split()) and "✓ norm, models.py:" in out
    assert "Slice*" in out and "Cast* x2" in out and "predicted from CANN's sources" in out
    assert "a word from the model" in err and "a word" not in out
    out, _ = cli("explain", "models.py:positional", "--full", "--soc", "A3")
    assert "rules: Ascend910_9382" in out and "def aln_layer_norm_" in out


def test_explain_as_json(cli):
    one, two = (explained(cli, "positional", "--soc", soc) for soc in ("Ascend910B3", "Ascend910B1"))
    site = one[0]["sites"][0]
    assert site["device"] == "npu:0" and site["kernel"].startswith("aln_layer_norm_")
    assert site["hidden_kernels"] == ["Slice", "Cast", "Cast"]
    assert two[0]["sites"][0]["kernel"] != site["kernel"], "kernels are named for the SoC"


def test_ascend_wants_channels_innermost(cli):
    """Elsewhere both are read where they lie (tests/patterns/test_channel_norm.py)."""
    written, library = explained(cli, "channels")[0]["sites"]
    assert written["status"] == "declined" and "not the innermost in memory" in written["reason"]
    assert library["status"] == "fused" and library["bytes_after"] == library["bytes_before"]  # of a copy
    assert library["note"].startswith(f"reads a contiguous copy of its input: {written['reason']}")
    assert "`x.movedim(dim, -1).contiguous()`" in written["remedy"] and not library["remedy"]


@pytest.mark.parametrize("name, graphs", [("keywords", 1), ("function", 1), ("huge", 1), ("breaks", 2)])
def test_what_a_function_may_return(cli, name, graphs):
    reports = explained(cli, name)
    assert len(reports) == graphs and all(r["fused"] == 1 and r["error"] is None for r in reports)


@pytest.mark.parametrize("name", ["closure", "of_the_file", "bound", "callable_object", "partial"])
def test_modules_that_a_function_calls(cli, name):
    """Their parameters are on the NPU, as those of a module that is returned itself."""
    site, = explained(cli, name)[0]["sites"]
    assert (site["status"], site["device"]) == ("fused", "npu:0")


def test_modules_are_found_once_and_empty_cells_are_not_looked_into():
    import torch

    from ascend_ln_fuse.trace import modules_of

    norm = torch.nn.LayerNorm(8)

    def later():
        return not_set

    both = [norm, lambda x: norm(x), later]
    both.append(both)
    if both is None:
        not_set = norm
    assert modules_of(lambda x: both) == [norm] and modules_of(norm) == [norm]
    assert modules_of(torch.nn.functional.layer_norm) == []


def test_autocast(cli):
    instead = "leave it out, and return the model and its inputs in its dtype, as in model.bfloat16()"
    _, err = cli("explain", "models.py:cast_npu", code=2)
    assert 'torch.autocast("npu") needs torch_npu' in err and instead in err
    report, = explained(cli, "cast_elsewhere")
    assert [note.split(";")[0] for note in report["notes"]] == [
        f'torch.autocast("{device}") casts nothing that is on "npu"' for device in ("cuda", "cpu")]
    assert all(instead in note for note in report["notes"])
    report, = explained(cli, "cast_nowhere")
    assert report["notes"] == [] and report["fused"] == 2


def test_explain_tells_no_time(cli):
    """Beside the name of an NPU, the pass's own would read as the NPU's."""
    for command, name in (("explain", "breaks"), ("explain", "plain")):
        out, _ = cli(command, f"models.py:{name}")
        assert "ascend_ln_fuse: graph 0" in out and not re.search(r"\d\s*(ms|us|s)\b", out)
        assert "seconds" not in cli(command, f"models.py:{name}", "--json")[0]


def test_graphs_behind_a_break_are_named_after_the_users_function(cli):
    out, err = cli("explain", "models.py:resumed")
    titles = re.findall(r"graph \d of (.*?):", out)
    assert len(titles) >= 2 and set(titles) == {"forward in models.py"}
    assert not re.search("torch_dynamo_resume|lru_cache|Dynamo", out + err)
    assert "the model's own word" in err


def test_explain_counts_what_the_kernel_of_long_rows_reads(cli):
    """Three passes of LayerNorm over x and one write, where two and one were the least; RMSNorm has two."""
    first, second = explained(cli, "long_rows")[0]["sites"]
    size = 64 * 1024 * 12288 * 2
    for site, times in ((first, 3), (second, 2)):
        read, loss, leave = site["note"].split("; ")
        assert read == f"rows of 12288 in pieces of 2048, read {times} times"
        assert site["bytes_after"] > site["bytes_before"] and loss.startswith("by this count a loss: ")
        assert leave.startswith("torch.compiler.disable on a norm leaves it out")
    # The weights are read once for each tile of four rows.
    assert first["bytes_after"] == pytest.approx((4 + 2 / 4) * size, rel=1e-3)
    assert second["bytes_after"] == pytest.approx((3 + 1 / 4) * size, rel=1e-3)
    site = explained(cli, "positional")[0]["sites"][0]
    assert site["note"] == "" and site["bytes_after"] == 2 * 50 * 4 * 128 * 2 + 3 * 128 * 2
    assert site["bytes_after"] < site["bytes_before"]
    same, = explained(cli, "tensor_once")[0]["sites"]
    assert same["note"] == "" and same["bytes_after"] == same["bytes_before"]
    left = [site for report in explained(cli, "long_rows_left") for site in report["sites"]]
    assert [site["pattern"] for site in left] == ["rms_norm"], "as the note says"


def test_options_are_the_backends(cli):
    """What it explains is what the backend does with these options."""
    streams = "1 stream that lies across memory is copied"
    cats = "1 cat of all pieces of a tensor is not made"

    def notes(*options):
        report, = explained(cli, "tokens", *options)
        return [note.split(" where ")[0].split(":")[0] for note in report["notes"]]

    assert notes() == [cats, streams]
    assert notes("-o", "streams=keep") == [cats]
    assert notes("--option", "cats=keep", "-o", "streams=keep") == []
    assert notes("-o", "inner=inductor") == [cats]  # it chooses layouts itself
    site, = explained(cli, "ffn", "-o", "training=decline", "--grad")[0]["sites"]
    assert "the option training is 'decline'" in site["reason"]
    assert "linear" in explained(cli, "ffn")[0]["sites"][0]["chain"]
    assert not explained(cli, "ffn", "-o", "inner=inductor")[0]["sites"][0]["chain"]


@pytest.mark.parametrize("given, message", [
    ("streams=no", "option 'streams' of ascend_ln_fuse must be 'simplify' or 'keep', not 'no'"),
    ("stream=keep", "unknown option 'stream' of ascend_ln_fuse (did you mean 'streams'?)"),
    ("streams", "'streams' is not NAME=VALUE, as in streams=keep"),
    ("inner=inducter", "no Dynamo backend 'inducter'; known: "),
])
@pytest.mark.parametrize("command", ["explain", "check", "tune"])
def test_options_that_the_backend_does_not_know(cli, command, given, message):
    out, err = cli(command, "models.py:plain", "-o", given, code=2)
    assert not out and "Invalid value for '-o' / '--option': " in err
    assert message in " ".join(err.split())


@pytest.mark.parametrize("given, message", [
    ("report=full", "-o report does nothing here: --full and --json choose what is printed.\n"),
    ("self_check=always", "-o self_check does nothing here: no kernel runs in a model"),
    ("inner_choice=fuse", "-o inner_choice does nothing here: nothing is measured"),
    ("masks=keep", "-o masks does nothing here: masks have no values here"),
])
def test_options_that_do_nothing_without_a_run(cli, given, message):
    out, err = cli("explain", "models.py:plain", "-o", given, "-o", "streams=keep", "-o", given)
    assert err.startswith(message) and err.count("\n") == 1 and out == cli("explain", "models.py:plain")[0]


def test_every_option_has_an_effect_or_is_told_of():
    """Those that decide what is fused are those of docs/ascend.md."""
    from dataclasses import fields

    from ascend_ln_fuse.cli import _WITHOUT_EFFECT
    from ascend_ln_fuse.options import Options

    names = {field.name for field in fields(Options)}
    assert set(_WITHOUT_EFFECT) <= names
    said = PAGE.read_text().partition("what is fused: ")[2]
    deciding, others = said.partition(". ")[0], said.partition(". ")[2].partition(") do nothing")[0]
    assert set(re.findall("`(\\w+)`", deciding)) == names - set(_WITHOUT_EFFECT)
    assert set(re.findall("`(\\w+)`", others)) == set(_WITHOUT_EFFECT)


def test_sizes_are_those_of_the_inputs(cli):
    for command in ("explain", "check"):
        _, err = cli(command, "models.py:plain", "-o", "dynamic=True", code=2)
        assert "the sizes of the inputs that FUNCTION returns" in " ".join(err.split())


def test_nothing_to_fuse(cli):
    out = " ".join(cli("explain", "models.py:plain")[0].split())
    assert out == "ascend_ln_fuse: graph 0: no LayerNorm, RMSNorm or l2 norm was found"


@pytest.mark.parametrize("target, message", [
    ("missing.py:build", "no such file: missing.py"),
    ("words.txt:build", "words.txt is no Python file"),
    (".:build", "no such file: ."),
    ("models.py", "'models.py' is not FILE:FUNCTION"),
    ("broken.py:build", "broken.py cannot be imported: ModuleNotFoundError: No module named 'not_there' "
                        "(broken.py:2)"),
    ("exits.py:build", "exits.py cannot be imported: SystemExit: 3"),
    ("models.py:nobody", "models.py has no function 'nobody': it has positional, keywords, tensor"),
    ("models.py:a_number", "a_number in models.py is an object of type int, not a function"),
    ("models.py:a_model", "a_model in models.py is an object of type ReLU, not a function"),
    ("models.py:takes", "takes in models.py takes arguments (size)"),
    ("models.py:fails", "fails() in models.py failed: KeyError: 'no such config' (models.py:"),
    ("models.py:nothing", "returned an object of type NoneType, not (model, inputs)"),
    ("models.py:number", "an object of type int where a model was expected"),
    ("models.py:text", "returned an object of type str as inputs"),
])
def test_errors_of_loading(target, message, folder, monkeypatch):
    """In this process: what names a device comes later."""
    from ascend_ln_fuse.loading import LoadError, load_example

    monkeypatch.chdir(folder)
    with pytest.raises(LoadError) as error:
        load_example(target)
    assert message in str(error.value)


def test_errors_are_one_line_and_code_2(cli, folder):
    for name, message in [
        ("missing.py:build", "no such file: missing.py"),
        ("models.py:mismatch", "the model does not run on fake tensors: RuntimeError: a and b must have same "
                               "reduction dim, but got [3, 7] X [8, 8].\n"),
        ("models.py:inside", f"but got [3, 7] X [8, 8]. (models.py:{LINE_TO_BLAME})\n"),
        ("models.py:values", "It needs a value out of a tensor"),
        ("models.py:constant", "stays where it was made: register it as a buffer"),
    ]:
        out, err = cli("explain", name, code=2)
        assert out == "" and err.startswith("Error: ") and message in err and err.count("\n") == 1
    done = subprocess.run([sys.executable, "-m", "ascend_ln_fuse", "--traceback", "explain", "x.py:build"],
                          cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" in done.stderr and "LoadError: no such file" in done.stderr


def test_parameters_stay_shared():
    import torch

    from ascend_ln_fuse.loading import empty_parameters

    with empty_parameters():
        tied = torch.nn.Linear(4, 4, bias=False)
        other = torch.nn.Embedding(4, 4)
        other.weight = tied.weight
    assert other.weight is tied.weight and tied.weight.device.type == "meta" and tied.weight.is_leaf
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


# -- check


@compilers
def test_check_compiles_and_runs(cli):
    out, _ = cli("check", "models.py:positional", "--verify")
    assert re.search(r"aln_layer_norm_\w{10}\s+1\s+\d+ x 128\s+\d+/192\s+\S+ KiB\s+ok", out)
    assert "run, right" in out and "is launched at\n  norm, models.py:" in out
    assert "Nothing ran on an NPU." in out


@compilers
def test_check_compiles_what_runs_behind_products(cli, folder, tmp_path):
    """On Ascend the library runs a chain's products, and a kernel each what is pointwise behind them."""
    out, _ = cli("check", "models.py:ffn", "--verify", "--json")
    data = json.loads(out)
    site, = data["reports"][0]["sites"]
    assert len(site["kernels_behind"]) == 2 and "silu mul" in site["chain"]
    assert {k["kernel"] for k in data["kernels"]} == {site["kernel"], *site["kernels_behind"]}
    assert all(k["verdict"] == "ok" and k["error_share"] <= 1 for k in data["kernels"])
    report, csv = tmp_path / "report.json", tmp_path / "kernel_details.csv"
    report.write_text(out)
    launched = site["kernel"], site["kernels_behind"][0]
    csv.write_text("Name,Type\n" + "".join(f"{name},x\n" for name in launched))
    table, _ = cli("profile", str(csv), "--report", str(report), "--json", code=1)
    assert [row["launches"] for row in json.loads(table)["sites"]] == [1, 1, 0]


@compilers
def test_check_as_json(cli):
    data = json.loads(cli("check", "models.py:breaks", "--json", "--soc", "A5", "--jobs", "2")[0])
    assert data["soc"] == "Ascend950PR_9589" and set(data["tools"]) == {"triton-ascend", "ascendnpu-ir"}
    assert [k["verdict"] for k in data["kernels"]] == ["ok", "ok"] and not data["failed"]
    assert {k["kernel"] for k in data["kernels"]} == \
        {s["kernel"] for r in data["reports"] for s in r["sites"]}


@compilers
def test_bytes_of_check_are_those_of_explain_but_for_what_its_legend_says(cli):
    data = json.loads(cli("check", "models.py:ragged", "--json")[0])
    kernel, = data["kernels"]
    site, = explained(cli, "ragged")[0]["sites"]
    row, rows, weights = 128 * 2, 211, 2  # weight and bias
    tile = int(re.match(r"(\d+) rows x 128 columns", kernel["tile"])[1])
    tiles = -(-rows // tile)
    assert rows % tile and kernel["bytes_moved"] - kernel["bytes_ideal"] == (tiles * tile - rows) * 2 * row
    programs, rest = divmod(kernel["bytes_ideal"] - site["bytes_after"], weights * row)
    assert rest == 0 and 1 < programs + 1 <= tiles
    assert "ideal: every tensor once" in cli("check", "models.py:ragged")[0]


@compilers
def test_check_of_a_kernel_that_no_npu_has(cli):
    out, _ = cli("check", "models.py:wide")
    assert "no kernel" in out and "does not compute in f64" in out or "No kernel would be launched" in out


def test_a_soc_that_is_unknown(cli):
    _, err = cli("check", "models.py:plain", "--soc", "H100", code=2)
    assert "unknown SoC 'H100'. Known are A2, A3, 910_93xx, A5, 950PR, and\n" in err
    assert "  A2: Ascend910B1, Ascend910B2," in err
    for command in ("explain", "check"):
        _, err = cli(command, "models.py:plain", "--soc", "Ascend950PR_1234", code=2)
        assert "unknown SoC 'Ascend950PR_1234'" in err and "Ascend950PR_9589" in err
        assert max(map(len, err.split("\n"))) <= 110
    _, err = cli("check", "models.py:plain", "--soc", "A5", "--verify", code=2)
    assert "the interpreter knows A2 and A3" in err


def test_each_soc_that_the_help_names_can_be_typed(cli):
    from ascend_ln_fuse.kernels.ascend.toolchain import resolve_soc

    for command in ("explain", "check"):
        out, _ = cli(command, "--help")
        text = " ".join(out.partition("--soc NAME")[2].partition("[default")[0].split())
        named = re.findall(r"Ascend\w+|\bA\d\b", text)
        assert len(named) == 6 and [resolve_soc(name) for name in named[:3]] == named[:3]
        assert [resolve_soc(name) for name in named[3:]] == named[:3]


def test_check_without_compilers(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ascendnpuir'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "ascend_ln_fuse", "check", "models.py:positional"],
                          cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "pip install" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("columns", ["60", "80"])
def test_names_of_kernels_are_never_cut(columns, monkeypatch, capsys):
    """Whatever the verdict: their end is what a profile shows."""
    from ascend_ln_fuse.kernels.ascend.evidence import Evidence
    from ascend_ln_fuse.kernels.ascend.tools import Outcome
    from ascend_ln_fuse.screens import show_evidence

    monkeypatch.setenv("COLUMNS", columns)
    found = [Evidence(f"aln_layer_norm_{outcome.name.lower():_<10.10}", 12, "1024 rows x 12288 columns", (),
                      outcome, 200_000, 248 * 1024, outcome is Outcome.PASSED, 3 << 30, 1 << 30,
                      reason="its reason") for outcome in Outcome]
    show_evidence(found, [], "Ascend950PR_9589", {})
    out = capsys.readouterr().out
    for one in found:
        assert re.search(rf"^{re.escape(one.kernel)} ", out, re.MULTILINE), out
        assert f"{one.kernel}: its reason" in out
    assert "degraded" in out
    assert out.count("\nideal: every tensor once, and weights") == 1


# -- profile


def test_profile(cli):
    out, _ = cli("profile", "kernel_details.csv")
    assert "Slice x1" in out and "2 kernels: 1 norms, 1 hidden kernels" in out
    out, _ = cli("profile", "kernel_details.csv", "--report", "report.json", code=1)
    assert "1 of 1 fused sites have no launch" in out
    out, _ = cli("profile", "fused.csv", "--report", "report.json")
    assert re.search(r"norm, m.py:1 +1\n", out)
    data = json.loads(cli("profile", "fused.csv", "--report", "report.json", "--json")[0])
    assert data["sites"] == [{"where": "norm, m.py:1", "kernel": "aln_layer_norm_0123456789", "launches": 1}]
    assert data["hidden"] == 1
    out, _ = cli("profile", "fused.csv", "--report", "declined.json", code=1)
    assert "no fused site" in out
    _, err = cli("profile", "nothing.csv", code=2)
    assert err.startswith("Error: no such file: nothing.csv; CSV is kernel_details.csv of torch_npu.profiler")


def test_a_profile_needs_no_torch(folder):
    code = "import sys; sys.modules['torch'] = None; from ascend_ln_fuse.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "profile", "fused.csv"], cwd=folder, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "3 kernels" in done.stdout, done.stderr


# -- models at full size

FULL = '''
import torch
def wan():
    from diffusers import WanTransformer3DModel
    half = dict(dtype=torch.bfloat16)
    return WanTransformer3DModel().bfloat16().eval(), {
        "hidden_states": torch.randn(1, 16, 21, 60, 104, **half),
        "timestep": torch.ones(1, dtype=torch.int64),
        "encoder_hidden_states": torch.randn(1, 512, 4096, **half)}
def qwen():
    from transformers import Qwen3Config, Qwen3ForCausalLM
    config = Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936)
    return Qwen3ForCausalLM(config).bfloat16().eval(), {"input_ids": torch.zeros(1, 4096, dtype=torch.int64)}
'''
MEASURED = '''
import re, resource, sys
from ascend_ln_fuse.cli import main
try:
    main()
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(u.ru_utime + u.ru_stime for u in used)
    # ru_maxrss begins with what the process had that started this one; VmHWM with this program.
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
    print("\\nused", seconds, peak / 1024**2, file=sys.stderr)
'''


@compilers
@pytest.mark.parametrize("name, library, sites, kernels", [
    ("wan", "diffusers", 281, 4), ("qwen", "transformers", 145, 3)])
def test_a_model_at_its_published_size(name, library, sites, kernels, tmp_path):
    """14 and 8 billion parameters: below 60 seconds of one core and 4 GiB, the compilers included."""
    pytest.importorskip(library)
    (tmp_path / "full.py").write_text(FULL)
    done = subprocess.run([sys.executable, "-c", MEASURED, "check", f"full.py:{name}", "--verify", "--json"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert sum(r["found"] for r in data["reports"]) == sites == sum(r["fused"] for r in data["reports"])
    found = data["kernels"]
    assert len(found) >= kernels and {k["verdict"] for k in found} == {"ok"}
    assert all(k["double_buffered"] and k["error_share"] <= 1 for k in found)
    assert all(1 <= k["bytes_moved"] / k["bytes_ideal"] < 1.01 for k in found)
    assert len({k["kernel"][-49:] for k in found}) == len(found), "a profile tells them apart"
    seconds, gib = map(float, re.search(r"^used (\S+) (\S+)$", done.stderr, re.MULTILINE).groups())
    assert seconds < 60 and gib < 4, (seconds, gib)


# -- the page


@compilers
def test_the_example_of_the_page(tmp_path, cli):
    text = PAGE.read_text(encoding="utf-8").split("<!-- model.py -->\n```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "model.py").write_text(text)
    out, _ = cli("check", f"{tmp_path}/model.py:build", "--verify")
    assert "2 norm sites, 2 fused" in out and "run, right" in out
