"""`ascend-ln-fuse tune`: what a machine without an accelerator can show of it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ascend_ln_fuse import Options
from ascend_ln_fuse.kernels import chain_choice, chain_contest
from ascend_ln_fuse.kernels.chain_choice import LIBRARY
from ascend_ln_fuse.loading import load_example
from ascend_ln_fuse.screens import show_tuned
from ascend_ln_fuse.tuning import TuneError, device_for_tuning, tune

MODEL = '''
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def build():
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    return model.bfloat16(), {"x": torch.randn(2, 3, 32).bfloat16()}

def fails():
    return Block(), torch.randn(3, 31)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A device on which everything takes as long as it says here, and kernels run in the interpreter."""
    from ascend_ln_fuse.kernels.store import Store

    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(chain_choice, "_store", Store("chains"))
    monkeypatch.setattr(chain_choice, "may_measure", lambda device: True)
    monkeypatch.setattr(chain_contest, "host_microseconds", lambda call, device: 1.0)
    monkeypatch.setattr(chain_contest, "device_microseconds",
                        lambda call, cold: 5.0 if hasattr(call, "args") else 10.0)


def test_choices_are_made_shown_and_kept(file, clock, capsys, monkeypatch, tmp_path):
    tuned = tune(load_example(f"{file}:build", empty=False), torch.device("cpu"))
    site = tuned.reports[0].sites[0]
    assert site.chain_ways() and all("one kernel" in way and "5.0 us" in way for way in site.chain_ways())
    show_tuned(tuned)
    out = capsys.readouterr().out
    assert "blocks.0.norm, model.py:11\n  part 1 of 2, up to 8 rows: one kernel" in out
    assert f"{LIBRARY} 10.0 us" in out
    assert str(tmp_path / "cache") in out.replace("\n", "")
    data = json.loads(json.dumps(tuned.to_dict()))
    assert data["reports"][0]["sites"][0]["ways"] == list(site.chain_ways())
    monkeypatch.setattr(chain_contest, "device_microseconds", None)  # nothing can be measured any more
    again = tune(load_example(f"{file}:build", empty=False), torch.device("cpu"))
    assert again.reports[0].sites[0].chain_ways() == site.chain_ways()


def test_options_are_the_backends(file, capsys):
    """But for the report, which has a table of its own."""
    tuned = tune(load_example(f"{file}:build", empty=False), torch.device("cpu"), grad=True,
                 options=Options(training="decline", report="full"))
    assert {site.status for site in tuned.reports[0].sites} == {"declined"}
    assert not capsys.readouterr().err


def test_what_fails_is_said(file):
    with pytest.raises(TuneError, match=r"does not run on cpu: .*model.py:11\)"):
        tune(load_example(f"{file}:fails", empty=False), torch.device("cpu"))


@pytest.mark.parametrize("name, words", [
    ("cpu", "--device cpu: nothing is measured on a CPU"), ("gpu0", "--device gpu0: .*gpu0")])
def test_devices_that_will_not_do(name, words):
    with pytest.raises(TuneError, match=words):
        device_for_tuning(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_no_accelerator(file):
    done = subprocess.run([sys.executable, "-m", "ascend_ln_fuse", "tune", f"{file}:build"], text=True,
                          capture_output=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2 and not done.stdout
    assert "no accelerator is there: nothing is measured on a CPU" in done.stderr
