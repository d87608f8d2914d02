"""The SoCs that `--soc` takes are those that the compilers take."""

import re
import subprocess

import pytest

pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")

from ascend_ln_fuse.kernels.ascend.toolchain import ALIASES, GENERATIONS, generation, resolve_soc  # noqa: E402
from ascend_ln_fuse.kernels.ascend.tools import find_tool  # noqa: E402
from ascend_ln_fuse.kernels.targets.npu import describe  # noqa: E402

TOOLS = {"A2": "bishengir-compile", "A3": "bishengir-compile", "A5": "bishengir-compile-a5"}


@pytest.mark.parametrize("family", GENERATIONS)
def test_names_are_the_compilers(family):
    text = subprocess.run([find_tool(TOOLS[family]), "--help"], capture_output=True, text=True).stdout
    # The compiler of the A5 lists others too, and that of A2 and A3 those of the A5.
    start = {"A2": r"Ascend910B", "A3": r"Ascend910_93", "A5": r"Ascend910_95|Ascend950"}[family]
    known = {name for name in re.findall(r"=(Ascend\S+)", text) if re.match(start, name)}
    assert known == set(GENERATIONS[family])
    assert all(generation(name) == family and resolve_soc(name) == name for name in known)


@pytest.mark.parametrize("name, means", [("ascend910b3", "Ascend910B3"), ("ASCEND910_9391", "Ascend910_9391"),
                                         ("a2", "A2"), ("950pr", "950PR")])
def test_capitals_do_not_matter(name, means):
    assert resolve_soc(name) == resolve_soc(means)


def test_aliases_and_cores():
    assert {generation(alias) for alias in ALIASES} == set(GENERATIONS)
    assert {(family, describe(name).cores) for family, names in GENERATIONS.items() for name in names} == \
        {("A2", 40), ("A2", 48), ("A3", 40), ("A3", 48), ("A5", 64)}


@pytest.mark.parametrize("name", ["Ascend950PR_1234", "Ascend910B5", "Ascend910B1C",
                                  "Ascend310B1", ""])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="unknown SoC") as error:
        resolve_soc(name)
    assert all(known in str(error.value) for names in GENERATIONS.values() for known in names)
