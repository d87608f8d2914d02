"""The fused op: `torch.ops.ascend_ln_fuse.region(text, inputs, scalars, *, self_check) -> outputs`.

One op for all regions; `text` (kernels/region.py) says what it computes. It is functional: outputs
are new tensors. `python_call` is the same without the dispatcher, for graphs that nobody traces again.
`self_check` says when a kernel is compared with plain PyTorch: a word of `settings.SELF_CHECKS`.

Differentiable: backward runs the reference again on the saved inputs and differentiates that, so no
intermediate is kept. `python_call` can be differentiated again; of the dispatcher's op that is an error
that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from .launch import Runner, runs_reference
from .reference import TORCH_DTYPES, program, reference
from .region import NormRegion, broadcast_sizes, dense_strides, parse
from .settings import DEFAULT_SELF_CHECK
from .values import ancestors, sources


def runner(text: str, self_check: str = DEFAULT_SELF_CHECK) -> Runner:
    """The one Runner in this process of a region text and a way to check (thread-safe).

    Raises:
        ValueError: no region, or no word of `settings.SELF_CHECKS`.
    """
    return _runner(text, self_check)


@lru_cache(maxsize=4096)
def _runner(text: str, self_check: str) -> Runner:
    region = parse(text)
    if region.text != text:  # one line, as in a graph: the Runner of the text itself
        return _runner(region.text, self_check)
    return Runner(region, self_check=self_check)


runner.cache_clear = _runner.cache_clear  # type: ignore[attr-defined]


def python_call(region: NormRegion, self_check: str = DEFAULT_SELF_CHECK) -> Callable:
    """A function of the region's inputs, then its scalars: returns a tensor for one output, else a
    tuple. Differentiable; to be called from generated graphs."""
    run, count, single = runner(region.text, self_check), len(region.inputs), len(region.outputs) == 1
    # On the CPU the region is plain torch, which autograd knows: no plan, no launch.
    plain = program(region) if runs_reference(torch.device("cpu")) else None

    def fused(*args):
        if plain is not None and args[0].is_cpu:
            results = plain(*args)
        else:
            inputs, scalars = args[:count], args[count:]
            if forward_ad._current_level >= 0:  # tangents flow through torch ops only
                results = reference(region, inputs, scalars)
            elif torch.is_grad_enabled() and any([x.requires_grad for x in inputs]):
                results = _Region.apply(run, region, scalars, *inputs)
            else:
                results = run(inputs, scalars)
        return results[0] if single else results

    fused.__name__ = fused.__qualname__ = "ascend_ln_fuse_region"
    fused.__module__ = __name__
    fused.__doc__ = region.text
    return fused


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, region, scalars, *inputs):
        ctx.region, ctx.scalars = region, scalars
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        # The reference may yield a view of what it computed, which autograd would forbid to write.
        outputs = tuple([x.data if x._is_view() else x for x in run(inputs, scalars)])
        mark_unrecorded(ctx, outputs, sources(region), inputs)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[3:]
        return (None, None, None,
                *input_gradients(ctx.region, ctx.saved_tensors, ctx.scalars, grads, needs))


def mark_unrecorded(ctx, outputs: Sequence[torch.Tensor], made_of: Sequence[Sequence[int]],
                    inputs: Sequence[torch.Tensor]) -> None:
    """Have the outputs of a Function require no grad that are made of inputs without one, as in eager: a
    residual sum beside the norm of it, where only the norm's weight is trained.

    `made_of`: for each output, the numbers of the inputs that it depends on."""
    if len(outputs) > 1:
        recorded = [x.requires_grad for x in inputs]
        ctx.mark_non_differentiable(*[out for out, numbers in zip(outputs, made_of)
                                      if not any([recorded[i] for i in numbers])])


class _Once(torch.autograd.Function):
    """The first `count` tensors as they are, made of all the others: whoever differentiates them again
    comes by here."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("ascend_ln_fuse: a fused norm cannot be differentiated twice; compile with "
                           "options={'training': 'decline'}")


def _once(grads: Sequence[torch.Tensor | None],
          made_of: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """`grads`, computed from `made_of`, which nobody may differentiate. `once_differentiable` would see
    that only where the incoming gradients require grad, and lose a term in silence where none does."""
    if not torch.is_grad_enabled():  # set only for create_graph=True
        return list(grads)
    given = [g for g in grads if g is not None]
    marked = iter(_Once.apply(len(given), *given, *made_of))
    return [None if grad is None else next(marked) for grad in grads]


def input_gradients(region: NormRegion, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
                    grads: Sequence[torch.Tensor | None],
                    needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of the region's inputs: the reference, run again and differentiated.

    `grads` are those of the outputs (None for zero); entry i of the result is None where `needs[i]` is
    False or the input does not reach an output. Differentiable again where grad mode is on."""
    return gradients_again(lambda leaves: reference(region, leaves, scalars), inputs, grads, needs)


def gradients_again(run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
                    inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None],
                    needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of `inputs` by running `run(inputs)`, which gives the outputs, once more; see
    `input_gradients`."""
    again = torch.is_grad_enabled()  # set in a backward only for create_graph=True
    with torch.enable_grad():
        leaves = [x.view_as(x) if again and need else x.detach().requires_grad_(need)
                  for x, need in zip(inputs, needs)]
        outputs = run(leaves)
        pairs = [(out, grad) for out, grad in zip(outputs, grads)
                 if grad is not None and out.requires_grad]
        wanted = [leaf for leaf, need in zip(leaves, needs) if need]
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs],
                                         create_graph=again, allow_unused=True)
                     if pairs else [None] * len(wanted))
    return [next(found) if need else None for need in needs]


# The dispatcher's form, for graphs that another compiler traces.

#: For compilers that choose strides: the op has correct fakes, and its inputs come with the strides that the
#: site was matched on, without a copy where eager has none. Said here, since the default differs by version.
TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides")
             if hasattr(torch.Tag, name))

_LIBRARY = torch.library.Library("ascend_ln_fuse", "DEF")
_LIBRARY.define("region(str text, Tensor[] inputs, float[] scalars, *, "
                f"str self_check='{DEFAULT_SELF_CHECK}') -> Tensor[]", tags=TAGS)
_LIBRARY.define("region_backward(str text, Tensor[] inputs, float[] scalars, Tensor[] grads, "
                "bool[] given, bool[] needs) -> Tensor[]", tags=TAGS)


def no_tangents() -> None:
    """Raises RuntimeError inside of forward-mode AD: tangents would be lost in silence, since the dispatcher
    shows them to no kernel."""
    if forward_ad._current_level >= 0:
        raise RuntimeError("ascend_ln_fuse: forward-mode AD of a fused norm needs options={'inner': 'eager'}")


def _region(text, inputs, scalars, *, self_check=DEFAULT_SELF_CHECK):
    no_tangents()
    return list(_runner(text, self_check)(inputs, scalars))


def _region_fake(text, inputs, scalars, *, self_check=DEFAULT_SELF_CHECK):
    return region_fake(parse(text), inputs)


def region_fake(region: NormRegion, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of `region` without values, for fakes: the shapes, strides and dtypes, without a guard."""
    sizes = broadcast_sizes(region, [x.shape for x in inputs])
    return [inputs[0].new_empty_strided(sizes, dense_strides(sizes, out.order),
                                        dtype=TORCH_DTYPES[out.dtype]) for out in region.outputs]


def _region_backward(text, inputs, scalars, grads, given, needs):
    grads = [grad if has else None for grad, has in zip(grads, given)]
    found = input_gradients(parse(text), inputs, scalars, grads, needs)
    # An op yields tensors only: an unneeded gradient is an empty one.
    results = [x.new_empty(0) if grad is None and not need else
               torch.zeros_like(x, memory_format=torch.contiguous_format) if grad is None else
               grad.contiguous() for x, grad, need in zip(inputs, found, needs)]
    return _apart(results, (*inputs, *(grad for grad in grads if grad is not None)))


def _apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`results`, copied where they share memory with one another or with `others`: the schema of an op says
    that they do not, and a compiler may write over each of them. (The two terms of a sum have one gradient.)
    """
    known = {x.untyped_storage()._cdata for x in others}
    apart = []
    for result in results:
        if result.untyped_storage()._cdata in known:
            result = result.clone()
        known.add(result.untyped_storage()._cdata)
        apart.append(result)
    return apart


def _region_backward_fake(text, inputs, scalars, grads, given, needs):
    return [x.new_empty(x.shape) if need else x.new_empty(0) for x, need in zip(inputs, needs)]


def _setup_context(ctx, inputs, keyword_only_inputs, output):
    ctx.text, tensors, ctx.scalars = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    if len(output) > 1:
        mark_unrecorded(ctx, output, sources(parse(ctx.text)), tensors)


def _backward(ctx, grads):
    inputs = ctx.saved_tensors
    region = parse(ctx.text)
    # An input that no differentiated output is made of has no gradient, not one of zeros.
    used = ancestors(region, [out.value for out, g in zip(region.outputs, grads) if g is not None])
    needs = [need and x.name in used for need, x in zip(ctx.needs_input_grad[1], region.inputs)]
    given = [g is not None for g in grads]
    filled = [inputs[0].new_empty(0) if g is None else g for g in grads]
    with torch.no_grad():
        found = torch.ops.ascend_ln_fuse.region_backward(ctx.text, inputs, ctx.scalars, filled, given,
                                                         needs)
    made_of = [*inputs, *(g for g in grads if g is not None)]
    # To torch.library an empty list is a structure of its own, which backward must return.
    no_scalars = None if ctx.scalars else []
    return None, _once([grad if need else None for grad, need in zip(found, needs)], made_of), no_scalars


_LIBRARY.impl("region", _region, "CompositeExplicitAutograd")
_LIBRARY.impl("region_backward", _region_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ascend_ln_fuse::region", _region_fake, lib=_LIBRARY)
torch.library.register_fake("ascend_ln_fuse::region_backward", _region_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("ascend_ln_fuse::region", _backward,
                                setup_context=_setup_context, lib=_LIBRARY)
