"""Tiles fit their target, waste little and do not make a row depend on its batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import TEXTS, inputs_for, region

from ascend_ln_fuse.kernels.layout import MAX_ROWS, Layout, layout
from ascend_ln_fuse.kernels.region import DTYPES, dense_strides, parse
from ascend_ln_fuse.kernels.source import Tile
from ascend_ln_fuse.kernels.targets import cuda, npu, target_for
from ascend_ln_fuse.kernels.tiling import CUDA_ROUND, ladder, live_tiles

GPU = cuda.describe("sm_90", 132)
NPU = npu.describe("Ascend910B3")


def walk(name, lane, dtype, outer) -> tuple[object, Layout]:
    r = region(name, lane, dtype)
    inputs = [x.to("meta") for x in inputs_for(r, (2, 3))]
    shapes, strides = [], []
    for x in inputs:
        shape = [n if d == 1 or i == x.dim() - 1 else outer[i] for i, (n, d) in
                 enumerate(zip(x.shape, x.shape))] if x.dim() == 3 else list(x.shape)
        if name == "sandwich" and x.dim() == 2:
            shape = [outer[1], 1]
        shapes.append(shape)
        strides.append(tuple(x.new_empty(shape).stride()))
    return r, layout(r, shapes, strides)


def tiles(name, lane, dtype, outer, target):
    r, found = walk(name, lane, dtype, outer)
    return ladder(r, found.structure, found.sizes, target)


@pytest.mark.parametrize("dtype, lane, rows", [
    # Where the official compiler keeps double buffering: 96 rows of 128, 12 of 1024, 3 of 3072, ...
    ("bf16", 128, 96), ("bf16", 1024, 12), ("bf16", 3072, 3), ("bf16", 4096, 2), ("bf16", 8192, 1),
    ("f32", 128, 96), ("f32", 8192, 1),
])
def test_ascend_rows(dtype, lane, rows):
    assert tiles("layer_norm", lane, dtype, (4, 100_000), NPU)[0].rows == rows
    assert tiles("layer_norm", lane, dtype, (4, 100_000), NPU)[0].cols == lane


def test_ascend_ladder_ends_in_column_passes():
    found = tiles("layer_norm", 128, "bf16", (4, 100_000), NPU)
    assert [t.rows for t in found[:3]] == [96, 48, 24]
    long = tiles("layer_norm", 30_000, "bf16", (4, 1000), NPU)
    assert all(t.cols < 30_000 for t in long) and long[-1].rows == 1
    assert all(t.cols % 16 == 0 for t in long)


def test_column_tiles_divide_the_lane_where_they_can():
    tile = tiles("layer_norm", 16384, "bf16", (4, 1000), NPU)[0]
    assert 16384 % tile.cols == 0 and tile.cols >= 512


@given(name=st.sampled_from(sorted(TEXTS)), lane=st.integers(1, 40_000),
       dtype=st.sampled_from(["bf16", "f16", "f32"]), batch=st.integers(2, 5),
       tokens=st.integers(2, 70_000), npu_=st.booleans())
def test_invariants(name, lane, dtype, batch, tokens, npu_):
    target = NPU if npu_ else GPU
    r, found = walk(name, lane, dtype, (batch, tokens))
    for tile in ladder(r, found.structure, found.sizes, target):
        assert 1 <= tile.rows <= MAX_ROWS
        assert tile.cols >= lane or tile.cols < lane <= 100 * tile.cols
        if npu_:
            assert tile.cols <= lane
            held = 8 * live_tiles(r, found.structure) * tile.rows * tile.cols
            assert held <= target.budget
        else:
            assert tile.rows & (tile.rows - 1) == 0 and tile.cols & (tile.cols - 1) == 0
            assert tile.num_warps in (1, 2, 4, 8, 16)
            assert tile.rows == 1 or tile.rows * tile.cols >= CUDA_ROUND * tile.num_warps


@given(lane=st.integers(1, 20_000), tokens=st.integers(1, 5000), npu_=st.booleans())
def test_a_batch_changes_rows_only(lane, tokens, npu_):
    target = NPU if npu_ else GPU
    few, many = (tiles("layer_norm", lane, "bf16", outer, target)[0]
                 for outer in ((2, tokens), (64, 100_000)))
    assert (few.cols, few.num_warps) == (many.cols, many.num_warps)
    assert (few.rows == 1) == (many.rows == 1)


def test_programs_that_all_run_at_once_load_all_first():
    def first(name, lane, outer, target=GPU):
        return tiles(name, lane, "bf16", outer, target)[0].loads_first

    # 4 warps of 8 + 8 + 8 registers of loads and 32 others: 9 programs for each of 132 multiprocessors.
    assert first("modulate", 2048, (4, 297)) and not first("modulate", 2048, (4, 298))
    assert first("layer_norm", 8192, (1, 128)) and not first("layer_norm", 8192, (64, 1024))
    assert not first("layer_norm", 128, (1, 128))  # several rows a program: loads are first as it is
    assert not first("layer_norm", 40_000, (1, 16))  # passes over the columns
    alone = parse("space [*, 4096]\nin x: bf16[*, 4096]\nv: bf16 = rms_norm(x, none, 1e-06)\n"
                  "out v: bf16 order(0, 1)")
    found = layout(alone, [(16, 4096)], [(4096, 1)])
    assert not ladder(alone, found.structure, found.sizes, GPU)[0].loads_first  # nothing that rows share
    assert not first("modulate", 2048, (4, 128), NPU)


def test_long_rows_of_large_calls_are_read_again():
    def tile(name, lane, tokens, target=GPU, dtype="bf16"):
        return tiles(name, lane, dtype, (1, tokens), target)[0]

    # 2**29 bytes: one operand read and one written, or two and two.
    for name, lane, tokens in (("layer_norm", 8192, 2**14), ("rms_norm", 4096, 2**15),
                               ("add_norm", 4096, 2**14)):
        large, small = tile(name, lane, tokens), tile(name, lane, tokens - 1)
        assert large.reads_again and not small.reads_again
        assert (large.cols, large.num_warps) == (small.cols, small.num_warps)  # reduced in the same order
    assert not tile("layer_norm", 2048, 2**20).reads_again  # short rows
    assert tile("layer_norm", 2048, 2**16, dtype="f32").reads_again  # as many bytes
    assert not tile("modulate", 4096, 2**16).reads_again  # modulations beside one operand
    assert not tile("layer_norm", 8192, 2**16, NPU).reads_again
    assert not tile("layer_norm", 40_000, 2**16).reads_again  # passes over the columns


def test_rows_that_fill_a_long_tile_badly_are_read_again_at_any_size():
    for tokens in (1, 100_000):
        assert tiles("layer_norm", 12288, "bf16", (1, tokens), GPU)[0] == \
            Tile(1, 16384, 8, reads_again=True)
        assert tiles("layer_norm", 12296, "bf16", (1, tokens), GPU)[0].num_warps == 16
        assert tiles("rms_norm", 12288, "bf16", (1, tokens), GPU)[0].num_warps == 16
        assert tiles("layer_norm", 6144, "bf16", (1, tokens), GPU)[0].num_warps == 8


def test_warps_of_a_long_row_take_it_in_whole_rounds():
    """Of 256 half-precision columns a warp."""
    for lane, warps in ((4096, 8), (5120, 4), (6144, 8), (7168, 4), (8192, 16), (5128, 8)):
        assert tiles("rms_norm", lane, "bf16", (1, 1000), GPU)[0].num_warps == warps
    for name in ("layer_norm", "add_norm"):  # not with a second reduction, or a second operand
        assert tiles(name, 8192, "bf16", (1, 1000), GPU)[0].num_warps == 8
    assert tiles("rms_norm", 5120, "f32", (1, 1000), GPU)[0].num_warps == 16


def test_short_rows_that_share_modulations_take_two_rounds_of_loads():
    """32 bytes a thread, of all that it reads of its rows."""
    for lane, rows in ((64, 32), (128, 16), (256, 8)):
        assert tiles("modulate", lane, "bf16", (2, 100_000), GPU)[0] == Tile(rows, lane, 4)
        assert tiles("layer_norm", lane, "bf16", (2, 100_000), GPU)[0] == Tile(rows, lane, 2)
        assert tiles("add_norm", lane, "bf16", (2, 100_000), GPU)[0] == Tile(rows, lane, 2)
    assert tiles("modulate", 512, "bf16", (2, 100_000), GPU)[0] == Tile(4, 512, 2)


def summed(lane, dtypes, shared="bf16"):
    """LayerNorm of a sum of operands of these dtypes, and a modulation; the sums are in the first's dtype."""
    first, lines = dtypes[0], [f"space [*, *, {lane}]"]
    lines += [f"in {'u' if i == 0 else 'h'}{i}: {dtype}[*, *, {lane}]" for i, dtype in enumerate(dtypes)]
    lines += [f"in s: {shared}[*, 1, {lane}]", "scalar eps"]
    lines += [f"u{i}: {first} = add(u{i - 1}, h{i})" for i in range(1, len(dtypes))]
    return parse("\n".join([*lines, f"v: {first} = layer_norm(u{len(dtypes) - 1}, none, none, eps)",
                            f"w: {first} = mul(v, s)", f"out w: {first} order(0, 1, 2)"]))


def tile_of(r, batch, tokens):
    lane = r.lane
    shapes = [tuple(n if n != "*" else size for n, size in zip(x.dims, (batch, tokens, lane)))
              for x in r.inputs]
    found = layout(r, shapes, [dense_strides(shape, range(3)) for shape in shapes])
    return ladder(r, found.structure, found.sizes, GPU)[0]


@pytest.mark.parametrize("dtype, own, tile", [
    ("bf16", 1, Tile(16, 128, 4)), ("bf16", 2, Tile(16, 128, 8)), ("bf16", 3, Tile(8, 128, 2)),
    ("bf16", 4, Tile(8, 128, 2)), ("bf16", 5, Tile(4, 128, 2)), ("f32", 3, Tile(4, 128, 2)),
])
def test_tiles_of_short_rows_with_several_operands(dtype, own, tile):
    """A power of two of warps, whatever the number of operands."""
    assert tile_of(summed(128, [dtype] * own, dtype), 2, 50_000) == tile


#: One batch shares its modulation, many of one token have one a row, and many tokens share again.
OUTER = ((1, 9), (2, 1), (100, 1), (100, 4), (2, 4096))


@pytest.mark.parametrize("shared", ["bf16", "f32"])
@pytest.mark.parametrize("dtypes", [("f32", "bf16"), ("f32", "bf16", "bf16"), ("f32",) * 5, ("bf16",) * 12],
                         ids=str)
@pytest.mark.parametrize("lane", [32, 64, 128, 256])
def test_threads_have_16_bytes_of_a_row_however_its_batch_shares(lane, dtypes, shared):
    """Else Triton gives them shorter pieces, and a row is added up in an order that depends on its batch."""
    r = summed(lane, dtypes, shared)
    for outer in OUTER:
        tile = tile_of(r, *outer)
        assert tile.rows == 1 or tile.rows * tile.cols >= CUDA_ROUND * tile.num_warps, (outer, tile)


@pytest.mark.parametrize("lane", [33, 63, 127])
def test_warps_that_share_rows_do_not_depend_on_the_batch(lane):
    """Threads load single elements of such rows, and so the warps of a program share each row."""
    for dtypes in (("f16",), ("f16", "f16")):
        r = summed(lane, dtypes, "f16")
        assert len({tile_of(r, *outer).num_warps for outer in OUTER}) == 1


def test_small_batches_use_all_cores():
    assert tiles("layer_norm", 128, "bf16", (2, 400), NPU)[0].rows < 96
    found = tiles("layer_norm", 128, "bf16", (2, 400), NPU)[0]
    assert -(-800 // found.rows) >= NPU.cores


def test_wide_offsets_take_one_row():
    r = region("layer_norm", 128, "bf16")
    found = layout(r, [(5, 7, 128), (128,), (128,)], [(2**25, 2**22, 1), (1,), (1,)])
    for target in (GPU, NPU):
        assert {t.rows for t in ladder(r, found.structure, found.sizes, target)} == {1}


def test_live_tiles():
    def count(name):
        r, found = walk(name, 128, "bf16", (4, 4096))
        return live_tiles(r, found.structure)

    assert [count(n) for n in ("layer_norm", "modulate", "add_norm", "qk")] == [1, 1, 2, 2]


def test_soc_table():
    assert npu.describe("Ascend910B3").cores == 40 and npu.describe("Ascend910B2C").cores == 48
    assert npu.describe("Ascend910_9382").cores == 48 and npu.describe("Ascend910_9362").cores == 40
    assert npu.describe("Ascend950PR_9589").cores == 64
    assert npu.describe("Ascend_of_tomorrow").budget == 192 * 1024


def test_target_of_a_device():
    import torch

    from ascend_ln_fuse.kernels.layout import Unsupported

    assert target_for(torch.device("cpu")).backend == "interpreter"
    with pytest.raises(Unsupported, match="'meta'"):
        target_for(torch.device("meta"))
    assert set(GPU.dtypes) == set(DTYPES) and "f64" not in NPU.dtypes
