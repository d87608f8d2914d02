"""`FusionChain`: layers written down one after another, built into a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .chain_hints import Hints
from .chain_layers import check_fit, check_layer, kind_of, make_norm, parse_dtype, parse_flag, parse_size
from .chain_modules import FusedChain, Layer, tied_in
from .chain_run import FusionMode, Settings, parse_mode
from .chain_steps import RESIDUALS, activation_name

#: Makes a layer, given device and dtype.
Maker = Callable[[dict], nn.Module]


@dataclass(frozen=True)
class _Declared:
    """A layer of the chain; `make` for those with parameters, `module` where an existing one is shared."""

    layer: Layer
    make: Maker | None = None
    module: nn.Module | None = None


class FusionChain:
    """Builds a module from a norm and what follows it:

        chain = FusionChain().add_layer_norm(512).add_matmul(2048).add_activation("relu").add_matmul(512)
        module = chain.build(dtype=torch.bfloat16)

    Every `add_...` returns the builder and raises TypeError or ValueError for what does not fit what is
    there, naming the argument. Layers get the names `norm1`, `linear1`, `linear2`, ... in order. With
    `module=` an existing layer is shared instead of a new one made.
    """

    def __init__(self):
        self._declared: list[_Declared] = []
        self._features = 0  # of the latest value; 0 before the first norm
        self._inputs = self._normed = 0  # of the chain's input, of the latest norm

    @classmethod
    def from_modules(cls, *modules: nn.Module) -> FusionChain:
        """A builder of existing layers: norms, nn.Linear, and activations of torch.nn, which the built
        module shares."""
        chain = cls()
        for number, module in enumerate(modules):
            kind = kind_of(module) if isinstance(module, nn.Module) else ""
            if kind == "layer_norm":
                chain.add_layer_norm(module=module)
            elif kind == "rms_norm":
                chain.add_rms_norm(module=module)
            elif kind == "linear":
                chain.add_matmul(module=module)
            elif isinstance(module, nn.Module):
                chain.add_activation(module)
            else:
                raise TypeError(f"modules[{number}] must be a torch.nn.Module, not {module!r:.80}")
        return chain

    def add_layer_norm(self, normalized_shape: int | Sequence[int] | None = None, *, eps: float = 1e-5,
                       elementwise_affine: bool = True, bias: bool = True,
                       module: nn.Module | None = None) -> FusionChain:
        """nn.LayerNorm over the last dim."""
        return self._norm("layer_norm", normalized_shape, eps, elementwise_affine, bias, module)

    def add_rms_norm(self, normalized_shape: int | Sequence[int] | None = None, *, eps: float | None = None,
                     elementwise_affine: bool = True, module: nn.Module | None = None) -> FusionChain:
        """nn.RMSNorm over the last dim."""
        return self._norm("rms_norm", normalized_shape, eps, elementwise_affine, False, module)

    def _norm(self, word, shape, eps, affine, bias, module) -> FusionChain:
        shape = self._given("normalized_shape", shape, module, word)
        size = parse_size(shape if module is None else tuple(module.normalized_shape), "normalized_shape")
        if self._features and size != self._features:
            raise ValueError(f"normalized_shape={size}: the chain gives {self._features} features here")
        if module is None:
            make_norm(word, size, eps, affine, bias, {"device": "meta"})  # checks the arguments
        self._add("norm", lambda where: make_norm(word, size, eps, affine, bias, where), module)
        self._inputs, self._features, self._normed = self._inputs or size, size, size
        return self

    def add_matmul(self, out_features: int | None = None, bias: bool = True, *,
                   module: nn.Module | None = None) -> FusionChain:
        """nn.Linear with as many input features as the chain gives."""
        out_features = self._given("out_features", out_features, module, "linear")
        self._begun("out_features", "a linear layer")
        features = parse_size(out_features if module is None else module.out_features, "out_features")
        taken = self._features
        if module is not None and module.in_features != taken:
            raise ValueError(f"module: takes {module.in_features} features, the chain gives {taken} here")
        parse_flag(bias, "bias")
        self._add("matmul", lambda where: nn.Linear(taken, features, bias, **where), module)
        self._features = features
        return self

    def add_activation(self, activation: str | nn.Module) -> FusionChain:
        """An activation, by name or as a module of torch.nn."""
        word = activation_name(activation)
        if word is None:
            if activation is None:
                raise ValueError("activation must not be None: leave the step out")
            return self
        self._begun("activation", "an activation")
        self._declared.append(_Declared(Layer("activation", word)))
        return self

    def add_residual(self, source: str = "input") -> FusionChain:
        """Adds the chain's "input", or the result of its latest "norm" (post-norm blocks)."""
        if source not in RESIDUALS:
            raise ValueError(f"source must be one of {', '.join(RESIDUALS)}, not {source!r}")
        self._begun("source", "a residual")
        wanted = self._inputs if source == "input" else self._normed
        if wanted != self._features:
            raise ValueError(f"source={source!r} has {wanted} features, the chain gives {self._features} "
                             "here")
        self._declared.append(_Declared(Layer("residual", source)))
        return self

    def build(self, mode: FusionMode | str = FusionMode.AUTO, *, checkpoint: bool = False,
              tile_size: int | None = None, alignment: int | None = None,
              device: torch.device | str | int | None = None, dtype: torch.dtype | None = None,
              model: nn.Module | None = None) -> FusedChain:
        """The module. Arguments as LayerNormLinear and its `from_modules`; `device` and `dtype` are those of
        layers made here, by default those of the shared ones, if there are any.

        Building again gives another module: its own parameters in the layers made here, the same in those
        that are shared.

        Raises:
            ValueError: the chain is empty, or parameters lie on several devices; TypeError: they are of
                several dtypes. And as LayerNormLinear.
        """
        if not self._declared:
            raise ValueError("the chain is empty: begin with add_layer_norm or add_rms_norm")
        where = {"device": device, "dtype": parse_dtype(dtype)}
        given = [d.module for d in self._declared if d.module is not None]
        shared = next((p for module in given for p in module.parameters()), None)
        if shared is not None:
            where = {"device": shared.device if device is None else device,
                     "dtype": shared.dtype if dtype is None else dtype}
        settings = Settings(parse_mode(mode), parse_flag(checkpoint, "checkpoint"),
                            Hints.parse(tile_size, alignment))
        modules = {d.layer.name: d.module if d.module is not None else d.make(where)
                   for d in self._declared if d.make is not None}
        check_fit(list(modules.items()))
        made = FusedChain([d.layer for d in self._declared], modules, settings)
        made._tied = tied_in(model, made)
        settings.hints.check(made._operands().steps)
        return made

    # -- shared

    def _given(self, argument: str, value, module, kind: str):
        """`value`, where either it or a module of that kind is given."""
        if (value is None) == (module is None):
            raise TypeError(f"{argument} or module must be given, and not both")
        if module is not None:
            check_layer(module, (kind,), "module")
        return value

    def _begun(self, argument: str, what: str) -> None:
        if not self._features:
            raise ValueError(f"{argument}: {what} has no known input features here: begin the chain with "
                             "add_layer_norm or add_rms_norm")

    def _add(self, kind: str, make: Maker, module: nn.Module | None) -> None:
        word = "norm" if kind == "norm" else "linear"
        number = 1 + sum(d.layer.kind == kind for d in self._declared)
        self._declared.append(_Declared(Layer(kind, f"{word}{number}"), make, module))


def matched(made: FusedChain, modules: Sequence[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """(layer of `made`, given one) for the layers with parameters.

    Raises:
        TypeError, ValueError: the given ones are of other kinds, number, sizes or activations.
    """
    layers = [layer for layer in made._layers if layer.kind in ("norm", "matmul", "activation")]
    # Activations may be left out, all of them.
    if not any(isinstance(m, nn.Module) and not kind_of(m) for m in modules):
        layers = [layer for layer in layers if layer.kind != "activation"]
    if len(layers) != len(modules):
        raise ValueError(f"modules: the chain has {len(layers)} layers to load, {len(modules)} were given")
    pairs = []
    for number, (layer, module) in enumerate(zip(layers, modules)):
        argument = f"modules[{number}]"
        if layer.kind == "activation":
            word = activation_name(module, argument)
            if word != layer.name:
                raise ValueError(f"{argument}: the chain has {layer.name} here, not {word}")
            continue
        mine = made._modules[layer.name]
        check_layer(module, (kind_of(mine),), argument)
        have, want = ({k: tuple(v.shape) for k, v in m.state_dict().items()} for m in (module, mine))
        if have != want:
            raise ValueError(f"{argument}: has {have}, {layer.name} needs {want}")
        if layer.kind == "norm" and module.eps != mine.eps:
            raise ValueError(f"{argument}: has eps={module.eps}, {layer.name} has eps={mine.eps}")
        pairs.append((mine, module))
    return pairs
