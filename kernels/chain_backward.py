"""Gradients of a chain: its stages in reverse, each value computed again when it is needed and freed behind.

Where eager's backward of `linear -> gelu -> linear` holds the pre-activation, the activation and the
gradient of one of them at once, this holds two of the three: the activation goes before its gradient
comes, which becomes the pre-activation's in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from .chain import Chain, RegionStage, evaluate, operand
from .chain_products import Heads, LinearStage, Part, Product, name_of
from .ops import gradients_again, runner
from .reference import TORCH_DTYPES, reference

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
        freed: of those that are gone, one element expanded to their shape.
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
        self.freed: dict[str, torch.Tensor] = {}
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
            elif isinstance(stage, Product):
                self.product(stage)
            elif stage.additive:
                self.additive(stage)
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

    def add_to(self, ref, grad: torch.Tensor, owned: bool = True) -> None:
        """`grad` to the gradient of what `ref` stands for."""
        if isinstance(ref, (Part, Heads)):
            self.add_part(ref, grad)
        else:
            self.add(ref, grad, owned)

    def add_part(self, part: Part | Heads, grad: torch.Tensor) -> None:
        """`grad` to the gradient of some columns."""
        like = self.freed[part.name] if part.name in self.freed else self.value(part.name)
        if isinstance(part, Heads) and part.columns == like.shape[-1]:
            self.add(part.name, grad.transpose(-3, -2).flatten(-2))
            return
        if part.name not in self.owned:
            before = self.found.get(part.name)
            whole = torch.zeros_like(like, memory_format=torch.contiguous_format)
            self.found[part.name] = whole if before is None else whole.add_(before)
            self.owned.add(part.name)
        part.of(self.found[part.name]).add_(grad)

    def value(self, name: str) -> torch.Tensor:
        """The value of that name, computed again where it was not kept."""
        if name not in self.values:
            stage = self.stages[name]
            outputs = runner(stage.region.text)(*self.operands(stage)) \
                if _activation(stage) or stage.additive else self.graph(stage)
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
        # Of an output only its place in the graph: the tensor goes when nobody reads it any more.
        self.graphs[stage.names[0]] = leaves, [get_gradient_edge(out) if out.requires_grad else None
                                               for out in outputs]
        return [out.detach() for out in outputs]

    def forget(self, stage) -> None:
        """The stage is done: what nobody else reads is freed."""
        for name in set(stage.reads):
            self.readers[name] -= 1
            if not self.readers[name] and name in self.stages and name in self.values:
                value = self.values.pop(name)
                self.freed[name] = value.new_empty(()).expand(value.shape)

    def linear(self, stage: LinearStage) -> None:
        grad = self.found.pop(stage.name)
        needs = [ref in self.wanted for ref in stage.refs]
        value = self.value(stage.value) if needs[1] else None
        of_parameters = stage.gradients(grad, (value, None, None), (False, *needs[1:]))
        del value
        self.forget(stage)
        of_value = stage.gradients(grad, (None, self.values[stage.weight], None), (needs[0], False, False))
        for ref, found in zip(stage.refs, (of_value[0], *of_parameters[1:])):
            if found is not None:
                self.add(ref, found)

    def product(self, stage: Product) -> None:
        grad = self.found.pop(stage.name)
        operands = [None if ref is None else self.argument(ref) for ref in stage.refs]
        needs = [ref is not None and name_of(ref) in self.wanted for ref in stage.refs]
        given = stage.gradients(grad, operands, needs)
        del grad, operands
        self.forget(stage)
        for ref, found in zip(stage.refs, given):
            if found is not None:
                self.add_to(ref, found)

    def additive(self, stage: RegionStage) -> None:
        """Its inputs' values are not needed, and may not be there."""
        given = {out.value: self.found.pop(name) for name, out in zip(stage.names, stage.region.outputs)
                 if name in self.found}
        found = additive_gradients(stage, given, self.numbers)
        for ref, x in zip(stage.args, stage.region.inputs):
            if x.name in found and name_of(ref) in self.wanted:
                grad = found.pop(x.name)
                if x.dims != stage.region.full:
                    grad = grad.sum_to_size(self.argument(ref).shape)
                self.add_to(ref, grad, owned=False)
        self.forget(stage)

    def region(self, stage: RegionStage) -> None:
        word = _activation(stage)
        if word:
            self.activation(stage, _DERIVATIVES[word])
        else:
            if stage.names[0] not in self.graphs:
                self.graph(stage)
            leaves, edges = self.graphs.pop(stage.names[0])
            pairs = [(edge, self.found.pop(name)) for name, edge in zip(stage.names, edges)
                     if name in self.found and edge is not None]
            refs = [(ref, leaf) for ref, leaf in zip(stage.args, leaves) if leaf.requires_grad]
            given = torch.autograd.grad([edge for edge, _ in pairs], [leaf for _, leaf in refs],
                                        [grad for _, grad in pairs], allow_unused=True) if pairs else []
            del edges, leaves, pairs
            for (ref, _), grad in zip(refs, given):
                if grad is not None:  # autograd may give one tensor to two
                    self.add_to(ref, grad, owned=False)
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
        self.add_to(ref, out)


def _activation(stage: RegionStage) -> str:
    """The word of a region that is one activation of one value whose derivative is known, else ''."""
    lines = stage.region.body
    if len(lines) != 1 or len(stage.region.outputs) != 1 or len(stage.region.inputs) != 1 or \
            lines[0].op not in _DERIVATIVES or lines[0].dtype != stage.region.inputs[0].dtype:
        return ""
    return lines[0].op


def additive_gradients(stage: RegionStage, given: dict[str, torch.Tensor],
                       numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Gradients of the region's inputs, by their names there and in its space's shape, from those of its
    values in `given`, which is emptied. A multiple is rounded as autograd rounds it."""
    region = stage.region
    scalars = dict(zip(region.scalars, map(numbers.__getitem__, stage.scalars)))
    for line in reversed(region.body):
        grad = given.pop(line.name, None)
        if grad is None:
            continue
        for place, arg in enumerate(line.args):
            if not isinstance(arg, str) or arg in scalars:
                continue
            more = grad
            if line.op in ("mul", "div"):
                number = next(scalars.get(a, a) for i, a in enumerate(line.args) if i != place)
                more = grad * number if line.op == "mul" else grad / number
            elif line.op == "neg" or (line.op == "sub" and place):
                more = -grad
            more = more.to(TORCH_DTYPES[region.dtype_of[arg]])
            given[arg] = given[arg] + more if arg in given else more
    return given


def _differentiable(chain, inputs, scalars, kept, grads, needs):
    """`chain_gradients` by autograd over the whole chain, with the products that are known."""
    def product(stage: Product, *operands):
        given = kept.get(stage.name)
        if given is None:  # only its gradient is asked for
            given = operands[0].new_empty(1).expand(stage.shape(*operands))
        return _KnownProduct.apply(given.detach(), stage, *operands)

    def run(leaves):
        return tuple(evaluate(chain, leaves, scalars, run_product=product).values())

    return gradients_again(run, inputs, grads, needs)


class _KnownProduct(torch.autograd.Function):
    """A product whose value is known: forward computes nothing, backward is its stage's."""

    @staticmethod
    def forward(ctx, given, stage, *operands):
        ctx.stage = stage
        ctx.save_for_backward(*operands)
        return given.view_as(given)

    @staticmethod
    def backward(ctx, grad):
        return (None, None, *ctx.stage.gradients(grad, ctx.saved_tensors, ctx.needs_input_grad[2:]))
