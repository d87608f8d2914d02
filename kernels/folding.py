"""Folding a norm's weight and bias into the linear layer behind it, for inference.

    (n * gamma + beta) @ W^T + b  =  n @ (gamma * W)^T + (beta @ W^T + b)        n: the normalised rows

The folded weight and bias are copies in the parameters' dtype; the parameters are never changed. Copies
are kept as long as the weight lives, and made again when any of the tensors that they were made of has
another storage, version, shape, dtype or device, which is what `load_state_dict`, `.to()`, in-place edits
and most optimizers leave behind. Fused optimizers count no version: every step of a `torch.optim.Optimizer`
drops what was made of its parameters. Nothing can tell a write through `.data` or a raw pointer: after
one, call `forget`.

A folded chain runs as any other: the norm's kernel reads no weight and no bias. A kernel that takes the
rows as they are, `rstd * (x @ W'^T - mean * sums) + b'`, finds `sums` in `Folded.column_sums`: taken of the
rounded weight, and to be subtracted from the fp32 sums before any of them is rounded.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from .recent import alike
from .reference import DTYPE_WORDS

#: Elements of a weight that are widened at a time.
CHUNK = 2**24

#: A folded weight may lose this share of half a rounding step more than rounding alone: fp32 norms.
SLACK = 1.01

UNTRACKED = "it was made in inference mode, where edits leave no trace"
TIED = "the weight is tied: another layer has it folded"
CAPTURING = "a graph is being captured, whose replays would not see an edit"


@dataclass(frozen=True)
class Folded:
    """Copies in the place of a linear layer's parameters.

    Attributes:
        weight: gamma * W, in the layout of W; None where the norm has no weight: W itself serves.
        bias: beta @ W^T + b, `[N]`; None where the norm has no bias: b itself serves.
        column_sums: sums of the (rounded) weight over its input features, fp32 `[N]`.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    column_sums: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.weight, self.bias, self.column_sums) if t is not None)


@dataclass
class _Entry:
    """What is known of one weight.

    Attributes:
        owner: weak reference to the layer that asked.
        states: of the tensors, when `result` was made of them.
        storages: keep the addresses in `states` from being given to other storages.
        result: the copies, or why there are none.
        stream: on which the copies were made.
        alike: `recent.alike` of the tensors.
        marks: `_marks` of them.
    """

    owner: weakref.ref
    states: tuple
    storages: tuple[StorageWeakRef, ...]
    result: Folded | str
    stream: int | None
    alike: Callable[..., bool] | None
    marks: list[tuple | None]

    def unchanged(self, owner: object, tensors: tuple) -> bool:
        """Whether `result` is what `owner` asks for, told by a few attributes; False where that takes a
        closer look."""
        given = [t for t in tensors if t is not None]
        return self.alike is not None and self.owner() is owner and len(given) == len(self.storages) and \
            self.alike(*given) and _marks(tensors) == self.marks


#: By the weight's storage, held weakly: a weak reference to the tensor itself would keep
#: `torch.utils.swap_tensors`, and so `.to()` of some modules, from working.
_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: The same by the id of the weight: where to look first, no more.
_hints: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def fold(owner: object, gamma: torch.Tensor | None, beta: torch.Tensor | None, weight: torch.Tensor,
         bias: torch.Tensor | None) -> Folded | str:
    """The folded copies for `owner`'s product, or why there are none (in words that follow "not folded:").

    The caller sees to it that no gradient is recorded and that nothing but the product reads the norm.

    Args:
        owner: the layer, held weakly: a weight is folded for one of them, others are told that it is tied.
        gamma, beta: the norm's `[K]`.
        weight: `[N, K]`; bias: `[N]`. All of one dtype on one device.
    """
    tensors = (gamma, beta, weight, bias)
    if _capturing(weight.device):
        return CAPTURING
    hint = _hints.get(id(weight))
    if hint is not None and hint.unchanged(owner, tensors):
        return _on_this_stream(hint, weight.device)
    if any(t is not None and type(t) not in _PLAIN for t in tensors):
        return unfoldable(tensors) or UNTRACKED
    with _lock:
        storage = weight.untyped_storage()
        entry = _entries.get(storage)
        states = _states(tensors)
        known = entry.owner() if entry is not None else None
        if known is not None and known is not owner:
            return TIED
        if known is owner and entry.states == states:
            return _on_this_stream(entry, weight.device)
        result = unfoldable(tensors) if states is not None else UNTRACKED
        if result is None:
            with torch.no_grad():
                result = _folded(gamma, beta, weight, bias)
        if states is not None:
            _watch_optimizers()
            given = [t for t in tensors if t is not None]
            _entries[storage] = _hints[id(weight)] = _Entry(
                weakref.ref(owner), states, tuple(StorageWeakRef(t.untyped_storage()) for t in given), result,
                _stream(weight.device), alike(given), _marks(tensors))
        return result


def forget(*tensors: torch.Tensor | None) -> None:
    """Drop the copies that were made of any of these tensors."""
    _drop({_place(t) for t in tensors if t is not None})


def pays(device: torch.device) -> bool:
    """Whether folding makes chains faster on `device`, so that it is worth a copy of the weights unasked.

    It does not on any way that chains have today: the library's product reads as much as before, and the
    norm's kernel is spared two vectors (on an H200, feed-forward blocks of 1024 and 4096 features in bf16, 1
    to 8192 rows, took within 5% of the same time). To be answered anew with a kernel that reads
    `column_sums`."""
    return False


def unfoldable(tensors) -> str | None:
    """Why no copy may be made of these tensors (None among them is passed over); None if one may."""
    state = sys.modules.get("torch.distributed._composable_state")
    if state is not None and len(getattr(state, "_module_state_mapping", ())):
        return "modules of this process are sharded (fully_shard): their weights come and go unseen"
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN:
            return f"a parameter is a {type(t).__name__}, a tensor subclass (quantised, sharded, ...)"
        if t.dtype not in DTYPE_WORDS:
            return f"a parameter is {t.dtype}: quantised"
        if not t.is_leaf:
            return "a parameter is computed from others"
        if t.untyped_storage().nbytes() != t.numel() * t.element_size():
            return "a parameter is a part of a larger tensor (packed or sharded)"
        if t.device.type == "cpu" and t.is_shared():
            return "a parameter lies in memory shared between processes, which may edit it unseen"
    return None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _states(tensors) -> tuple | None:
    """What changes when a tensor does; None where that cannot be told."""
    states = []
    for t in tensors:
        if t is None:
            states.append(None)
        elif t.is_inference():
            return None
        else:
            states.append((_place(t), t.data_ptr(), t._version, t.dtype, t.device, t.shape, t.stride(),
                           t.is_leaf))
    return tuple(states)


def _marks(tensors) -> list[tuple | None]:
    """The part of `_states` that is no layout: what `recent.alike` does not see."""
    return [None if t is None else (t._version, t.data_ptr(), t.untyped_storage()._cdata, t.is_leaf)
            for t in tensors]


def _place(t: torch.Tensor) -> int:
    """Which storage it is: unique among those that live or are held weakly."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without one
        return 0


def _folded(gamma, beta, weight, bias) -> Folded | str:
    dtype, device = weight.dtype, weight.device
    # Products of two 16-bit numbers are exact in fp32, those of fp32 in fp64, which few devices have.
    double = device.type in ("cpu", "cuda")
    wide = torch.float64 if double and dtype in (torch.float32, torch.float64) else torch.float32
    most = torch.float64 if double else torch.float32
    limit = SLACK * torch.finfo(dtype).eps / 2
    made = None if gamma is None else torch.empty_like(weight)
    shift = None if beta is None else torch.empty(weight.shape[0], dtype=most, device=device)
    sums = torch.empty(weight.shape[0], dtype=torch.float32, device=device)
    good = torch.ones((), dtype=torch.bool, device=device)
    step = max(CHUNK // max(weight.shape[1], 1), 1)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        exact = part = weight[rows].to(wide)
        if made is not None:
            exact = part * gamma.to(wide)
            made[rows] = exact
            rounded = made[rows].to(wide)
            size = exact.norm(dim=1)
            good &= ((rounded - exact).norm(dim=1) <= limit * size).all() & size.isfinite().all()
            exact = rounded
        sums[rows] = exact.sum(1, dtype=most)
        if shift is not None:
            shift[rows] = (part * beta.to(wide)).sum(1, dtype=most)
    offset = bias
    if shift is not None:
        offset = (shift if bias is None else shift + bias).to(dtype)
        good &= offset.isfinite().all()
    # The wait for the device also means that the copies are whole when another stream reads them.
    if not good.item():
        return f"gamma * W does not fit {DTYPE_WORDS[dtype]}: it overflows, or loses digits"
    return Folded(made, offset if shift is not None else None, sums)


# -- devices


def _capturing(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and asked()


def _stream(device: torch.device) -> int | None:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def _on_this_stream(entry: _Entry, device: torch.device) -> Folded | str:
    """The result; the allocator is told of another stream that reads it, for the day when it is dropped."""
    if isinstance(entry.result, Folded) and _stream(device) != entry.stream:
        stream = torch.cuda.current_stream(device)
        for t in entry.result.tensors:
            t.record_stream(stream)
    return entry.result


# -- optimizers


@lru_cache(maxsize=1)
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer, args, kwargs) -> None:
    """`fused=True` writes parameters without counting a version."""
    if len(_entries):
        _drop({_place(p) for group in optimizer.param_groups for p in group["params"]})


def _drop(places: set[int]) -> None:
    with _lock:
        stale = [storage for storage, entry in _entries.items()
                 if any(state is not None and state[0] in places for state in entry.states)]
        for storage in stale:
            del _entries[storage]
