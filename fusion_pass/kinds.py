"""One word for every spelling of an op: functions, methods, operators, builtins, ATen overloads.

`base_name(node)` reduces a target to its plain name ("add_", "layer_norm"); `KINDS` maps plain names
to words. A name that no table holds has no kind: the pass leaves it alone, and `effects.py` decides
what it may touch.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
from torch.fx import Node

#: plain name -> word. A name that is its own word is listed in `_SAME`.
KINDS: dict[str, str] = {
    # casts and copies; which of the two a call is, the fakes' dtypes and storages say
    **dict.fromkeys(("to", "float", "bfloat16", "half", "double", "type", "type_as", "_to_copy",
                     "convert_element_type"), "to"),
    **dict.fromkeys(("contiguous", "clone"), "copy"),
    # arithmetic
    **dict.fromkeys(("add", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("sub", "subtract", "__sub__"), "sub"),
    **dict.fromkeys(("rsub", "__rsub__"), "rsub"),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "__truediv__"), "div"),
    # (float_power is no pow: it computes in double)
    **dict.fromkeys(("pow", "__pow__"), "pow"),
    **dict.fromkeys(("neg", "negative", "__neg__"), "neg"),
    **dict.fromkeys(("abs", "absolute"), "abs"),
    **dict.fromkeys(("sigmoid", "logistic"), "sigmoid"),
    "silu": "silu", "swish": "silu",
    # norms
    **dict.fromkeys(("layer_norm", "native_layer_norm"), "layer_norm"),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), "rms_norm"),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), "norm"),
    **dict.fromkeys(("clamp", "clamp_min"), "clamp"),
    **dict.fromkeys(("matmul", "__matmul__"), "matmul"),
    **dict.fromkeys(("getitem",), "getitem"),
    **dict.fromkeys(("cat", "concat", "concatenate"), "cat"),
}
_SAME = (
    "mean", "var", "std", "var_mean", "sum", "square", "sqrt", "rsqrt", "reciprocal", "exp", "tanh",
    "relu", "gelu", "mish", "hardswish", "normalize", "maximum", "minimum", "view", "reshape", "unflatten",
    "flatten", "permute", "transpose", "movedim", "select", "narrow", "unbind", "chunk", "split",
    "tensor_split", "expand",
    "unsqueeze", "squeeze", "slice", "item", "addcmul", "linear", "stack", "_unsafe_view", "t",
    "swapaxes", "swapdims", "moveaxis", "expand_as", "view_as", "reshape_as", "broadcast_to",
    "split_with_sizes", "mT", "rearrange", "addmm", "bmm", "einsum", "conv2d",
    # (in eval mode an identity, which its fake shows)
    "dropout",
)
KINDS.update((name, name) for name in _SAME)

#: Methods that look at shape, dtype and device alone.
_LAYOUTLESS = frozenset("size dim ndimension numel __len__ new_empty new_full new_ones new_zeros".split())

#: Views that mean the same on any strides: replayed on another tensor of the same shape, they are
#: valid and select the same elements.
STRIDE_FREE_VIEWS = frozenset(
    "unflatten permute transpose movedim select narrow unbind chunk split tensor_split expand "
    "unsqueeze squeeze slice getitem swapaxes swapdims moveaxis expand_as broadcast_to "
    "split_with_sizes t mT".split())

#: Views that change the grouping of dims, and exist only for some strides.
REGROUPING_VIEWS = frozenset(
    "view reshape flatten _unsafe_view view_as reshape_as rearrange".split())

_TRUSTED = ("torch", "_operator", "operator", "builtins", "math", "einops", "_VariableFunctions")


@lru_cache(maxsize=8192)
def _function_name(target) -> str | None:
    """Plain name of a callable target, or None when it is not PyTorch's, Python's or einops's own."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2] if target.namespace in _NAMESPACES else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        namespace, _, plain = name.partition("::")
        return plain if namespace in _NAMESPACES else None
    if isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if getattr(target, "__module__", None) is None and hasattr(target, "__objclass__"):
        module = target.__objclass__.__module__
    else:
        module = getattr(target, "__module__", None) or ""
        owner = getattr(target, "__self__", None)
        if not module and owner is not None:
            # torch.layer_norm and friends are methods of torch._C._VariableFunctions.
            module = getattr(owner, "__module__", None) or getattr(owner, "__name__", "") or ""
    if module.partition(".")[0] not in _TRUSTED:
        return None
    return getattr(target, "__name__", None)


_NAMESPACES = ("aten", "prims")


def base_name(node: Node) -> str | None:
    """The plain name that `node` calls, or None when it calls nothing known."""
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return None
    if node.target is getattr and node.args[1:] == ("mT",):
        return "mT"
    return _function_name(node.target)


def ignores_layout(node: Node) -> bool:
    """Whether `node` is a method that never looks at where a tensor's elements are."""
    return node.op == "call_method" and node.target in _LAYOUTLESS


def kind(node: Node) -> str | None:
    """The word for what `node` computes, whatever its spelling; None when the table has none.

    In-place spellings have no kind: they are mutations first (`effects.py`). Of those that may be read as
    their functional form, a lens knows the word (`updates.py`).
    """
    name = base_name(node)
    if name is None:
        return None
    word = KINDS.get(name)
    if word == "getitem" and node.target is not operator.getitem:
        return None
    return word


def is_foreign(target) -> bool:
    """Whether `target` is a registered op of somebody else's than PyTorch's."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _NAMESPACES
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] not in _NAMESPACES
    return False
