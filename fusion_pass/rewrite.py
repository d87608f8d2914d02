"""Rewriting: a new graph with one fused op in the place of each site.

The old graph is only read, so that it can run when anything here fails. The contract is asserted for
every output: shape, strides, dtype and device are those of the value that it replaces.
"""

from __future__ import annotations

import copy
import operator

import torch
from torch.fx import Graph, Node

from .graph import Lens, same_shape
from .kernels.ops import python_call
from .kernels.reference import TORCH_DTYPES
from .kernels.region import broadcast_sizes, dense_strides
from .select import Taken
from .site import Site, replay


class ContractError(AssertionError):
    """A fused op would not yield exactly what it replaces. A bug of the pattern, never the user's."""


def check_contract(lens: Lens, site: Site) -> None:
    """Raise ContractError unless each output of `site` has the shape, strides, dtype and device of
    the value it replaces, for all sizes that the graph may meet."""
    region = site.region
    sizes = broadcast_sizes(region, [fake.shape for fake in site.fakes])
    devices = {fake.device for fake in site.fakes}
    for out, node in zip(region.outputs, site.outputs):
        value = lens.tensor(node)
        fake = replay(_empty(value, sizes, dense_strides(sizes, out.order)), site.finish)
        order = range(value.dim()) if site.finish else out.order
        # Sizes that are proven equal may be written differently, and strides with them: the wanted
        # strides are compared with those that the wanted sizes give.
        if not same_shape(fake.shape, value.shape) or \
                not same_shape(dense_strides(tuple(value.shape), order), value.stride()) or \
                (site.finish and not same_shape(fake.stride(), dense_strides(fake.shape, order))):
            raise ContractError(f"{node.name}: the fused op yields {tuple(fake.shape)} in order "
                                f"{out.order}, the graph {tuple(value.shape)}, {value.stride()}")
        if TORCH_DTYPES[out.dtype] != value.dtype or devices != {value.device}:
            raise ContractError(f"{node.name}: the fused op yields {out.dtype} on {devices}, "
                                f"the graph {value.dtype} on {value.device}")


def _empty(like: torch.Tensor, sizes, strides) -> torch.Tensor:
    """A fake of the given layout in the fake mode of `like`."""
    with like.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)


def rewrite(lens: Lens, taken: Taken, traceable: bool) -> Graph:
    """The graph with the taken sites fused.

    Args:
        traceable: call `torch.ops.ascend_ln_fuse.region`, which another compiler can trace, instead of
            the launcher itself, which costs less per call.

    Raises:
        ContractError: see `check_contract`.
    """
    graph = Graph()
    graph._codegen = copy.deepcopy(lens.graph._codegen)  # how inputs and outputs are packed
    env: dict[Node, Node] = {}
    views: dict = {}
    schedule = taken.schedule()
    for site in taken.sites:
        check_contract(lens, site)
    interior = {node for site in taken.sites for node in site.interior}
    for unit in schedule:
        if isinstance(unit, Site):
            _insert(graph, unit, env, views, traceable)
        elif unit not in interior:
            env[unit] = graph.node_copy(unit, env.__getitem__)
    graph.lint()
    return graph


def _insert(graph: Graph, site: Site, env: dict, views: dict, traceable: bool) -> None:
    inputs = [_operand(graph, node, steps, env, views) for node, steps in site.inputs]
    scalars = [env[s] if isinstance(s, Node) else s for s in site.scalars]
    count = len(site.outputs)
    if traceable:
        args = (site.region.text, inputs, scalars)
        op = graph.call_function(torch.ops.ascend_ln_fuse.region.default, args)
        results = [graph.call_function(operator.getitem, (op, i)) for i in range(count)]
    else:
        op = graph.call_function(python_call(site.region), (*inputs, *scalars))
        results = [op] if count == 1 else \
            [graph.call_function(operator.getitem, (op, i)) for i in range(count)]
    _keep_meta(op, site.anchor)
    for node, result in zip(site.outputs, results):
        for step in site.finish:
            result = step.insert(graph, result, env.__getitem__)
        result.meta = dict(node.meta)
        env[node] = result


def _operand(graph: Graph, node: Node, steps, env: dict, views: dict) -> Node:
    """`node` seen through `steps`; equal views of one tensor are taken once."""
    result, key = env[node], node
    for step in steps:
        # Steps hold slices and lists, which cannot be hashed but print exactly.
        key = (key, step.op, step.target, repr(step.args), repr(step.kwargs))
        if key not in views:
            views[key] = step.insert(graph, result, env.__getitem__)
        result = views[key]
    return result


def _keep_meta(op: Node, anchor: Node) -> None:
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if name in anchor.meta:
            op.meta[name] = anchor.meta[name]


