"""Steps that are parts of whole models: attentions and their masks, rotary embeddings of q and k, results
that a cat joins, a norm with the layers behind it, residual streams across memory. Each in forms that the
pass takes, and in some that only look so.
"""

from __future__ import annotations

from .builder import Builder, NoFit
from .program import BATCH
from .steps import BINARY, UNARY, WRITES, Genes, rows, step

#: masks of an attention of `{0}`, of rows `{s}` and as many columns, that say nothing: all True, or causal
NEEDLESS = (
    "torch.ones({s}, {s}, dtype=torch.bool).tril()", "torch.ones({s}, {s}, dtype=torch.bool)",
    "torch.arange({s})[None] <= torch.arange({s})[:, None]", "torch.arange({s})[:, None] >= 0",
    "{0}.new_ones({s}, {s}, dtype=torch.bool).tril()", "torch.ones_like({0}[..., :1], dtype=torch.bool)",
    "torch.zeros({s}, {s}, dtype={0}.dtype)",
    "torch.zeros({s}, {s}, dtype={0}.dtype).masked_fill(torch.ones({s}, {s}, dtype=torch.bool).triu(1), "
    "float('-inf'))",
    "(torch.arange({s})[:, None] >= torch.arange({s})).expand({0}.shape[0], 1, -1, -1)",
    "torch.ones({s}, dtype=torch.bool)[None, :].repeat({s}, 1)")
#: and those that are needed
NEEDED = (
    "torch.ones({s}, {s}, dtype=torch.bool).tril(1)", "torch.ones({s}, {s}, dtype=torch.bool).triu()",
    "(torch.arange({s})[:, None] - torch.arange({s})).abs() < 2", "{0}[..., :1] > -100",
    "-(torch.arange({s})[:, None] - torch.arange({s})).abs().to({0}.dtype)",
    "torch.zeros({s}, {s}, dtype={0}.dtype).masked_fill(torch.ones({s}, {s}, dtype=torch.bool).triu(1), "
    "-10000.0)", "torch.eye({s}, dtype=torch.bool)", "{0}[..., :1].expand(*{0}.shape[:-1], {s}) * 0.5")
#: what is done to a mask `{0}` of an attention of `{1}` before it is read, or after; nothing most of the time
MASK_WRITES = ("{0}[..., 0] = 1", "{0}[0] = 1", "{0}.fill_(1)", "{0}.mul_(1)", "{0}[..., 1:, :1] = 0",
               "{0}.copy_({0}.clone())", "{0}.view(-1)[1:2].fill_(1)", "{0}[..., -1].zero_()")
ATTENTIONS = ("F.scaled_dot_product_attention({q}, {k}, {v}, {mask})",
              "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask})",
              "F.scaled_dot_product_attention({q}, {k}, {v}, {mask}, 0.0, False)",
              "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask}, dropout_p=0.0, scale=0.5)",
              "F.scaled_dot_product_attention({q}, {k}, value={v}, attn_mask={mask}, is_causal=False)",
              "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask}, dropout_p=0.25)")


@step(3)
def attention(b: Builder, g: Genes) -> None:
    """One with a mask that is built of sizes, or two with the same."""
    value = _value(b, g[0], (3, 4), (BATCH, 2, 5, 8))
    key, other = (_like(b, value, gene) for gene in g[2:])
    size = f"{value}.shape[-2]"
    forms = NEEDLESS if g[1] % 4 else NEEDED
    mask = b.aside(forms[g[1] // 4 % len(forms)].format(value, s=size), "attention")
    write = MASK_WRITES[g[3] // 4 % len(MASK_WRITES)].format(mask, value)
    if g[3] % 4 == 0:
        b.do(write, "mask that is written")
    call = ATTENTIONS[g[2] // 4 % (len(ATTENTIONS) - (g[2] % 8 > 0))]  # few with dropout
    out, = b.let(call.format(q=value, k=key, v=other, mask=mask), "attention")
    if g[3] % 8 == 1:
        b.do(write, "mask that is written")
    if g[3] % 8 in (1, 2):
        b.let(call.format(q=other, k=key, v=value, mask=mask), "attention")
    elif g[3] % 8 == 3:
        b.let(f"{mask}.to({value}.dtype) + 0.5", "attention")
    elif b.tensor(out).dim() == 4 and g[3] % 8 > 4:
        b.let(f"{out}.transpose(1, 2).reshape({out}.shape[0], {out}.shape[2], -1)", "attention")


def _value(b: Builder, gene: int, dims: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Rows of so many dims, or a new argument of `shape`."""
    try:
        return b.pick(gene, lambda t: rows(t) and t.dim() in dims and t.shape[-2] > 1)
    except NoFit:
        return b.parameter(shape, b.dtype)


def _like(b: Builder, value: str, gene: int) -> str:
    """Another value of the shape and dtype of `value`; itself where there is none."""
    t = b.tensor(value)
    try:
        return b.pick(gene, lambda o: o.shape == t.shape and o.dtype == t.dtype and o is not t)
    except NoFit:
        return value


#: the rotation of a lane `{x}` of `{n}` by tables `{c}` and `{s}`, which have an element for each of it
HALF, FIRST = "{x}[..., {n} // 2:]", "{x}[..., :{n} // 2]"
ROTATED = (
    f"torch.cat((-{HALF}, {FIRST}), -1)", f"torch.cat([-{HALF}, {FIRST}], dim=-1)",
    "torch.cat((-{x}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]), dim=-1)",
    "torch.stack((-{x}[..., 1::2], {x}[..., ::2]), -1).flatten(-2)",
    "torch.stack((-{x}[..., 1::2], {x}[..., 0::2]), dim=-1).reshape({x}.shape)",
    "torch.stack([-{x}.unflatten(-1, (-1, 2))[..., 1], {x}.unflatten(-1, (-1, 2))[..., 0]], -1).flatten(-2)")
#: what only looks like it
NOT_ROTATED = (
    f"torch.cat(({HALF}, -{FIRST}), -1)", f"torch.cat(({HALF}, {FIRST}), -1)",
    f"torch.cat((-{FIRST}, {HALF}), -1)", "torch.cat((-{x}[..., 1::2], {x}[..., ::2]), -1)",
    f"torch.stack((-{HALF}, {FIRST}), -1).flatten(-2)",
    "torch.cat((-{x}[..., {n} // 2 - 1:-1], {x}[..., :{n} // 2]), -1)",
    "torch.stack((-{x}[..., ::2], {x}[..., 1::2]), -1).flatten(-2)")
EMBEDDED = ("{x} * {c} + {r} * {s}", "{r} * {s} + {x} * {c}", "({x} * {c}) + ({r} * {s})",
            "{x} * {c} - {r} * {s}", "torch.addcmul({x} * {c}, {r}, {s})", "{x} * {s} + {r} * {c}",
            "{x}.float() * {c} + {r}.float() * {s}", "({x} * {c} + {r} * {s}).to({x}.dtype)")
#: where the tables of a lane have their rows, beside the value's
TABLES = ("{0}", "{0}[:, None]", "{0}[None]", "{0}.unsqueeze(1)", "{0}[None, :, None]", "{0}[None, None]")


@step(4)
def rotary_pair(b: Builder, g: Genes) -> None:
    """The rotary embeddings of q and k by common tables, before anything is normalised or behind it."""
    q = _value(b, g[0], (3, 4), (BATCH, 2, 5, 8))
    t = b.tensor(q)
    if t.shape[-1] % 2:
        raise NoFit
    if g[1] % 2:
        k = b.parameter(tuple(t.shape), str(t.dtype).removeprefix("torch."))
    else:
        k = _like(b, q, g[1])
    lane = t.shape[-1]
    cos, sin = (b.parameter((t.shape[-2], lane), b.other if g[3] % 8 == 7 else b.dtype) for _ in range(2))
    if t.dim() > 2 and t.shape[-2] == t.shape[1] and g[3] % 2:
        cos, sin = (TABLES[g[3] // 8 % len(TABLES)].format(table) for table in (cos, sin))
    if g[2] % 4 == 3:
        for value in dict.fromkeys((q, k)):
            _written_rotary(b, value, cos, sin, g[2] // 4)
        return
    wrong = g[2] % 16 == 2
    forms = NOT_ROTATED if wrong else ROTATED
    embedded = EMBEDDED[g[3] // 2 % len(EMBEDDED)]
    for value in dict.fromkeys((q, k)):
        x = value
        if g[2] % 8 == 1:
            x, = b.let(f"{value}.float()", "rotary", inner=True)
        rotated, = b.let(forms[g[2] // 16 % len(forms)].format(x=x, n=lane), "rotary", inner=True)
        if g[1] % 32 == 4:
            b.do(WRITES[g[3] % len(WRITES)].format(value, "0.5"), "write in place")
        b.let(embedded.format(x=x, r=rotated, c=cos, s=sin), "rotary")


def _written_rotary(b: Builder, value: str, cos: str, sin: str, form: int) -> None:
    """The embedding written into a buffer, as diffusers' Wan does, or almost so."""
    made = ("torch.empty_like({0})", "torch.zeros_like({0})")[form % 2]
    one, two = b.let((f"({value}[..., ::2], {value}[..., 1::2])",
                      f"{value}.unflatten(-1, (-1, 2)).unbind(-1)")[form // 2 % 2], "rotary", 2, inner=True)
    cos, sin = (f"{table}[..., {'0' if even else '1'}::2]" for table, even in
                zip((cos, sin), (form // 4 % 2, form // 8 % 2)))
    writes = [f"[..., 0::2] = {one} * {cos} - {two} * {sin}", f"[..., 1::2] = {one} * {sin} + {two} * {cos}"]
    if form % 16 == 15:
        writes[1] = f"[..., 1::2] = {one} * {sin} - {two} * {cos}"
    if form // 16 == 1:
        writes.reverse()
    out = b.aside(made.format(value), "rotary")
    try:
        for i, text in enumerate(writes):
            b.do(out + text, "rotary")
            if i == 0 and form // 16 == 2 and form % 2:  # read, or written, between the two
                b.let(f"{out} * 1", "rotary", inner=True)
            elif i == 0 and form // 16 == 3:
                b.do(f"{value}.mul_(0.5)", "write in place")
    finally:
        b.let(f"{out}.type_as({value})", "rotary")


#: views between a result and the cat that joins it
BEFORE_CAT = ("{0}", "{0}", "{0}.transpose(1, 2)", "{0}[:, None]", "{0}.flatten(0, 1)", "{0}[None]",
              "{0}.unsqueeze(1)", "{0}.transpose(0, 1)", "{0}[:, :1]", "{0}.contiguous()")
#: what happens between the result `{0}` of `{1}`, beside a part `{2}` that is copied, and their cat
MEANWHILE = ("{1}.mul_(0.5)", "{2}.mul_(0.5)", "{0}.mul_(0.5)", "{2}.add_({2})", "{0}[..., :1] = 0.5",
             "{2}[..., 1:] = 0.25")
#: of a cat
AFTER_CAT = ("{0}[:, 1:]", "{0}.transpose(0, 1)", "{0}.flatten(0, 1)", "{0}.view({0}.shape[0], -1)",
             "{0}[..., 1:]", "{0} * 2", "{0}.unbind(0)[0]")


@step(4)
def joined_results(b: Builder, g: Genes) -> None:
    """Results of norms, and other values, that one or two cats join along a dim."""
    value = _value(b, g[0], (3, 4), (BATCH, 5, 2, 8))
    t = b.tensor(value)
    lane, dtype = t.shape[-1], str(t.dtype).removeprefix("torch.")
    dim = (1, 0, -2, 1, 2, -1, 0, 1)[g[1] % 8]
    shape = list(t.shape)
    if 0 < dim % t.dim() < t.dim() - 1:
        shape[dim] += g[1] // 8 % 3
    other = b.parameter(tuple(shape), dtype) if g[1] // 32 % 4 else _like(b, value, g[3])
    norms = (f"F.rms_norm({{0}}, ({lane},))", f"F.layer_norm({{0}}, ({lane},)) * 0.5",
             f"F.silu(F.rms_norm({{0}}, ({lane},), {b.vector(lane, 1, dtype)}, 1e-5))",
             f"F.layer_norm({{0}}, ({lane},), {b.vector(lane, 1, dtype)})")
    norm = norms[g[2] % len(norms)]
    view = BEFORE_CAT[g[2] // 4 % len(BEFORE_CAT)]
    one, = b.let(norm.format(value), "joined", inner=True)
    part, = b.let(view.format(one), "joined", inner=True)
    plain = g[3] % 4 == 3  # its second part is copied
    two = other if plain else b.let(norm.format(other), "joined", inner=True)[0]
    if g[3] // 4 % 4 == 0:
        b.do(MEANWHILE[g[3] // 16 % len(MEANWHILE)].format(one, value, other), "write before a cat")
    last, = b.let(view.format(two), "joined", inner=True)
    parts = [part, last] if g[3] % 2 else [last, part]
    parts += [b.let(view.format(f"({other} * 2)"), "joined", inner=True)[0]] * (g[2] // 64 == 1)
    parts += [part] * (g[2] // 64 == 2 and g[3] % 8 == 0)
    joined, = b.let(f"torch.cat(({', '.join(parts)}), {dim})", "joined")
    kind = g[3] // 4 % 8
    if kind == 1:
        b.let(AFTER_CAT[g[3] // 32 % len(AFTER_CAT)].format(joined), "joined")
    elif kind == 2:
        b.do(f"{joined}.add_(0.5)", "write in place")
    elif kind == 3:
        b.do(f"{other}.mul_(0.5)", "write in place")
    elif kind == 5:  # a second cat, of the same parts or of other results
        more = view.format(f"({norm.format(f'({other} + 1)')})")
        b.let(f"torch.cat(({part}, {more}), {dim})", "joined")


@step(4)
def layers(b: Builder, g: Genes) -> None:
    """A norm, linear layers, what is pointwise behind them, and again; or the scores of an attention."""
    scores = g[2] % 4 == 3
    value = _value(b, g[0], (3,) if scores else (2, 3, 4), (BATCH, 5, 8))
    t = b.tensor(value)
    lane, dtype = t.shape[-1], str(t.dtype).removeprefix("torch.")
    wide = (lane, 2 * lane, 6, 8)[g[1] % 4]
    weight = b.vector(lane, g[1], dtype)
    norms = (f"F.layer_norm({value}, ({lane},), {weight})", f"F.rms_norm({value}, ({lane},), {weight}, 1e-6)")
    h, = b.let(norms[g[1] // 4 % 2], "library norm")
    if scores:
        _scores(b, h, lane, dtype, g)
        return
    y = _product(b, h, lane, wide, dtype, g[1] // 8)
    kind = g[2] // 4 % 5
    if kind == 0:
        y, = b.let(UNARY[g[3] % len(UNARY)].format(y), "layers")
    elif kind == 1:
        gate = _product(b, h, lane, wide, dtype, g[1] // 8)
        y, = b.let(BINARY[g[3] % len(BINARY)].format(y, f"F.silu({gate})"), "layers")
    elif kind == 2 and wide % 2 == 0:
        one, two = b.let(f"{y}.chunk(2, -1)", "layers", 2, inner=True)
        y, = b.let(f"F.silu({one}) * {two}", "layers")
        wide //= 2
    elif kind == 3:
        b.do(f"{y}.mul_(0.5)", "layers")
    if g[2] // 32 % 2:
        y = _product(b, y, wide, lane, dtype, g[3] // 32)
        if g[2] // 64 % 2:
            b.let((f"{value} + {y}", f"{y} + {h}", f"{value} + {weight} * {y}")[g[3] % 3], "layers")
    if g[2] // 64 == 2:
        b.let(f"{h} * 2" if g[3] % 2 else f"{h}.sum(-1)", "layers")


def _product(b: Builder, value: str, features: int, out: int, dtype: str, form: int) -> str:
    """A linear layer, in a spelling of some library."""
    form %= 5
    if form < 2:
        weight = b.parameter((out, features), dtype)
        bias = f", {b.vector(out, 1, dtype)}" if form else ""
        text = f"F.linear({value}, {weight}{bias})"
    else:
        weight = b.parameter((features, out), dtype)
        text = f"{value} @ {weight}"
        if form == 3:  # GPT-2's
            text = f"torch.addmm({b.vector(out, 1, dtype)}, {value}.view(-1, {features}), {weight})" \
                   f".view(*{value}.shape[:-1], {out})"
        elif form == 4:
            text = f"torch.matmul({value}, {weight}) + {b.vector(out, 1, dtype)}"
    return b.let(text, "layers")[0]


def _scores(b: Builder, h: str, lane: int, dtype: str, g: Genes) -> None:
    """`q @ k^T` of heads of one or two linear layers of `h`, scaled, with something added."""
    heads, size = 2, lane
    if g[3] % 2:
        q, k = (_product(b, h, lane, heads * size, dtype, g[1] // 8) for _ in range(2))
    else:
        y = _product(b, h, lane, 2 * heads * size, dtype, g[1] // 8)
        q, k = b.let(f"{y}.chunk(2, -1)", "layers", 2, inner=True)
    seen = f"view({h}.shape[0], -1, {heads}, {size})"
    if g[3] // 2 % 4 == 3:
        q, k = (b.let(f"{x}.{seen}", "layers", inner=True)[0] for x in (q, k))
        product = f"torch.einsum('bihd,bjhd->bhij', {q}, {k})"
    else:
        q, k = (b.let(f"{x}.{seen}.transpose(1, 2)", "layers", inner=True)[0] for x in (q, k))
        if g[3] // 8 % 2:
            q, = b.let(f"{q} * 0.25", "layers", inner=True)
        turned = ("transpose(-1, -2)", "mT")[g[3] // 16 % 2]
        product = (f"{q} @ {k}.{turned}", f"torch.matmul({q}, {k}.{turned})")[g[3] // 32 % 2]
    score, = b.let(product, "layers", inner=True)
    b.let(SCORES[g[3] // 64].format(score), "layers")


#: what becomes of an attention's scores
SCORES = ("({0} * 0.125).softmax(-1)", "{0} / 8",
          "{0} * 0.125 + torch.arange({0}.shape[-1]).to({0}.dtype)",
          "({0} * 0.125 + {0}.new_ones({0}.shape[-2:]).tril()).softmax(-1)")


@step(2)
def convolutions(b: Builder, g: Genes) -> None:
    """A norm over the channels of an image, and a convolution over pixels or patches that reads it."""
    channels, size = (8, 6, 16)[g[0] % 3], (4, 6, 5)[g[1] % 3]
    patch = (1, 2, 2, 3)[g[2] % 4]
    last = g[3] % 4
    norm = f"F.layer_norm({{0}}, ({channels},), {b.vector(channels, g[3], b.dtype)})"
    if last == 0:  # ConvNeXt's
        x = b.parameter((BATCH, channels, size, 6), b.dtype)
        image, = b.let(norm.format(f"{x}.permute(0, 2, 3, 1)") + ".permute(0, 3, 1, 2)", "library norm")
    elif last == 1:  # the tokens of an image
        x = b.parameter((BATCH, size * 6, channels), b.dtype)
        h, = b.let(norm.format(x), "library norm")
        image = f"{h}.permute(0, 2, 1).reshape({x}.shape[0], {channels}, {size}, 6)"
        image, = b.let(image, "layers", inner=True)
    else:
        x = b.parameter((BATCH, size, 6, channels), b.dtype)
        h, = b.let(norm.format(x), "library norm")
        image, = b.let(f"{h}.permute(0, 3, 1, 2)", "layers", inner=True)
    stride = patch if g[2] % 16 else max(1, patch - 1)
    weight = b.parameter((2 * channels, channels, patch, patch), b.dtype)
    bias = b.vector(2 * channels, 1, b.dtype) if g[2] % 3 else "None"
    y, = b.let(f"F.conv2d({image}, {weight}, {bias}, {stride})", "convolution")
    if g[2] // 16 % 3:
        y, = b.let(UNARY[g[3] // 4 % len(UNARY)].format(y), "convolution")
    if g[2] // 64 % 2:
        one = b.parameter((channels, 2 * channels, 1, 1), b.dtype)
        y, = b.let(f"F.conv2d({y}, {one})", "convolution")
        if patch == 1 and g[3] % 2:
            b.let(f"{y} + {image}", "convolution")
    elif g[2] // 128:
        b.let(f"{y}.flatten(2).transpose(1, 2)", "convolution")


#: what makes the next value of a stream `{0}` of a norm `{1}` of it
SUMS = ("{0} + {1}", "{0} + {1} * 0.5", "{1} + {0}", "torch.add({0}, F.silu({1}))",
        "({0}.float() + {1}).to({0}.dtype)", "F.dropout({0} + {1}, 0.1, False)", "torch.maximum({0}, {1})",
        "{0} - {1}.mean(1, keepdim=True)")
#: what else is done with a stream `{0}` of rows of `{1}`, or with the memory `{2}` in which it begins
ASIDES = ("{0} * 2", "{0}[:, 1:].contiguous()", "{0}.reshape({0}.shape[0], -1)", "{2} + 1", "{0}.sum(1)",
          "{0}.transpose(1, 2).view({0}.shape[0], -1)", "torch.cat(({0}, {0}[:, :1]), 1)", "{0}.flip(1)",
          "{0}.view(-1, {1})")


@step(3)
def stream(b: Builder, g: Genes) -> None:
    """Sums that lie across memory, as behind a convolution over patches, and a norm of each."""
    value = _value(b, g[0], (3,), (BATCH, 5, 8))
    lane = b.tensor(value).shape[-1]
    made, = b.let(f"{value}.transpose(1, 2).contiguous() * 0.5", "stream", inner=True)
    h, = b.let(f"{made}.{('transpose(1, 2)', 'mT', 'permute(0, 2, 1)')[g[1] % 3]}", "stream", inner=True)
    if g[2] % 8 == 0:
        b.do(WRITES[g[2] // 8 % len(WRITES)].format(made if g[3] % 2 else h, h), "write in place")
    for number in range(3 + g[1] // 4 % 2):
        norm, = b.let(f"F.layer_norm({h}, ({lane},))", "library norm", inner=True)
        h, = b.let(SUMS[(g[3] + number) % len(SUMS)].format(h, norm), "stream", inner=True)
    kind = g[2] // 8 % 16
    if kind < len(ASIDES):
        b.let(ASIDES[kind].format(h, lane, made), "stream")
    elif kind < 14:
        copy = h if kind > 11 else b.let(f"{h}.{('contiguous()', 'flatten(1)')[g[1] % 2]}", "stream")[0]
        b.do(WRITES[g[3] % len(WRITES)].format(copy, copy), "write in place")
    b.let(f"F.layer_norm({h}, ({lane},))", "library norm")
