"""The prediction of hidden Ascend kernels: facts/ascend.md's table, and what must always hold."""

import itertools
import math
import random

import pytest
import torch

from ascend_ln_fuse.hidden import layout_kernels, norm_kernels


def meta(*shape):
    return torch.empty(shape, device="meta")


def predict(view):
    return layout_kernels(
        view.shape,
        view.stride(),
        offset=view.storage_offset(),
        storage_size=view.untyped_storage().nbytes() // view.element_size(),
    )


def packed(batch, length, heads, size):
    return meta(batch, length, 3 * heads * size).view(batch, length, 3, heads, size)


TABLE = {
    "seedvr": (
        lambda: meta(4096, 7680).view(4096, 3, 20, 128).unbind(1)[1],
        (4096, 20, 128),
        (7680, 128, 1),
        ("Slice",),
    ),
    "hunyuan_video": (
        lambda: packed(2, 4096, 20, 128).permute(2, 0, 1, 3, 4)[1],
        (2, 4096, 20, 128),
        (31457280, 7680, 128, 1),
        ("Slice",),
    ),
    "flux": (
        lambda: packed(2, 4096, 20, 128).permute(2, 0, 3, 1, 4)[1],
        (2, 20, 4096, 128),
        (31457280, 128, 7680, 1),
        ("AsStrided",),
    ),
    "timm_64": (
        lambda: packed(2, 197, 12, 64).permute(2, 0, 3, 1, 4).unbind(0)[1],
        (2, 12, 197, 64),
        (453888, 64, 2304, 1),
        ("AsStrided",),
    ),
    "timm_80": (
        lambda: packed(2, 257, 16, 80).permute(2, 0, 3, 1, 4).unbind(0)[1],
        (2, 16, 257, 80),
        (986880, 80, 3840, 1),
        ("Slice", "Transpose"),
    ),
    "chunk": (
        lambda: meta(2, 4096, 7680).chunk(3, -1)[1],
        (2, 4096, 2560),
        (31457280, 7680, 1),
        ("Slice",),
    ),
    "gqa_k": (
        lambda: meta(2, 4096, 4608).split([3584, 512, 512], -1)[1].unflatten(-1, (4, 128)),
        (2, 4096, 4, 128),
        (18874368, 4608, 128, 1),
        ("Slice",),
    ),
    "odd_pitch": (
        lambda: meta(2, 4096, 14507)[..., :2560].unflatten(-1, (20, 128)),
        (2, 4096, 20, 128),
        (4096 * 14507, 14507, 128, 1),
        ("AsStrided",),
    ),
    "separate_linear": (
        lambda: meta(2, 4096, 2560).view(2, 4096, 20, 128).transpose(1, 2),
        (2, 20, 4096, 128),
        (10485760, 128, 2560, 1),
        ("Transpose",),
    ),
    "cls_token": (lambda: meta(4, 197, 768)[:, 0, :], (4, 768), (151296, 1), ("Slice",)),
    "all_but_cls": (lambda: meta(4, 197, 768)[:, 1:], (4, 196, 768), (151296, 768, 1), ("Slice",)),
    "every_other_row": (
        lambda: meta(4, 197, 768)[::2],
        (2, 197, 768),
        (302592, 768, 1),
        ("Slice",),
    ),
    "every_other_lane": (
        lambda: meta(2, 20, 4096, 128)[..., ::2],
        (2, 20, 4096, 64),
        (10485760, 524288, 128, 2),
        ("StridedSlice",),
    ),
    "expand": (
        lambda: meta(197, 768).expand(4, -1, -1),
        (4, 197, 768),
        (0, 768, 1),
        ("BroadcastTo",),
    ),
    "unfold": (lambda: meta(64).unfold(0, 8, 4), (15, 8), (4, 1), ("AsStrided",)),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_table_of_facts(row):
    make, shape, strides, kernels = row
    view = make()
    assert (tuple(view.shape), view.stride()) == (shape, strides)
    assert predict(view) == kernels
    assert layout_kernels(shape, strides) == kernels  # the offset of an ordinary view is no matter


MORE = {
    "permuted lanes": (
        lambda: meta(2, 20, 40, 128)[..., ::2].transpose(1, 2),
        "StridedSlice Transpose",
    ),
    "sliced, expanded": (lambda: meta(8, 96)[:, 32:64].expand(4, -1, -1), "Slice BroadcastTo"),
    "transposed, expanded": (lambda: meta(8, 96).t().expand(4, -1, -1), "Transpose BroadcastTo"),
    "heads of 64, batch 1": (lambda: packed(1, 197, 12, 64).permute(2, 0, 3, 1, 4)[0], "AsStrided"),
    "one head": (lambda: packed(2, 197, 1, 80).permute(2, 0, 3, 1, 4)[0], "Slice"),
    "permuted lanes, last size 64": (
        lambda: meta(8, 64, 96)[..., :80].transpose(1, 2),
        "Slice Transpose",
    ),
    "vector": (lambda: meta(64)[::2], "Slice"),
    "scalar expanded": (lambda: meta(1).expand(5), "BroadcastTo"),
    "lanes too wide": (lambda: meta(8, 9)[:, ::2], "AsStrided"),  # the pitch 9 < 2 * 5
    # A permutation of size-1 dims moves nothing.
    "size 1": (lambda: meta(5, 1, 7).transpose(0, 1), ""),
    "empty": (lambda: meta(5, 0, 7).transpose(0, 2), ""),
}


@pytest.mark.parametrize("row", MORE.values(), ids=MORE)
def test_further_views(row):
    make, kernels = row
    assert predict(make()) == tuple(kernels.split())


def test_negative_stride():
    assert layout_kernels((4, 8), (-8, 1)) == ("AsStrided",)
    assert layout_kernels((8, 4), (8, -1)) == ("AsStrided",)
    assert layout_kernels((1, 8), (-8, 1)) == ()


def test_a_view_outside_its_implied_source_is_as_strided():
    # Rows of 3 read from a pitch of 2: no element but the last is shared, so only the fit tells.
    assert layout_kernels((5, 3), (2, 1)) == ("AsStrided",)
    assert layout_kernels((4, 8), (16, 1), offset=8, storage_size=64) == ("Slice",)
    assert layout_kernels((4, 8), (16, 1), offset=9, storage_size=73) == ("AsStrided",)
    assert layout_kernels((4, 8), (16, 1), storage_size=56) == ("AsStrided",)
    assert layout_kernels((4, 4), (16, 2), offset=1, storage_size=64) == ("StridedSlice",)
    assert layout_kernels((4, 4), (16, 2), offset=33, storage_size=128) == ("StridedSlice",)
    assert layout_kernels((4, 4), (16, 2), offset=10, storage_size=74) == ("AsStrided",)
    # No dense source has these strides: 100 is no multiple of the 72 that the others imply.
    assert layout_kernels((2, 2, 2, 2), (100, 36, 24, 2)) == ("AsStrided",)
    assert layout_kernels((2, 2, 2, 2), (144, 36, 24, 2)) == ("StridedSlice",)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 64), (2, 1, 4, 64), (6, 6, 6)])
def test_a_permuted_dense_tensor_is_transposed_alone(shape):
    for order in itertools.permutations(range(len(shape))):
        view = meta(*shape).permute(order)
        assert predict(view) == (() if view.is_contiguous() else ("Transpose",)), order


def random_view(rng):
    """A random chain of views of a small dense tensor."""
    view = meta(*(rng.choice((1, 2, 3, 6, 64)) for _ in range(rng.randint(1, 4))))
    for _ in range(rng.randint(0, 3)):
        dim = rng.randrange(view.dim())
        size = view.shape[dim]
        start, step = rng.randrange(size), rng.choice((1, 1, 2, 3))
        choice = rng.randrange(5)
        if choice == 0:
            view = view.movedim(dim, rng.randrange(view.dim()))
        elif choice == 1 and view.dim() > 1:
            view = view.select(dim, start)
        elif choice == 2:
            view = view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:])
        elif choice == 3:
            view = view[(slice(None),) * dim + (slice(start, None, step),)]
        else:
            view = view.unsqueeze(dim)
    return view


def test_any_view_keeps_the_order_of_kernels_and_the_meaning_of_each():
    rng = random.Random(0)
    seen = set()
    for _ in range(4000):
        view = random_view(rng)
        kernels = predict(view)
        seen.add(kernels)
        about = (tuple(view.shape), view.stride(), view.storage_offset(), kernels)
        assert (kernels == ()) == view.is_contiguous(), about
        if kernels in ((), ("AsStrided",)):
            continue
        assert kernels == tuple(
            k for k in ("Slice", "StridedSlice", "Transpose", "BroadcastTo") if k in kernels
        ), about
        assert not {"Slice", "StridedSlice"} <= set(kernels), about
        assert ("BroadcastTo" in kernels) == (0 in view.stride()), about
        dims = [(n, step) for n, step in zip(view.shape, view.stride(), strict=True) if step]
        steps = [step for n, step in dims if n != 1]
        assert ("Transpose" in kernels) == (steps != sorted(steps, reverse=True)), about
        # Elements read, and elements from the first to the last of them: equal without gaps.
        gaps = math.prod(n for n, _ in dims) != 1 + sum((n - 1) * step for n, step in dims)
        assert ("Slice" in kernels or "StridedSlice" in kernels) == gaps, about
    assert len(seen) >= 9, seen  # the walk reaches nearly every combination


def test_a_symbolic_size_is_refused_before_it_is_compared():
    class Symbol:
        def __eq__(self, other):
            raise AssertionError("this would have been a guard")

        __lt__ = __gt__ = __ne__ = __eq__
        __hash__ = None

    with pytest.raises(TypeError, match="hints"):
        layout_kernels((Symbol(), 8), (8, 1))
    with pytest.raises(TypeError, match="hints"):
        norm_kernels("layer_norm", (4, 8), (Symbol(), 1), "float16", has_weight=True)
    with pytest.raises(TypeError, match="hints"):
        norm_kernels("layer_norm", (4, 8), (8, 1), "float16", has_weight=True, norm_size=Symbol())
    with pytest.raises(ValueError, match="length"):
        layout_kernels((4, 8), (8, 1, 1))


def layer_norm(dtype, weight=True, bias=True, weight_dtype=None, shape=(16, 1152), **more):
    strides = torch.empty(shape, device="meta").stride()
    flags = {"has_weight": weight, "has_bias": bias, "weight_dtype": weight_dtype}
    return norm_kernels("layer_norm", shape, strides, dtype, **flags, **more)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def test_layer_norm_fills_and_casts():
    assert layer_norm(F32) == ()
    assert layer_norm(F32, weight=False, bias=False) == ("Fill", "Fill")
    assert layer_norm(F32, bias=False) == ("Fill",)
    assert layer_norm(F32, weight=False) == ("Fill",)
    assert layer_norm(BF16) == ("Cast", "Cast")
    assert layer_norm("bfloat16") == ("Cast", "Cast")
    assert layer_norm(F16) == ("Cast", "Cast")
    assert layer_norm(BF16, weight_dtype=F32) == ()
    # What is filled in for a missing weight has the dtype of the input, or of the bias.
    assert layer_norm(BF16, weight=False, bias=False) == ("Fill", "Fill", "Cast", "Cast")
    assert layer_norm(BF16, False, False, weight_dtype=F32) == ("Fill", "Fill", "Cast", "Cast")
    assert layer_norm(BF16, weight=False, weight_dtype=F32) == ("Fill",)


def test_sizes_that_layer_norm_v4_takes_need_no_cast():
    assert layer_norm(BF16, shape=(16, 1024)) == layer_norm(BF16, shape=(16, 4096)) == ()
    assert layer_norm(F16, shape=(16, 1024)) == ("Cast", "Cast")
    assert layer_norm(BF16, shape=(16, 24)) == ()  # below 64 and no multiple of 16
    assert layer_norm(BF16, shape=(16, 32)) == layer_norm(F16, shape=(16, 72)) == ("Cast", "Cast")
    assert layer_norm(BF16, shape=(16, 4, 256), norm_size=1024) == ()


def test_950_needs_neither():
    assert layer_norm(BF16, weight=False, bias=False, soc="950") == ()


def test_layout_comes_first():
    q = TABLE["seedvr"][0]()
    assert norm_kernels("layer_norm", q.shape, q.stride(), BF16, has_weight=False) == (
        *("Slice", "Fill", "Fill", "Cast", "Cast"),
    )


def test_rms_norm_has_no_kernel_of_its_own():
    def chain(dtype, weight):
        return norm_kernels("rms_norm", (4, 8), (16, 1), dtype, has_weight=weight)

    core = ("Pow", "ReduceMean", "Add", "Rsqrt", "Mul")
    assert chain(F32, False) == ("Slice", *core)
    assert chain(F32, True) == ("Slice", *core, "Mul")
    assert chain(BF16, True) == ("Slice", "Cast", *core, "Mul", "Cast")


def test_no_rows_no_kernels():
    assert layer_norm(BF16, weight=False, bias=False, shape=(0, 64)) == ()


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="op must be"):
        norm_kernels("group_norm", (4, 8), (8, 1), F32, has_weight=True)
    with pytest.raises(ValueError, match="soc must be"):
        layer_norm(F32, soc="310P")
