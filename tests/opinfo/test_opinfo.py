"""PyTorch's own samples of layer_norm, native_layer_norm and rms_norm (see samples.py)."""

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

from opinfo.samples import OPS, cases, compare, errors, same_error  # noqa: E402


@pytest.mark.parametrize("grad", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("name, dtype, strided", list(cases()), ids=str)
def test_samples(name, dtype, strided, grad):
    outcome = compare(name, dtype, strided, grad)
    assert outcome.samples >= 6
    if dtype.is_floating_point and not strided:
        assert outcome.fused == outcome.samples


@pytest.mark.parametrize("dtype", sorted(OPS["native_layer_norm"].dtypes, key=str), ids=str)
def test_statistics_are_eagers_too(dtype):
    outcome = compare("native_layer_norm", dtype, False, statistics=True)
    assert set(outcome.declined) == {"the statistics are read too"} and not outcome.fused


@pytest.mark.parametrize("name, error", list(errors()), ids=lambda x: x if isinstance(x, str) else "")
def test_refused_as_in_eager(name, error):
    same_error(name, error)


def test_all_are_there():
    assert len(OPS) == 3 and len(list(errors())) >= 7
    assert {torch.float32, torch.bfloat16, torch.float16, torch.float64} <= {d for _, d, _ in cases()}
