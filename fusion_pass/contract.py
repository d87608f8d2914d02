"""What every pattern must keep, built in or a user's: checked, never trusted.

A fused op has to yield exactly what it replaces (shape, strides, dtype, device), and a norm has to be a
piece of graph that nothing else looks into.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .across import lies_across
from .graph import Lens, hint, same, same_shape
from .kernels.layout import MAX_DIMS, Unsupported, layout
from .kernels.reference import TORCH_DTYPES
from .kernels.region import NORMS, broadcast_sizes, dense_strides
from .kernels.tiling import holds_across
from .rules import rules_of
from .site import Decline, Norm, Site
from .views import Step, replay


class ContractError(AssertionError):
    """A fused op would not yield exactly what it replaces: a bug of a pattern."""


def check_norm(lens: Lens, norm: Norm) -> None:
    """Raise Decline unless `norm` is a closed piece of the graph that yields what it is given.

    Its interior ends in `out`; nobody outside reads the rest of it; nothing in it is written in place or
    lies behind a switch of grad mode or autocast; the result has the value's shape and the weights
    have the normalised one.
    """
    value, out = lens.tensor(norm.value), lens.tensor(norm.out)
    if norm.op not in NORMS:
        raise Decline(f"op must be one of {', '.join(map(repr, NORMS))}, not {norm.op!r}", norm.out)
    if not isinstance(norm.eps, (int, float, Node)) or isinstance(norm.eps, bool):
        raise Decline(f"eps must be a number or a node, not {norm.eps!r}", norm.out)
    if not isinstance(norm.shape, tuple) or not norm.shape or \
            not all(isinstance(n, int) for n in norm.shape):
        raise Decline(f"shape must be a tuple of ints, not {norm.shape!r}", norm.out)
    if value is None or out is None:
        raise Decline("the norm's value or result is no plain tensor", norm.out)
    if norm.out not in norm.interior or norm.value in norm.interior:
        raise Decline("the norm's nodes must hold its result and not its input", norm.out)
    read = [x for x in (norm.value, norm.weight, norm.bias, norm.eps) if isinstance(x, Node)]
    if any(lens.position.get(x, len(lens.nodes)) >= lens.position[norm.out] for x in read):
        raise Decline("the norm reads what comes after its result, or is not in the graph", norm.out)
    if not same_shape(value.shape, out.shape):
        raise Decline("the norm's result has another shape than its input", norm.out)
    dims = [norm.axis] if norm.axis is not None else range(-len(norm.shape), 0)
    if len(norm.shape) > value.dim() or \
            not all(same(value.shape[d], n) for d, n in zip(dims, norm.shape)):
        raise Decline(f"the normalised shape {norm.shape} is not the input's", norm.out)
    if norm.dtype != out.dtype:
        raise Decline(f"the norm yields {out.dtype}, not {norm.dtype}", norm.out)
    for vector in (norm.weight, norm.bias):
        if vector is not None and (lens.tensor(vector) is None or
                                   not same_shape(lens.tensor(vector).shape, norm.shape)):
            raise Decline("weight or bias is not of the normalised shape", norm.out)
    eps = lens.tensor(norm.eps) if isinstance(norm.eps, Node) else None
    if eps is not None and (eps.dim() or eps.requires_grad or eps.dtype == torch.float64 != value.dtype):
        raise Decline("eps is no number: a tensor with dims, gradient or fp64", norm.out)
    for node in norm.interior:
        if node.op not in ("call_function", "call_method"):
            raise Decline("a norm cannot hold a graph input", node)
        if lens.segment[node] != lens.segment[norm.out] or \
                (node is not norm.out and lens.is_mutated(node)):
            raise Decline("memory is written, or a mode switched, inside the norm", node)
        if node is not norm.out and any(user not in norm.interior for user in node.users):
            raise Decline("the statistics are read elsewhere too", node)


def check_kernel(lens: Lens, site: Site) -> None:
    """Raise Decline where no kernel would serve `site`, so that it would run as its torch reference."""
    region, node = site.region, site.anchor
    if region.compute == "f64" and rules_of(site.fakes[0].device) == "npu":
        raise Decline("fp64 has no kernel on Ascend", node)
    for out, result in zip(region.outputs, site.outputs, strict=True):
        if out.order[-1] != region.rank - 1 and (region.lane > 1 or site.axis is not None) and \
                not lies_across(lens.tensor(result), -1 if site.axis is None else site.axis):
            raise Decline("the result's normalised dim is not the innermost in memory", node)
    across = any(lies_across(fake) for fake in site.fakes if fake.dim()) or \
        any(out.order[-1] != region.rank - 1 for out in region.outputs)
    if region.outer > MAX_DIMS or across:
        try:
            walk = layout(region, [tuple(map(hint, fake.shape)) for fake in site.fakes],
                          [tuple(map(hint, fake.stride())) for fake in site.fakes])
        except Unsupported as why:
            raise Decline(f"no kernel walks these tensors: {why}", node) from why
        if walk.structure.across and not holds_across(region, walk.structure):
            raise Decline("the normalised dim lies across memory, too long for so many operands", node)


def check_contract(lens: Lens, site: Site) -> None:
    """Raise ContractError unless each output of `site` has the shape, strides, dtype and device of
    the value it replaces, for all sizes that the graph may meet."""
    region = site.region
    sizes = broadcast_sizes(region, [fake.shape for fake in site.fakes])
    devices = {fake.device for fake in site.fakes}
    for out, node in zip(region.outputs, site.outputs, strict=True):
        value, finish, axis = lens.tensor(node), site.finish, site.axis
        if axis is not None:  # compare with the normalised dim at the end, as the region has it
            value, finish = replay(value, (Step.method("movedim", axis, -1),)), ()
        strides = dense_strides(sizes, out.order)
        fake = replay(_empty(value, sizes, strides), finish) if finish else None
        shape = sizes if fake is None else fake.shape
        order = site.heads[0].memory_order(out.order) if site.heads else \
            range(value.dim()) if finish else out.order
        # Sizes that are proven equal may be written differently, and strides with them: the wanted
        # strides are compared with those that the wanted sizes give.
        if not same_shape(shape, value.shape) or \
                not same_shape(dense_strides(tuple(value.shape), order), value.stride()) or \
                (fake is not None and not same_shape(fake.stride(), dense_strides(shape, order))):
            raise ContractError(f"{node.name}: the fused op yields {tuple(shape)} in order "
                                f"{out.order}, the graph {tuple(value.shape)}, {value.stride()}")
        if TORCH_DTYPES[out.dtype] != value.dtype or devices != {value.device}:
            raise ContractError(f"{node.name}: the fused op yields {out.dtype} on {devices}, "
                                f"the graph {value.dtype} on {value.device}")


def _empty(like: torch.Tensor, sizes, strides) -> torch.Tensor:
    """A fake of the given layout in the fake mode of `like`."""
    with like.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
