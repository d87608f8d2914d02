"""Layers of torch that a chain may be made of, and the arguments of what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn

from .chain_steps import NORM_OPS, NormStep
from .kernels.reference import DTYPE_WORDS


def parse_flag(value: bool, argument: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be a bool, not {value!r}")
    return value


def parse_size(size: int | Sequence[int], argument: str) -> int:
    """A number of features: a positive int, or a sequence of one. Raises TypeError or ValueError."""
    if isinstance(size, (tuple, list, torch.Size)):
        if len(size) != 1:
            raise ValueError(f"{argument}={list(size)}: must be one dim, the last, which the linear "
                             "layer reads")
        size = size[0]
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{argument} must be an int, not {size!r}")
    if size <= 0:
        raise ValueError(f"{argument} must be positive, not {size}")
    return size


def parse_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    if dtype is not None and dtype not in DTYPE_WORDS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPE_WORDS))}, not {dtype}")
    return dtype


def make_norm(norm: str, size: int, eps: float | None, affine: bool, bias: bool, where: dict) -> nn.Module:
    """A torch norm. Raises TypeError or ValueError."""
    parse_flag(affine, "elementwise_affine")
    parse_flag(bias, "bias")
    if eps is not None and (isinstance(eps, bool) or not isinstance(eps, (int, float))):
        raise TypeError(f"eps must be a number or None, not {eps!r}")
    if norm == "layer_norm":
        return nn.LayerNorm(size, 1e-5 if eps is None else eps, affine, bias, **where)
    if norm == "rms_norm":
        return nn.RMSNorm(size, eps, affine, **where)
    raise ValueError(f"norm must be one of {', '.join(NORM_OPS)}, not {norm!r}")


def check_layer(module: nn.Module, kinds: Sequence[str], argument: str) -> None:
    """Whether a module is one of `kinds` and nothing more.

    Raises:
        TypeError: it is not; ValueError: it is a norm over several dims.
    """
    names = [base.__name__ for base, word in _FORWARDS.items() if word in kinds]
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument} must be an nn.{' or nn.'.join(names)}, not {module!r:.80}")
    if kind_of(module) not in kinds:
        raise TypeError(f"{argument} must be an nn.{' or nn.'.join(names)}, not {type(module).__name__}, "
                        "which may compute something else; auto_fusion fuses norms of any spelling")
    if "linear" not in kinds:
        parse_size(tuple(module.normalized_shape), f"{argument}: normalized_shape")


def check_fit(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Whether layers in a row have matching sizes, one device and one dtype.

    Raises:
        ValueError: sizes or devices do not fit; TypeError: dtypes do not.
    """
    features, first, before = None, None, ""
    for name, module in layers:
        wanted = module.in_features if kind_of(module) == "linear" else module.normalized_shape[-1]
        if features is not None and wanted != features:
            raise ValueError(f"{name} takes {wanted} features, {before} gives {features}")
        features, before = getattr(module, "out_features", wanted), name
        for word, t in module.named_parameters(recurse=False):
            first = first or (f"{name}.{word}", t)
            if t.device != first[1].device:
                raise ValueError(f"{name}.{word} is on {t.device}, {first[0]} on {first[1].device}")
            if t.dtype != first[1].dtype:
                raise TypeError(f"{name}.{word} is {t.dtype}, {first[0]} is {first[1].dtype}")


# -- layers of an existing model


_FORWARDS = {nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.Linear: "linear"}


def kind_of(module: nn.Module) -> str:
    """"layer_norm", "rms_norm" or "linear"; "" for a module that computes anything else."""
    return _kind(type(module))


@lru_cache(maxsize=256)
def _kind(kind: type) -> str:
    if kind.__call__ is not nn.Module.__call__:
        return ""
    return next((word for base, word in _FORWARDS.items()
                 if issubclass(kind, base) and kind.forward is base.forward), "")


def deviation(module: nn.Module) -> str:
    """Why calling `module` is more than a norm or product with its parameters; "" where it is not."""
    if not kind_of(module) or "forward" in module.__dict__:
        return f"is a {type(module).__name__} with a forward of its own"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or \
            module._backward_pre_hooks:
        return "has hooks"
    if "weight" not in module._parameters:
        return "has a weight that is computed (a parametrization)"
    if "bias" not in module._parameters and getattr(module, "bias", None) is not None:
        return "has a bias that is computed (a parametrization)"
    return ""


def norm_step(module: nn.Module) -> NormStep:
    return NormStep(kind_of(module), module.normalized_shape[-1], module._parameters["weight"] is not None,
                    module._parameters.get("bias") is not None)


def eps_of(eps: float | None, weight: torch.Tensor | None) -> float:
    """torch's rule for RMSNorm(eps=None): that of the type in which it computes."""
    if eps is not None:
        return eps
    double = weight is not None and weight.dtype == torch.float64
    return torch.finfo(torch.float64 if double else torch.float32).eps
