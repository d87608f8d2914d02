"""One call of a chain of layers: checked, folded where it may be, run as a Chain (kernels/chain.py)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as recomputed

from .chain_hints import Hints, runner_with
from .chain_steps import MatmulStep, NormStep, Step, chain_of, foldable_pairs, folded_steps
from .kernels import folding
from .kernels.chain_ops import chain_call
from .kernels.reference import DTYPE_WORDS


class FusionMode(str, enum.Enum):
    """When the norm's weight and bias are folded into the linear layer behind it.

    INFERENCE: whenever no gradient is recorded and it is safe (kernels/folding.py); `last_call` says why
    not. TRAINING: never. AUTO: as TRAINING where gradients are recorded; else as INFERENCE, but only where
    a folded chain is faster. So far it is on no device, and a folded weight is a second copy of it.
    """

    AUTO = "auto"
    TRAINING = "training"
    INFERENCE = "inference"


@dataclass(frozen=True)
class LastCall:
    """How a module's latest call ran.

    Attributes:
        way: "chain", or "layers": one after the other.
        folded: the chain ran with folded weights.
        reason: why the layers, or why not folded.
    """

    way: str
    folded: bool = False
    reason: str = ""

    def __str__(self) -> str:
        words = self.way + (", folded" if self.folded else "")
        return words + (f" ({self.reason})" if self.reason else "")


#: Called with each chain's runner and arguments after it has run (kernel_info.py).
listener: ContextVar[Callable | None] = ContextVar("ascend_ln_fuse_listener", default=None)

NEVER = "TRAINING never folds"
RECORDED = "gradients are recorded"
NO_GAIN = "AUTO folds only where that is faster, which it is not here"
READ_ELSEWHERE = "the norm's result is read by more than the linear layer behind it"
TIED = "the weight is tied: another layer of the model reads it"


def parse_mode(mode: FusionMode | str) -> FusionMode:
    """A FusionMode by itself or by its name. Raises TypeError or ValueError."""
    if not isinstance(mode, str):
        raise TypeError(f"mode must be a FusionMode or its name, not {mode!r}")
    try:
        return FusionMode(mode.lower())
    except ValueError:
        raise ValueError(f"mode: unknown mode {mode!r}; known: "
                         f"{', '.join(m.value for m in FusionMode)}") from None


@dataclass(frozen=True)
class Settings:
    """What a module or function was asked for; see LayerNormLinear."""

    mode: FusionMode = FusionMode.AUTO
    checkpoint: bool = False
    hints: Hints = Hints()


class Operands(NamedTuple):
    """What a chain runs on, beside its input.

    Attributes:
        steps: of the chain.
        parameters: weight and bias of each norm and linear layer, None where it has none.
        eps: of the norms.
        owners: of the linear layers, those for which weights are folded; None for one that is tied.
    """

    steps: tuple[Step, ...]
    parameters: Sequence[torch.Tensor | None]
    eps: Sequence[float]
    owners: Sequence[object | None]


def observed(device: torch.device) -> str:
    """Why the layers must be called one after the other, from the state of torch; "" for no reason."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "inside a function transform or forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "inside torch.jit.trace"
    kind = device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return "autocast chooses the dtypes"
    return "a TorchDispatchMode wants to see every operation" if torch._C._len_torch_dispatch_stack() else ""


def special(tensors: Sequence[torch.Tensor | None]) -> str:
    """Why the layers must be called one after the other, from the kinds of the tensors; "" for plain ones."""
    for t in tensors:
        if t is None:
            continue
        if type(t) not in (torch.Tensor, nn.Parameter):
            return f"an operand is a {type(t).__name__}, a tensor subclass"
        if t.is_nested or t.layout != torch.strided or t.device.type == "meta":
            return "an operand is no plain tensor in memory"
    return ""


class Known:
    """What is settled for all calls on tensors of the same kinds and layouts (kernels/recent.py).

    Attributes:
        steps: of the chain.
        foldable: see `_foldable`.
        requires_grad: one of the tensors does.
        flat: the rows of a contiguous input, of any rank, can be taken as a matrix; `rank`: of what the
            chain then sees.
    """

    def __init__(self, x: torch.Tensor, operands: Operands):
        """Of a call that `check_operands` has seen."""
        self.steps, self.foldable = operands.steps, _foldable(operands.steps)
        self.requires_grad = any(t.requires_grad for t in (x, *operands.parameters) if t is not None)
        self.flat = x.dim() != 2 and x.is_contiguous()
        self.rank = 2 if self.flat or x.dim() == 1 else x.dim()
        self.dtype, self.device = DTYPE_WORDS[x.dtype], x.device
        self._calls: dict[bool, Callable] = {}

    def call(self, folded: bool, tile_size: int | None) -> Callable:
        """The function that runs the chain; `tile_size` is the same at all calls."""
        found = self._calls.get(folded)
        if found is None:
            steps = self.foldable[1] if folded else self.steps
            found = self._calls[folded] = callable_of(steps, self.rank, self.dtype, tile_size,
                                                      self.device.type)
        return found


def run_chain(x: torch.Tensor, operands: Operands, settings: Settings,
              known: Known) -> tuple[torch.Tensor, LastCall]:
    """The chain of `operands` on `x`, and how it ran."""
    recorded = known.requires_grad and torch.is_grad_enabled()
    parameters, why = operands.parameters, ""
    if settings.mode is FusionMode.TRAINING:
        why = NEVER
    elif recorded:
        why = RECORDED
    elif settings.mode is FusionMode.AUTO and not folding.pays(known.device):
        why = NO_GAIN
    else:
        parameters, why = fold(operands, known.foldable)
    # One shape of chain for all ranks, where the rows lie as a matrix.
    rows = x.view(-1, x.shape[-1]) if known.flat else x.unsqueeze(0) if x.dim() == 1 else x
    call = known.call(not why, settings.hints.tile_size)
    arguments = (rows, *[t for t in parameters if t is not None], *operands.eps)
    if settings.checkpoint and recorded:
        result = recomputed(call, *arguments, use_reentrant=False, preserve_rng_state=False)
    else:
        result = call(*arguments)
    heard = listener.get()
    if heard is not None:
        heard(call.runner, arguments)
    if rows is not x:
        result = result.view(*x.shape[:-1], result.shape[-1])
    return result, _chain_ran(not why, why)


@lru_cache(maxsize=64)
def _chain_ran(folded: bool, why: str) -> LastCall:
    return LastCall("chain", folded, why)


@lru_cache(maxsize=1024)
def callable_of(steps: tuple[Step, ...], rank: int, dtype: str, tile_size: int | None,
                device: str) -> Callable:
    """The function that runs the chain of `steps` on devices of a type; see `chain_of`."""
    chain = chain_of(steps, rank, dtype)
    return chain_call(chain, runner=runner_with(chain, tile_size, device))


def check_operands(x: torch.Tensor, operands: Operands) -> None:
    """Whether the tensors fit together.

    Raises:
        ValueError: a shape or device does not; TypeError: a dtype does not.
    """
    if x.dtype not in DTYPE_WORDS:
        raise TypeError(f"x: a chain takes {', '.join(map(str, DTYPE_WORDS))}, not {x.dtype}")
    size = operands.steps[0].size
    if x.dim() == 0 or x.shape[-1] != size:
        raise ValueError(f"x: the norm is over {size} features, x has shape {list(x.shape)}")
    parameters = iter(operands.parameters)
    for number, step in enumerate(operands.steps):
        if isinstance(step, NormStep):
            shapes = {"weight": (step.size,), "bias": (step.size,)}
            if step.size != size:
                raise ValueError(f"step {number}: a norm over {step.size} features behind {size}")
        elif isinstance(step, MatmulStep):
            shapes = {"weight": (step.features, size), "bias": (step.features,)}
            size = step.features
        else:
            continue
        for name, shape in shapes.items():
            t = next(parameters)
            if t is None:
                continue
            words = f"{type(step).__name__.removesuffix('Step').lower()} {name} (step {number})"
            if t.shape != shape:
                raise ValueError(f"{words}: must be of shape {list(shape)}, not {list(t.shape)}")
            if t.device != x.device:
                raise ValueError(f"{words}: is on {t.device}, x on {x.device}")
            if t.dtype != x.dtype:
                raise TypeError(f"{words}: is {t.dtype}, x is {x.dtype}")


def fold(operands: Operands, foldable: tuple) -> tuple[Sequence[torch.Tensor | None], str]:
    """(parameters, why not): folded are all norms of the chain, or none. `foldable` is `_foldable`'s."""
    _, _, pairs, products, why = foldable
    if why:
        return operands.parameters, why
    parameters = list(operands.parameters)
    weights = [parameters[slot] for slot in products]
    for norm, matmul in pairs:
        owner, weight = operands.owners[products.index(matmul)], parameters[matmul]
        if owner is None or sum([t is weight for t in weights]) > 1:
            return operands.parameters, TIED
        found = folding.fold(owner, *parameters[norm:norm + 2], *parameters[matmul:matmul + 2])
        if isinstance(found, str):
            return operands.parameters, found
        parameters[norm:norm + 2] = None, None
        if found.weight is not None:
            parameters[matmul] = found.weight
        if found.bias is not None:
            parameters[matmul + 1] = found.bias
    return parameters, ""


@lru_cache(maxsize=1024)
def _foldable(steps: tuple[Step, ...]) -> tuple:
    """(steps, the same folded, (place of the norm's weight, of the product's) for each fold, places of all
    products' weights, why nothing can be folded). Places are among `Operands.parameters`."""
    places = {}
    for i, step in enumerate(steps):
        if isinstance(step, (NormStep, MatmulStep)):
            places[i] = 2 * len(places)
    affine = [i for i, step in enumerate(steps) if isinstance(step, NormStep) and (step.weight or step.bias)]
    followed = all(i + 1 < len(steps) and isinstance(steps[i + 1], MatmulStep) for i in affine)
    why = "" if affine and set(affine) <= set(foldable_pairs(steps)) else \
        "the norm has neither weight nor bias" if not affine else \
        READ_ELSEWHERE if followed else "no linear layer follows the norm"
    return (steps, folded_steps(steps), [] if why else [(places[i], places[i + 1]) for i in affine],
            [place for i, place in places.items() if isinstance(steps[i], MatmulStep)], why)
