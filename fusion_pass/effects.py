"""What a node reads and writes: the memory behind tensors, the random stream, ambient state.

The unit of memory is a storage, as the fakes tell it: a view shares its base's. Nothing is assumed of
an op that no table knows: it reads and writes all that its arguments reach.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .kinds import base_name, is_foreign

#: Not memory, but ordered like it.
RANDOM = "random"
WORLD = "world"

#: Functions that write running statistics, which neither name nor schema betrays. Where among the
#: arguments they stand differs by spelling: all but the first count as written.
_STATISTICS = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm",
                         "miopen_batch_norm", "_batch_norm_impl_index"))
#: Substrings of names of ops that draw random numbers (some only with dropout_p > 0: an order too
#: many costs nothing).
_RANDOM_WORDS = ("dropout", "rand", "bernoulli", "normal_", "multinomial", "poisson", "exponential_",
                 "uniform_", "cauchy_", "geometric_", "attention", "rrelu", "gumbel", "fractional_max_pool",
                 "seed", "rng_state")
_RANDOM_NAMES = frozenset(("normal", "lstm", "gru", "rnn_tanh", "rnn_relu"))
#: Calls that switch state which later ops depend on: nothing may move across one.
_FENCES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
           "_exit_inference_mode", "_vmap_increment_nesting", "_vmap_decrement_nesting",
           "_grad_increment_nesting", "_grad_decrement_nesting", "_jvp_increment_nesting",
           "_jvp_decrement_nesting", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
           "set_deterministic_debug_mode", "_set_deterministic_algorithms", "_enter_dual_level",
           "_exit_dual_level", "set_fwd_grad_enabled", "_set_fwd_grad_enabled", "set_stream")
#: What begins and ends a functorch transform, or forward-mode AD: its tensors are not what they look like.
_TRANSFORM_WORDS = ("_vmap_", "_grad_increment", "_grad_decrement", "_jvp_", "_dual_level")


@dataclass(frozen=True)
class Effects:
    """Storage keys (ints) and the words RANDOM and WORLD that a node reads and writes."""

    reads: frozenset
    writes: frozenset


def value_of(node: Node):
    """The fake (or symbolic number, or tuple of such) that `node` yields; None when unknown."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def give_value(node: Node, value) -> None:
    """Have `node` carry another one."""
    node.meta["example_value" if "example_value" in node.meta else "val"] = value


def tensors_of(value) -> Iterator[torch.Tensor]:
    """The tensors in `value`, through tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def is_plain(fake: torch.Tensor | None) -> bool:
    """Whether the values of a fake are what lies in its memory, and no gradient of it is recorded."""
    return isinstance(fake, FakeTensor) and not (fake.is_conj() or fake.is_neg() or fake.requires_grad)


def storage_key(tensor: torch.Tensor) -> int | None:
    """A key of the memory behind a fake, valid while the graph is alive; None where it has none of
    its own (sparse, nested and wrapper subclasses)."""
    if not isinstance(tensor, FakeTensor) and is_traceable_wrapper_subclass(tensor):
        # (It has a storage, which says nothing.)
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def storages(value) -> frozenset:
    """Keys of all memory behind `value`; WORLD stands for memory that cannot be told."""
    tensors = (value,) if isinstance(value, torch.Tensor) else tensors_of(value)
    return frozenset([WORLD if (key := storage_key(t)) is None else key for t in tensors])


def storages_of(node: Node) -> frozenset:
    """`storages` of what `node` yields. A dropout in eval mode yields its input itself; its fake has
    memory of its own."""
    return storages(value_of(node.args[0] if is_idle_dropout(node) else node))


def is_idle_dropout(node: Node) -> bool:
    """Whether `node` is a dropout whose `training` is False in the graph, or whose p is 0."""
    name = base_name(node) if node.op == "call_function" else None
    if name is None or "dropout" not in name or not node.args or not isinstance(node.args[0], Node):
        return False
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train"))
    idle = training is False or (isinstance(p, (int, float)) and p == 0)
    return idle and isinstance(value_of(node), torch.Tensor)


def is_attention_without_dropout(node: Node) -> bool:
    """Whether `node` is a scaled_dot_product_attention whose dropout_p is 0 in the graph."""
    if node.op != "call_function" or base_name(node) != "scaled_dot_product_attention":
        return False
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return isinstance(dropout, (int, float)) and dropout == 0


def is_fence(node: Node) -> bool:
    """Whether `node` switches ambient state (grad mode, autocast, functorch levels)."""
    name = node.op == "call_function" and getattr(node.target, "__name__", None)
    return bool(name) and name in _FENCES


def transform_depth_change(node: Node) -> int:
    """+1 where a functorch transform or forward-mode AD begins, -1 where it ends, else 0."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if any(word in name for word in _TRANSFORM_WORDS):
        return 1 if "increment" in name or "enter" in name else -1
    return 0


def effects_of(node: Node, storages_of: Callable[[Node], frozenset] = storages_of) -> Effects:
    """What `node` reads and writes (see the module docstring); `storages_of` may be one that remembers."""
    if node.op in ("placeholder", "get_attr"):
        return Effects(frozenset(), frozenset())
    reads = frozenset().union(*map(storages_of, node.all_input_nodes))
    if node.op == "output":
        return Effects(reads, frozenset())
    written = _written(node)
    if written is None:
        return Effects(reads | {WORLD}, reads | {WORLD, RANDOM})
    writes = frozenset().union(*map(storages_of, written))
    if _draws(node.target, base_name(node) or "") and not is_idle_dropout(node):
        writes |= {RANDOM}
    return Effects(reads, writes)


@lru_cache(maxsize=8192)
def _draws(target, name: str) -> bool:
    """Whether a call takes from the random stream, or does what only its author knows: custom ops
    (which may draw, print, communicate) keep their order too."""
    if is_foreign(target):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return name in _RANDOM_NAMES or any(word in name for word in _RANDOM_WORDS) or \
        any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _namesakes(name))


@lru_cache(maxsize=1024)
def _namesakes(name: str) -> tuple:
    """The overloads of the ATen op that a function of this name calls, without its `out=` forms."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(o for o in overloads if not any(arg.is_out for arg in o._schema.arguments))


@lru_cache(maxsize=1024)
def _writing_schemas(name: str) -> tuple:
    """The schemas among `_namesakes` by which a call writes one of its arguments."""
    return tuple(o._schema for o in _namesakes(name) if o._schema.is_mutable)


def _nodes_in(arg) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(arg, lambda n: found.append(n) or n)
    return found


def _written(node: Node) -> list[Node] | None:
    """The nodes whose memory `node` writes; None when that cannot be told."""
    target = node.target
    name = base_name(node)
    if name in _STATISTICS:
        return _nodes_in((node.args[1:], {k: v for k, v in node.kwargs.items() if k != "input"}))
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return [n for overload in overloads for n in _written_by_schema(node, overload._schema)]
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if name is None or is_fence(node):
        return None
    written = _nodes_in(node.kwargs["out"]) if "out" in node.kwargs else []
    if _writes_first(node, name):
        # Named arguments: any of them may be the one.
        written += _nodes_in(node.args[:1]) or node.all_input_nodes
    if name in ("embedding", "embedding_bag") and \
            (node.kwargs.get("max_norm") is not None or any(arg is not None for arg in node.args[3:4])):
        written += _nodes_in((node.args[1:2], node.kwargs.get("weight")))
    for schema in _writing_schemas(name):  # what neither name nor keyword betrays: fake-quant observers
        written += _written_by_schema(node, schema)
    return written


def _writes_first(node: Node, name: str) -> bool:
    if getattr(node.target, "__module__", None) in ("_operator", "operator"):
        return name in _INPLACE_OPERATORS  # `and_` and `or_` are none
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in _INPLACE_METHODS:
        return True
    if node.op == "call_method":
        return False
    return binds_inplace(node)


_INPLACE_OPERATORS = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift "
    "setitem delitem".split())
_INPLACE_METHODS = frozenset(f"__{name}__" for name in _INPLACE_OPERATORS) | {"set_data"}


def binds_inplace(node: Node) -> bool:
    """Whether a function is called with `inplace=True`, by name or by position."""
    if node.kwargs.get("inplace"):
        return True
    position = inplace_position(node.target)
    return position is not None and len(node.args) > position and bool(node.args[position])


@lru_cache(maxsize=1024)
def inplace_position(target) -> int | None:
    """Where among its positional arguments a function takes `inplace`; None for one that takes none."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _written_by_schema(node: Node, schema) -> list[Node]:
    if not schema.is_mutable:
        return []
    written: list[Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in node.kwargs:
            written += _nodes_in(node.kwargs[argument.name])
        elif index < len(node.args) and not argument.kwarg_only:
            written += _nodes_in(node.args[index])
    return written
