"""The products that read a value of a chain: linear layers, 1x1 and patch convolutions, attention scores.

A value is in one of two layouts: with its features last, or, where `first` is said, as `[N, C, H, W]` in
channels_last memory, which as the chain has it is `[N, H, W, C]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Node

from ..chain_site import Pointwise, Product, Score, Views
from ..graph import Lens, same, same_shape
from ..kernels.chain_products import Heads, Part
from ..kernels.reference import DTYPE_WORDS
from ..kernels.region import dense_strides
from ..kinds import REGROUPING_VIEWS
from ..select import Taken
from ..site import Decline, Site
from ..views import Step

#: What turns a value `[N, H, W, C]` of a chain into the graph's `[N, C, H, W]`.
TO_CHANNELS_FIRST = Step.method("movedim", -1, 1)

#: Copies whose result, where it is contiguous, has the elements in the order of what was copied.
COPIES = (REGROUPING_VIEWS | {"copy"}) - {"rearrange"}


def is_free(lens: Lens, site: Site, node: Node, taken: Taken) -> bool:
    """Whether a chain of `site` may take `node` in at all."""
    return node.op in ("call_function", "call_method") and not taken.holds(node) and \
        lens.segment[node] == lens.segment[site.anchor] and node not in lens.transformed and \
        not lens.is_mutated(node)


# Linear layers and convolutions


def products_of(lens: Lens, site: Site, value: Node, first: bool, taken: Taken,
                refused: list[Decline]) -> list[Product]:
    """The linear layers that read `value`, itself, through an identity (dropout in eval mode), or as an
    image, its channels moved to the front. `refused`: why others that read it are none is added to it."""
    found: list[Product] = []
    for user in value.users:
        seen = ((user,), None) if lens.is_identity(user) else None if first else _image(lens, value, user)
        if seen is not None and user.args[0] is value:
            path, grid = seen
            if not all(is_free(lens, site, node, taken) for node in path):
                continue
            views = {node: _steps(lens, node, value) for node in path}
            for p in products_of(lens, site, path[-1], first or not lens.is_identity(user), taken, refused):
                if grid is not None:  # a pixel of the image is a row of the value
                    p = replace(p, patches=True, grid=grid, weight=(p.weight[0], ()))
                found.append(replace(p, value=value, nodes=p.nodes | {*path}, views={**views, **p.views}))
            continue
        matches = (_convolution,) if first else (_linear, _matmul, _rows)
        try:
            product = next((p for match in matches if (p := match(lens, value, user)) is not None), None)
            if product is not None:
                _check(lens, site, product, taken)
                found.append(product)
        except Decline as decline:
            refused.append(decline)
    return found


def _check(lens: Lens, site: Site, product: Product, taken: Taken) -> None:
    """Raise Decline where a chain of `site` may not hold `product`."""
    held = next((node for node in product.nodes if not is_free(lens, site, node, taken)), None)
    if held is not None:
        raise Decline("the product is part of another site, written in place, or runs in another mode", held)
    if not _is_plain(lens, product):
        raise Decline("the product and what it reads differ in dtype or device (autocast casts)", product.out)


def _is_plain(lens: Lens, product: Product) -> bool:
    """Whether all is of one dtype on one device, so that the product is what torch's `linear` computes
    (autocast casts first), and the weight is a plain matrix."""
    value, out = lens.tensor(product.value), lens.tensor(product.out)
    operands = [lens.tensor(node) for node, _ in filter(None, (product.weight, product.bias))]
    if out is None or None in operands or out.dtype not in DTYPE_WORDS:
        return False
    return all(t.dtype == value.dtype and t.device == value.device for t in (*operands, out)) and \
        isinstance(operands[0].shape[0], int) and value.dim() > 1


def _argument(node: Node, position: int, name: str):
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _operand(arg) -> tuple[Node, tuple[Step, ...]] | None:
    return (arg, ()) if isinstance(arg, Node) else None


def _fits_bias(lens: Lens, bias: tuple[Node, tuple[Step, ...]] | None, features: int) -> bool:
    """Whether a product of so many features has a bias with a number for each, or none. (PyTorch adds
    whatever broadcasts.)"""
    return bias is None or lens.tensor(bias[0]) is not None and \
        same_shape(lens.tensor(bias[0]).shape, (features,))


def _linear(lens: Lens, value: Node, node: Node) -> Product | None:
    if lens.kind(node) != "linear" or _argument(node, 0, "input") is not value:
        return None
    weight, bias = _operand(_argument(node, 1, "weight")), _operand(_argument(node, 2, "bias"))
    if weight is None or lens.tensor(weight[0]) is None or lens.tensor(weight[0]).dim() != 2 or \
            not _fits_bias(lens, bias, lens.tensor(weight[0]).shape[0]):
        return None
    return Product(value, weight, bias, False, node, frozenset([node]))


def _matmul(lens: Lens, value: Node, node: Node) -> Product | None:
    if lens.kind(node) != "matmul" or len(node.args) != 2 or node.args[0] is not value or node.kwargs:
        return None
    weight = _operand(node.args[1])
    if weight is None or lens.tensor(weight[0]) is None or lens.tensor(weight[0]).dim() != 2:
        return None
    return Product(value, weight, None, True, node, frozenset([node]))


def _rows(lens: Lens, value: Node, view: Node) -> Product | None:
    """`addmm(bias, value.view(-1, K), weight).view(..., N)`."""
    rows, whole = lens.tensor(view), lens.tensor(value)
    if lens.kind(view) not in REGROUPING_VIEWS or len(view.users) != 1 or rows is None or \
            rows.dim() != 2 or not same(rows.shape[-1], whole.shape[-1]):
        return None
    product, = view.users
    if lens.kind(product) != "addmm" or len(product.args) != 3 or product.args[1] is not view or \
            product.kwargs or len(product.users) != 1:
        return None
    back, = product.users
    fake = lens.tensor(back)
    if lens.kind(back) not in REGROUPING_VIEWS or back.args[0] is not product or fake is None or \
            not same_shape(fake.shape[:-1], whole.shape[:-1]):
        return None
    bias, weight = _operand(product.args[0]), _operand(product.args[2])
    if weight is None or bias is None or not _fits_bias(lens, bias, fake.shape[-1]):
        return None
    return Product(value, weight, bias, True, back, frozenset([view, product, back]))


def _convolution(lens: Lens, value: Node, node: Node) -> Product | None:
    """A convolution of a value with its channels in front. Of one pixel it is the product over the channels;
    else its stride is its kernel."""
    if lens.kind(node) != "conv2d" or _argument(node, 0, "input") is not value:
        return None
    weight, bias = _operand(_argument(node, 1, "weight")), _operand(_argument(node, 2, "bias"))
    fake, out = lens.tensor(weight[0] if weight else None), lens.tensor(node)
    if fake is None or out is None or fake.dim() != 4 or out.dim() != 4:
        return None
    kernel = tuple(fake.shape[2:])
    stride, padding, dilation, groups = (_argument(node, i, name) for i, name in enumerate(
        ("stride", "padding", "dilation", "groups"), 3))
    # Sizes are compared without `==`: of a kernel whose size is a symbol, it would become a number by that.
    if not same_shape(_pair(stride, 1), kernel) or _pair(padding, 0) not in ((0, 0), ("valid", "valid")) or \
            _pair(dilation, 1) != (1, 1) or _pair(groups, 1) != (1, 1):
        return None
    if not same_shape(dense_strides(tuple(out.shape), (0, 2, 3, 1)), out.stride()):
        raise Decline("the result of the convolution is not in channels_last memory", node)
    patches = not same_shape(kernel, (1, 1))
    return Product(value, (weight[0], () if patches else (Step.method("flatten", 1),)), bias, False, node,
                   frozenset([node]), (TO_CHANNELS_FIRST,), patches)


def _image(lens: Lens, value: Node, node: Node) -> tuple[list[Node], tuple[int, int] | None] | None:
    """(views, grid): `views`, of which `node` is the first, make `[N, C, H, W]` of `value`, which is
    (N, H, W, C), or (N, H * W, C) where there is a grid."""
    whole, path = lens.tensor(value), []
    while lens.is_view(node) and lens.tensor(node) is not None:
        path.append(node)
        fake = lens.tensor(node)
        grid = None if whole.dim() == 4 else tuple(fake.shape[2:])
        if fake.dim() == 4 and same(fake.storage_offset(), whole.storage_offset()) and \
                all(map(same_shape, _image_of(whole, grid), (fake.shape, fake.stride()))):
            return path, grid
        if len(node.users) != 1:
            return None
        node, = node.users
    return None


def _image_of(whole: torch.Tensor, grid: tuple[int, int] | None) -> tuple[list, list]:
    """(sizes, strides) of `whole` as an image; none where it is none of `grid`."""
    if grid is None:
        return tuple([of[i] for i in (0, 3, 1, 2)] for of in (whole.shape, whole.stride()))
    if whole.dim() != 3 or not all(isinstance(n, int) for n in grid) or \
            not same(grid[0] * grid[1], whole.shape[1]):
        return [], []
    (batch, _, channels), (outer, pixel, inner) = whole.shape, whole.stride()
    return [batch, channels, *grid], [outer, inner, grid[1] * pixel, pixel]


def _pair(value, default=None) -> tuple:
    """What a convolution takes for two dims, written as one or left out."""
    value = default if value is None else value
    return tuple(value) * (2 // len(value)) if isinstance(value, (tuple, list)) else (value, value)


# Attention scores


def score_of(lens: Lens, site: Site, sources: list[Product | Pointwise], taken: Taken) -> Score | None:
    """The first product of two of `sources`, or of columns of one, seen as heads: q and k."""
    known = {source.out for source in sources if lens.tensor(source.out).dim() > 1}
    for node in sorted(_readers(lens, known), key=lens.position.__getitem__):
        for query, key in _operands(lens, node):
            score = _score(lens, node, query, key, known)
            if score is not None and all(is_free(lens, site, n, taken) for n in score.nodes):
                return score
    return None


def _readers(lens: Lens, sources: set[Node]) -> set[Node]:
    """The products of two tensors that read `sources`, or what views and copies make of them."""
    stack, seen, found = list(sources), set(sources), set()
    while stack:
        for user in stack.pop().users:
            if lens.kind(user) in ("matmul", "bmm", "einsum"):
                found.add(user)
            elif user not in seen and (lens.is_view(user) or lens.kind(user) in COPIES):
                seen.add(user)
                stack.append(user)
    return found


def _operands(lens: Lens, node: Node) -> Iterator[tuple[tuple[Node, list[int]], tuple[Node, list[int]]]]:
    """(node, order of its dims as [..., T, D]) of q and of k, when `node` is `q @ k^T`."""
    out = lens.tensor(node)
    if out is None or node.kwargs:
        return
    if lens.kind(node) == "einsum":
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = list(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return
        orders = _einsum_orders(equation)
        if orders is None:  # k may come first
            operands.reverse()
            words, arrow, result = equation.partition("->")
            orders = _einsum_orders(",".join(reversed(words.split(","))) + arrow + result)
    else:
        operands = list(node.args)
        outer = list(range(out.dim() - 2))
        orders = [*outer, out.dim() - 2, out.dim() - 1], [*outer, out.dim() - 1, out.dim() - 2]
    if orders is None or len(operands) != 2:
        return
    fakes = [lens.tensor(operand) for operand in operands]
    if all(fake is not None and fake.dim() == len(order) == out.dim() and fake.dtype == out.dtype
           for fake, order in zip(fakes, orders)):
        yield tuple(zip(operands, orders))


def _einsum_orders(equation: str) -> tuple[list[int], list[int]] | None:
    """For `bihd,bjhd->bhij`: where q and k have the dims of [..., T, D]."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    words = given.split(",")
    if not arrow or len(words) != 2 or len({len(result), *map(len, words)}) != 1 or \
            not all(word.isalpha() and len(set(word)) == len(word) for word in (*words, result)):
        return None
    summed = (set(words[0]) & set(words[1])) - set(result)
    outer = result[:-2]
    wanted = [(*outer, row, *summed) for row in result[-2:]]
    if len(summed) != 1 or any(set(word) != set(dims) for word, dims in zip(words, wanted)):
        return None
    return tuple([word.index(dim) for dim in dims] for word, dims in zip(words, wanted))


def _score(lens: Lens, node: Node, query, key, sources: set[Node]) -> Score | None:
    out = lens.tensor(node)
    found = [_seen(lens, *operand, sources) for operand in (query, key)]
    if None in found or not same_shape(dense_strides(tuple(out.shape), range(out.dim())), out.stride()):
        return None
    (first, q, flat, one), (second, k, also_flat, other) = found
    inside = {*one, *other}
    views: Views = {}
    for seen in sorted(inside, key=lens.position.__getitem__):
        for user in seen.users:
            if user in inside or user is node:
                continue
            read = seen
            if lens.tensor(seen) is None:  # a tuple of views: its members are the outputs
                if not lens.is_view(user):
                    return None
                read = user
            steps = _steps(lens, read, first if seen in one else second)
            if steps is None:  # a copy that others read too
                return None
            views[read] = steps
    if flat != also_flat:
        return None
    return Score((first, q), (second, k), flat, node, frozenset([*inside, *views, node]), views)


def _steps(lens: Lens, node: Node, source: Node) -> tuple[Node, tuple[Step, ...]] | None:
    """`node` as views of `source`; None where a copy is between them."""
    steps: list[Step] = []
    while node is not source:
        if not lens.is_view(node):
            return None
        if not lens.is_identity(node):
            steps.insert(0, Step.of(node))
        node = node.args[0]
    return source, tuple(steps)


def _seen(lens: Lens, node: Node, order: list[int], sources: set[Node],
          ) -> tuple[Node, Callable, bool, list[Node]] | None:
    """(source, a function that makes the operand of its name, whether outer dims are flattened, the nodes
    between) when `node`, its dims in `order`, is heads or columns of one of `sources`."""
    between: list[Node] = []
    copy, source = None, node
    while source not in sources:
        if source.op not in ("call_function", "call_method") or not source.args or \
                not isinstance(source.args[0], Node):
            return None
        if not lens.is_view(source):
            if copy is not None or lens.kind(source) not in COPIES or lens.tensor(source) is None:
                return None
            copy = source
        between.append(source)
        source = source.args[0]
    whole, fake = lens.tensor(source), lens.tensor(node)
    shape, strides = ([of[i] for i in order] for of in (fake.shape, fake.stride()))
    if copy is None:
        make = _columns(whole, shape, strides, fake.storage_offset())
        return make and (source, make, False, between)
    laid, before = lens.tensor(copy), lens.tensor(copy.args[0])
    if before is None or before.dim() != 4 or before.dtype != laid.dtype:
        return None
    make = _columns(whole, before.shape, before.stride(), before.storage_offset())
    flat = len(shape) == 3
    wanted = [before.shape[0] * before.shape[1], *before.shape[2:]] if flat else list(before.shape)
    # What is contiguous has its elements in the order of what was copied, whatever its shape.
    plain = same_shape(dense_strides(tuple(laid.shape), range(laid.dim())), laid.stride()) and \
        same_shape(dense_strides(tuple(shape), range(len(shape))), strides) and \
        same(fake.storage_offset(), laid.storage_offset()) and same_shape(shape, wanted)
    return (source, make, flat, between) if make and plain else None


def _columns(whole: torch.Tensor, shape, strides, offset) -> Callable | None:
    """What makes the operand of the name of `whole`, `[..., T, F]`, that has these sizes and strides there:
    columns `[..., T, D]` or heads `[..., H, T, D]`."""
    heads = len(shape) == whole.dim() + 1
    if not heads and len(shape) != whole.dim():
        return None
    rows = [i for i in range(len(shape) - 1) if not heads or i != len(shape) - 3]
    if not same_shape([shape[i] for i in rows], whole.shape[:-1]) or \
            not all(same(strides[i], step) or same(size, 1)
                    for i, step, size in zip(rows, whole.stride(), whole.shape)):
        return None
    start, length = offset - whole.storage_offset(), shape[-1]
    count = shape[-3] if heads else 1
    step = strides[-3] if heads and not same(count, 1) else length
    numbers = (start, length, count, step, whole.shape[-1])
    if not all(isinstance(n, int) for n in numbers) or not same(whole.stride(-1), 1) or \
            not (same(strides[-1], 1) or length == 1) or start < 0 or length < 1 or step < length or \
            start + (count - 1) * step + length > whole.shape[-1]:
        return None
    if heads:
        return partial(Heads, start=start, length=length, count=count, step=step)
    return partial(_part, start=start, length=length) if length < whole.shape[-1] else str


def _part(name: str, start: int, length: int) -> Part:
    return Part(name, start, length)
