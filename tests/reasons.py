"""`checks.check` for tables of models: the declined norms are given by their reasons."""

from collections.abc import Sequence

import torch
from checks import check

from ascend_ln_fuse import FusionReport


def check_reasons(model: torch.nn.Module, *inputs, fused: int = 1, declined: Sequence[str] = (),
                  **options) -> FusionReport:
    """`declined` has a word of the reason of each norm that is declined, in order. One graph only."""
    report = check(model, *inputs, fused=fused, declined=len(declined), **options)
    reasons = [site.reason for site in report.sites if site.status != "fused"]
    assert len(reasons) == len(declined), "more than one graph"
    assert all(want in reason for want, reason in zip(declined, reasons)), reasons
    return report
