"""A user's FILE:FUNCTION: from the words on the command line to a model and its inputs.

FUNCTION takes no arguments. It returns a model and example inputs for it: `(model, inputs)`, where
`inputs` is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments. It runs as
it is written, on the CPU; only that every parameter is emptied as a module takes it in: a model of any
size costs no memory, and no time to initialise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import UserError

#: Ends the message on a FILE that is none.
_WANTED = "FILE of FILE:FUNCTION is the path of one that ends in .py, as in model.py:build"


class LoadError(UserError):
    """What FILE:FUNCTION names cannot be used."""


@dataclass(frozen=True)
class Example:
    """A model and the arguments of one call of it."""

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]


def load_example(target: str, empty: bool = True) -> Example:
    """The model and inputs of "model.py:build".

    empty: the model's parameters are on the meta device, whatever the function does.

    Raises:
        LoadError: no such file or function, it does not import, it fails, or it returns no model.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise LoadError(f"{target!r} is not FILE:FUNCTION, as in model.py:build")
    function = _function(_module(Path(file)), name, file)
    try:
        with empty_parameters() if empty else contextlib.nullcontext():
            result = function()
    except (Exception, SystemExit) as error:  # sys.exit() in a model must not pass for success
        raise LoadError(f"{name}() in {file} failed: {describe(error, file)}") from error
    return _example(result, f"{name}() in {file}")


def describe(error: BaseException, file: str | None = None) -> str:
    """`ValueError: no such size (model.py:31)`: the error's first line, and the last line of the user's
    file that led to it."""
    text = str(error).strip().split("\n", 1)[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if file and Path(f.filename).name == Path(file).name]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _module(path: Path):
    if not path.is_file():
        raise LoadError(f"no such file: {path}; {_WANTED}")
    if path.suffix != ".py":
        raise LoadError(f"{path} is no Python file; {_WANTED}")
    name, root = _dotted_name(path.resolve())
    sys.path.insert(0, str(root))  # as if it were run as a script, or with `python -m`
    try:
        module = importlib.import_module(name) if "." in name else _executed(name, path)
    except BaseException as error:  # a script may end with sys.exit()
        if isinstance(error, KeyboardInterrupt):
            raise
        raise LoadError(f"{path} cannot be imported: {describe(error, str(path))}") from error
    if not _is_of(module, path):
        raise LoadError(f"{path} cannot be imported: {name} is {module.__file__}")
    return module


def _dotted_name(path: Path) -> tuple[str, Path]:
    """(name of the module in this file, the folder to import it from): in a package, so that its relative
    imports work, where the folders say so."""
    names, root = [path.stem], path.parent
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        names.insert(0, root.name)
        root = root.parent
    if len(names) > 1 and names[-1] == "__init__":
        names.pop()
    return ".".join(names), root


def _executed(name: str, path: Path):
    """The module in a file that is in no package. Another module of its name stays what it is to everybody
    else: json.py is not json."""
    if name in sys.stdlib_module_names or name in sys.modules and not _is_of(sys.modules[name], path):
        name = f"_{name}_of_the_user"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
        raise
    return module


def _is_of(module, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _function(module, name: str, file: str) -> Callable:
    function = getattr(module, name, None)
    if function is None:
        known = [n for n, value in vars(module).items()
                 if inspect.isfunction(value) and value.__module__ == module.__name__]
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise LoadError(f"{file} has no function {name!r}: {has}")
    if isinstance(function, torch.nn.Module) or not callable(function):
        raise LoadError(f"{name} in {file} is {_a(function)}, not a function that returns "
                        "(model, inputs)")
    wanted = [p.name for p in inspect.signature(function).parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if wanted:
        raise LoadError(f"{name} in {file} takes arguments ({', '.join(wanted)}); wanted is a function "
                        "of none that returns (model, inputs)")
    return function


def _example(result: Any, what: str) -> Example:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise LoadError(f"{what} returned {_a(result)}, not (model, inputs)")
    model, inputs = result
    if not callable(model):
        raise LoadError(f"{what} returned {_a(model)} where a model was expected: wanted is "
                        "(model, inputs), with a torch.nn.Module or a function")
    if isinstance(inputs, Mapping):
        return Example(model, (), dict(inputs))
    if isinstance(inputs, torch.Tensor):
        return Example(model, (inputs,), {})
    if isinstance(inputs, (tuple, list)):
        return Example(model, tuple(inputs), {})
    raise LoadError(f"{what} returned {_a(inputs)} as inputs: wanted is a tensor, a tuple of positional "
                    "arguments, or a dict of keyword arguments")


def _a(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules keep no parameter's memory: each moves to the meta device when a module takes it in. It
    stays the same object, so parameters that are shared stay shared."""
    original = torch.nn.Module.register_parameter

    def register(self, name, param):
        if isinstance(param, torch.nn.Parameter) and param.device.type != "meta":
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            torch.utils.swap_tensors(param, torch.nn.Parameter(empty, requires_grad=param.requires_grad))
        return original(self, name, param)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original
