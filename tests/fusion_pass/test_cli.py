"""The command line as a process (a fake device npu stays in the one that names it): `explain`, errors."""

import re
import subprocess
import sys

import pytest
from cli_cases import LINE_TO_BLAME, PAGE, explained

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
