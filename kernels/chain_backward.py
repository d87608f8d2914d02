"""Gradients of a chain: its stages in reverse, each value computed again when it is needed and freed behind.

Where eager's backward of `linear -> gelu -> linear` holds the pre-activation, the activation and the
gradient of one of them at once, this holds two of the three: the activation goes before its gradient
comes, which becomes the pre-activation's in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from .chain import Chain, LinearStage, Part, RegionStage, evaluate, name_of, operand
from .ops import gradients_again, runner
from .reference import reference

aten = torch.ops.aten

#: Derivatives of an activation by its argument x, written into `out`, which may be the gradient itself.
_DERIVATIVES: dict[str, Callable] = {
    "relu": lambda grad, x, out: aten.threshold_backward.grad_input(grad, x, 0, grad_input=out),
    "gelu": lambda grad, x, out: aten.gelu_backward.grad_input(grad, x, grad_input=out),
    "gelu_tanh": lambda grad, x, out: aten.gelu_backward.grad_input(grad, x, approximate="tanh",
                                                                    grad_input=out),
    "silu": lambda grad, x, out: aten.silu_backward.grad_input(grad, x, grad_input=out),
    "hardswish": lambda grad, x, out: aten.hardswish_backward.out(grad, x, out=out),
}


def chain_gradients(chain: Chain, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
                    kept: dict[str, torch.Tensor], grads: Sequence[torch.Tensor | None],
                    needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of the chain's inputs, as autograd gives them for the plain chain.

    `kept` are the values of `chain.kept`, `grads` those of the outputs (None for zero); entry i of the
    result is None where `needs[i]` is False or the input reaches no output. Differentiable again where
    grad mode is on; elsewhere `kept` is emptied, so that each value is freed behind its last reader."""
    if torch.is_grad_enabled():  # set in a backward only for create_graph=True
        return _differentiable(chain, inputs, scalars, kept, grads, needs)
    return _Reverse(chain, inputs, scalars, kept, needs).run(grads)


class _Reverse:
    """One pass over a chain's stages from the last to the first.

    Attributes:
        values: tensors by name: the inputs, the kept products, and what was computed again.
        found: gradients so far, by name; those in `owned` may be written to.
    """

    def __init__(self, chain: Chain, inputs, scalars, kept, needs):
        self.chain = chain
        self.values = {**dict(zip(chain.inputs, inputs)), **kept}
        kept.clear()
        self.numbers = dict(zip(chain.scalars, scalars))
        self.stages = {name: stage for stage in chain.stages for name in stage.names}
        self.wanted = {name for name, need in zip(chain.inputs, needs) if need}
        for stage in chain.stages:
            if self.wanted.intersection(stage.reads):
                self.wanted.update(stage.names)
        self.readers = Counter(name for stage in chain.stages for name in set(stage.reads))
        self.graphs: dict[str, tuple] = {}
        self.found: dict[str, torch.Tensor] = {}
        self.owned: set[str] = set()

    def run(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        for name, grad in zip(self.chain.outputs, grads):
            if grad is not None and name in self.wanted:
                self.add(name, grad, owned=False)
        for stage in reversed(self.chain.stages):
            if not self.found.keys() & set(stage.names):
                self.forget(stage)
            elif isinstance(stage, LinearStage):
                self.linear(stage)
            else:
                self.region(stage)
        return [self.found.get(name) for name in self.chain.inputs]

    def add(self, name: str, grad: torch.Tensor, owned: bool = True) -> None:
        """`grad` to the gradient of `name`; `owned`: nobody else has it."""
        before = self.found.get(name)
        if before is None:
            self.found[name] = grad
        elif name in self.owned:
            before.add_(grad)
            return
        else:
            self.found[name] = before + grad
        if owned or before is not None:
            self.owned.add(name)

    def add_part(self, part: Part, grad: torch.Tensor) -> None:
        """`grad` to the gradient of some columns."""
        if part.name not in self.owned:
            before = self.found.get(part.name)
            whole = torch.zeros_like(self.value(part.name), memory_format=torch.contiguous_format)
            self.found[part.name] = whole if before is None else whole.add_(before)
            self.owned.add(part.name)
        part.of(self.found[part.name]).add_(grad)

    def value(self, name: str) -> torch.Tensor:
        """The value of that name, computed again where it was not kept."""
        if name not in self.values:
            stage = self.stages[name]
            outputs = runner(stage.region.text)(*self.operands(stage)) if _activation(stage) else \
                self.graph(stage)
            self.values.update(zip(stage.names, outputs))
        return self.values[name]

    def argument(self, ref) -> torch.Tensor:
        self.value(name_of(ref))
        return operand(self.values, ref)

    def operands(self, stage: RegionStage) -> tuple[list[torch.Tensor], list[float]]:
        """(tensors, scalars) of a region's call."""
        return [self.argument(arg) for arg in stage.args], [self.numbers[s] for s in stage.scalars]

    def graph(self, stage: RegionStage) -> list[torch.Tensor]:
        """The stage's outputs; what autograd needs for its gradient is kept."""
        args, numbers = self.operands(stage)
        leaves = [arg.detach().requires_grad_(name_of(ref) in self.wanted)
                  for arg, ref in zip(args, stage.args)]
        with torch.enable_grad():
            outputs = reference(stage.region, leaves, numbers)
        self.graphs[stage.names[0]] = leaves, outputs
        return [out.detach() for out in outputs]

    def forget(self, stage) -> None:
        """The stage is done: what nobody else reads is freed."""
        for name in set(stage.reads):
            self.readers[name] -= 1
            if not self.readers[name] and name in self.stages:
                self.values.pop(name, None)

    def linear(self, stage: LinearStage) -> None:
        grad = self.found.pop(stage.name)
        if stage.weight in self.wanted:
            self.add(stage.weight, weight_gradient(grad, self.value(stage.value), stage.transposed))
        if stage.bias in self.wanted:
            self.add(stage.bias, bias_gradient(grad))
        self.forget(stage)
        if stage.value in self.wanted:
            self.add(stage.value, value_gradient(grad, self.values[stage.weight], stage.transposed))

    def region(self, stage: RegionStage) -> None:
        word = _activation(stage)
        if word:
            self.activation(stage, _DERIVATIVES[word])
        else:
            if stage.names[0] not in self.graphs:
                self.graph(stage)
            leaves, outputs = self.graphs.pop(stage.names[0])
            pairs = [(out, self.found.pop(name)) for name, out in zip(stage.names, outputs)
                     if name in self.found and out.requires_grad]
            refs = [(ref, leaf) for ref, leaf in zip(stage.args, leaves) if leaf.requires_grad]
            given = torch.autograd.grad([out for out, _ in pairs], [leaf for _, leaf in refs],
                                        [grad for _, grad in pairs], allow_unused=True) if pairs else []
            del outputs, leaves, pairs
            for (ref, _), grad in zip(refs, given):
                if grad is None:
                    continue
                if isinstance(ref, Part):
                    self.add_part(ref, grad)
                else:  # autograd may give one tensor to two
                    self.add(ref, grad, owned=False)
        self.forget(stage)

    def activation(self, stage: RegionStage, derivative: Callable) -> None:
        """The gradient of a lone activation, in the place of its result's where that is ours."""
        name, ref = stage.names[0], stage.args[0]
        grad = self.found.pop(name)
        x = self.argument(ref)
        grad = grad.expand(x.shape)
        fits = name in self.owned and grad.dtype == x.dtype and grad.is_contiguous()
        out = grad if fits else torch.empty_like(x, memory_format=torch.contiguous_format)
        derivative(grad, x, out)
        if isinstance(ref, Part):
            self.add_part(ref, out)
        else:
            self.add(ref, out)


def _activation(stage: RegionStage) -> str:
    """The word of a region that is one activation of one value whose derivative is known, else ''."""
    lines = stage.region.body
    if len(lines) != 1 or len(stage.region.outputs) != 1 or len(stage.region.inputs) != 1 or \
            lines[0].op not in _DERIVATIVES or lines[0].dtype != stage.region.inputs[0].dtype:
        return ""
    return lines[0].op


def value_gradient(grad: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Of `value @ weight^T` by value: `[..., N]` -> `[..., K]`."""
    return F.linear(grad, weight if transposed else weight.t())


def weight_gradient(grad: torch.Tensor, value: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Of `value @ weight^T` by weight: as the weight lies, `[N, K]` or `[K, N]`."""
    rows, flat = grad.reshape(-1, grad.shape[-1]), value.reshape(-1, value.shape[-1])
    return flat.t() @ rows if transposed else rows.t() @ flat


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Of a bias `[N]`."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def _differentiable(chain, inputs, scalars, kept, grads, needs):
    """`chain_gradients` by autograd over the whole chain, with the products that are known."""
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
        return (None, value_gradient(grad, weight, ctx.transposed) if needs_value else None,
                weight_gradient(grad, value, ctx.transposed) if needs_weight else None,
                bias_gradient(grad) if needs_bias else None, None)
