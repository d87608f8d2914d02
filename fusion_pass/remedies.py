"""What a person can do about a norm that is declined, or a stream that is left across memory, where something
is known to help."""

from __future__ import annotations

from .across import NOT_INNERMOST

#: Stands between reasons that hold at once.
ALSO = "; also: "

#: Of a stream (streams.py): what the pass would do, but that it must not change what others see.
_CONTIGUOUS = "`.contiguous()` behind the view with which it begins"

#: How a reason of the report begins -> what helps, in half a sentence (Markdown). The tables of reasons in
#: docs/fusions.md have the same words; a test compares them. A remedy that gives other numbers says so.
REMEDIES = {
    # (Not channels_last memory, which a convolution of torch_npu does not return.)
    NOT_INNERMOST: "a norm over the last dim of a contiguous copy, `x.movedim(dim, -1).contiguous()`",
    "the result's normalised dim is not the innermost in memory": "`.contiguous()` above",
    "the normalised dim lies across memory, too long for so many operands": "channels_last memory",
    "no kernel walks these tensors": "`.contiguous()` above",
    "the normalised dims are not one run of memory": "a contiguous slice",
    "the normalised size is symbolic":
        "`torch._dynamo.mark_static(x, x.ndim - 1)`, or weights of a fixed size",
    "weight or bias is not of the normalised shape": "multiply after the norm: that fuses",
    "weight and input have different dtypes, which eager may refuse":
        "`weight.to(x.dtype)`, or the input cast",
    "the statistics are changed in place": "`variance + eps`",
    "eps is added to the standard deviation":
        "`/ torch.sqrt(variance + eps)`, if eps may act otherwise",
    "the variance is unbiased": "`unbiased=False` (`correction=0`), if the mean over D is meant",
    "eps is added to the length of the vector, which is not clamped to it":
        "`x / x.norm(dim=-1, keepdim=True).clamp_min(eps)`, if eps may act otherwise",
    "the length of the vector is scaled before the value is divided by it":
        "`F.normalize(x, dim=-1) * dim**0.5`, if eps may act otherwise; a pattern of your own",
    "eps bounds a root that is no length of the vector alone": "`rsqrt(... + eps)`, if eps may act otherwise",
    "eps bounds the squares instead of being added to them": "`rsqrt(... + eps)`, if eps may act otherwise",
    "normalize writes its result into a given tensor (out=)": "`y = F.normalize(x, dim=-1)`",
    "the length of the vector is of a wider dtype than the result": "`x / n.to(x.dtype)`",
    "eps is no number": "a python float",
    "a value inside gives its dtype to a cast outside": "`y.to(dtype)`",
    "inside the one call that nn.TransformerEncoderLayer makes in inference":
        "`torch.backends.mha.set_fastpath_enabled(False)`",
    "inside a higher-order op (checkpoint, cond, ...)": "compile without checkpointing",
    "an operand is written in place, and backward needs what it was": "`x = x + y` instead of `x += y`",
    "left to the inner compiler, which is as fast without it, or faster": '`inner_choice="fuse"`',
    "left to the inner compiler: which is faster was not measured":
        '`torch.no_grad()`, or `inner_choice="fuse"`',
    "gradients are recorded of it": "`torch.no_grad()`",
    "it is returned, and would be with other strides": _CONTIGUOUS,
    "its layout may matter to what reads it": _CONTIGUOUS,
    "it begins as a view of an input or a parameter": _CONTIGUOUS,
    "what it begins as a view of is read later too, or returned": _CONTIGUOUS,
    "its memory may be written later": _CONTIGUOUS,
    "gradients are recorded here, and the option training is 'decline'":
        '`torch.no_grad()`, or `training="fuse"`',
}


def remedy(reason: str) -> str:
    """What helps against `reason`, or all that has to be done against several; "" where for one of them
    nothing is known to help: what helps against the others alone would change nothing."""
    found = [next((helps for start, helps in REMEDIES.items() if one.startswith(start)), "")
             for one in reason.split(ALSO)]
    return "; and ".join(dict.fromkeys(found)) if all(found) else ""
