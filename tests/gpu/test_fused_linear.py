"""Segments with matrix products on a GPU: every kind of kernel and every tile of the tuning set, against
float64; graphs, streams and kernels that start early."""

from dataclasses import replace

import pytest
import torch
from fused_linear_cases import NAMES, assert_right, case, check

from ascend_ln_fuse.kernels import fused_linear_plan
from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile, reference
from ascend_ln_fuse.kernels.fused_linear_tiles import FEW, MANY, NARROW_FEW, NARROW_MANY, VECTOR

pytestmark = pytest.mark.real_gpu

TILES = [*VECTOR, *FEW, *MANY, *NARROW_FEW, *NARROW_MANY]
KINDS = {
    "dot": GemmTile(16, 32, 64),
    "dot of 128 rows": GemmTile(128, 64, 64, num_warps=8),
    "vector": GemmTile(1, 16, 128, num_stages=1),
    "vector, pipelined": GemmTile(1, 16, 128, num_stages=3),
    "swapped": GemmTile(16, 64, 64, swapped=True),
    "split": GemmTile(16, 32, 64, split=4),
    "split, swapped, ahead": GemmTile(16, 64, 64, split=2, swapped=True, norm_ahead=True),
    "prefetch": GemmTile(16, 32, 64, prefetch=2),
    "prefetch, split vector": GemmTile(1, 16, 128, num_stages=1, split=2, prefetch=1),
    "no overlap": GemmTile(16, 32, 64, norm_ahead=True, overlap=False),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Outputs and what lies between kernels start as NaN: what is not written is seen."""
    monkeypatch.setattr(fused_linear_plan, "allocator", lambda device: (
        lambda size, strides, dtype: torch.full(size, float("nan"), dtype=dtype, device=device)))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_segments(name, dtype, kind):
    """K and N are no multiples of the block, or odd; M is ragged."""
    for k, n in ((1000, 360), (513, 99), (64, 48)):
        one = case(name, k, n, dtype, "cuda")
        run = FusedLinear(one.segment)
        for outer in ((3, 37), (1, 1)):
            for _ in range(2):  # compiles, then launches directly
                check(run, one.arguments(outer), KINDS[kind])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_tile_of_the_tuning_set(ahead, dtype, tile):
    one = case("gelu", 3000, 640, dtype, "cuda")
    run = FusedLinear(one.segment)
    for split in (1, 2):
        for rows in {1, tile.rows, 2 * tile.rows + 1}:
            for mean in (0.0, 1.0, 10.0, 100.0, 1000.0):
                check(run, one.arguments((1, rows), mean), replace(tile, norm_ahead=ahead, split=split))


@pytest.mark.parametrize("joint", ["gelu", "gated"])
def test_proposals_run(joint):
    one = case(joint, 2048, 2048, "bf16", "cuda")
    run = FusedLinear(one.segment)
    n = 2048 * len(one.segment.projections)
    for rows in (1, 2, 16, 33, 128, 200):
        args = one.arguments((1, rows))
        for tile in (*run.configs(rows, n, 2048), *run.unsplit(rows, n, 2048)):
            check(run, args, tile)


def test_a_row_does_not_depend_on_its_neighbours():
    one = case("gelu", 1024, 512, "bf16", "cuda")
    run, args = FusedLinear(one.segment), one.arguments((1, 64))
    for tile in KINDS.values():
        whole, = run(*args, config=tile)
        part, = run([args[0][0][:, 16:19], *args[0][1:]], *args[1:], config=tile)
        assert torch.equal(part[0], whole[0, 16:19])


@pytest.mark.parametrize("kind", ["split, swapped, ahead", "prefetch", "prefetch, split vector"])
def test_kernels_that_start_early_wait(kind, monkeypatch):
    """A chain of segments, each reading what the one in front has just written, replayed from a graph with
    other inputs every time."""
    monkeypatch.undo()  # a fill between the kernels would keep them apart
    one = case("product", 2048, 2048, "bf16", "cuda")
    run, (_, _, weights, _, _, _) = FusedLinear(one.segment), one.arguments((1, 1))
    weights = [w / w.float().norm(dim=1).mean().to(w.dtype) for w in weights]
    x = torch.randn(16, 2048, device="cuda").bfloat16()

    def chain(step):
        a = x
        for _ in range(8):
            a, = step([a], [], weights, [None])
        return a

    def ours(*args):
        return run(*args, config=KINDS[kind])

    chain(ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(ours)
    for _ in range(20):
        x.normal_()
        graph.replay()
        first = result.clone()
        want = chain(ours_alone(run, KINDS[kind]))
        assert torch.equal(first, want)
    low = chain(lambda *args: reference(one.segment, *args))
    torch.testing.assert_close(result.float(), low.float(), rtol=5e-2, atol=5e-2)


def ours_alone(run, tile):
    """The same kernels, with nothing else on the device."""
    def step(*args):
        torch.cuda.synchronize()
        found = run(*args, config=tile)
        torch.cuda.synchronize()
        return found

    return step


def test_runs_on_the_current_stream():
    one = case("gelu", 1024, 4096, "bf16", "cuda")
    run, args = FusedLinear(one.segment), one.arguments((1, 16))
    tile = KINDS["split, swapped, ahead"]
    run(*args, config=tile)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        args[0][0].mul_(2.0)
        outputs = run(*args, config=tile)
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(one.segment, args, outputs)
