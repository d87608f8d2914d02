"""Bytes and kernels of a site, before and after: estimates for selection and the report.

Before: each op of the site reads its inputs and writes its result once, a library norm on a strided
view first makes a copy, and `F.normalize`, which PyTorch composes, reads its input twice. After: every
operand is read once, every output written once. Sizes are those seen at compile time.
"""

from __future__ import annotations

from torch.fx import Node

from .effects import value_of
from .graph import Lens, hint, tensor_bytes
from .hidden import layout_kernels, norm_kernels
from .kernels.region import dense_strides
from .kinds import base_name
from .site import Site


def bytes_before(lens: Lens, site: Site) -> int:
    """Bytes that the site's ops move in eager."""
    total = 0
    for node in site.interior:
        if not _is_free(lens, node):
            total += sum(map(lens.bytes_of, node.all_input_nodes)) + lens.bytes_of(node)
    for norm in site.norms:
        fake = value_of(norm.value)
        if norm.spelling in ("layer_norm", "rms_norm") and layout_kernels(*_concrete(fake)):
            total += 2 * tensor_bytes(fake)
        if norm.spelling == "normalize":  # read for the length, and again to be divided
            total += tensor_bytes(fake)
    return total


def bytes_after(lens: Lens, site: Site) -> int:
    """Bytes that the fused kernel moves, and the copies of what it cannot read as it lies."""
    copies = 2 * sum(map(lens.bytes_of, site.copied))
    return copies + sum(map(tensor_bytes, site.fakes)) + sum(map(lens.bytes_of, site.outputs))


def saved_bytes(lens: Lens, site: Site) -> int:
    """What selection ranks by; a launch saved counts as 4 KiB so that small sites count too."""
    launches = sum(not _is_free(lens, node) for node in site.interior) - 1
    return bytes_before(lens, site) - bytes_after(lens, site) + 4096 * launches


def kernels_removed(lens: Lens, site: Site) -> tuple[str, ...]:
    """The eager ops that disappear, in graph order; views, which launch nothing, are left out."""
    ordered = sorted(site.interior, key=lens.position.__getitem__)
    return tuple(_label(lens, node) for node in ordered if not _is_free(lens, node))


def hidden_kernels(site: Site) -> tuple[str, ...]:
    """The kernels that Ascend is predicted to launch round the site's library norms (`hidden.py`)."""
    names: list[str] = []
    for norm in site.norms:
        names += predicted(norm, copied=norm.value in site.copied)
    return tuple(names)


def predicted(norm, copied: bool = False) -> tuple[str, ...]:
    """Predicted hidden kernels of one norm; none for a handwritten one, whose kernels are explicit.
    `copied`: without those that make its input contiguous."""
    if norm.spelling not in ("layer_norm", "rms_norm"):
        return ()
    fake = value_of(norm.value)
    shape, strides = _concrete(fake)
    if copied:
        strides = dense_strides(shape, range(len(shape)))
    weight = value_of(norm.weight) if norm.weight is not None else None
    return norm_kernels(norm.op, shape, strides, _word(fake),
                        has_weight=norm.weight is not None, has_bias=norm.bias is not None,
                        weight_dtype=None if weight is None else _word(weight))


def _word(fake) -> str:
    return str(fake.dtype).removeprefix("torch.")


def _concrete(fake) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(hint, fake.shape)), tuple(map(hint, fake.stride()))


def _is_free(lens: Lens, node: Node) -> bool:
    """A view, an identity and an allocation launch nothing."""
    return lens.kind(node) == "getitem" or lens.is_view(node) or base_name(node) == "empty_like"


def _label(lens: Lens, node: Node) -> str:
    word = lens.kind(node) or base_name(node) or getattr(node.target, "__name__", str(node.target))
    if word == "to":
        return f"to({_word(value_of(node))})"
    return word
