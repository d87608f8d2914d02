"""The zoo's models: every architecture of transformers and diffusers, tiny and with random weights.

Names are `library/model type`. `catalogue.json` says which of them can be built and run without a network,
and how, and why the others cannot: `zoo.py --discover` writes it anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
CATALOGUE = FOLDER / "catalogue.json"
#: A test run takes one name in so many.
SHARE = 3


@dataclass(frozen=True)
class Recipe:
    """How a model is built: which variant of the rules for its config, and which set of inputs."""

    shape: int = 0
    inputs: int = 0


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return json.loads(CATALOGUE.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def overrides() -> dict[str, dict[str, Any]]:
    """Per name what the rules get wrong: `config` and `inputs`."""
    return json.loads((FOLDER / "overrides.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    """The models that can be built, sorted."""
    return sorted(_data()["built"])


def left_out() -> dict[str, str]:
    """Name -> why it cannot be built and run here."""
    return _data()["left out"]


def every_name() -> list[str]:
    """All architectures of the two libraries, whether they can be built or not."""
    import diffusers_models
    import transformers_models

    return [*(f"transformers/{name}" for name in transformers_models.names()),
            *(f"diffusers/{name}" for name in diffusers_models.names())]


def in_test_run(name: str) -> bool:
    """Whether `make test` runs this model: a fixed third of all."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % SHARE == 0


def build(name: str, recipe: Recipe | None = None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, in eval mode and fp32, and its forward's keyword arguments; the same each time."""
    library, _, short = name.partition("/")
    recipe = recipe or Recipe(**_data()["built"][name])
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = _library(library).build(short, recipe.shape, overrides().get(name, {}))
        model = model.eval().requires_grad_(False)
        _spread_weights(model)
        inputs = _library(library).inputs(short, model, overrides().get(name, {}))
        return model, next(itertools.islice(inputs, recipe.inputs, None))


def recipes(name: str) -> Iterator[tuple[Recipe, torch.nn.Module, dict[str, Any]]]:
    """Every way to build `name`, the most wanted first; those that cannot be built are passed over.

    Raises:
        Exception: what the first way raised, where none can be built.
    """
    library, _, short = name.partition("/")
    first: Exception | None = None
    found = False
    for shape in range(_library(library).SHAPES):
        try:
            torch.manual_seed(0)
            model = _library(library).build(short, shape, overrides().get(name, {}))
            model = model.eval().requires_grad_(False)
            _spread_weights(model)
            for i, made in enumerate(_library(library).inputs(short, model, overrides().get(name, {}))):
                found = True
                yield Recipe(shape, i), model, made
        except Exception as error:
            first = first or error
    if first and not found:
        raise first


def _spread_weights(model: torch.nn.Module) -> None:
    """Vectors that are 1 or 0 throughout (norm weights, biases) get values of their own: a weight or bias
    that were left out would not show otherwise."""
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _library(name: str):
    import diffusers_models
    import transformers_models

    return {"transformers": transformers_models, "diffusers": diffusers_models}[name]
