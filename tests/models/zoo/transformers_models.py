"""Tiny models of transformers' architectures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from feed import feeds
from shrink import VARIANTS, TokenIds, tiny_fields
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.utils import logging

logging.set_verbosity_error()

#: variants of the rules for sizes
SHAPES = len(VARIANTS)


def _classes() -> dict[str, str]:
    """Model type -> class: the base model; where a type has none, the first model of a task."""
    tasks = [getattr(modeling_auto, name) for name in sorted(dir(modeling_auto))
             if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    found: dict[str, str] = {}
    for table in (modeling_auto.MODEL_MAPPING_NAMES, *tasks):
        for model_type, classes in table.items():
            found.setdefault(model_type, classes if isinstance(classes, str) else classes[0])
    return found


def names() -> list[str]:
    """Every model type that has a class, each class once: by the type that it is named for."""
    by_class: dict[str, str] = {}
    for model_type, cls in sorted(_classes().items()):
        named = cls.lower().startswith(model_type.replace("_", "").replace("-", ""))
        if model_type in CONFIG_MAPPING and (named or cls not in by_class):
            by_class[cls] = model_type
    return sorted(by_class.values())


def build(name: str, shape: int, override: Mapping[str, Any]) -> torch.nn.Module:
    """The model of that type with a config made small by variant `shape` of the rules."""
    config_class = CONFIG_MAPPING[name]
    fields = tiny_fields(config_class, override.get("config", {}), TokenIds(), rules=VARIANTS[shape])
    model_class = getattr(transformers, override.get("class", _classes()[name]))
    return model_class(config_class(**fields))


def inputs(name: str, model: torch.nn.Module, override: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Sets of keyword arguments to try, the smallest first."""
    return feeds(model, override.get("inputs", {}))
