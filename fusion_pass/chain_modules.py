"""Layers that run as a chain (kernels/chain.py): a norm, the linear layers behind it, what is pointwise.

`LayerNormLinear` is one norm and one linear layer, `LayerNormLinearFusion` the same as a function of its
weights, and `FusedChain` what `FusionChain` (chain_builder.py) builds. All are their layers: where a layer
is more than its parameters (a hook, an adapter in its place, a quantised or sharded weight), or somebody
wants to see every operation (torch.compile, autocast, vmap), the layers are called one after the other. Else
one Chain runs, through the same regions and kernels as in a graph that the backend compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .chain_hints import Hints
from .chain_layers import (
    check_fit,
    check_layer,
    deviation,
    eps_of,
    make_norm,
    norm_step,
    parse_dtype,
    parse_flag,
    parse_size,
)
from .chain_run import (
    FusionMode,
    Known,
    LastCall,
    Operands,
    Settings,
    check_operands,
    observed,
    parse_mode,
    run_chain,
    special,
)
from .chain_steps import (
    ACTIVATIONS,
    ActivationStep,
    MatmulStep,
    NormStep,
    ResidualStep,
    Step,
    activation_name,
    chain_of,
    folded_steps,
)
from .kernels import folding
from .kernels.chain import Chain
from .kernels.recent import Recent
from .kernels.reference import DTYPE_WORDS
from .shape_range import Prepared, ShapeRange, prepare


@dataclass(frozen=True)
class Layer:
    """A step of a module. `name`: of its submodule ("norm", "matmul"), of the function ("activation"), or
    what is added ("residual")."""

    kind: str
    name: str


class FusedChain(nn.Module):
    """Layers in a row that run as one Chain; made by `FusionChain.build` and, for one norm and one linear
    layer, LayerNormLinear.

    Its submodules hold the parameters, under the names that it prints; sharing them with another model,
    `load_state_dict`, `.to()`, hooks on them and replacing them work as with any module.

    Attributes:
        last_call: how the latest call ran, and why not otherwise; None before the first, and inside
            `torch.compile`, where the layers are traced one by one and the backend fuses what it finds.
    """

    def __init__(self, layers: Sequence[Layer], modules: dict[str, nn.Module], settings: Settings):
        super().__init__()
        self._layers, self._settings = tuple(layers), settings
        self._tied: frozenset[str] = frozenset()  # names of linear layers whose weight others read
        self._last_call: LastCall | None = None
        #: names of the layers that have parameters, and whether each is a norm
        self._held = tuple((layer.name, layer.kind == "norm") for layer in self._layers
                           if layer.kind in ("norm", "matmul"))
        #: for the latest calls, what steps were made of (see `_read`), and what is known of such calls
        self._recent = Recent()
        for name, module in modules.items():
            self.add_module(name, module)

    @property
    def mode(self) -> FusionMode:
        return self._settings.mode

    @property
    def in_features(self) -> int:
        return self._modules[self._layers[0].name].normalized_shape[-1]

    @property
    def last_call(self) -> LastCall | None:
        return self._last_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in features]` -> `[..., out features]`.

        Raises:
            TypeError: `x` is no tensor, or of another dtype than the parameters.
            ValueError: its last dim or device does not fit.
        """
        if torch.compiler.is_compiling():
            return self._one_by_one(x)
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.fx.Proxy):
                return self._one_by_one(x)
            raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}")
        why = self._deviation() or observed(x.device)
        if not why:
            operands, known, why = self._checked(x)
        if why:
            self.__dict__["_last_call"] = LastCall("layers", reason=why)
            return self._one_by_one(x)
        result, self.__dict__["_last_call"] = run_chain(x, operands, self._settings, known)
        return result

    def prepare(self, shapes: ShapeRange) -> Prepared:
        """Compile and measure, on an accelerator, what calls with inputs of these shapes need, so that
        none of them waits for a compiler. Elsewhere nothing is to be done, and the result says so."""
        return prepare(self, shapes)

    def refold(self) -> None:
        """Forget folded copies: to be called after parameters were written through `.data` or a raw
        pointer, which leaves no trace."""
        folding.forget(*self.parameters())

    def chain(self, rank: int = 2, dtype: torch.dtype | None = None, folded: bool = False) -> Chain:
        """The Chain that runs for inputs of `rank` dims (contiguous inputs have two) and `dtype` (by
        default that of the parameters)."""
        operands = self._operands()
        given = next((t.dtype for t in operands.parameters if t is not None), torch.get_default_dtype())
        steps = folded_steps(operands.steps) if folded else operands.steps
        return chain_of(steps, rank, DTYPE_WORDS[dtype or given])

    def load_from(self, *modules: nn.Module) -> FusedChain:
        """Copy the parameters of existing layers (norms and linear layers, in order; activations between
        them may be given too and must be the same) into this module. Returns itself.

        Raises:
            TypeError, ValueError: a module of another kind, number, shape or activation; nothing is copied.
        """
        from .chain_builder import matched

        pairs = matched(self, modules)
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())
        return self

    def extra_repr(self) -> str:
        words = [layer.name if layer.kind != "residual" else f"+ {layer.name}" for layer in self._layers]
        return f"{' -> '.join(words)}, mode={self.mode.value}"

    # -- layers

    def _one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        value = norm = x
        for layer in self._layers:
            if layer.kind == "activation":
                value = ACTIVATIONS[layer.name].function(value)
            elif layer.kind == "residual":
                value = value + (x if layer.name == "input" else norm)
            else:
                value = getattr(self, layer.name)(value)
                norm = value if layer.kind == "norm" else norm
        return value

    def _deviation(self) -> str:
        """Why the layers are more than their parameters; "" where they are not."""
        if nn.modules.module._has_any_global_hook():
            return "global module hooks are set"
        for name, _ in self._held:
            why = deviation(self._modules[name])
            if why:
                return f"{name} {why}"
        return ""

    def _checked(self, x: torch.Tensor) -> tuple[Operands, Known | None, str]:
        """(operands, what is known of calls like this one, why the layers must be called instead)."""
        parameters, eps, owners, made_of = self._read()
        tensors = (x, *[t for t in parameters if t is not None])
        found = self._recent.find(tensors, ())
        if found is not None and found[0] == made_of:
            return Operands(found[1].steps, parameters, eps, owners), found[1], ""
        operands, known = self._operands(), None
        why = special((x, *parameters))
        if not why:
            check_operands(x, operands)
            known = Known(x, operands)
            self._recent.add(tensors, (), (made_of, known))
        return operands, known, why

    def _read(self) -> tuple:
        """(parameters, eps, owners) as in Operands, and what steps are made of beside the parameters'
        sizes."""
        parameters: list[torch.Tensor | None] = []
        eps: list[float] = []
        owners: list[object | None] = []
        made_of: list = []
        for name, is_norm in self._held:
            module = self._modules[name]
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            parameters += (weight, bias)
            made_of += (type(module), weight is None, bias is None)
            if is_norm:
                made_of.append(module.normalized_shape)
                eps.append(eps_of(module.eps, weight))
            else:
                owners.append(None if name in self._tied else self)
        return parameters, eps, owners, made_of

    def _operands(self) -> Operands:
        steps: list[Step] = []
        for layer in self._layers:
            module = self._modules.get(layer.name)
            if layer.kind == "activation":
                steps.append(ActivationStep(layer.name))
            elif layer.kind == "residual":
                steps.append(ResidualStep(layer.name))
            elif layer.kind == "norm":
                steps.append(norm_step(module))
            else:
                weight, bias = module._parameters["weight"], module._parameters.get("bias")
                steps.append(MatmulStep(weight.shape[0], bias is not None))
        return Operands(tuple(steps), *self._read()[:3])

    def __getstate__(self) -> dict:
        """Copies and pickles have no calls behind them."""
        return {**self.__dict__, "_last_call": None, "_recent": Recent()}


class LayerNormLinear(FusedChain):
    """A norm over the last dim, a linear layer and, if wanted, an activation, as one module.

    Parameters are `norm.weight`, `norm.bias`, `linear.weight` and `linear.bias`, with the initial values of
    torch's own layers.

    Args:
        normalized_shape: the input's features, an int or a sequence of one.
        out_features: the result's.
        eps: of the norm; None: torch's default (1e-5; for "rms_norm" that of the compute dtype).
        elementwise_affine: the norm has a weight (and, for "layer_norm", a bias).
        bias: the linear layer has one.
        activation: a name of `ACTIVATIONS`, a module of torch.nn, or None.
        norm: "layer_norm" or "rms_norm".
        mode: see FusionMode.
        checkpoint: where gradients are recorded keep only the input and the parameters for backward, and
            compute all else again. Without it the products that an activation reads are kept as well.
        tile_size: output columns of a tile in kernels that hold the matrix product (see docs/chains.md).
        alignment: elements; rows lie on chip in multiples of it.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: at once; the message names the argument and what is possible.
    """

    def __init__(self, normalized_shape: int | Sequence[int], out_features: int, *, eps: float | None = None,
                 elementwise_affine: bool = True, bias: bool = True,
                 activation: str | nn.Module | None = None, norm: str = "layer_norm",
                 mode: FusionMode | str = FusionMode.AUTO, checkpoint: bool = False,
                 tile_size: int | None = None, alignment: int | None = None,
                 device: torch.device | str | int | None = None, dtype: torch.dtype | None = None):
        size = parse_size(normalized_shape, "normalized_shape")
        features = parse_size(out_features, "out_features")
        where = {"device": device, "dtype": parse_dtype(dtype)}
        modules = {"norm": make_norm(norm, size, eps, elementwise_affine, True, where),
                   "linear": nn.Linear(size, features, parse_flag(bias, "bias"), **where)}
        self._set_up(modules, activation, mode, checkpoint, tile_size, alignment)

    def _set_up(self, modules: dict[str, nn.Module], activation, mode, checkpoint, tile_size,
                alignment) -> None:
        word = activation_name(activation)
        layers = [Layer("norm", "norm"), Layer("matmul", "linear")]
        layers += [Layer("activation", word)] if word else []
        settings = Settings(parse_mode(mode), parse_flag(checkpoint, "checkpoint"),
                            Hints.parse(tile_size, alignment))
        FusedChain.__init__(self, layers, modules, settings)
        settings.hints.check(self._operands().steps)

    @classmethod
    def from_modules(cls, norm: nn.Module, linear: nn.Module, activation: str | nn.Module | None = None, *,
                     model: nn.Module | None = None, mode: FusionMode | str = FusionMode.AUTO,
                     checkpoint: bool = False, tile_size: int | None = None,
                     alignment: int | None = None) -> LayerNormLinear:
        """A module that shares (does not copy) these layers, so that both see every change.

        model: which they are part of: a weight that other layers of it read too is never folded.

        Raises:
            TypeError, ValueError: a module is no nn.LayerNorm, nn.RMSNorm or nn.Linear (or computes
                something else), sizes, devices or dtypes do not fit.
        """
        check_layer(norm, ("layer_norm", "rms_norm"), "norm")
        check_layer(linear, ("linear",), "linear")
        check_fit([("norm", norm), ("linear", linear)])
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set_up({"norm": norm, "linear": linear}, activation, mode, checkpoint, tile_size, alignment)
        made._tied = tied_in(model, made)
        return made


def tied_in(model: nn.Module | None, made: FusedChain) -> frozenset[str]:
    """Names of the linear layers of `made` whose weight another module of `model` holds too.

    Raises:
        TypeError: `model` is no module.
    """
    if model is None:
        return frozenset()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    own = {layer.name: made._modules[layer.name] for layer in made._layers if layer.kind == "matmul"}
    found = set()
    for other in model.modules():
        for t in other.parameters(recurse=False):
            found |= {name for name, module in own.items()
                      if other is not module and t.data_ptr() == module.weight.data_ptr()
                      and t.device == module.weight.device and t.device.type != "meta"}
    return frozenset(found)


# -- a function of its weights


class LayerNormLinearFusion:
    """`op(x, ln_weight, ln_bias, linear_weight)`: the norm, the linear layer and an activation, with the
    weights given at each call. Arguments as LayerNormLinear; holds no parameters.

    Attributes:
        last_call: as FusedChain's.
    """

    def __init__(self, *, eps: float | None = None, activation: str | nn.Module | None = None,
                 norm: str = "layer_norm", mode: FusionMode | str = FusionMode.AUTO, checkpoint: bool = False,
                 tile_size: int | None = None, alignment: int | None = None):
        make_norm(norm, 1, eps, False, False, {"device": "meta"})  # checks the arguments
        self.norm, self.eps = norm, 1e-5 if eps is None and norm == "layer_norm" else eps
        self.activation = activation_name(activation)
        self.settings = Settings(parse_mode(mode), parse_flag(checkpoint, "checkpoint"),
                                 Hints.parse(tile_size, alignment))
        self.last_call: LastCall | None = None

    def __call__(self, x: torch.Tensor, ln_weight: torch.Tensor | None, ln_bias: torch.Tensor | None,
                 linear_weight: torch.Tensor, linear_bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., K]`, `[K]`, `[K]`, `[N, K]`, `[N]` -> `[..., N]`.

        Raises:
            TypeError, ValueError: tensors that do not fit, naming the argument.
        """
        given = {"x": x, "ln_weight": ln_weight, "ln_bias": ln_bias, "linear_weight": linear_weight,
                 "linear_bias": linear_bias}
        for name, t in given.items():
            if not isinstance(t, torch.Tensor) and not (t is None and name not in ("x", "linear_weight")):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(t).__name__}")
        if linear_weight.dim() != 2:
            raise ValueError(f"linear_weight must have two dims, not shape {list(linear_weight.shape)}")
        if self.norm == "rms_norm" and ln_bias is not None:
            raise ValueError("ln_bias must be None: rms_norm has no bias")
        if torch.compiler.is_compiling():
            return self._plain(**given)
        why = observed(x.device) or special(tuple(given.values()))
        if why:
            self.last_call = LastCall("layers", reason=why)
            return self._plain(**given)
        features, size = linear_weight.shape
        steps: list[Step] = [NormStep(self.norm, size, ln_weight is not None, ln_bias is not None),
                             MatmulStep(features, linear_bias is not None)]
        steps += [ActivationStep(self.activation)] if self.activation else []
        if self.settings.hints:
            self.settings.hints.check(steps)
        operands = Operands(tuple(steps), (ln_weight, ln_bias, linear_weight, linear_bias),
                            (eps_of(self.eps, x),), (self,))
        check_operands(x, operands)
        result, self.last_call = run_chain(x, operands, self.settings, Known(x, operands))
        return result

    def _plain(self, x, ln_weight, ln_bias, linear_weight, linear_bias) -> torch.Tensor:
        shape = linear_weight.shape[1:]
        if self.norm == "layer_norm":
            value = F.layer_norm(x, shape, ln_weight, ln_bias, self.eps)
        else:
            value = F.rms_norm(x, shape, ln_weight, self.eps)
        value = F.linear(value, linear_weight, linear_bias)
        return ACTIVATIONS[self.activation].function(value) if self.activation else value
