"""Chains in generated graphs: `chain_call(chain)` is a function of its inputs, then its scalars.

Differentiable. For backward a chain keeps its inputs and the products that an activation reads; the
norm's result and the activation's, which eager keeps as well, are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from .chain import Chain, LinearStage, evaluate
from .chain_ways import ChainRunner
from .launch import runs_reference
from .ops import gradients_again
from .settings import DEFAULT_SELF_CHECK


@lru_cache(maxsize=4096)
def chain_runner(chain: Chain, self_check: str = DEFAULT_SELF_CHECK) -> ChainRunner:
    """The one ChainRunner in this process of equal chains and a way to check (thread-safe)."""
    return ChainRunner(chain, self_check)


def chain_call(chain: Chain, self_check: str = DEFAULT_SELF_CHECK,
               runner: ChainRunner | None = None) -> Callable:
    """A function of the chain's inputs, then its scalars, that returns a tensor for one output, else a
    tuple. To be called from generated graphs. `runner` runs it instead of the one of all equal chains."""
    run, count, single = runner or chain_runner(chain, self_check), len(chain.inputs), len(chain.outputs) == 1

    def fused(*args):
        inputs, scalars = args[:count], args[count:]
        if args[0].device.type == "cpu" and runs_reference(args[0].device) or \
                forward_ad._current_level >= 0:
            results = tuple(evaluate(chain, inputs, scalars).values())
        elif torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            results = _Chain.apply(run, scalars, *inputs)
        else:
            results = run(inputs, scalars)
        return results[0] if single else results

    fused.__name__ = fused.__qualname__ = "ascend_ln_fuse_chain"
    fused.__module__ = __name__
    fused.__doc__ = chain.text
    fused.runner = run
    return fused


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, scalars, *inputs):
        chain = ctx.chain = run.chain
        ctx.scalars, ctx.count = scalars, len(inputs)
        ctx.set_materialize_grads(False)
        values = run.values(inputs, scalars, keep=chain.kept)
        ctx.save_for_backward(*inputs, *(values[name] for name in chain.kept))
        return tuple(values[name] for name in chain.outputs)

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        inputs, kept = saved[:ctx.count], dict(zip(ctx.chain.kept, saved[ctx.count:]))
        found = chain_gradients(ctx.chain, inputs, ctx.scalars, kept, grads, ctx.needs_input_grad[2:])
        return (None, None, *found)


def chain_gradients(chain: Chain, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
                    kept: dict[str, torch.Tensor], grads: Sequence[torch.Tensor | None],
                    needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of the chain's inputs, as autograd gives them for the plain chain.

    `kept` are the values of `chain.kept`, `grads` those of the outputs (None for zero); entry i of the
    result is None where `needs[i]` is False or the input reaches no output. Differentiable again where
    grad mode is on."""
    def product(stage: LinearStage, value, weight, bias):
        given = kept.get(stage.name)
        if given is None:  # only its gradient is asked for
            columns = weight.shape[1 if stage.transposed else 0]
            given = value.new_empty(1).expand(*value.shape[:-1], columns)
        return _KnownProduct.apply(given.detach(), value, weight, bias, stage.transposed)

    def run(leaves):
        return tuple(evaluate(chain, leaves, scalars, run_linear=product).values())

    return gradients_again(run, inputs, grads, needs)


class _KnownProduct(torch.autograd.Function):
    """A product whose value is known: forward computes nothing, backward is a linear layer's."""

    @staticmethod
    def forward(ctx, given, value, weight, bias, transposed):
        ctx.transposed = transposed
        ctx.save_for_backward(value, weight)
        return given.view_as(given)

    @staticmethod
    def backward(ctx, grad):
        value, weight = ctx.saved_tensors
        _, needs_value, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        found = [None, None, None]
        if needs_value:
            found[0] = F.linear(grad, weight if ctx.transposed else weight.t())
        if needs_weight:
            flat = value.reshape(-1, value.shape[-1])
            found[1] = flat.t() @ rows if ctx.transposed else rows.t() @ flat
        if needs_bias:
            found[2] = rows.sum(0)
        return (None, *found, None)
