"""A file for each kernel that failed its self-check: a program that runs the comparison again."""

from __future__ import annotations

import hashlib
import os
import platform
import pprint
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from . import directories
from .self_check import Finding
from .settings import INTERPRET, SAVE_INPUTS, switched_on

#: The folder of the files, in `directories.cache_directory()`.
FOLDER = "failed-self-checks"

#: Packages whose versions a file names, where they are installed.
PACKAGES = ("ascend-ln-fuse", "torch", "triton", "triton-ascend", "torch_npu")

_PROGRAM = '''\
# A kernel of ascend_ln_fuse that failed its self-check. Run this file to make the comparison again: it exits
# with 1 where the kernel is outside the bound here too.
#
# Seen: {finding}
# Where: {where}
# On: {device} ({device_name}); Python {python}, {machine}
# With: {versions}

from {program} import run

REGION = """\\
{region}"""

# (shape, strides, storage offset, dtype, address modulo 16) of each input.
INPUTS = {inputs}

SCALARS = {scalars}

if __name__ == "__main__":
    raise SystemExit(run(REGION, INPUTS, SCALARS, device={device_type!r}, saved={saved!r}))
'''


def write(region: str, inputs: Sequence[torch.Tensor], scalars: Sequence[float], finding: object,
          where: str, program: str = __name__) -> str:
    """Write the file for one call and return its path, or why there is none, in words.

    `region` is the text that `run` of the module `program` takes, which the file calls.
    The tensors themselves are saved, beside it, only with ASCEND_LN_FUSE_SAVE_INPUTS=1.
    """
    device = inputs[0].device
    specs = [(tuple(x.shape), x.stride(), x.storage_offset(), str(x.dtype).rpartition(".")[2],
              x.data_ptr() % 16) for x in inputs]
    name = hashlib.sha256(f"{region}{specs}{scalars}{device}".encode()).hexdigest()[:16]
    folder = directories.cache_directory() / FOLDER
    try:
        if why := directories.distrust(folder):
            return f"not written: {why}"
        directories.make(folder)
        path, tensors = folder / f"{name}.py", folder / f"{name}.pt"
        saved = switched_on(SAVE_INPUTS)
        if saved:
            # As they lie in memory, but without what else their storage holds.
            _replace(tensors, lambda partial: torch.save([_alone(x) for x in inputs], partial))
        comments = {"finding": finding, "where": where, "device": device,
                    "device_name": _device_name(device), "python": platform.python_version(),
                    "machine": platform.platform(), "versions": _versions()}
        text = _PROGRAM.format(
            **{name: " ".join(str(comment).split()) for name, comment in comments.items()},
            program=program, region=region, inputs=pprint.pformat(specs, width=100),
            scalars=list(map(float, scalars)), device_type=device.type, saved=tensors.name if saved else None)
        _replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        return str(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        return f"not written: {error}"


def run(text: str, inputs: Sequence[tuple], scalars: Sequence[float], device: str,
        saved: str | None = None) -> int:
    """What a file does: the comparison on tensors like those of the call, or on those that were saved.

    Prints what it finds. Returns 1 where the kernel is outside the bound, else 0.
    """
    from .launch import Runner
    from .region import parse
    from .self_check import compare

    region, tensors = parse(text), tensors_of(inputs, device, saved)
    runner = Runner(region, self_check="off")
    outputs = runner(tensors, scalars)
    if runner.reasons:
        print("no kernel ran:", "; ".join(runner.reasons))
        return 0
    return told(compare(region, tensors, scalars, outputs))


def tensors_of(inputs: Sequence[tuple], device: str, saved: str | None) -> list[torch.Tensor]:
    """The tensors of a file's call; those of a CPU are for kernels that Triton's interpreter runs."""
    if device == "cpu":
        os.environ.setdefault(INTERPRET, "1")
    if saved is None:
        print("on random numbers: the tensors of the call were not saved")
        generator = torch.Generator().manual_seed(0)
        return [_like(spec, generator, device) for spec in inputs]
    path = Path(sys.argv[0]).with_name(saved)
    return [_placed(x, spec, device) for x, spec in
            zip(torch.load(path, map_location="cpu", weights_only=True), inputs)]


def told(finding: Finding) -> int:
    """Print what was found; the exit code."""
    print(f"{'within' if finding.within else 'OUTSIDE'} the bound: {finding}; "
          f"{finding.rows} of {finding.of} rows")
    return 0 if finding.within else 1


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous()


def _like(spec: tuple, generator: torch.Generator, device: str) -> torch.Tensor:
    shape, _, _, dtype, _ = spec
    return _placed(torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)),
                   spec, device)


def _placed(values: torch.Tensor, spec: tuple, device: str) -> torch.Tensor:
    """`values` with the strides and the alignment of an input."""
    shape, strides, _, _, alignment = spec
    skip = alignment // values.element_size()
    reach = skip + 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    memory = torch.empty(reach, dtype=values.dtype, device=device)
    x = memory.as_strided(shape, strides, skip)
    single = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)  # expanded dims are one place
    x[single].copy_(values[single])
    return x


def _replace(path: Path, write_to) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        write_to(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _device_name(device: torch.device) -> str:
    module = getattr(torch, device.type, None)
    ask = getattr(module, "get_device_name", None)
    try:
        return str(ask(device.index or 0)) if ask else device.type
    except Exception as error:  # a name is not worth losing the file for
        return f"{device.type}: {error}"
