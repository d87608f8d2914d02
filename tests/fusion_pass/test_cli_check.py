"""The command line: `check`, `profile`, models at full size, the page's example."""

import json
import os
import re
import subprocess
import sys

import pytest
from cli_cases import PAGE, compilers, explained

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
