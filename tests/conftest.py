"""What every test runs with: failures of the pass raise, seeds are fixed, Dynamo starts clean."""

import os

import pytest
import torch
from hypothesis import settings

os.environ["ASCEND_LN_FUSE_STRICT"] = "1"
# Every run draws the same examples: whether a few elements keep the bound is luck (that of eager's rounding).
settings.register_profile("seeded", derandomize=True, database=None)
settings.load_profile("seeded")
torch.set_num_threads(1)  # tests run in parallel processes


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """What is measured or reported is kept in a directory of this run's, not in the user's."""
    os.environ["ASCEND_LN_FUSE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _clean():
    from ascend_ln_fuse import clear_reports
    from ascend_ln_fuse.kernels.chain_ops import chain_runner
    from ascend_ln_fuse.kernels.ops import runner

    chain_runner.cache_clear()
    runner.cache_clear()  # plans remember whether kernels run through the interpreter
    torch.manual_seed(0)
    torch._dynamo.reset()
    clear_reports()
    yield
    torch._dynamo.reset()
