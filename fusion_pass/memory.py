"""How much memory the values of a graph take while it runs: an estimate from its fakes, at the sizes seen at
compile time. What ops need inside of them is not known, and left out; so are inputs and parameters, which are
there throughout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch.fx import Node

from .graph import Lens


def live_bytes(lens: Lens, units: Sequence) -> list[int]:
    """For each unit, in the order in which they run, the bytes of the values that are there when it has run:
    made by then, and read by it or later. A unit is a node, or a site with `inputs` and `outputs`."""
    size: dict = {}  # storage -> bytes
    first: dict = {}
    last: dict = {}
    for number, unit in enumerate(units):
        if isinstance(unit, Node):
            given = unit.op in ("placeholder", "get_attr")
            read, made = unit.all_input_nodes, () if given else (unit,)
        else:
            read, made = [node for node, _ in unit.inputs], unit.outputs
        for node in made:
            for key in lens.storages(node):
                first.setdefault(key, number)
                size.setdefault(key, lens.bytes_of(node))
        for node in (*read, *made):
            last.update(dict.fromkeys(lens.storages(node), number))
    change = [0] * (len(units) + 1)
    for key, number in first.items():
        change[number] += size[key]
        change[last[key] + 1] -= size[key]
    return list(accumulate(change[:-1]))
