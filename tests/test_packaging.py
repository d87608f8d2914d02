"""The package as users install it: one import name, an entry point, nothing loaded that is not needed."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"fusion_pass": "", "patterns": "patterns/", "kernels": "kernels/"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources: building leaves files beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in [*FOLDERS, "pyproject.toml", "README.md"]:
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps",
                    "--no-build-isolation", "--no-index", "-w", out, source], check=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel, unpacked: what a plain `pip install` puts into site-packages."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def python(code: str, site: Path, **environment: str) -> str:
    """Run `code` with `site` in front of everything else, away from the repository."""
    environment = {**os.environ, "PYTHONPATH": str(site), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=site.parent, env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_and_nothing_else_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if name.endswith(".py")}
    written = {f"ascend_ln_fuse/{prefix}{path.relative_to(ROOT / folder).as_posix()}"
               for folder, prefix in FOLDERS.items() for path in (ROOT / folder).rglob("*.py")}
    assert packed == written
    # transformers probes for a module `kernels`: ours must never be one.
    assert {name.split("/")[0] for name in names} == {"ascend_ln_fuse", "ascend_ln_fuse-0.1.0.dist-info"}


def test_the_command_is_installed(wheel):
    with zipfile.ZipFile(wheel) as packed:
        entries = packed.read("ascend_ln_fuse-0.1.0.dist-info/entry_points.txt").decode()
    assert "[console_scripts]\nascend-ln-fuse = ascend_ln_fuse.cli:main" in entries


def test_the_backend_is_found_with_no_import_of_ours(installed):
    out = python("""
import sys, torch
from torch._dynamo.backends.registry import list_backends
assert "ascend_ln_fuse" in list_backends(exclude_tags=())
assert not any(name.startswith("ascend_ln_fuse") for name in sys.modules)
norm = torch.nn.LayerNorm(8)
x = torch.randn(3, 8)
assert torch.equal(torch.compile(norm, backend="ascend_ln_fuse")(x), norm(x))
print(sys.modules["ascend_ln_fuse"].__file__)
""", installed)
    assert Path(out) == installed / "ascend_ln_fuse" / "__init__.py"


def test_works_without_triton_torch_npu_and_rich(installed):
    """No accelerator and no Triton: the reference runs. rich is wanted by reports that are printed."""
    python("""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "torch_npu", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
x = torch.randn(3, 8)
assert torch.equal(compiled(x), model(x))
from ascend_ln_fuse import last_reports
assert last_reports()[-1].fused == 1 and last_reports()[-1].to_json()
""", installed, ASCEND_LN_FUSE_STRICT="1")


def test_importing_costs_little_and_loads_nothing(installed):
    out = python("""
import sys, time, torch
before = set(sys.modules)
started = time.perf_counter()
import ascend_ln_fuse
spent = time.perf_counter() - started
print(spent, sorted({name.split(".")[0] for name in set(sys.modules) - before}))
""", installed)
    spent, loaded = out.split(" ", 1)
    assert loaded == "['ascend_ln_fuse']"
    assert float(spent) < 0.05


def test_the_module_kernels_is_not_ours(installed):
    """Also with the repository itself on the path, as for a script that is run in it."""
    python("""
import importlib.util, transformers
assert importlib.util.find_spec("ascend_ln_fuse.kernels") is not None
from transformers import LlamaModel
""", ROOT) if importlib.util.find_spec("transformers") else pytest.skip("needs transformers")


def test_the_version_is_one():
    import ascend_ln_fuse

    assert importlib.metadata.version("ascend-ln-fuse") == ascend_ln_fuse.__version__


def test_pins_lie_within_what_the_project_asks_for():
    project = (ROOT / "pyproject.toml").read_text()
    pinned = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert {"torch", "numpy", "triton-ascend", "ascendnpu-ir"} <= {name for name, _ in pinned}
    for name, version in pinned:
        for sign, bound in re.findall(rf'"{name}(>=|==|<)([\w.]+)', project):
            have, want = (tuple(map(int, re.findall(r"\d+", v)[:3])) for v in (version, bound))
            assert {">=": have >= want, "==": have == want, "<": have < want}[sign], (name, version)


def test_no_machine_is_named_in_the_project_files():
    for name in ("pyproject.toml", "requirements.txt", "Makefile", ".ci/run", "README.md"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|/opt/|/work/|/home/|index-url|find-links", text), name
