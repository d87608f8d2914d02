"""Which models can be built here, and how: makes catalogue.json (`make zoo ARGS=--discover`)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re

import torch
from catalogue import recipes

#: parameters that a model of the zoo may have at most
MAX_PARAMETERS = 12_000_000


def discover(name: str) -> dict:
    """`{"built": {"shape": i, "inputs": j}}` for the first way that eager runs, or `{"left out": reason}`."""
    first = ""
    try:
        for recipe, model, inputs in recipes(name):
            if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                first = first or "no config of a few million parameters"
                continue
            try:
                with torch.no_grad(), contextlib.redirect_stdout(None):
                    model(**copy.deepcopy(inputs))
            except Exception as error:
                first = first or reason(error)
            else:
                return {"built": dataclasses.asdict(recipe)}
    except Exception as error:
        first = first or reason(error)
    return {"left out": first}


def reason(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    needs = re.search(r"requires the (\w+) library|No module named '(\w+)'", text)
    if needs:
        return f"needs {needs[1] or needs[2]}"
    return f"no tiny config and inputs by rules: {type(error).__name__}: {text[:100]}"
