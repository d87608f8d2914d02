"""Rewriting: a new graph with one fused op in the place of each site.

The old graph is only read, so that it can run when anything here fails.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node

from .cat_site import CatSite, RestSite
from .chain_site import ChainSite
from .contract import check_contract
from .effects import value_of
from .graph import Lens
from .kernels.chain_ops import chain_call
from .kernels.joined import joined_call
from .kernels.ops import python_call
from .kernels.placed import rest_call
from .kernels.region import one_line
from .select import Taken
from .site import Site
from .updates import update_word

#: What is taken, and one op each in the new graph.
Unit = Site | ChainSite | CatSite | RestSite


def read_by_result(graph: Graph) -> Graph:
    """The graph in which all who come after an in-place op read its result instead of what it writes, which
    is the same tensor: `h.mul_(2); return h` as `return h.mul_(2)`. `graph` itself where none does.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    updates = {node for node in graph.nodes if update_word(node) and _yields_target(node)}
    if all(position[user] <= position[node] for node in updates for user in node.args[0].users):
        return graph
    result = Graph(graph.owning_module, tracer_cls=graph._tracer_cls)
    result._codegen = copy.deepcopy(graph._codegen)
    env: dict[Node, Node] = {}
    latest: dict[Node, Node] = {}  # a node of `result` that was written -> the result of that

    def lookup(node: Node) -> Node:
        while env[node] in latest:
            env[node] = latest[env[node]]
        return env[node]

    for node in graph.nodes:
        env[node] = _copy(result, node, lookup)
        if node in updates:
            latest[env[node].args[0]] = env[node]
    return result


def _yields_target(update: Node) -> bool:
    """Whether the fake of an in-place op is that of its target."""
    return value_of(update) is not None and value_of(update) is value_of(update.args[0])


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
        for piece in (site,) if isinstance(site, Site) else site.pieces:
            check_contract(lens, piece)
    interior = {node for site in taken.sites for node in site.interior}
    for unit in schedule:
        if not isinstance(unit, Node):
            known = views.setdefault(lens.segment[unit.anchor], {})
            _insert(graph, unit, env, known, traceable, self_check)
        elif unit not in interior and unit not in lens.constants:
            env[unit] = _copy(graph, unit, env.__getitem__)
    graph.lint()
    return graph


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy to be changed, and the copy of each node."""
    copied = Graph(owning_module=graph.owning_module)
    copied._codegen = copy.deepcopy(graph._codegen)  # how inputs and outputs are packed
    env: dict[Node, Node] = {}
    for node in graph.nodes:
        env[node] = _copy(copied, node, env.__getitem__)
    return copied, env


def erase_unread(graph: Graph, nodes: Iterable[Node], is_pure: Callable[[Node], bool]) -> None:
    """Erase those of `nodes` that nobody reads, and what is pure and read by them alone."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if not node.users and not node._erased:
            above = node.all_input_nodes
            graph.erase_node(node)
            waiting += filter(is_pure, above)


def _copy(graph: Graph, node: Node, lookup: Callable[[Node], Node | int]) -> Node:
    result = graph.node_copy(node, lookup)
    if hasattr(node, "_dynamo_source"):  # of an input; AOTAutograd asks for it
        result._dynamo_source = node._dynamo_source
    return result


def _insert(graph: Graph, site: Unit, env: dict, views: dict, traceable: bool, self_check: str) -> None:
    inputs = [_operand(graph, node, steps, env, views) for node, steps in site.inputs]
    scalars = [env[s] if isinstance(s, Node) else s for s in site.scalars]
    if traceable:
        fused = site.chain if isinstance(site, ChainSite) else site.region
        name = "chain" if isinstance(site, ChainSite) else "region"
        op = graph.call_function(getattr(torch.ops.ascend_ln_fuse, name).default,
                                 (one_line(fused.text), inputs, scalars), {"self_check": self_check})
    else:
        op = graph.call_function(_call(site, self_check), (*inputs, *scalars))
    _keep_meta(op, site.anchor)
    count = len(set(site.results))
    single = count == 1 and not traceable
    results = [op if single else graph.call_function(operator.getitem, (op, number))
               for number in range(count)]
    for node, finish, number in zip(site.outputs, site.finishes, site.results):
        result = results[number]
        for step in finish:
            result = step.insert(graph, result, env.__getitem__)
        whole = site.wholes.get(node, node) if isinstance(site, ChainSite) else node
        result.meta = dict(whole.meta)
        env[node] = result


def _call(site: Unit, self_check: str) -> Callable:
    """The function of a site's inputs, then its scalars."""
    if isinstance(site, Site):
        return python_call(site.region, self_check)
    if isinstance(site, ChainSite):
        return chain_call(site.chain, self_check)
    return joined_call(site.joined, self_check) if isinstance(site, CatSite) else rest_call(site.rest)


def _operand(graph: Graph, node: Node, steps, env: dict, views: dict) -> Node:
    """`node` seen through `steps`; equal views of one tensor are taken once."""
    result, key = env[node], node
    for step in steps:
        key = (key, step.key)
        if key not in views:
            views[key] = step.insert(graph, result, env.__getitem__)
        result = views[key]
    return result


def _keep_meta(op: Node, anchor: Node) -> None:
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if name in anchor.meta:
            op.meta[name] = anchor.meta[name]


