"""Rewriting: a new graph with one fused op in the place of each site.

The old graph is only read, so that it can run when anything here fails.
"""

from __future__ import annotations

import copy
import operator

import torch
from torch.fx import Graph, Node

from .chain_site import ChainSite
from .contract import check_contract
from .graph import Lens
from .kernels.chain_ops import chain_call
from .kernels.ops import python_call
from .kernels.region import one_line
from .select import Taken
from .site import Site


def rewrite(lens: Lens, taken: Taken, traceable: bool, self_check: str) -> Graph:
    """The graph with the taken sites fused.

    Args:
        traceable: call `torch.ops.ascend_ln_fuse.region` (or `chain`), which another compiler can trace,
            instead of the launcher itself, which costs less per call.
        self_check: the option of that name.
    """
    graph = Graph()
    graph._codegen = copy.deepcopy(lens.graph._codegen)  # how inputs and outputs are packed
    env: dict[Node, Node | int] = dict(lens.constants)
    #: per segment of the graph: a view taken under no_grad has no gradient elsewhere
    views: dict[int, dict] = {}
    schedule = taken.schedule()
    for site in taken.sites:
        for piece in site.pieces if isinstance(site, ChainSite) else (site,):
            check_contract(lens, piece)
    interior = {node for site in taken.sites for node in site.interior}
    for unit in schedule:
        if isinstance(unit, (Site, ChainSite)):
            known = views.setdefault(lens.segment[unit.anchor], {})
            _insert(graph, unit, env, known, traceable, self_check)
        elif unit not in interior and unit not in lens.constants:
            env[unit] = _copy(graph, unit, env)
    graph.lint()
    return graph


def _copy(graph: Graph, node: Node, env: dict) -> Node:
    result = graph.node_copy(node, env.__getitem__)
    if hasattr(node, "_dynamo_source"):  # of an input; AOTAutograd asks for it
        result._dynamo_source = node._dynamo_source
    return result


def _insert(graph: Graph, site: Site | ChainSite, env: dict, views: dict, traceable: bool,
            self_check: str) -> None:
    inputs = [_operand(graph, node, steps, env, views) for node, steps in site.inputs]
    scalars = [env[s] if isinstance(s, Node) else s for s in site.scalars]
    fused = site.chain if isinstance(site, ChainSite) else site.region
    if traceable:
        name = "chain" if isinstance(site, ChainSite) else "region"
        op = graph.call_function(getattr(torch.ops.ascend_ln_fuse, name).default,
                                 (one_line(fused.text), inputs, scalars), {"self_check": self_check})
    else:
        call = chain_call if isinstance(site, ChainSite) else python_call
        op = graph.call_function(call(fused, self_check), (*inputs, *scalars))
    _keep_meta(op, site.anchor)
    single = len(set(site.places)) == 1 and not traceable
    results = [op if single else graph.call_function(operator.getitem, (op, number))
               for number in range(len(set(site.places)))]
    for node, finish, place in zip(site.outputs, site.finishes, site.places):
        result = results[place]
        for step in finish:
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


