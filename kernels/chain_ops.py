"""Chains in generated graphs: `chain_call(chain)` is a function of its inputs, then its scalars.

Differentiable. For backward a chain keeps its inputs and the products that an activation reads; the
norm's result and the activation's, which eager keeps as well, are computed again.

`torch.ops.ascend_ln_fuse.chain(text, inputs, scalars, *, self_check) -> outputs` is the same for graphs that
another compiler traces, and for inference alone: it has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from .chain import Chain, evaluate
from .chain_backward import chain_gradients
from .chain_text import parse_chain
from .chain_ways import ChainRunner
from .launch import runs_reference
from .ops import TAGS, mark_unrecorded, no_tangents, region_fake
from .settings import DEFAULT_SELF_CHECK


@lru_cache(maxsize=4096)
def chain_runner(chain: Chain, self_check: str = DEFAULT_SELF_CHECK) -> ChainRunner:
    """The one ChainRunner in this process of equal chains and a way to check (thread-safe)."""
    return ChainRunner(chain, self_check)


def chain_call(chain: Chain, self_check: str = DEFAULT_SELF_CHECK,
               runner: ChainRunner | None = None) -> Callable:
    """A function of the chain's inputs, then its scalars, that returns a tensor for one output, else a
    tuple. To be called from generated graphs. `runner` runs it instead of the one of all equal chains.

    An output that has a place is the whole tensor (kernels/placed.py); where plain torch runs or gradients
    are recorded, it is the value by itself."""
    run, count, single = runner or chain_runner(chain, self_check), len(chain.inputs), len(chain.outputs) == 1
    recorded = chain_runner(replace(chain, places=()), self_check) if chain.places else run

    def fused(*args):
        inputs, scalars = args[:count], args[count:]
        if forward_ad._current_level >= 0 or args[0].is_cpu and runs_reference(args[0].device):
            results = tuple(evaluate(chain, inputs, scalars).values())
        elif torch.is_grad_enabled() and any([x.requires_grad for x in inputs]):
            results = _Chain.apply(recorded, scalars, *inputs)
        else:
            results = run(inputs, scalars)
        return results[0] if single else results

    fused.__name__ = fused.__qualname__ = "ascend_ln_fuse_chain"
    fused.__module__ = __name__
    fused.__doc__ = chain.text
    fused.runner = run
    return fused


def _no_view(result: torch.Tensor) -> torch.Tensor:
    """`result` as a tensor that the graph may write in place: torch's products of rows are views of matrices,
    and autograd refuses that for a view that a Function returns."""
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, scalars, *inputs):
        chain = ctx.chain = run.chain
        ctx.scalars, ctx.count = scalars, len(inputs)
        ctx.set_materialize_grads(False)
        values = run.values(inputs, scalars, keep=chain.kept)
        values.update((name, _no_view(values[name])) for name in chain.outputs)
        ctx.save_for_backward(*inputs, *(values[name] for name in chain.kept))
        outputs = tuple(values[name] for name in chain.outputs)
        mark_unrecorded(ctx, outputs, chain.sources, inputs)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        inputs, kept = saved[:ctx.count], dict(zip(ctx.chain.kept, saved[ctx.count:]))
        del saved
        ctx.maybe_clear_saved_tensors()  # unless the graph is to be kept: what is kept goes when it was read
        found = chain_gradients(ctx.chain, inputs, ctx.scalars, kept, grads, ctx.needs_input_grad[2:])
        return (None, None, *found)


# The dispatcher's form.

_LIBRARY = torch.library.Library("ascend_ln_fuse", "FRAGMENT")
_LIBRARY.define("chain(str text, Tensor[] inputs, float[] scalars, *, "
                f"str self_check='{DEFAULT_SELF_CHECK}') -> Tensor[]", tags=TAGS)


def _chain(text, inputs, scalars, *, self_check=DEFAULT_SELF_CHECK):
    no_tangents()
    chain = parse_chain(text)
    if inputs[0].device.type == "cpu" and runs_reference(inputs[0].device):
        return list(evaluate(chain, inputs, scalars).values())
    return list(chain_runner(chain, self_check)(inputs, scalars))


def _chain_fake(text, inputs, scalars, *, self_check=DEFAULT_SELF_CHECK):
    """Shapes alone: torch's own fakes would compare symbolic sizes, and so add guards."""
    def product(stage, *operands):
        return operands[0].new_empty(stage.shape(*operands))

    return list(evaluate(parse_chain(text), inputs, scalars, lambda stage, args, _: region_fake(
        stage.region, args), product).values())


def _no_gradient(ctx, *grads):
    raise RuntimeError("ascend_ln_fuse: the chain of a graph that was traced without gradients cannot be "
                       "differentiated")


_LIBRARY.impl("chain", _chain, "CompositeExplicitAutograd")
torch.library.register_fake("ascend_ln_fuse::chain", _chain_fake, lib=_LIBRARY)
torch.library.register_autograd("ascend_ln_fuse::chain", _no_gradient, lib=_LIBRARY)
