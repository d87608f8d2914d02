"""The steps that programs are made of. Each takes a Builder and four genes (0..255) that choose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .builder import Builder, NoFit
from .program import BATCH

Genes = tuple[int, int, int, int]
#: name -> (step, how often it is drawn)
STEPS: dict[str, tuple[Callable[[Builder, Genes], None], int]] = {}

UNARY = ("F.silu({0})", "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "{0}.relu()", "torch.sigmoid({0})",
         "{0}.tanh()", "-{0}", "{0}.abs()", "{0} * torch.sigmoid({0})", "{0}.square()",
         "torch.exp(-{0}.abs())", "({0} ** 2)", "{0} / (1 + {0}.abs())", "F.hardswish({0})",
         "{0}.clamp(-1, 1)")
SCALED = ("{0} * 0.5", "{0} + 1", "1 - {0}", "{0} / 2", "2 * {0}", "{0} - 0.25", "0.5 + {0}",
          "torch.mul({0}, 0.125)", "{0} * {0}.shape[0]", "{0}.sub(1)", "torch.rsub({0}, 1)")
BINARY = ("{0} + {1}", "{0} * {1}", "{0} - {1}", "{1} + {0}", "{0} * (1 + {1})", "torch.add({0}, {1})",
          "{0}.add({1}, alpha=2)", "{1} - {0}", "torch.sigmoid({1}) * {0}", "{0} * F.silu({1})",
          "torch.mul({1}, {0})", "{0} / (2 + {1})", "torch.maximum({0}, {1})", "{0} + {1} * 0.5",
          "torch.addcmul({0}, {0}, {1})", "torch.where({0} > 0, {0}, {1})", "torch.lerp({0}, {1}, 0.5)")
# No number but 0 is written everywhere: of rows of equal values a norm gives their rounding errors.
WRITES = ("{0}.add_({1})", "{0}.mul_(0.5)", "{0} += {1}", "{0} *= 0.5", "{0}[..., 0] = 0", "{0}[:1] = 0.5",
          "{0}.copy_({1})", "{0}.zero_()", "F.relu({0}, inplace=True)", "{0}[..., :2].mul_(2)",
          "{0}.transpose(-1, -2).add_(1)", "{0}.clamp_(-1, 1)", "{0}.add_({1}, alpha=0.5)",
          "torch.add({0}, {1}, out={0})", "{0}.relu_()", "F.silu({0}, inplace=True)", "{0}.neg_()",
          "{0}.masked_fill_({0} > 0, 0.5)", "{0} -= {1}", "{0}[..., 1:2] = {0}[..., :1]",
          "torch.mul({0}, 2, out={0})", "{0}.lerp_({1}, 0.5)", "{0}.unbind(0)[0].add_(1)",
          "{0}.addcmul_({0}, {0}, value=0.1)")
#: what makes memory of `{0}`, whose last dim is `{1}`; and what is then written there
MADE = ("F.layer_norm({0}, ({1},))", "{0} + 1", "{0}.clone()", "{0} * {0}", "torch.sigmoid({0})",
        "F.linear({0}, {0}[..., :1].new_ones(({1}, {1})))", "F.layer_norm({0}.float(), ({1},)).to({0}.dtype)",
        "{0}.float()")
UPDATES = ("{0}.mul_({1})", "{0}.add_({1})", "{0} += {1}", "{0} *= {1}", "{0} -= {1}", "{0} /= 2",
           "{0}.sub_({1})", "F.silu({0}, inplace=True)", "F.relu({0}, True)", "{0}.neg_()", "{0}.tanh_()",
           "{0}.square_()", "{0}.view({0}.shape[0], -1).mul_(0.5)", "{0}.mul_(1 + {1}).add_({1})",
           "{0}.mul_({0})", "torch.sigmoid_({0})", "{0}.pow_(2)", "{0} **= 3")
METADATA = ("{0}.unsqueeze_(0)", "{0}.transpose_(0, 1)", "{0}.squeeze_()", "{0}.t_()")
CASTS = ("{0}.float()", "{0}.to(torch.bfloat16)", "{0}.to({1}.dtype)", "{0}.type_as({1})", "{0}.half()",
         "{0}.contiguous()", "{0}.clone()", "{0}.double()", "{0}.to({1})", "{0}.to(torch.float32, copy=True)",
         "{0}.type(torch.bfloat16)", "{0}.bfloat16().float()", "torch.clone({0})",
         "{0}.clone(memory_format=torch.contiguous_format)")
READERS = ("{0}.sum(-1, keepdim=True)", "{0}.mean(-1)", "{0}.softmax(-1)", "torch.cat(({0}, {0}), -1)",
           "torch.stack(({0}, {0} + 1))", "F.dropout({0}, 0.5, True)", "torch.zeros_like({0})",
           "{0}.new_zeros({0}.shape)", "{0}.amax(-1, keepdim=True)", "{0}.cumsum(-1)",
           "{0}.flip(-1)", "{0}.roll(1, -1)", "F.pad({0}, (1, 1))",
           "{0}.var(-1, keepdim=True)", "F.normalize({0}, dim=-1)")
EPS = ("1e-5", "1e-6", "1e-3", "0.1", "1e-12")


def step(weight: int):
    def register(f):
        STEPS[f.__name__] = f, weight
        return f

    return register


def floating(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() > 0


def rows(t: torch.Tensor) -> bool:
    """Rows to normalise. Of two or three numbers they would be ill-conditioned beyond any bound: a gradient
    is then what is left of two that cancel."""
    return floating(t) and t.dim() > 1 and t.shape[-1] > 4 and t.numel() > 0


@step(5)
def unary(b: Builder, g: Genes) -> None:
    b.let(UNARY[g[1] % len(UNARY)].format(b.pick(g[0])), "activation")


@step(5)
def scaled(b: Builder, g: Genes) -> None:
    b.let(SCALED[g[1] % len(SCALED)].format(b.pick(g[0], floating)), "scale")


@step(9)
def binary(b: Builder, g: Genes) -> None:
    value = b.pick(g[0])
    b.let(BINARY[g[1] % len(BINARY)].format(value, b.operand(value, g[2], g[3])), "binary")


@step(3)
def modulate(b: Builder, g: Genes) -> None:
    value = b.pick(g[0], rows)
    scale, shift = b.operand(value, g[1], g[2]), b.operand(value, g[1], g[3])
    b.let(f"{value} * (1 + {scale}) + {shift}", "modulate")


@step(5)
def cast(b: Builder, g: Genes) -> None:
    b.let(CASTS[g[1] % len(CASTS)].format(b.pick(g[0]), b.pick(g[2])), "cast or copy")


@step(5)
def view(b: Builder, g: Genes) -> None:
    value = b.pick(g[0], floating)
    forms = list(_views(value, b.tensor(value)))
    b.let(forms[g[1] % len(forms)], "view")


@step(3)
def parts(b: Builder, g: Genes) -> None:
    """unbind, chunk, split."""
    value = b.pick(g[0], floating)
    t = b.tensor(value)
    dims = [d for d in range(t.dim()) if t.shape[d] in (2, 3, 6, 8, 16)]
    if not dims:
        raise NoFit
    dim = dims[g[1] % len(dims)]
    size = t.shape[dim]
    count = 2 if size % 2 == 0 else 3 if size % 3 == 0 else 1
    forms = [(f"{value}.chunk({count}, {dim})", count), (f"{value}.split({size // count}, {dim})", count),
             (f"{value}.split([1, {size - 1}], {dim})", 2), (f"{value}.tensor_split({count}, {dim})", count),
             (f"torch.split({value}, [{size - 1}, 1], dim={dim})", 2)]
    if size <= 3:
        forms = [(f"{value}.unbind({dim})", size), (f"torch.unbind({value}, dim={dim})", size), *forms]
    text, count = forms[g[2] % len(forms)]
    b.let(text, "unbind, chunk, split", count)


@step(4)
def write(b: Builder, g: Genes) -> None:
    value = b.pick(g[0])
    form = WRITES[g[1] % len(WRITES)]
    # A copy of one number a row would make rows whose variance is zero.
    operand = b.operand(value, 0 if "copy_" in form else g[2], g[3]) if "{1}" in form else ""
    b.do(form.format(value, operand), "write in place")


@step(4)
def update(b: Builder, g: Genes) -> None:
    """One to three in-place ops on a tensor that was just made; now and then a view of it, or what somebody
    read of it, stays in use."""
    value = b.pick(g[0], rows)
    made, = b.let(MADE[g[1] % len(MADE)].format(value, b.tensor(value).shape[-1]), "update of what was made")
    if g[3] % 4 == 3:
        forms = (*_views(made, b.tensor(made)), f"{made} * 2", f"{made}.sum(-1, keepdim=True)")
        b.let(forms[g[3] // 4 % len(forms)], "update of what was made")
    for i in range(1 + g[2] % 3):
        form = UPDATES[(g[1] // len(MADE) + i * g[2]) % len(UPDATES)]
        b.do(form.format(made, b.operand(made, g[2] + i, g[3]) if "{1}" in form else ""),
             "update of what was made")


@step(1)
def write_base(b: Builder, g: Genes) -> None:
    """Of an argument, whatever was made of it since."""
    names = [p.name for p in b.parameters]
    b.do(WRITES[g[1] % len(WRITES)].format(names[g[0] % len(names)], "0.25"), "write in place")


@step(1)
def metadata(b: Builder, g: Genes) -> None:
    if g[2] % 3:  # rare
        raise NoFit
    made = [name for name in reversed(b.names) if name.startswith("v")]
    if not made:
        raise NoFit
    b.do(METADATA[g[1] % len(METADATA)].format(made[g[0] % len(made)]), "shape in place")


@step(2)
def reader(b: Builder, g: Genes) -> None:
    b.let(READERS[g[1] % len(READERS)].format(b.pick(g[0], floating)), "other reader")


@step(1)
def linear(b: Builder, g: Genes) -> None:
    value = b.pick(g[0], rows)
    t = b.tensor(value)
    dtype = str(t.dtype).removeprefix("torch.")
    weight = b.parameter((6 if g[1] % 2 else t.shape[-1], t.shape[-1]), dtype)
    b.let(f"F.linear({value}, {weight})", "linear")


@step(1)
def block(b: Builder, g: Genes) -> None:
    """Open or close a `with` block for what follows."""
    names = ("no_grad", "autocast", "enable_grad", "no_autocast")
    b.context = b.context[:-1] if b.context and g[0] % 2 else (*b.context[:1], names[g[1] % 4])


@step(1)
def graph_break(b: Builder, g: Genes) -> None:
    if g[0] % 4 == 0:
        b.do("torch._dynamo.graph_break()", "graph break")


@step(1)
def argument(b: Builder, g: Genes) -> None:
    """Another argument: of its own, or a view of one that is there."""
    if g[0] % 2 and b.parameters:
        owner = b.parameters[g[1] % len(b.parameters)].name
        b.alias(owner, ("{}", "{}[1:]", "{}[..., :2]", "{}.transpose(0, -1)", "{}.view(-1)")[g[2] % 5])
    else:
        first(b, g)


def first(b: Builder, g: Genes) -> None:
    """An argument to start from."""
    lane = (16, 8, 6, 5, 16, 8, 1, 10)[g[0] % 8]
    rest = (5, 2, 3, 1)[g[1] % 4]
    shapes = ((BATCH, lane), (BATCH, rest, lane), (BATCH, 3, lane), (BATCH, rest, 3 * lane),
              (BATCH, rest, 3, 2, lane), (BATCH, rest, 2, lane), (BATCH, 6, 2, 3), (BATCH, lane, rest))
    layout = g[3] - 200 if 200 < g[3] < 208 else 0
    b.parameter(shapes[g[2] % len(shapes)], b.dtype, layout)


@step(5)
def library_norm(b: Builder, g: Genes) -> None:
    value = b.pick(g[0], rows)
    t = b.tensor(value)
    lane = t.shape[-1]
    dtype = str(t.dtype).removeprefix("torch.")
    weight = bias = "None"
    if g[2] % 3:
        weight = b.vector(lane, g[2], dtype if g[2] % 8 else "float32")
        bias = b.vector(lane, g[3], dtype) if g[2] % 3 == 2 else "None"
    eps = EPS[g[3] % len(EPS)]
    wide = [text if text == "None" else f"{text}.float()" for text in (weight, bias)]
    forms = (f"F.layer_norm({value}, ({lane},), {weight}, {bias}, {eps})",
             f"F.rms_norm({value}, ({lane},), {weight}, {eps})",
             f"F.layer_norm({value}, {value}.shape[-1:], {weight}, {bias})",
             f"F.layer_norm({value}.float(), ({lane},), {', '.join(wide)}, {eps}).to({value}.dtype)",
             f"F.rms_norm({value}, ({lane},), {weight})",
             f"torch.layer_norm({value}, [{lane}], {weight}, {bias}, {eps})",
             f"F.layer_norm({value}, {value}.shape[-2:], eps={eps})",
             f"torch.native_layer_norm({value}, ({lane},), {weight}, {bias}, {eps})[0]",
             f"F.rms_norm({value}.float(), ({lane},), {wide[0]}, {eps}).type_as({value})",
             f"F.layer_norm({value}.transpose(-1, -2), ({t.shape[-2]},)).transpose(-1, -2)")
    b.let(forms[g[1] % len(forms)], "library norm")


@step(3)
def l2_norm(b: Builder, g: Genes) -> None:
    """Of a dim, by a call or written out; some only look like one."""
    value = b.pick(g[0], rows)
    wide, eps = (value, f"{value}.float()")[g[2] % 2], EPS[g[3] % len(EPS)]
    dim = "1" if g[2] % 16 == 7 else "-1"
    length = (f"{wide}.norm(dim={dim}, keepdim=True)", f"torch.norm({wide}, 2, {dim}, True)",
              f"torch.linalg.vector_norm({wide}, dim={dim}, keepdim=True)",
              f"{value}.float().norm(dim={dim}).unsqueeze({dim})",
              f"{wide}.norm(1, {dim}, True)")[g[3] // 8 % 5]
    total = (f"({wide} * {wide}).sum({dim}, keepdim=True)", f"{wide}.pow(2).sum({dim}, True)")[g[3] // 8 % 2]
    forms = (f"F.normalize({wide}, dim={dim}, eps={eps})", f"F.normalize({wide}, dim={dim}) * 4",
             f"{wide} / {length}.clamp_min({eps})", f"{wide} / {length}.clamp(min={eps})",
             f"{wide} * torch.rsqrt({total} + {eps})", f"{wide} / torch.sqrt({total} + {eps})",
             f"{wide} * (1 / {length}.clamp_min({eps}).expand_as({wide}))",
             f"{wide} / ({length} + {eps})", f"{wide} / {length}.clamp(0.5, 2.0)")
    y = b.let(forms[g[1] % len(forms)], "l2 norm")
    if g[2] // 2 % 2:
        b.let(f"{y[0]}.to({value}.dtype)", "cast")


@step(4)
def handwritten_norm(b: Builder, g: Genes) -> None:
    """Its steps follow at once, or each after another step (where g[3] is odd)."""
    value = b.pick(g[0], rows)
    dim = 1 if b.tensor(value).dim() > 2 and b.tensor(value).shape[1] > 4 and g[3] % 8 == 3 else -1
    b.later(_handwritten(b, value, dim, *g[1:]), "handwritten norm")
    if g[3] % 4 != 1:
        b.finish()


def _handwritten(b: Builder, value: str, dim: int, form: int, spelling: int, more: int) -> list[str]:
    """The steps of a norm of `value` over `dim`; `{i}` is the value of step i."""
    eps, keep = EPS[more % len(EPS)], f"{dim}, keepdim=True"
    size = b.tensor(value).shape[dim]
    wide = spelling % 3 > 0
    steps = [f"{value}.float()"] if wide else []
    x = "{0}" if wide else value

    def add(text: str) -> str:
        steps.append(text)
        return f"{{{len(steps) - 1}}}"

    def squares(of: str) -> str:
        return (f"{of}.pow(2)", f"{of} * {of}", f"{of}.square()", f"{of} ** 2")[spelling // 4 % 4]

    def mean(of: str) -> str:
        return (f"{of}.mean({keep})", f"torch.mean({of}, {keep})", f"{of}.sum({keep}) / {size}")[
            spelling // 16 % 3]

    centred = form % 2
    if centred:
        mu = add(mean(x))
        c = add(f"{x} - {mu}")
        var = add((mean(f"({squares(c)})"), f"{x}.var({keep}, unbiased=False)",
                   f"{mean(f'({squares(x)})')} - {mu} ** 2",
                   f"torch.var({x}, {dim}, correction=0, keepdim=True)")[form // 2 % 4])
    else:
        c, var = x, add(mean(f"({squares(x)})"))
    var = add(f"{var} + {eps}")
    last = (f"{c} * torch.rsqrt({var})", f"{c} / torch.sqrt({var})", f"torch.rsqrt({var}) * {c}",
            f"{c} * {var} ** -0.5", f"{c} * (1 / {var}.sqrt())", f"{c} * {var}.rsqrt()")[form // 8 % 6]
    y = add(last if more % 8 != 6 else _no_norm(b, value, x, c, var, form, size, keep))
    if wide and spelling % 3 == 1:
        y = add(f"{y}.to({value}.dtype)")
    if form // 64 % 2 and dim == -1:
        weight = b.vector(size, more, b.dtype)
        y = add((f"{weight} * {y}", f"{y} * (1 + {weight})", f"{y} * {weight}.float()")[more // 8 % 3])
    if wide and spelling % 3 == 2:
        add(f"{y}.type_as({value})")
    return steps


def _no_norm(b: Builder, value: str, x: str, c: str, var: str, form: int, size: int, keep: str) -> str:
    """The last step of what only looks like a norm: the variance is divided by one number less, eps is
    added to the standard deviation, or the statistics are those of another value."""
    kind = form // 2 % 4
    if kind == 0:
        return f"{c} * torch.rsqrt({x}.var({keep}) + 1e-5)"
    if kind == 1:
        return f"{c} * torch.rsqrt(({c} * {c}).sum({keep}) / {size - 1} + 1e-5)"
    if kind == 2:
        return f"{c} / (torch.sqrt({var}) + 0.1)"
    other = b.pick(form, lambda t: t.shape == b.tensor(value).shape and t is not b.tensor(value))
    return f"{other} * torch.rsqrt({var})"


@step(1)
def packed(b: Builder, g: Genes) -> None:
    """q, k and v of one argument, q and k normalised."""
    lane = (16, 8, 6)[g[0] % 3]
    x = b.parameter((BATCH, 5, 3, 2, lane), b.dtype)
    unbind = ("{}.unbind(2)", "{}.unbind(dim=-3)", "{}.permute(2, 0, 3, 1, 4).unbind(0)")[g[1] % 3]
    q, k, _ = b.let(unbind.format(x), "unbind, chunk, split", 3)
    weight = b.vector(lane, 0, b.dtype)
    for name, eps in ((q, EPS[g[3] % 2]), (k, EPS[g[3] // 2 % 2])):
        forms = (f"F.rms_norm({name}, ({lane},), {weight}, {eps})",
                 f"F.layer_norm({name}, ({lane},), {weight}, eps={eps})",
                 f"F.rms_norm({name}.float(), ({lane},)).to({name}.dtype) * {weight}")
        b.let(forms[g[2] % 3], "library norm")


#: two different parts of one tensor of twice the lane (`{0}`, of lane `{1}`), then of two rows of it
HALVES = (("{0}[..., :{1}]", "{0}[..., {1}:]"), ("{0}.chunk(2, -1)[0]", "{0}.chunk(2, -1)[1]"),
          ("{0}.narrow(-1, 0, {1})", "{0}.narrow(-1, {1}, {1})"),
          ("{0}.split({1}, dim=-1)[1]", "{0}.split({1}, dim=-1)[0]"))
ROWS = (("{0}.select(1, 0)", "{0}.select(1, 1)"), ("{0}[:, 0]", "{0}[:, 1]"),
        ("{0}.unbind(1)[1]", "{0}.unbind(1)[0]"), ("{0}[:, :1].squeeze(1)", "{0}[:, 1:].squeeze(1)"))
#: norms of `{0}` with two parts of one tensor as operands, `{2}` and `{3}`
CONDITIONED = ("{1} * (1 + {2}) + {3}", "{3} + {1} * (1 + {2})", "({1} + {2}) * F.silu({3})",
               "{1} * {2} - {3}", "torch.addcmul({3}, {1}, {2})")


@step(2)
def conditioned(b: Builder, g: Genes) -> None:
    """A norm modulated by two parts of one tensor, as adaLN's shift and scale; or two norms, each by one.

    Each part is taken of a cast or scaled copy of its own, or of the tensor itself: what a site takes in is
    then one tensor, seen through two views that differ in nothing but their arguments. Now and then the first
    is read under no_grad, and the second is the same part."""
    value = b.pick(g[0], rows)
    t = b.tensor(value)
    shape, lane = tuple(t.shape), t.shape[-1]
    middle = (1,) * (len(shape) - 2)
    if g[1] % 2:
        memory, parts = (shape[0], *middle, 2 * lane), HALVES[g[1] // 2 % 4]
    else:
        memory, parts = (shape[0], 2, *middle, lane), ROWS[g[1] // 2 % 4]
    source = b.parameter(memory, b.other if g[1] >= 192 else b.dtype)
    copy = ("{0}.float()", "({0} * 2)", "{0}.to({1}.dtype)", "{0}", "{0}.to(torch.bfloat16)")[g[2] % 5]
    one, two = (part.format(copy.format(source, value), lane) for part in parts)
    normal = (f"F.layer_norm({{0}}, ({lane},))", f"F.rms_norm({{0}}, ({lane},), None, 1e-6)")[g[2] // 8 % 2]
    form = g[3] % 8
    if form < len(CONDITIONED):
        parted = [b.let(part, "parts of one tensor", inner=True)[0] for part in (one, two)]
        b.let(CONDITIONED[form].format(value, normal.format(value), *parted), "parts of one tensor")
    elif form == 5:
        b.let(f"{normal.format(f'{value} + {one}')} * {two}", "parts of one tensor")
    else:
        before = b.context
        if form == 7:
            two, b.context = one, ("no_grad",)
        try:
            first, = b.let(f"{normal.format(value)} * {one}", "parts of one tensor", inner=True)
        finally:
            b.context = before
        b.let(f"{first} + {normal.format(f'{value} * 2')} * {two}", "parts of one tensor")


@step(1)
def rotary(b: Builder, g: Genes) -> None:
    value = b.pick(g[0], lambda t: rows(t) and t.shape[-1] % 2 == 0)
    lane = b.tensor(value).shape[-1]
    shape = (b.tensor(value).shape[-2], lane)
    cos, sin = (b.parameter(shape, b.other if g[1] % 4 == 3 else b.dtype) for _ in range(2))
    if g[3] % 3 == 2:
        one, two = b.let(f"({value}[..., ::2], {value}[..., 1::2])", "rotary", 2, inner=True)
        out, = b.let(f"torch.zeros_like({value})", "rotary", inner=True)
        b.do(f"{out}[..., 0::2] = {one} * {cos}[..., 0::2] - {two} * {sin}[..., 1::2]", "rotary")
        b.do(f"{out}[..., 1::2] = {one} * {sin}[..., 1::2] + {two} * {cos}[..., 0::2]", "rotary")
        b.let(f"{out}.type_as({value})", "rotary")
        return
    half = f"[..., :{lane // 2}]"
    halves = (f"{value}.chunk(2, -1)", f"({value}{half}, {value}[..., {lane // 2}:])")[g[2] % 2]
    one, two = b.let(halves, "rotary", 2, inner=True)
    if g[3] % 3:
        b.let(f"torch.cat(({one} * {cos}{half} - {two} * {sin}{half}, "
              f"{two} * {cos}{half} + {one} * {sin}{half}), -1)", "rotary")
    else:
        turned, = b.let(f"torch.cat((-{two}, {one}), dim=-1)", "rotary", inner=True)
        b.let(f"{value} * {cos} + {turned} * {sin}", "rotary")


def _views(v: str, t: torch.Tensor):
    rank, lane = t.dim(), t.shape[-1]
    yield from (f"{v}[1:]", f"{v}[..., 1:]", f"{v}[None]", f"{v}.unsqueeze(-1)", f"{v}.detach()",
                f"{v}.view_as({v})", f"{v}[..., :2]", f"{v}[..., ::2]", f"{v}.reshape(-1, {lane})",
                f"{v}[:]", f"{v}.narrow(-1, 0, {max(lane // 2, 1)})", f"{v}[None].expand(2, *{v}.shape)",
                f"{v}.flatten()")
    if lane % 2 == 0:
        yield from (f"{v}.unflatten(-1, (2, {lane // 2}))", f"{v}.view(*{v}.shape[:-1], {lane // 2}, 2)",
                    f"{v}.reshape({v}.shape[0], -1, {lane // 2})")
    if rank > 1:
        yield from (f"{v}.transpose(0, 1)", f"{v}.transpose(-1, -2)", f"{v}.movedim(0, -1)", f"{v}.mT",
                    f"{v}.flatten(0, 1)", f"{v}.flatten(-2)", f"{v}[:, 0]", f"{v}.select(1, -1)",
                    f"{v}.view(-1, {lane})", f"{v}[:, :1]", f"{v}.flatten(1)", f"{v}[0]", f"{v}[:, None]",
                    f"{v}.reshape({v}.shape[0], -1)", f"{v}.select(-1, 0)", f"{v}.squeeze(1)",
                    f"{v}[:, :, None]", f"{v}.diagonal()")
    if rank > 2:
        order = ", ".join(map(str, (0, *range(rank - 1, 0, -1))))
        yield from (f"{v}.permute({order})", f"{v}.permute(1, 0, *range(2, {rank}))", f"{v}.transpose(1, 2)",
                    f"{v}.movedim(1, -1)", f"{v}.view({v}.shape[0], -1, {lane})", f"{v}[:, 1:]",
                    f"{v}[:, 0, ..., 1:]")
