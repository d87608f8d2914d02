"""PyTorch's OpInfo samples of the norms, compiled with the backend and compared with eager.

All samples of an operator and dtype are one model, so that there is one graph to compile. Run as a command
(`make opinfo`), it writes the section of docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checks import NoRounding, assert_within_bound, tensors
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import ErrorInput
from torch.utils._pytree import tree_map

from ascend_ln_fuse import clear_reports, last_reports

NAMES = ("nn.functional.layer_norm", "native_layer_norm", "nn.functional.rms_norm")
OPS = {op.name: op for op in op_db if op.name in NAMES and not op.variant_test_name}

#: Why a site of these samples may be declined.
REASONS = {
    "the statistics are read too": "native_layer_norm yields them, and the model returns them",
    "the normalised dim is not the innermost in memory": "a non-contiguous sample",
    "the normalised dims are not one run of memory": "a non-contiguous sample",
    "dtype complex": "the kernels are for real numbers",
    "the input is no plain tensor": "the kernels are for real numbers",
}


@dataclass
class Outcome:
    """What came of one model. `samples`: how many were compared."""

    samples: int = 0
    fused: int = 0
    declined: Counter = field(default_factory=Counter)


def cases() -> Iterator[tuple[str, torch.dtype, bool]]:
    """(operator, dtype, whether the samples are non-contiguous)."""
    for name, op in OPS.items():
        for dtype in sorted(op.dtypes, key=str):
            yield from ((name, dtype, strided) for strided in (False, True))


def samples_of(name: str, dtype: torch.dtype, strided: bool, grad: bool) -> list[tuple]:
    """(input, args, kwargs) of each sample, the same each time."""
    torch.manual_seed(0)
    found = list(OPS[name].sample_inputs("cpu", dtype, requires_grad=grad))
    found = [sample.noncontiguous() for sample in found] if strided else found
    return [(sample.input, sample.args, sample.kwargs) for sample in found]


def compare(name: str, dtype: torch.dtype, strided: bool, grad: bool = False,
            statistics: bool = False) -> Outcome:
    """Compile all samples as one model and hold its outputs, and gradients where `grad`, against eager's.

    `statistics`: the model returns the mean and rstd of native_layer_norm too.

    Raises:
        AssertionError: something differs, or a site is declined for a reason that is not in REASONS.
    """
    def model(samples):
        results = [OPS[name](x, *args, **kwargs) for x, args, kwargs in samples]
        return [r if statistics or isinstance(r, torch.Tensor) else r[0] for r in results]

    def run(call, samples, *modes):
        with ExitStack() as stack:
            for mode in (torch.set_grad_enabled(grad), *modes):
                stack.enter_context(mode)
            outputs = tensors(call(samples))
        if not grad:
            return outputs
        used = [out for out in outputs if out.requires_grad]
        leaves = tensors([[x, *args, *kwargs.values()] for x, args, kwargs in samples])
        return [*outputs, *torch.autograd.grad(used, leaves, [torch.ones_like(out) for out in used])]

    samples = samples_of(name, dtype, strided, grad)
    torch._dynamo.reset()
    clear_reports()
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True, options={"report": "off"})
    eager, ours = run(model, samples), run(compiled, samples)
    exact = run(model, tree_map(_wide, samples), NoRounding()) if dtype.is_floating_point else eager
    assert samples and len(eager) == len(ours) == len(exact)
    for a, b, c in zip(eager, ours, exact):
        if dtype.is_floating_point:
            assert_within_bound(b.detach(), a.detach(), c.detach())
        else:
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
    sites = [site for report in last_reports() for site in report.sites]
    reasons = Counter(_known(site.reason) for site in sites if site.status != "fused")
    assert len(sites) == len(samples)
    return Outcome(len(samples), len(sites) - reasons.total(), reasons)


def _wide(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().double().clone().requires_grad_(value.requires_grad)


def _known(reason: str) -> str:
    found = next((known for known in REASONS if known in reason), None)
    assert found is not None, f"declined for a reason without a name: {reason}"
    return found


def errors() -> Iterator[tuple[str, ErrorInput]]:
    """(operator, a call that it refuses)."""
    for name, op in OPS.items():
        if op.error_inputs_func is not None:
            yield from ((name, error) for error in op.error_inputs("cpu"))


def same_error(name: str, error: ErrorInput) -> None:
    """Assert that the compiled call raises what eager does, with the words that OpInfo expects."""
    sample = error.sample_input

    def call(x):
        return OPS[name](x, *sample.args, **sample.kwargs)

    raised = []
    for f in (call, torch.compile(call, backend="ascend_ln_fuse", options={"report": "off"})):
        try:
            f(sample.input)
        except Exception as failure:
            raised.append(failure)
    assert len(raised) == 2, "not refused"
    assert isinstance(raised[0], error.error_type)
    # Dynamo wraps what fails while it traces in a subclass of RuntimeError.
    assert isinstance(raised[1], type(raised[0])) and re.search(error.error_regex, str(raised[1])), raised


def main() -> None:
    """Run all and write the section."""
    from pages import made_with, write_section

    rows = []
    for name in OPS:
        total = Outcome()
        dtypes = [dtype for found, dtype, _ in cases() if found == name]
        for dtype, strided, grad in product(dict.fromkeys(dtypes), (False, True), (False, True)):
            outcome = compare(name, dtype, strided, grad)
            total = Outcome(total.samples + outcome.samples, total.fused + outcome.fused,
                            total.declined + outcome.declined)
        refused = [same_error(name, error) for found, error in errors() if found == name]
        words = "; ".join(f"{count} {reason} ({REASONS[reason]})" for reason, count in total.declined.items())
        rows.append(f"| `{name}` | {len(dict.fromkeys(dtypes))} | {total.samples} | {total.fused} | "
                    f"{words or 'none'} | {len(refused)} |")
    text = ["All samples of OpInfo, contiguous and not, with and without gradients, are within the bound; "
            "every error input is refused as in eager. Made by `make opinfo` with "
            f"{made_with('torch')}.", "",
            "| operator | dtypes | samples | fused | declined | error inputs |",
            "|---|---:|---:|---:|---|---:|", *rows]
    print("\n".join(text))
    write_section("reliability.md", "opinfo", "\n".join(text))


if __name__ == "__main__":
    os.environ["ASCEND_LN_FUSE_STRICT"] = "1"
    main()
