"""A linear layer with its activation applied in the product's own epilogue, by torch's library.

cuBLASLt adds the bias and applies relu or gelu (tanh) before it writes a product: the widest tensor of a
feed-forward block is not read and written once more, and a kernel less is launched. The activation sees the
product before it is rounded to the model's dtype: one rounding less than eager has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .chain import RegionStage
from .chain_products import LinearStage, Product
from .chain_segments import Segment
from .fused_linear_check import compare
from .fused_linear_structure import Projection
from .fused_linear_structure import Segment as Fusible
from .fused_linear_tiles import GemmTile
from .guard import device_lost, out_of_memory
from .region import NormRegion
from .settings import strict

#: Activation -> whether the library's is gelu (else relu), and the activation by itself, on a product that is
#: nobody else's.
ACTIVATIONS: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": (False, torch.relu_), "gelu_tanh": (True, lambda z: F.gelu(z, approximate="tanh"))}

DTYPES = ("bf16", "f16", "f32")

#: Rows and columns of a product at whose multiples the check looks.
_TILE = GemmTile(128, 128, 64)


@dataclass(frozen=True)
class ActivatedProduct(Product):
    """`name = activation(value @ weight^T + bias)`: a LinearStage and what follows it. No stage of a chain,
    but of a way to run one; it has no gradient.

    Attributes:
        name: of the activation's result.
        linear: the product.
        activation: a key of ACTIVATIONS.
        failed: told why, where the library cannot run a call; eager's two operations take its place.
    """

    name: str
    linear: LinearStage
    activation: str
    failed: Callable[[str], None]

    word = "linear"

    @property
    def refs(self) -> tuple[str | None, ...]:
        return self.linear.refs

    def __str__(self) -> str:
        return f"{self._call('linear')} -> {self.activation}"

    def run(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`[..., K]` -> `[..., N]`."""
        gelu, alone = ACTIVATIONS[self.activation]
        rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
        try:
            product = torch._addmm_activation(bias, rows, weight if self.linear.transposed else weight.t(),
                                              use_gelu=gelu)
        except Exception as error:
            if out_of_memory(error) or device_lost(error) or strict():
                raise
            self.failed(f"{type(error).__name__}: {error}".split("\n", 1)[0])
            return alone(self.linear.run(value, weight, bias))
        return product if rows is value else product.view(self.shape(value, weight, bias))

    def shape(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple:
        return self.linear.shape(value, weight, bias)


def activated(segment: Segment, spent: Sequence[str],
              failed: Callable[[str], None]) -> ActivatedProduct | None:
    """The product of `segment` with what is behind it; None where that is not one product with a bias and one
    activation that the library has, or somebody else reads the product. `spent`: what nothing reads behind
    the segment."""
    stage = segment.pointwise
    if stage is None or len(segment.products) != 1 or not hasattr(torch, "_addmm_activation"):
        return None
    product, activation = segment.products[0], _only_activation(stage.region)
    if activation is None or not isinstance(product, LinearStage) or product.bias is None or \
            stage.args != (product.name,) or product.name not in spent:
        return None
    return ActivatedProduct(stage.names[0], product, activation, failed)


def _only_activation(region: NormRegion) -> str | None:
    """The key of ACTIVATIONS that `region` is, in one dtype and contiguous; None where it is none."""
    if len(region.inputs) != 1 or region.scalars or len(region.body) != 1 or len(region.outputs) != 1:
        return None
    (x,), (line,), (out,) = region.inputs, region.body, region.outputs
    whole = x.dims == region.full and out.is_contiguous
    right = line.op in ACTIVATIONS and out.value == line.name and x.dtype in DTYPES
    return line.op if whole and right and x.dtype == line.dtype == out.dtype else None


def serves(device: torch.device) -> bool:
    """Whether the library applies activations in products on `device`. (On a CPU it runs them one after the
    other, and its gelu is the exact one.)"""
    return device.type == "cuda"


def within_bound(product: ActivatedProduct, stage: RegionStage, operands: Sequence[torch.Tensor],
                 found: torch.Tensor) -> bool:
    """Whether `found` is as near to float64 as the project demands of kernels: an error of at most twice that
    of PyTorch's product with `stage` behind it, plus one unit in the last place. On a sample of rows and
    columns; waits for the device."""
    segment = Fusible(None, (Projection(True, product.linear.transposed),), stage.region)
    return compare(segment, _TILE, operands, [], [found]).within
