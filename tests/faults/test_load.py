"""Many threads at once, and two processes that share their files."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from checks import assert_within_bound
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for
from torch import nn

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.kernels import compiling, launch
from ascend_ln_fuse.kernels.ops import runner

THREADS = 8


def in_threads(work) -> None:
    """`work(number)` in each of THREADS threads, all of which start at once; the first error is raised."""
    errors, barrier = [], threading.Barrier(THREADS)

    def run(number):
        try:
            barrier.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        h = x + self.norm(x)
        return self.out(h)


def assert_model_right(model, ours, x):
    with torch.no_grad():
        wide = Model(x.shape[-1]).double()
        wide.load_state_dict(model.state_dict())
        assert_within_bound(ours, model(x), wide(x.double()))


@pytest.mark.fault("eight threads that compile and call the same and different models", "right results")
@pytest.mark.parametrize("models", ["one", "several"])
def test_threads_compile_and_call(models):
    torch.manual_seed(0)
    made = [Model(16 + 8 * (number if models == "several" else 0)) for number in range(THREADS)]
    if models == "one":
        made = made[:1] * THREADS
    for model in made:
        if model._compiled_call_impl is None:
            model.compile(backend="ascend_ln_fuse", options={"report": "off"})

    def work(number):
        model, width = made[number], made[number].norm.normalized_shape[0]
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for rows in (3, 17, 3):
                x = torch.randn(2, rows, width, generator=generator)
                ours = model(x)
                plain = Model(width)
                plain.load_state_dict(model.state_dict())
                assert_model_right(plain, ours, x)

    in_threads(work)
    sites = [site for report in last_reports() for site in report.sites]
    assert sites and not any(site.fallback_words() for site in sites)
    assert not [report.error for report in last_reports() if report.error]


def test_threads_share_runners():
    """Every region in every thread at once: each is compiled once, and each thread gets its own numbers."""
    compiled, original = [], launch.load

    def load(source):
        compiled.append(source.name)
        return original(source)

    launch.load = load
    try:
        def work(number):
            for name in sorted(TEXTS):
                r = region(name, 24, "bf16")
                inputs = inputs_for(r, (2, 5 + number % 2), seed=number)
                assert_right(r, inputs, scalars_for(r), runner(r.text)(inputs, scalars_for(r)))

        in_threads(work)
    finally:
        launch.load = original
    assert not compiling._jobs
    assert not any(runner(region(name, 24, "bf16").text).record.fallback() for name in TEXTS)


@pytest.mark.fault("eight threads whose kernel is wrong", "right results in all of them, one warning")
def test_threads_with_a_wrong_kernel(mutate, warned):
    mutate(r"RSTD_\w+ = ", r"\g<0>1.1 * ")
    r = region("layer_norm", 24, "bf16")

    def work(number):
        for rows in (4, 40, 4):
            inputs = inputs_for(r, (2, rows), seed=number)
            assert_right(r, inputs, scalars_for(r), runner(r.text)(inputs, scalars_for(r)))

    in_threads(work)
    assert len(warned()) == 1 and runner(r.text).record.fallback()


PROCESS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.RMSNorm(24))
compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
from ascend_ln_fuse import last_reports
with torch.no_grad():
    for rows in (1, 5, 9):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x), model(x))
assert not any(site.fallback_words() for report in last_reports() for site in report.sites)
"""


@pytest.mark.fault("two processes that compile the same model", "right results in both")
def test_two_processes_compile(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "ASCEND_LN_FUSE_STRICT": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS], env=environment, stderr=subprocess.PIPE,
                                  text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
