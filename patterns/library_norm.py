"""`F.layer_norm`, `F.rms_norm`, their ATen forms, and `F.normalize`: norms that a library call spells out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from ..effects import value_of
from ..graph import Lens, same_shape, static_size
from ..kinds import base_name
from ..rules import rules_of
from ..site import Decline, Norm
from .vector_norm import is_euclidean, places_from_the_end

#: parameter names by position, for calls by keyword
_PARAMETERS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}


def match(lens: Lens, node: Node) -> Iterator[Norm]:
    """The norm that `node` calls, if it calls one.

    Raises:
        Decline: for a norm that has no region.
    """
    word = lens.kind(node)
    if word in _PARAMETERS:
        yield _norm(lens, node, word)
    elif word == "normalize":
        yield _normalize(lens, node)
    elif base_name(node) == "_transformer_encoder_layer_fwd":
        raise Decline("inside the one call that nn.TransformerEncoderLayer makes in inference", node)


def _norm(lens: Lens, node: Node, word: str) -> Norm:
    names = _PARAMETERS[word]
    bound = dict(zip(names, node.args)) | dict(node.kwargs)
    value, weight, bias = bound["input"], bound.get("weight"), bound.get("bias")
    shape = _static_shape(bound["normalized_shape"], node)
    fake, out, interior = lens.tensor(value), node, {node}
    if fake is None:
        raise Decline("the input is no plain tensor", node)
    if lens.tensor(node) is None:
        # native_layer_norm and _fused_rms_norm yield (out, statistics...).
        parts = [user for user in node.users if lens.kind(user) == "getitem"]
        outs = [part for part in parts if part.args[1] == 0]
        if len(outs) != 1 or len(parts) != len(node.users) or \
                any(part.users for part in parts if part is not outs[0]):
            raise Decline("the statistics are read too", node)
        out = outs[0]
        interior.update(parts)
    result = lens.tensor(out)
    if not same_shape(fake.shape[-len(shape):], shape):
        raise Decline(f"the normalised shape {shape} is not the input's", node)
    vectors = [lens.tensor(v) for v in (weight, bias) if v is not None]
    for vector in vectors:
        if vector is None or not same_shape(vector.shape, shape):
            raise Decline("weight or bias is not of the normalised shape", node)
    if fake.dtype == result.dtype:
        _check_mixed(fake, vectors, word, node)
    eps = bound.get("eps", 1e-5 if word == "layer_norm" else None)
    if eps is None:
        # F.rms_norm(eps=None): that of the type it computes in.
        wide = torch.float64 if fake.dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps
    return Norm(word, value, weight, bias, eps, shape, out, frozenset(interior), result.dtype, word)


def _normalize(lens: Lens, node: Node) -> Norm:
    """`F.normalize(x, dim=-1)`, also of another dim or of several."""
    bound = dict(zip(("input", "p", "dim", "eps", "out"), node.args)) | dict(node.kwargs)
    value, order = bound["input"], bound.get("p", 2.0)
    fake, result = lens.tensor(value), lens.tensor(node)
    if fake is None or result is None:
        raise Decline("the input is no plain tensor", node)
    if bound.get("out") is not None:
        raise Decline("normalize writes its result into a given tensor (out=)", node)
    if not is_euclidean(order):
        raise Decline(f"normalises by another norm than the Euclidean one (p={order})", node)
    dims = places_from_the_end(bound.get("dim", 1), fake.dim(), node)
    shape = tuple(static_size(fake.shape[dim]) for dim in dims)
    if None in shape:
        raise Decline("the normalised size is symbolic", node)
    axis = None if dims[-1] == -1 else fake.dim() + dims[0]
    return Norm("normalize", value, None, None, bound.get("eps", 1e-12), shape, node, frozenset({node}),
                result.dtype, "normalize", axis)


def _static_shape(shape, node: Node) -> tuple[int, ...]:
    """The normalised sizes as ints: `x.shape[-1:]` and `(x.size(-1),)` are nodes under dynamic=True."""
    value = value_of(shape) if isinstance(shape, Node) else shape
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    static = tuple(static_size(value_of(n) if isinstance(n, Node) else n) for n in sizes)
    if None in static:
        raise Decline("the normalised size is symbolic", node)
    return static


def _check_mixed(fake, vectors, word: str, node: Node) -> None:
    """Weights of another dtype: what eager does with them differs by device, so only the mixes that
    eager computes in one way everywhere it accepts them are taken."""
    if all(vector.dtype == fake.dtype for vector in vectors):
        return
    low = fake.dtype in (torch.bfloat16, torch.float16)
    wide = all(vector.dtype == torch.float32 for vector in vectors)
    if word != "layer_norm" or not (low and wide) or rules_of(fake.device) not in ("cpu", "npu"):
        raise Decline("weight and input have different dtypes, which eager may refuse", node)
