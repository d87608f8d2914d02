"""Whose rules the pass follows: those of the device that a graph's tensors are on, or an NPU's, where
somebody asks what an NPU would get of a model that is on another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_npu: ContextVar[bool] = ContextVar("ascend_ln_fuse_rules_of_an_npu", default=False)


def rules_of(device: torch.device) -> str:
    """The device type whose kernels a site on `device` is made for."""
    return "npu" if _npu.get() else device.type


@contextmanager
def rules_of_an_npu() -> Iterator[None]:
    """While open, every site is made for an NPU's kernels, wherever its tensors are."""
    token = _npu.set(True)
    try:
        yield
    finally:
        _npu.reset(token)
