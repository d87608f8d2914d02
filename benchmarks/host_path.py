"""What a warm call costs the host: us a call from Python, one after another.

    python benchmarks/host_path.py [--calls N] [--rounds N] [--profile ROW]

Tensors are so small that a GPU has nothing to do. Without a GPU the plans of an H200 run on CPU tensors with
a launch that does nothing: what is left is the Python between a graph and the launch, and torch's own CPU
operators in the place of the library's. Figures of the two kinds are not to be compared with each other.
`calls` counts the Python and C functions entered in one call, which no machine disturbs. Figures are the
least of the rounds; contenders take turns. `--profile ROW` shows where the time of one row goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.nn import functional as F

from ascend_ln_fuse.chain_builder import FusionChain
from ascend_ln_fuse.chain_steps import ActivationStep, MatmulStep, NormStep, chain_of
from ascend_ln_fuse.kernels import chain_ops, fused_linear, launch, ops
from ascend_ln_fuse.kernels.chain_choice import LIBRARY, ONE_KERNEL, Choice
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.targets import cuda

HIDDEN, ROWS, EPS = 16, 1, 1e-5
BF16 = torch.bfloat16


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """Inside, CPU tensors run through the plans of an H200, whose launches do nothing."""

    class Compiled:
        function = packed_metadata = None

        @staticmethod
        def run(*args):
            pass

    class Kernel:
        def __init__(self, source):
            pass

        def warmup(self, *args, **options):
            pass

        def __getitem__(self, grid):
            return lambda *args, **options: Compiled

    guards = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for owner, name, fake in (
                (launch, "_jit", Kernel),
                (torch.cuda, "device", lambda index: contextlib.nullcontext()),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
                (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
                (chain_ops, "ChainRunner", lambda chain, self_check: ChainRunner(
                    chain, "off", lambda question: Choice(LIBRARY))),
                *((module, "runs_reference", lambda device: False)
                  for module in (launch, ops, chain_ops, fused_linear)),
                *((module, "target_for", lambda device: cuda.describe("sm_90", 132))
                  for module in (launch, fused_linear)),
                (sys.modules[f"{launch.__package__}.fused_linear_plan"], "allocator",
                 lambda device: guards._empty_strided_cpu)):
            stack.enter_context(mock.patch.object(owner, name, fake, create=True))
        yield


def contenders(device: str, self_check: str) -> dict[str, tuple[Callable, tuple]]:
    """Name -> (function, arguments)."""
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=BF16)

    x, g, b = randn(ROWS, HIDDEN), randn(HIDDEN), randn(HIDDEN)
    weights = randn(4 * HIDDEN, HIDDEN), randn(4 * HIDDEN), randn(HIDDEN, 4 * HIDDEN), randn(HIDDEN)
    norm = (x, g, b)
    ffn = (*norm, *weights)

    def eager_norm(x, g, b):
        return F.layer_norm(x, (HIDDEN,), g, b, EPS)

    def eager_ffn(x, g, b, w1, b1, w2, b2):
        return F.linear(F.gelu(F.linear(F.layer_norm(x, (HIDDEN,), g, b, EPS), w1, b1)), w2, b2)

    steps = NormStep("layer_norm", HIDDEN), MatmulStep(4 * HIDDEN), ActivationStep("gelu"), MatmulStep(HIDDEN)
    chain = chain_of(steps, 2, "bf16")
    region = chain.stages[0].region
    found = {
        "F.layer_norm": (eager_norm, norm),
        "F.layer_norm, backend=\"eager\"": (torch.compile(eager_norm, backend="eager"), norm),
        "fused norm": (ops.python_call(region, self_check), (*norm, EPS)),
        "4 ops of eager": (eager_ffn, ffn),
    }
    for ways in ((ONE_KERNEL, ONE_KERNEL), (ONE_KERNEL, LIBRARY), (LIBRARY, LIBRARY)):
        runner = ChainRunner(chain, self_check, _decided(ways))
        found[f"chain: {' + '.join(ways)}"] = chain_ops.chain_call(chain, runner=runner), (*ffn, EPS)
    for mode in ("training", "inference"):
        layers = FusionChain().add_layer_norm(HIDDEN).add_matmul(4 * HIDDEN).add_activation("gelu")
        module = layers.add_matmul(HIDDEN).build(mode).to(device, BF16).requires_grad_(False)
        found[f"FusionChain, {mode}"] = module, (x,)
    return found


def _decided(ways: tuple[str, ...]) -> Callable:
    """Answers the questions of a chain's segments, in their order, with these ways."""
    rest = list(ways)

    def decide(question):
        way = rest.pop(0)
        return Choice(way, question.configs()[0] if way == ONE_KERNEL else None)

    return decide


def least(calls: dict[str, tuple[Callable, tuple]], count: int, rounds: int) -> dict[str, float]:
    """us a call."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, (call, args) in calls.items():
            wait()
            gc.collect()
            started = time.perf_counter()
            for _ in range(count):
                call(*args)
            times[name] = min(times[name], (time.perf_counter() - started) / count * 1e6)
    return times


def entered(call: Callable, args: tuple) -> int:
    """Functions entered in one call."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return count - 1  # sys.setprofile itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--calls", type=int, default=4000, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", metavar="ROW")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        gpu = torch.cuda.is_available()
        if gpu:
            from timing import machine

            print(machine())
        else:
            stack.enter_context(no_gpu())
            torch.set_num_threads(1)
            print(f"no GPU: launches do nothing, torch {torch.__version__} on the CPU in the library's place")
        calls = contenders("cuda" if gpu else "cpu", "first_call" if gpu else "off")
        for call, given in calls.values():
            for _ in range(10):
                call(*given)
        if args.profile:
            call, given = calls[args.profile]
            profile = cProfile.Profile()
            profile.runcall(lambda: [call(*given) for _ in range(args.calls)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return 0
        times = least(calls, args.calls, args.rounds)
        print(f"{'':40}{'us':>8}{'calls':>8}")
        for name, us in times.items():
            print(f"{name:40}{us:8.2f}{entered(*calls[name]):8}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
