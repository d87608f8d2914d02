"""LayerNorm, RMSNorm and l2 norms written out of primitives, recognised by structure.

A norm is `value * rstd` or `value / std`, where `std` is the root of a mean of squares (plus eps) over the
last dims. What the mean is of tells which norm: the value itself (RMSNorm), or the value less its mean
(LayerNorm). The spelling is free: pow, square or x*x; mean, sum/D, var, var_mean or E[x^2]-mean^2; rsqrt,
1/sqrt, pow(-0.5) or a division; operands in either order; casts anywhere. A sum of squares in the place of
the mean makes an l2 norm, and the length of the vector itself, clamped to eps, what F.normalize is.

Casts inside the statistics are dropped, since the kernel computes them in fp32 whatever the model wrote;
casts of the value itself are kept, because where a model rounds is part of its meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import NoReturn

import torch
from torch.fx import Node

from ..effects import value_of
from ..graph import Lens, hint, same, same_shape, static_size
from ..kinds import base_name
from ..site import Decline, Norm
from .vector_norm import clamped_from_below, is_euclidean, places_from_the_end, vector_norm
from .written_steps import NoNorm, Reader, lens_rank

_CLAMPS_IN_PLACE = ("clamp_", "clamp_min_")


@dataclass(frozen=True)
class _Stat:
    """What the norm `op` divides by, over `dims` (counted from the end) of `of`: a mean of squares, centred
    or not, their sum, or the length of a vector."""

    of: Node
    op: str
    dims: tuple[int, ...]


def match(lens: Lens, node: Node) -> Iterator[Norm]:
    """The norm whose last step is `node`, if it is one.

    Raises:
        Decline: for what only looks like a norm, or one that has no region; the reason names it.
    """
    if lens.kind(node) not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return
    if lens.tensor(node) is None or not lens.tensor(node).is_floating_point():
        return
    for value, scale, inverse in _readings(lens, node):
        try:
            yield _Matcher(lens, node).norm(value, scale, inverse)
            return
        except NoNorm:
            continue


def _readings(lens: Lens, node: Node):
    """(value, scale, whether scale is 1/std) for each way to read the node."""
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return
    if lens.kind(node) == "mul":
        yield a, b, True
        yield b, a, True
    else:
        yield a, b, False


class _Matcher(Reader):
    def __init__(self, lens: Lens, out: Node):
        super().__init__(lens, out)
        #: the `std` that stands for the root itself, where there is one: anywhere else it is no variance
        self.own_root: Node | None = None
        #: what the root is clamped to from below; the order of the vector norm that it is, and whether that
        #: is multiplied by a number first
        self.least: float | Node | None = None
        self.order: object = 2
        self.scaled = False

    def norm(self, value: Node, scale: Node, inverse: bool) -> Norm:
        # Cheap refusal first: this runs on every product of the graph.
        if lens_rank(self.lens, scale) != lens_rank(self.lens, value) or \
                lens_rank(self.lens, value) < 1:
            raise NoNorm
        scale = self._unexpanded(scale)
        scale, weight = self._scale(scale) if inverse else (scale, None)
        squared = self._rstd(scale) if inverse else self._std(scale)
        stat, eps = self._with_eps(squared)
        if not self._is_statistic(scale, value, stat.dims):
            raise NoNorm
        shape = self._normal_shape(stat)
        source, weight = self._source(value, stat, weight)
        axis = None if stat.dims[-1] == -1 else lens_rank(self.lens, source) + stat.dims[0]
        dtype = self.lens.tensor(self.out).dtype
        if weight is not None and (axis is not None or self.lens.tensor(weight).dtype != dtype):
            raise Decline("the weight is multiplied in before the statistics, and is of another dtype "
                          "or of a dim that is not the last", self.out)
        op, eps = self._bounded(stat, eps, scale)
        return Norm(op, source, weight, None, eps, shape, self.out, self._interior(source), dtype,
                    f"handwritten {op}", axis)

    def _bounded(self, stat: _Stat, eps: float | Node, scale: Node) -> tuple[str, float | Node]:
        """The norm's op and eps, where the root may be clamped from below."""
        op = stat.op
        if self.least is not None:
            if op not in ("l2_norm", "normalize") or isinstance(eps, Node) or eps != 0:
                raise Decline("eps bounds a root that is no length of the vector alone", self.out)
            op, eps = "normalize", self.least
        if op == "normalize":
            why = []
            if self.scaled:
                why.append(Decline("the length of the vector is scaled before the value is divided by it",
                                   self.out))
            if not is_euclidean(self.order):
                why.append(Decline(f"normalises by another norm than the Euclidean one (p={self.order})",
                                   self.out))
            # What is 0 in fp16 is 0 for a region whose result is fp16.
            if self.lens.tensor(self.out).dtype == torch.float16 != self.lens.tensor(scale).dtype:
                why.append(Decline("the length of the vector is of a wider dtype than the result", self.out))
            if why:
                raise reduce(operator.add, why)
        return op, eps

    def _unexpanded(self, node: Node) -> Node:
        """`node` below a view that repeats its one number a row."""
        lens = self.lens
        while lens.kind(node) in ("expand", "expand_as", "broadcast_to") and lens.is_view(node) and \
                lens_rank(lens, node.args[0]) == lens_rank(lens, node):
            node = self._step(node, node.args[0])
        return node

    def _factors(self, node: Node) -> Iterator[tuple[Node, Node | None]]:
        """(part, weight) for each way to read `node` as a part times a vector, itself first."""
        yield node, None
        word, args = self._operation(node)
        if word == "mul" and len(args) == 2:
            for part, vector in (args, args[::-1]):
                if lens_rank(self.lens, vector) == 1 and \
                        lens_rank(self.lens, part) == lens_rank(self.lens, node):
                    yield part, vector

    def _scale(self, node: Node) -> tuple[Node, Node | None]:
        """(rstd, weight) of `weight * rstd`; (node, None) where it is no such product."""
        for part, weight in self._factors(node):
            if weight is not None and same(self.lens.tensor(part).shape[-1], 1):
                return part, self._through(node, weight)
        return node, None

    # rstd and std

    def _rstd(self, node: Node) -> Node:
        """The variance of which `node` is the inverse root."""
        node = self._kept(node)
        if base_name(node) == "rsqrt_" and node not in self.lens.updates:
            self._decline_in_place(node)
        word, args = self._operation(node)
        if word == "rsqrt":
            return self._step(node, args[0])
        if word == "pow" and len(args) == 2 and args[1] == -0.5:
            return self._step(node, args[0])
        if word == "reciprocal":
            return self._std(self._step(node, args[0]))
        if word == "div" and len(args) == 2 and _is_one(args[0]):
            return self._std(self._step(node, args[1]))
        if word == "pow" and len(args) == 2 and args[1] in (-1, -1.0):
            return self._std(self._step(node, args[0]))
        raise NoNorm

    def _std(self, node: Node) -> Node:
        """The variance of which `node` is the root."""
        node = self._kept(node)
        clamped = clamped_from_below(self.lens, node)
        if clamped is not None and self.least is None and self._is_scalar(clamped[1]):
            value, self.least = clamped
            node = self._kept(self._step(node, value))
        if self.lens.kind(node) in ("std", "norm"):
            self.own_root = node
            return node
        word, args = self._operation(node)
        if word == "sqrt" or (word == "pow" and len(args) == 2 and args[1] == 0.5):
            return self._step(node, args[0])
        if word in ("mul", "div") and len(args) == 2:
            length, factor = args[::-1] if word == "mul" and self._is_scalar(args[0]) else args
            length = self._kept(self._step(node, length))
            if self.lens.kind(length) == "norm" and self._is_scalar(factor):
                self.scaled, self.own_root = True, length
                return length
        if self.lens.kind(node) == "add":
            self._decline_eps_on_std(node)
        if base_name(node) in _CLAMPS_IN_PLACE:
            self._decline(Decline("the statistics are changed in place", self.out),
                          lambda: self._statistic(self._std(node.args[0])))
        raise NoNorm

    def _decline(self, why: Decline, read: Callable[[], object]) -> NoReturn:
        """Decline the norm for `why`, and for what stands in the way of reading the rest of it, if anything.

        Raises:
            Decline: always, but where the rest is no part of a norm.
            NoNorm: then.
        """
        try:
            read()
        except Decline as other:
            raise why + other from None
        raise why

    def _decline_eps_on_std(self, node: Node) -> None:
        """`(x - mean) / (std + eps)` is no LayerNorm, and `x / (norm(x) + eps)` no norm that a region has."""
        for arg in node.args:
            if self.lens.tensor(arg) is not None and self.lens.kind(arg) != "add":
                try:
                    root = self._std(arg)
                except NoNorm:
                    continue
                why = Decline("eps is added to the length of the vector, which is not clamped to it",
                              self.out) if root is self.own_root and self.lens.kind(root) == "norm" else \
                    Decline("eps is added to the standard deviation, not to the variance", self.out)
                with suppress(NoNorm):
                    self._decline(why, partial(self._statistic, root))

    def _with_eps(self, node: Node) -> tuple[_Stat, float | Node]:
        """The statistic and the eps of `stat + eps`."""
        node = self._kept(node)
        if base_name(node) in ("add_", "iadd") and node not in self.lens.updates:
            self._decline_in_place(node)
        if self.lens.kind(node) == "add" and len(node.args) == 2 and not node.kwargs:
            for a, b in (node.args, node.args[::-1]):
                if isinstance(a, Node) and self._is_scalar(b):
                    return self._statistic(self._step(node, a)), b
        clamped = clamped_from_below(self.lens, node)
        if clamped is not None and self._is_scalar(clamped[1]):
            self._decline(Decline("eps bounds the squares instead of being added to them", self.out),
                          lambda: self._statistic(clamped[0]))
        if base_name(node) in _CLAMPS_IN_PLACE and node.args:
            self._decline(Decline("the statistics are changed in place", self.out),
                          lambda: self._statistic(node.args[0]))
        return self._statistic(node), 0.0

    def _decline_in_place(self, node: Node) -> NoReturn:
        """A norm that works on its statistics in place is left as it is, by name."""
        while base_name(node) in ("add_", "iadd", "rsqrt_"):
            node = node.args[0]
        self._decline(Decline("the statistics are changed in place", self.out), lambda: self._with_eps(node))

    def _is_scalar(self, eps) -> bool:
        if isinstance(eps, (int, float)):
            return not isinstance(eps, bool)
        if not isinstance(eps, Node):
            return False
        fake = self.lens.tensor(eps)
        if fake is None:
            return isinstance(value_of(eps), (torch.SymFloat, torch.SymInt, float, int))
        return fake.dim() == 0

    # The statistic

    def _statistic(self, node: Node) -> _Stat:
        node = self._kept(node)
        word = self.lens.kind(node)
        if word == "norm" and node is self.own_root:
            return self._length(node, "normalize")
        if word == "var" or node is self.own_root:
            return self._variance(node)
        if word == "getitem" and self.lens.kind(node.args[0]) == "var_mean" and node.args[1] == 0:
            self.trail.through(node)
            return self._variance(node.args[0])
        if word == "sub" and not node.kwargs:
            return self._moments(node)
        if word in ("square", "pow"):
            root = self._kept(self._square(node))
            if self.lens.kind(root) == "std":
                return self._variance(root)
            if self.lens.kind(root) == "norm":
                return self._length(root, "l2_norm")
        if word == "sum":
            squares, dims = self._reduced(node)
            return _Stat(self._square(squares), "l2_norm", dims)
        squares, dims = self._mean(node)
        base = self._square(squares)
        centred = self._centred(base, dims)
        if centred is None:
            return _Stat(base, "rms_norm", dims)
        return _Stat(centred, "layer_norm", dims)

    def _length(self, call: Node, op: str) -> _Stat:
        """A vector norm of the value, as `op` takes it."""
        found = vector_norm(call)
        if found is None:
            raise NoNorm
        of, dims, self.order = found
        self.trail.through(call)
        return _Stat(of, op, self._dims(dims, of))

    def _variance(self, call: Node) -> _Stat:
        """`var`, `std` or `var_mean` of the value."""
        bound = _bound(call)
        rest = call.args[2:]
        unbiased = bound.get("unbiased", rest[0] if rest and isinstance(rest[0], bool) else None)
        correction = bound.get("correction", None if unbiased is None else int(unbiased))
        if isinstance(bound.get("dim"), bool) or \
                not {"input", "dim"} <= bound.keys() <= {"input", "dim", "keepdim", "unbiased", "correction"}:
            raise NoNorm
        dims = self._dims(bound["dim"], bound["input"])
        if correction != 0:
            raise Decline("the variance is unbiased (divided by D-1); LayerNorm's is biased", self.out)
        self.trail.through(call)
        return self._shift_free(bound["input"], dims)

    def _shift_free(self, of: Node, dims: tuple[int, ...]) -> _Stat:
        """The variance of `of`, which is that of x where `of` is x - mean(x)."""
        centred = self._centred(of, dims)
        return _Stat(of if centred is None else centred, "layer_norm", dims)

    def _moments(self, node: Node) -> _Stat:
        """E[x^2] - E[x]^2."""
        if len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
            raise NoNorm
        first, second = node.args
        self.trail.through(node)
        squares, dims = self._mean(self._uncast(first))
        base = self._square(squares)
        mean = self._square(self._uncast(second))
        of, other = self._mean(self._uncast(mean))
        if other != dims or not self._equal(of, base):
            raise NoNorm
        return self._shift_free(base, dims)

    def _mean(self, node: Node) -> tuple[Node, tuple[int, ...]]:
        """(what `node` is the mean of, over which dims counted from the end)."""
        node = self._kept(node)
        if self.lens.kind(node) == "mean":
            return self._reduced(node)
        word, args = self._operation(node)
        if word == "mul" and len(args) == 2 and isinstance(args[0], (int, float)):
            args = args[::-1]
        if word in ("div", "mul") and len(args) == 2 and isinstance(args[0], Node):
            total = self._kept(args[0])
            if self.lens.kind(total) == "sum":
                of, dims = self._reduced(total)
                count = 1
                for dim in dims:
                    count = count * self.lens.tensor(of).shape[dim]
                if not self._counts(args[1], count, word):
                    raise NoNorm
                self.trail.through(node)
                return of, dims
        raise NoNorm

    def _counts(self, factor, count, word: str) -> bool:
        if isinstance(factor, Node):
            factor = value_of(factor)
        known = hint(count)
        if isinstance(factor, float):
            return same(count, known) and factor == (known if word == "div" else 1.0 / known)
        return word == "div" and isinstance(factor, (int, torch.SymInt)) and same(factor, count)

    def _reduced(self, node: Node) -> tuple[Node, tuple[int, ...]]:
        bound = _bound(node)
        if not {"input", "dim"} <= bound.keys() <= {"input", "dim", "keepdim", "dtype"} or \
                bound.get("dtype") not in (None, torch.float32, torch.float64):
            raise NoNorm
        dims = self._dims(bound["dim"], bound["input"])
        self.trail.through(node)
        return bound["input"], dims

    def _dims(self, dim, value: Node) -> tuple[int, ...]:
        """The reduced dims, counted from the end."""
        fake = self.lens.tensor(value)
        if fake is None:
            raise NoNorm
        dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (tuple, list)) else []
        if not dims or not all(isinstance(d, int) for d in dims):
            raise NoNorm
        return places_from_the_end(dims, fake.dim(), self.out)

    def _is_statistic(self, node: Node, value: Node, dims: tuple[int, ...]) -> bool:
        """Whether `node` has one number per row of `value`, in the shape that pairs it with its row."""
        fake, shape = self.lens.tensor(node), list(self.lens.tensor(value).shape)
        for dim in dims:
            shape[dim] = 1
        return fake is not None and same_shape(fake.shape, shape)

    # The value

    def _centred(self, node: Node, dims: tuple[int, ...]) -> Node | None:
        """x of x - mean(x), or None when `node` is something else."""
        before = set(self.trail.nodes)
        node = self._uncast(node)
        if self.lens.kind(node) != "sub" or len(node.args) != 2 or node.kwargs or \
                not all(isinstance(arg, Node) for arg in node.args):
            self.trail.nodes = before
            return None
        try:
            of, over = self._mean_of(node.args[1])
        except (NoNorm, Decline):
            self.trail.nodes = before
            return None
        if over != dims or not self._equal(of, node.args[0]) or \
                not self._is_statistic(node.args[1], node.args[0], dims):
            self.trail.nodes = before
            return None
        self.trail.through(node)
        return node.args[0]

    def _mean_of(self, node: Node) -> tuple[Node, tuple[int, ...]]:
        """As `_mean`, and the mean of `var_mean`."""
        inner = self._kept(node)
        if self.lens.kind(inner) == "getitem" and self.lens.kind(inner.args[0]) == "var_mean" and \
                inner.args[1] == 1:
            call = inner.args[0]
            bound = _bound(call)
            self.trail.nodes |= {inner, call}
            return bound["input"], self._dims(bound.get("dim"), bound["input"])
        return self._mean(node)

    def _source(self, value: Node, stat: _Stat, weight: Node | None) -> tuple[Node, Node | None]:
        """What is normalised: the node whose value enters the product, uncentred; and the weight, where
        it is part of `value` (or given)."""
        for part, factor in self._factors(value):
            source = self._centred(part, stat.dims) if stat.op == "layer_norm" else part
            if source is not None and self._equal(source, stat.of) and None in (weight, factor):
                return source, weight if factor is None else self._through(value, factor)
        raise NoNorm

    # Helpers

    def _interior(self, source: Node) -> frozenset[Node]:
        interior = (self.trail.nodes | self.trail.loose) - {source}
        for cast in sorted(self.trail.loose, key=self.lens.position.__getitem__, reverse=True):
            if self.lens.is_mutated(cast) or any(user not in interior for user in cast.users):
                interior.discard(cast)
        return frozenset(interior)

    def _normal_shape(self, stat: _Stat) -> tuple[int, ...]:
        fake = self.lens.tensor(stat.of)
        shape = tuple(static_size(fake.shape[dim]) for dim in stat.dims)
        if None in shape:
            raise Decline("the normalised size is symbolic", self.out)
        return shape


def _bound(call: Node) -> dict:
    """The arguments of a reduction by name; NumPy's `axis` is `dim`."""
    bound = dict(zip(("input", "dim"), call.args)) | dict(call.kwargs)
    if "axis" in bound:
        bound["dim"] = bound.pop("axis")
    return bound


def _is_one(value) -> bool:
    return isinstance(value, (int, float)) and value == 1
