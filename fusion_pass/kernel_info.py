"""`kernel_info`: which kernels a call launches, and what each holds on chip and moves.

Counted from shapes, generated sources and what compilers say of them; nothing is measured, and nothing here
is a time or a utilisation.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from .backend import device_type, frame_round, fuse_graph
from .chain_modules import FusedChain, LayerNormLinearFusion
from .kernels.call import DEFAULT_SOC, Call
from .kernels.chain import RegionStage, evaluate
from .kernels.chain_choice import ACTIVATED, ONE_KERNEL, Way
from .kernels.chain_products import Product
from .kernels.chain_ways import ChainRunner
from .kernels.joined import Joined
from .kernels.launch import runs_reference
from .kernels.layout import Unsupported
from .kernels.reference import DTYPE_WORDS, TORCH_DTYPES
from .kernels.region import parse
from .kernels.source import KernelSource, jit
from .kernels.targets import npu
from .options import Options
from .report import traffic, visible
from .rules import rules_of_an_npu
from .simplify import simplified
from .trace import cause

GENERATED, LIBRARY, NONE = "generated", "library", "none"


@dataclass(frozen=True)
class KernelEntry:
    """One kernel.

    Attributes:
        name: of the function, as profilers show it; "" for the library's, which are not ours to name.
        kind: "generated", "library" (torch's product), or "none" (plain PyTorch runs; `note` says why).
        region: what it computes, as text.
        target: what would run it: a SoC, or the device.
        block: its block shape; "" for the library's.
        on_chip_bytes, on_chip_limit: memory that the compiler gave one program, and what there is: the
            Unified Buffer on Ascend, shared memory on CUDA; None where no compiler is there to say.
        bytes_in, bytes_out: every element read or written counted once.
        launches: in one call.
        note: what else there is to say.
    """

    name: str
    kind: str
    region: str
    target: str
    block: str
    on_chip_bytes: int | None
    on_chip_limit: int | None
    bytes_in: int
    bytes_out: int
    launches: int = 1
    note: str = ""

    @property
    def on_chip_share(self) -> float | None:
        """Of the on-chip memory that there is, between 0 and 1."""
        if self.on_chip_bytes is None or not self.on_chip_limit:
            return None
        return self.on_chip_bytes / self.on_chip_limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "on_chip_share": self.on_chip_share}


@dataclass(frozen=True)
class KernelInfo:
    """The kernels of one call, in the order in which they are first launched; prints as a table."""

    kernels: tuple[KernelEntry, ...]
    note: str = ""

    @property
    def count(self) -> int:
        """Launches of one call."""
        return sum(kernel.launches for kernel in self.kernels if kernel.kind != NONE)

    @property
    def generated(self) -> int:
        """Those of generated kernels."""
        return sum(kernel.launches for kernel in self.kernels if kernel.kind == GENERATED)

    @property
    def plain(self) -> int:
        """Fused sites of one call that have no kernel: plain PyTorch runs them, in launches of its own."""
        return sum(kernel.launches for kernel in self.kernels if kernel.kind == NONE)

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generated": self.generated, "plain": self.plain, "note": self.note,
                "kernels": [kernel.to_dict() for kernel in self.kernels]}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        return _render(self)


def kernel_info(op_or_model: nn.Module | LayerNormLinearFusion | Callable, example_inputs=None, *,
                soc: str | None = None) -> KernelInfo:
    """The kernels that one call launches.

    For a chain module or LayerNormLinearFusion those of its chain. For any other module or function it is
    compiled apart with the backend, called once, and the kernels of its fused sites are listed; its other
    operations are not. On a CPU, where plain PyTorch runs, and wherever `soc` is given, it is compiled as for
    that NPU: fused is what `ascend-ln-fuse explain` and `check` show for the same SoC and grad mode.

    Args:
        example_inputs: a tensor, a tuple of the call's positional arguments or a dict of its keyword ones.
            For a chain module None stands for one row.
        soc: the Ascend SoC to generate for; by default the device's target, on a CPU Ascend910B3.

    Raises:
        TypeError: `op_or_model` cannot be called, or `example_inputs` is missing.
        ValueError: an unknown `soc`, or a model that does not run on the inputs: the message has its error
            and the line.
    """
    if soc is not None:
        from .kernels.ascend.toolchain import resolve_soc

        soc = resolve_soc(soc)
    if not callable(op_or_model):
        raise TypeError(f"op_or_model must be a module or a function, not {type(op_or_model).__name__}")
    if example_inputs is None:
        if not isinstance(op_or_model, FusedChain):
            raise TypeError("example_inputs must be given: a tensor, or a tuple or dict of the arguments")
        parameter = next(op_or_model.parameters(), torch.empty(0))
        example_inputs = parameter.new_ones(1, op_or_model.in_features)
    args, kwargs = _arguments(example_inputs)
    seen = _Seen(soc)
    if isinstance(op_or_model, (FusedChain, LayerNormLinearFusion)):
        note = _of_chain(seen, op_or_model, args, kwargs)
    else:
        note = _of_model(seen, op_or_model, args, kwargs)
    return KernelInfo(seen.entries(), note)


def _arguments(example) -> tuple[tuple, dict]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _of_chain(seen: _Seen, op: FusedChain | LayerNormLinearFusion, args: tuple, kwargs: dict) -> str:
    with _listening(seen):
        op(*args, **kwargs)
    last = op.last_call
    if last.way == "layers":
        return f"the layers run one after the other, without a kernel of ours: {last.reason}"
    return "folded" if last.folded else f"not folded: {last.reason}"


def _of_model(seen: _Seen, model, args: tuple, kwargs: dict) -> str:
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    options = Options(report="off")

    def backend(gm, inputs):
        with rules_of_an_npu() if seen.for_npu(torch.device(device_type(inputs))) else nullcontext():
            plain = simplified(gm.graph, options).graph
            graph, _ = fuse_graph(plain, options)
        return _Listener(fx.GraphModule(gm, graph or plain), seen).run

    call = frame_round(model)
    try:
        torch.compile(call, backend=backend)(*args, **kwargs)
    except Exception:
        try:
            call(*args, **kwargs)
        except Exception as error:
            raise ValueError(f"the model does not run on example_inputs: {cause(error)}") from error
        raise  # it does run: the failure is not the model's
    return "the kernels of fused sites, and the products in their chains; other operations are not listed"


class _Listener(fx.Interpreter):
    """Runs a fused graph and notes each call of a region or a chain."""

    def __init__(self, module: fx.GraphModule, seen: _Seen):
        super().__init__(module)
        self.seen = seen

    def call_function(self, target, args, kwargs):
        results = super().call_function(target, args, kwargs)
        if getattr(target, "__name__", "") == "ascend_ln_fuse_region":
            self.seen.region(target, args)
        elif isinstance(getattr(target, "joined", None), Joined):
            self.seen.joined(target.joined, args, results)
        elif isinstance(getattr(target, "runner", None), ChainRunner):
            self.seen.chain(target.runner, args)
        return results


class _listening:
    """While open, chains of modules are noted in `seen`."""

    def __init__(self, seen: _Seen):
        self.seen = seen

    def __enter__(self):
        from . import chain_run

        self.before = chain_run.listener.get()
        chain_run.listener.set(self.seen.chain)

    def __exit__(self, *error):
        from . import chain_run

        chain_run.listener.set(self.before)


# -- what was seen


class _Seen:
    """Collects kernels; equal ones are one entry."""

    def __init__(self, soc: str | None):
        self.soc = soc
        self.found: dict[tuple, KernelEntry] = {}

    def for_npu(self, device: torch.device) -> bool:
        """Whether the kernels for what is on `device` are listed as an NPU's."""
        return self.soc is not None or runs_reference(device)

    def entries(self) -> tuple[KernelEntry, ...]:
        return tuple(self.found.values())

    def add(self, entry: KernelEntry) -> None:
        key = tuple(asdict(entry).values())
        known = self.found.get(key)
        self.found[key] = entry if known is None else replace(known, launches=known.launches + 1)

    def region(self, target: Callable, args: Sequence) -> None:
        region = parse(target.__doc__)
        count = len(region.inputs)
        self.call(Call(region, *_places(args[:count]), args[0].device, self.soc))

    def joined(self, joined: Joined, args: Sequence, results) -> None:
        """The kernels that write the parts of cats, and copies of the other parts."""
        wholes = (results,) if isinstance(results, torch.Tensor) else results
        places = {part: whole.stride() for cat, whole in zip(joined.cats, wholes) for part in cat.parts}
        for number, launch in enumerate(joined.launches):
            strides = tuple(places[number, i] for i in range(len(launch.region.outputs)))
            tensors = [args[i] for i in launch.inputs]
            self.call(Call(launch.region, *_places(tensors), args[0].device, self.soc, places=strides))

    def call(self, call: Call) -> None:
        self.add(_generated(call))

    def chain(self, runner: ChainRunner, args: Sequence) -> None:
        """The kernels of a chain that has just run on these arguments."""
        chain, device = runner.chain, args[0].device
        count = len(chain.inputs)
        metas = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in args[:count]]
        made: dict[tuple, list[KernelEntry]] = {}  # stage -> its kernels in the library's way
        values = dict(zip(chain.inputs, metas))

        def region(stage: RegionStage, tensors, scalars):
            results = [tensors[0].new_empty(x) for x in _spaces(stage, tensors)]
            placed = [chain.placed.get(name) for name in stage.names]
            strides = tuple(result.stride() if place is None else place.strides(result.shape)
                            for result, place in zip(results, placed)) if any(placed) else None
            made[stage.names] = [_generated(Call(stage.region, *_places(tensors), device, self.soc,
                                                 places=strides))]
            results = [r.to(TORCH_DTYPES[o.dtype]) for r, o in zip(results, stage.region.outputs)]
            values.update(zip(stage.names, results))
            return results

        def product(stage: Product, *operands):
            result = operands[0].new_empty(stage.shape(*operands))
            given = [t for t in operands if t is not None]
            word = str(stage).partition("= ")[2].partition("(")[0]
            text = f"{word}({', '.join(map(_typed, given))})"
            target = (self.soc or DEFAULT_SOC) if self.for_npu(device) else str(device)
            made[stage.names] = [KernelEntry("", LIBRARY, text, target, "", None, None,
                                             sum(map(_bytes, given)), _bytes(result), 1, "torch's product")]
            values[stage.name] = result
            return result

        evaluate(chain, metas, args[count:], region, product)
        for number, segment in enumerate(runner.segments):
            way = _chosen(runner, number, segment, values, device)
            entries = [entry for stage in segment.stages for entry in made[stage.names]]
            if way is not None and way.word == ONE_KERNEL:
                entries = _one_kernel(way.config, entries)
            elif way is not None and way.word == ACTIVATED:
                entries = [*entries[:-2], _activated(*entries[-2:])]
            for entry in entries:
                self.add(entry)


def _spaces(stage: RegionStage, tensors) -> list[tuple]:
    from .kernels.region import broadcast_sizes

    return [broadcast_sizes(stage.region, [t.shape for t in tensors])] * len(stage.region.outputs)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[tuple, tuple]:
    return tuple(tuple(t.shape) for t in tensors), tuple(t.stride() for t in tensors)


def _typed(t: torch.Tensor) -> str:
    return f"{DTYPE_WORDS.get(t.dtype, t.dtype)}{list(t.shape)}"


def _bytes(t: torch.Tensor) -> int:
    """Of the elements of `t` in memory: a broadcast dim is there once."""
    return math.prod(n for n, step in zip(t.shape, t.stride()) if step) * t.element_size()


def _chosen(runner: ChainRunner, number: int, segment, values: Mapping, device: torch.device) -> Way | None:
    """The way that plain calls of a segment take; None where there was none to choose."""
    if not segment.products:
        return None
    rows = math.prod(values[segment.products[0].name].shape[:-1])
    bucket = 1 << max(rows - 1, 0).bit_length()
    for (which, index, up_to, *_), choice in list(runner.choices.items()):
        if (which, up_to) == (number, bucket) and index == (-1 if device.type == "cpu" else device.index):
            return choice.plain
    return None


def _activated(product: KernelEntry, activation: KernelEntry) -> KernelEntry:
    """What the library launches for a product with its activation inside, from the two without."""
    return replace(product, region=f"{product.region}\n{activation.region}", bytes_out=activation.bytes_out,
                   note="torch's product, with the activation inside")


def _one_kernel(config, parts: Sequence[KernelEntry]) -> list[KernelEntry]:
    """What a segment launches as one kernel, from what its stages would launch: what one of them writes and
    the next reads stays on chip."""
    inside = sum(part.bytes_out for part in parts[:-1])
    text = "\n".join(part.region for part in parts)
    more = ["the norm runs ahead in a kernel of its own"] * config.norm_ahead
    more += ["a second kernel adds up the parts of its sums"] * (config.split > 1)
    launches = 1 + len(more)
    return [KernelEntry("fused_linear", GENERATED, text, parts[0].target, str(config), None, None,
                        max(sum(part.bytes_in for part in parts) - inside, 0), parts[-1].bytes_out, launches,
                        "; ".join(more))]


# -- one generated kernel


def _generated(call: Call) -> KernelEntry:
    region = call.region
    widths = [torch.empty((), dtype=TORCH_DTYPES[x.dtype]).element_size() for x in region.inputs]
    read = sum(math.prod(n for n, step in zip(shape, stride) if step) * width
               for shape, stride, width in zip(call.shapes, call.strides, widths))
    where = str(call.device)
    try:
        target = call.target()
        where = target.name
        walk = call.walk(target)
        kernel = call.first_kernel()
    except (Unsupported, ImportError) as why:
        return KernelEntry("", NONE, region.text, where, "", None, None, read, 0, 1,
                           f"plain PyTorch runs: {why}")
    written = sum(math.prod(walk.space) * torch.empty((), dtype=TORCH_DTYPES[x.dtype]).element_size()
                  for x in region.outputs)
    if kernel is None:
        return KernelEntry("", NONE, region.text, target.name, "", None, None, read, written, 1,
                           "no element to compute")
    entry = KernelEntry(kernel.name, GENERATED, region.text, target.name, str(kernel.tile), None, None, read,
                        written)
    return _on_npu(entry, call, target.name) if target.backend == "npu" else _on_cuda(entry, call, kernel)


def _on_npu(entry: KernelEntry, call: Call, soc: str) -> KernelEntry:
    """With what the official compiler made of the kernel, where it is installed."""
    from .kernels.ascend.evidence import check_calls
    from .kernels.ascend.tools import MissingTool

    limit = npu.describe(soc).budget
    try:
        found, = check_calls([call], soc)
    except (MissingTool, ImportError) as why:
        return replace(entry, on_chip_limit=limit, note=f"memory unknown: {why}")
    return replace(entry, name=found.kernel, block=found.tile, on_chip_bytes=found.ub_bytes or None,
                   on_chip_limit=limit,
                   note="" if found.verdict == "ok" else f"{found.verdict}: {found.reason}")


def _on_cuda(entry: KernelEntry, call: Call, kernel: KernelSource) -> KernelEntry:
    """With the shared memory that Triton gave the kernel; its tiles are in registers."""
    if call.device.type != "cuda":
        return entry
    numbers = {"i32": 1, "i64": 1, "fp32": 1.0}
    tensors = {word: torch.empty(1, dtype=dtype, device=call.device) for word, dtype in
               (("*bf16", torch.bfloat16), ("*fp16", torch.float16), ("*fp32", torch.float32),
                ("*fp64", torch.float64))}
    arguments = [numbers.get(word, tensors.get(word)) for _, word in kernel.params]
    try:
        with torch.cuda.device(call.device):
            compiled = jit(kernel).warmup(*arguments, grid=(1,), num_warps=kernel.tile.num_warps)
        limit = torch.cuda.get_device_properties(call.device).shared_memory_per_block_optin
        return replace(entry, on_chip_bytes=compiled.metadata.shared, on_chip_limit=limit)
    except Exception as why:  # compilers' errors have no common class; the rest is still worth reading
        return replace(entry, note=f"shared memory unknown: {type(why).__name__}")


# -- as a table


def _render(info: KernelInfo, width: int = 80) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False)
    other = info.count - info.generated
    beside = f"; {info.plain} more as plain PyTorch" if info.plain else ""
    console.print(Text(f"{info.count} kernels a call: {info.generated} generated, {other} of the library"
                       f"{beside}"))
    if info.kernels:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("kernel", overflow="fold")
        for title in ("launches", "block", "on chip", "in / out"):
            table.add_column(title, justify="right", overflow="fold")
        for kernel in info.kernels:
            first = kernel.name or {LIBRARY: "torch", NONE: "plain PyTorch"}.get(kernel.kind, "")
            lines = [Text(visible(first))]
            lines += [Text(f"  {visible(line)}", overflow="fold") for line in _short(kernel)]
            table.add_row(Group(*lines), str(kernel.launches), kernel.block.replace(" rows x ", " x ")
                          .replace(" columns", ""), _memory(kernel),
                          f"{traffic(kernel.bytes_in, None)}\n{traffic(kernel.bytes_out, None)}")
        console.print(table)
    if info.note:
        console.print(Text(visible(info.note)))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _short(kernel: KernelEntry) -> list[str]:
    """The lines of the region that compute, the target, the note."""
    lines = [line.strip() for line in kernel.region.split("\n")]
    body = [line for line in lines if " = " in line or line.startswith("linear")]
    return [*body, f"for {kernel.target}", *([kernel.note] if kernel.note else [])]


def _memory(kernel: KernelEntry) -> str:
    if kernel.kind != GENERATED:
        return ""
    if kernel.on_chip_bytes is None:
        return "unknown"
    return f"{traffic(kernel.on_chip_bytes, None)}\n{kernel.on_chip_share:.0%}"
