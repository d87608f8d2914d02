"""Makes the modules next to this file importable, and gives the grid a folder for compiled kernels."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig) -> Path:
    """Final modules of earlier runs, by source and compiler (in .pytest_cache)."""
    return pytestconfig.cache.mkdir("ascend-kernels")
