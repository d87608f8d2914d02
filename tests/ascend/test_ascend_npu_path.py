"""The NPU path for real, up to the launch: a device named npu over CPU memory, Triton for Ascend with the
official compiler behind it, and the interpreter where the hardware would be. See npu_checks.py."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")


@pytest.mark.parametrize("check", ["models", "arguments", "overflow", "columns", "last_resort", "around"])
def test_on_npu(check):
    script = Path(__file__).with_name("npu_checks.py")
    done = subprocess.run([sys.executable, script, check], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
