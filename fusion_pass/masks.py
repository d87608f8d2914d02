"""Attention masks that say nothing: built from sizes alone, all True or causal.

Where a library asks in eager whether a mask is needed at all, it cannot ask while it is traced: the graph
then builds the mask from `arange` and comparisons in every call, and scaled_dot_product_attention, given a
mask, has to run a slower kernel than it does in eager. Such a mask is a constant of the graph. It is
computed once, here, and where it is all True the call gets no mask, where it is causal `is_causal=True`,
which mean the same by the definition of torch.nn.functional.scaled_dot_product_attention. (But for scores
that are Inf where the mask is not True: masks are added to them as -Inf, which gives NaN, and `is_causal`
does not look at them. And PyTorch's kernel for CPUs, which runs where there is no mask, gives 0 for a query
that is NaN.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from .draft import Draft
from .effects import effects_of, is_attention_without_dropout, value_of
from .graph import Lens, again_on_fakes, call, on_fakes
from .kinds import STRIDE_FREE_VIEWS, base_name, kind
from .rewrite import erase_unread

ALL, CAUSAL = "all True", "causal"

#: elements of the largest mask that is looked into, and of what it is made of
MAX_ELEMENTS = 1 << 27

_FACTORIES = frozenset("arange ones zeros full eye".split())
#: of a tensor whose values do not matter -> what they fill the result with
_FILLS = {"new_ones": 1, "ones_like": 1, "new_zeros": 0, "zeros_like": 0}
#: Functions of their arguments alone, which write nothing and draw nothing.
_PURE = frozenset(
    "add sub mul eq ne lt le gt ge and_ or_ xor invert not_ and or logical_and logical_or "
    "logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bool int long float "
    "to diff cumsum tril triu where masked_fill repeat repeat_interleave contiguous clone view reshape "
    "flatten abs".split()) | STRIDE_FREE_VIEWS

_ATTENTION = "scaled_dot_product_attention"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def drop_needless_masks(draft: Draft) -> tuple[str, ...]:
    """Leave them out of a draft, which stays as it is where it has none; returns notes for the report."""
    found = needless_masks(draft)
    if not found:
        return ()
    nodes = draft.change()
    _drop(draft.graph, {nodes[node]: meaning for node, meaning in found.items()})
    return (_words(found),)


def needless_masks(draft: Draft) -> dict[Node, str]:
    """The attentions of a draft that have a constant and needless mask -> ALL or
    CAUSAL. None with dropout: which numbers are drawn for which score depends on the kernel, and that on
    whether there is a mask."""
    calls = [(node, _arguments(node)) for node in draft.graph.nodes if is_attention_without_dropout(node)]
    calls = [(node, given) for node, given in calls
             if isinstance(given.get("attn_mask"), Node) and given.get("is_causal", False) is False]
    if not calls or _capturing():
        return {}
    lens = draft.lens
    constants = _constants(lens, {given["attn_mask"] for _, given in calls})
    known: dict[Node, str | None] = {}
    found = {}
    for node, given in calls:
        mask = given["attn_mask"]
        if mask not in constants:
            continue
        if mask not in known:
            known[mask] = _meaning(_evaluate(lens, mask, constants))
        if known[mask] is not None and _fits(lens, node, given, known[mask]):
            found[node] = known[mask]
    return found


def _capturing() -> bool:
    """Whether CUDA records what is launched: then nothing can be computed and looked at."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _drop(graph: Graph, attentions: dict[Node, str]) -> None:
    """Take the masks out of those calls of `graph`, and what nobody reads then."""
    orphans = []
    for node, meaning in attentions.items():
        given = _arguments(node)
        orphans.append(given.pop("attn_mask"))
        if meaning == CAUSAL:
            given["is_causal"] = True
        others = {name: arg for name, arg in node.kwargs.items() if name not in _ARGUMENTS}
        node.args = tuple(given.pop(name) for name in _ARGUMENTS[:3])
        node.kwargs = {**given, **others}
    erase_unread(graph, orphans, _is_pure)


def _words(attentions: dict[Node, str]) -> str:
    counts = [f"{list(attentions.values()).count(meaning)} {meaning}" for meaning in (ALL, CAUSAL)
              if meaning in attentions.values()]
    which = "1 attention runs" if len(attentions) == 1 else f"{len(attentions)} attentions run"
    return f"{which} without a mask, which is the same in every call ({', '.join(counts)})"


def _arguments(node: Node) -> dict:
    """The arguments of an attention by name, without those that only a keyword can give."""
    named = {name: arg for name, arg in node.kwargs.items() if name in _ARGUMENTS}
    return {**dict(zip(_ARGUMENTS, node.args)), **named}


def _is_pure(node: Node) -> bool:
    name = base_name(node) or ""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]  # Dynamo writes `a == b` as a method in some versions
    if "out" in node.kwargs:
        return False
    return name in _FACTORIES or name in _FILLS or name in _PURE or kind(node) in _PURE


def _constants(lens: Lens, masks: Iterable[Node]) -> set[Node]:
    """Those of `masks`, and of what they are made of, that are the same in every call of the graph."""
    pure, waiting = set(), [*masks]
    while waiting:
        node = waiting.pop()
        if node in pure or not _is_pure(node) or node in lens.transformed or lens.is_mutated(node):
            continue
        if not all(map(_small, _tensors(value_of(node)))):
            continue
        pure.add(node)
        waiting += _made_of(node)
    found: set[Node] = set()
    for node in sorted(pure, key=lens.position.__getitem__):
        if all(arg in found for arg in _made_of(node)):
            found.add(node)
    return found


def _made_of(node: Node) -> Sequence[Node]:
    """What the values of a pure node depend on."""
    return () if base_name(node) in _FILLS else node.all_input_nodes


def _tensors(value) -> Iterator[torch.Tensor | None]:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        yield one if isinstance(one, torch.Tensor) else None


def _small(fake: torch.Tensor | None) -> bool:
    """Whether it is a plain tensor of static sizes, with values, and not too large."""
    return fake is not None and fake.layout is torch.strided and fake.device.type != "meta" and \
        all(isinstance(n, int) for n in (*fake.shape, *fake.stride())) and fake.numel() <= MAX_ELEMENTS


def _evaluate(lens: Lens, mask: Node, constants: set[Node]) -> torch.Tensor | None:
    """The values of a constant node; None where they cannot be computed here."""
    needed, stack = set(), [mask]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += _made_of(node)
    values: dict[Node, object] = {}
    order = sorted(needed, key=lens.position.__getitem__)
    last = {arg: node for node in order for arg in node.all_input_nodes}
    try:
        with unset_fake_temporarily(), torch.no_grad():
            for node in order:
                values[node] = _run(node, values)
                for arg in node.all_input_nodes:
                    if last[arg] is node:
                        values.pop(arg, None)  # a mask of many tokens is large, and made in several steps
    except Exception:  # a mask that stays in the graph is no failure
        return None
    return values[mask] if isinstance(values[mask], torch.Tensor) else None


def _run(node: Node, values: dict[Node, object]):
    fill = _FILLS.get(base_name(node))
    if fill is not None:
        fake = value_of(node)
        return torch.full(fake.shape, fill, dtype=fake.dtype, device=fake.device)
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    return call(node, args, kwargs)


def _meaning(mask: torch.Tensor | None) -> str | None:
    if mask is None or mask.dim() < 2:
        return None
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            return None
        # What is added to the scores: nothing, or all that there is.
        if not bool(((mask == 0) | (mask == -torch.inf)).all()):
            return None
        mask = mask == 0
    if bool(mask.all()):
        return ALL
    rows, columns = mask.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return CAUSAL if rows == columns and bool((mask == causal).all()) else None


def _fits(lens: Lens, node: Node, given: dict, meaning: str) -> bool:
    """Whether the attention has the mask's rows and columns, and without it the same shape, with strides that
    the graph bears."""
    query, key, value = (lens.tensor(given.get(name)) for name in _ARGUMENTS[:3])
    mask, out = lens.tensor(given["attn_mask"]), lens.tensor(node)
    if any(fake is None for fake in (query, key, value, mask, out)):
        return False
    if query.dim() == 4 and mask.dim() == 3:
        return False  # no kernel takes it but plain matmuls, which can be differentiated twice
    if meaning == CAUSAL and tuple(mask.shape[-2:]) != (query.shape[-2], key.shape[-2]):
        return False
    rest = {name: arg for name, arg in node.kwargs.items() if name not in _ARGUMENTS}
    try:
        bare = on_fakes(node, (query, key, value), {**rest, "is_causal": meaning == CAUSAL}, query)
    except Exception:
        return False
    return tuple(bare.shape) == tuple(out.shape) and _settles(lens, node, bare)


def _settles(lens: Lens, node: Node, fake: torch.Tensor) -> bool:
    """Whether nothing in the graph depends on `node` having other strides than `fake`: what reads it, and
    alone does, has the strides of the graph again before it is read by more. (Kernels of attention differ in
    the strides of their results; a `reshape` makes them alike, a `view` fails.)"""
    while fake.stride() != lens.tensor(node).stride():
        reader, *others = node.users
        if others or reader.op not in ("call_function", "call_method") or effects_of(reader).writes:
            return False
        try:
            fake = again_on_fakes(reader, lambda arg: fake if arg is node else value_of(arg), fake)  # noqa: B023
        except Exception:
            return False
        if not isinstance(fake, torch.Tensor) or lens.tensor(reader) is None:
            return False
        node = reader
    return True
