"""Convolutions over patches in front of a stream, in channels_last: their result is the stream's tokens, each
in one run of memory, and nothing has to be copied.

cuDNN computes convolutions of 16-bit floats with the channels innermost, and transposes what comes in and
what goes out where it does not lie so; the bias is added to it as it lies. What comes in is small (16 of a
latent's channels beside 1536 or 3072 features).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from .effects import give_value, value_of
from .graph import Lens, again_on_fakes, hint, quietly, same, same_shape, static_size
from .kinds import REGROUPING_VIEWS, STRIDE_FREE_VIEWS, base_name, ignores_layout, kind

#: rank of the input -> memory format
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = frozenset({"conv2d", "conv3d"})
#: Channels come in multiples of this. (cuDNN pads others, an image's 3, while it transposes them; what it
#: would do with those in channels_last was not measured.)
ALIGNED = 8
_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Patches:
    """A convolution and the views from it to where a stream begins.

    Attributes:
        input: what the convolution reads.
        given: the fake of that in channels_last.
        values: of the convolution and of each view, what they yield then.
    """

    input: Node
    given: torch.Tensor
    values: Mapping[Node, torch.Tensor]

    def lay_out(self, graph: Graph, nodes: Mapping[Node, Node]) -> None:
        """Have the convolution of `graph` read a copy in channels_last. `nodes`: those to change, by those of
        which this was found."""
        convolution = nodes[next(iter(self.values))]
        with graph.inserting_before(convolution):
            copy = graph.call_method("contiguous", (nodes[self.input],),
                                     {"memory_format": FORMATS[self.given.dim()]})
        copy.meta = dict(nodes[self.input].meta)
        convolution.replace_input_with(nodes[self.input], copy)
        for node, value in ((copy, self.given), *((nodes[n], v) for n, v in self.values.items())):
            give_value(node, value)


def patches_of(lens: Lens, source: Node, wanted: torch.Tensor) -> Patches | None:
    """The convolution whose result, in channels_last, gives `source`, a view of it that nothing else of the
    graph reads, the layout of `wanted`; None where there is none, or where it is not known to be as fast."""
    path = [source]
    while kind(path[-1]) in STRIDE_FREE_VIEWS | REGROUPING_VIEWS and isinstance(path[-1].args[0], Node):
        path.append(path[-1].args[0])
    convolution, views = path[-1], path[-2::-1]
    given = _input(lens, convolution)
    if given is None or any([user for user in node.users if not ignores_layout(user)] != [below]
                            for below, node in pairwise(path)):
        return None
    fake = lens.tensor(given)
    values: dict[Node, torch.Tensor] = {}

    def now(node: Node):
        return laid if node is given else values[node] if node in values else value_of(node)

    try:
        with torch.no_grad():
            with quietly(fake):
                laid = fake.contiguous(memory_format=FORMATS[fake.dim()])
            for node in (convolution, *views):
                values[node] = again_on_fakes(node, now, fake)
    except Exception:  # a convolution or a view that does not exist so
        return None
    found = values[source]
    if not isinstance(found, torch.Tensor) or found.dtype != wanted.dtype or \
            not same_shape(found.shape, wanted.shape) or not same_shape(found.stride(), wanted.stride()) or \
            not same(found.storage_offset(), 0):
        return None
    return Patches(given, laid, values)


def _input(lens: Lens, convolution: Node) -> Node | None:
    """What a convolution of 16-bit floats reads, where it may be given a copy of it."""
    if base_name(convolution) not in CONVOLUTIONS or convolution.op != "call_function" or \
            convolution in lens.transformed:
        return None
    given = convolution.args[0] if convolution.args else convolution.kwargs.get("input")
    fake = lens.tensor(given) if isinstance(given, Node) else None
    made = lens.tensor(convolution)
    if fake is None or made is None or fake.dim() not in FORMATS or fake.dtype not in _HALF or \
            made.dtype != fake.dtype or fake.requires_grad or made.requires_grad:
        return None
    channels = static_size(fake.shape[1])
    if channels is None or channels % ALIGNED:
        return None
    # Where the copy would be larger than the result, nothing is gained.
    return given if hint(fake.numel()) < hint(made.numel()) else None
