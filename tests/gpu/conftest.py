"""Skips the tests of this folder where there is no NVIDIA GPU.

With ASCEND_LN_FUSE_INTERPRET=1 those that take the `device` fixture and are not marked `real_gpu` run on
the CPU instead, through Triton's interpreter (slow: choose with -k).
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# `norm_cases` lies there.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

GPU = torch.cuda.is_available() and torch.version.cuda is not None
INTERPRET = os.environ.get("ASCEND_LN_FUSE_INTERPRET") == "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "real_gpu: cannot run through the interpreter")


def pytest_collection_modifyitems(items):
    if GPU:
        return
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not INTERPRET or "device" not in item.fixturenames or item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; none was found"))


def pytest_terminal_summary(terminalreporter):
    if not GPU and not INTERPRET and terminalreporter.stats.get("skipped"):
        terminalreporter.line("tests/gpu was skipped: it needs an NVIDIA GPU, and none was found")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")
