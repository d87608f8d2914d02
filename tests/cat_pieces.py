"""Cats of all pieces of one tensor: how their tests compile, compare and look."""

from __future__ import annotations

import torch

BATCH, TEXT, TOKENS, WIDTH = 2, 3, 8, 16
NOTE = "1 cat of all pieces of a tensor is not made: the tensor itself is read"


def example(seed=0, shape=(BATCH, TOKENS, WIDTH)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled(f, **options):
    torch._dynamo.reset()
    return torch.compile(f, backend="ascend_ln_fuse", options={"report": "off", **options})


def assert_as_eager(ours, eager):
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def cats(graph):
    return [node for node in graph.nodes if getattr(node.target, "__name__", "") in
            ("cat", "concat", "concatenate")]


def slices(h):
    return torch.cat([h[:, :TEXT], h[:, TEXT:]], dim=1)


def memory(*values):
    """Which of the tensors share memory."""
    found = [value.untyped_storage().data_ptr() for value in flat(values)]
    return [found.index(pointer) for pointer in found]


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [one for item in value for one in flat(item)]


def both(f, *inputs, same_inputs=False):
    """Results and inputs, as eager leaves them and as we do."""
    found = []
    for call in (f, compiled(f)):
        given = [one.clone() for one in inputs]
        given = [given[0]] * len(given) if same_inputs else given
        with torch.no_grad():
            result = flat([call(*given)])
        found.append((result, given, memory(result, given)))
    return found


def check(f, *inputs, same_inputs=False):
    """What is returned and what the inputs hold then, and which of them are one memory, as in eager."""
    (eager, theirs, shared), (ours, mine, ours_shared) = both(f, *inputs, same_inputs=same_inputs)
    assert_as_eager(ours, eager)
    assert_as_eager(mine, theirs)
    assert shared == ours_shared
