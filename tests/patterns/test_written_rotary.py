"""Rotary embeddings written into a fresh buffer by two setitems: diffusers' Wan, and what only looks so."""

import pytest
import torch
from rotary_forms import DTYPES, DYNAMIC, D, Written, rotary, wan, written


def wan_later(x, cos, sin):
    """The odd elements first."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 1::2] = second * cos + sin * first
    out[..., 0::2] = cos * first - second * sin
    return out.type_as(x)


def wan_otherwise(x, cos, sin):
    """Slices for the pairs, the other elements of the tables, other indices, a buffer of zeros."""
    out = torch.zeros_like(x)
    out[:, :, :, ::2] = x[..., ::2] * cos[..., 1::2] - x[..., 1::2] * sin[..., ::2]
    out[:, ..., 1::2] = x[..., ::2] * sin[..., ::2] + x[..., 1::2] * cos[..., 1::2]
    return out


def wan_shared(x, cos, sin):
    """The halves and the tables have other readers."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out, first.cumsum(-1), cos.cumsum(-1)


def wan_wide(x, cos, sin):
    """Everything in fp32."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out


def wan_read_later(x, cos, sin):
    """Views and values of the buffer, all behind the writes."""
    out = wan(x, cos, sin, None)
    return out.transpose(1, 2), out.sum(-1), out[0]


WRITTEN = [wan_later, wan_otherwise, wan_shared, wan_wide, wan_read_later]


@DYNAMIC
@pytest.mark.parametrize("form", WRITTEN, ids=lambda f: f.__name__)
def test_written(form, dynamic):
    for dtype in DTYPES:
        for tables in {dtype, torch.float32}:
            torch._dynamo.reset()
            site, = rotary(Written(form), *written(dtype, tables), dynamic=dynamic)
            assert site.region.count("repeat_") == 2 and site.region.count("\nin ") == 3
            assert ("cast(x" in site.region) == (form is wan_wide and dtype != torch.float32)


def test_written_to_the_bit():
    """The rounding of each op is eager's, whichever comes first in the sum."""
    for dtype in DTYPES:
        torch._dynamo.reset()
        given = written(dtype)
        model = Written(lambda *given: wan(*given, None))
        rotary(model, *given)
        compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
        assert torch.equal(compiled(*given), model(*given))


def test_written_in_the_layout_of_eager():
    for lay in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[:, :, ::2],
                lambda x: x[:1], lambda x: x[:, :, :1]):
        torch._dynamo.reset()
        rotary(Written(lambda x, cos, sin, lay=lay: wan(lay(x), cos, sin, None)), *written(torch.bfloat16))


def even(first, second, cos, sin):
    return first * cos - second * sin


def odd(first, second, cos, sin):
    return first * sin + second * cos


def parts(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second, cos[..., 0::2], sin[..., 1::2]


def third_write(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = even(*given)
    out[..., 1::2] = odd(*given)
    out[..., 0] = 0
    return out


def write_in_place_later(x, cos, sin):
    return wan(x, cos, sin, None).transpose(1, 2).mul_(2)


def masked_between(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = even(*given)
    out[x > 0] = 1
    out[..., 1::2] = odd(*given)
    return out


def read_between(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.zeros_like(x)
    out[..., 0::2] = even(*given)
    before = out.sum(-1)
    out[..., 1::2] = odd(*given)
    return out, before


def viewed_before(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.empty_like(x)
    view = out.transpose(1, 2)
    out[..., 0::2] = even(*given)
    out[..., 1::2] = odd(*given)
    return view


def one_write(x, cos, sin):
    out = torch.zeros_like(x)
    out[..., 0::2] = even(*parts(x, cos, sin))
    return out


def written_twice(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.zeros_like(x)
    out[..., 0::2] = even(*given)
    out[..., 0::2] = odd(*given)
    return out


def other_places(x, cos, sin):
    """The even ones to the first half."""
    given = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., :D // 2] = even(*given)
    out[..., D // 2:] = odd(*given)
    return out


def changed_places(x, cos, sin):
    given = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 1::2] = even(*given)
    out[..., 0::2] = odd(*given)
    return out


def some_rows(x, cos, sin):
    out = torch.zeros_like(x)
    given = parts(x[:, 1:], cos[:, 1:], sin[:, 1:])
    out[:, 1:, :, 0::2] = even(*given)
    out[:, 1:, :, 1::2] = odd(*given)
    return out


def other_buffer(x, cos, sin):
    """A buffer that is no fresh one."""
    given = parts(x, cos, sin)
    x[..., 0::2], x[..., 1::2] = even(*given), odd(*given)
    return x


def larger_buffer(x, cos, sin):
    given = parts(x[:1], cos, sin)
    out = torch.empty_like(x.repeat(2, 1, 1, 1))
    out[..., 0::2] = even(*given)
    out[..., 1::2] = odd(*given)
    return out


def other_signs(x, cos, sin):
    first, second, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos + second * sin
    out[..., 1::2] = first * sin - second * cos
    return out


def other_difference(x, cos, sin):
    first, second, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = second * sin - first * cos
    out[..., 1::2] = first * sin + second * cos
    return out


def other_tables(x, cos, sin):
    """cos and sin of the odd elements are others."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos[..., 0::2], sin[..., 0::2])
    out[..., 1::2] = odd(first, second, cos[..., 1::2], sin[..., 1::2])
    return out


def exchanged_tables(x, cos, sin):
    first, second, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos, sin)
    out[..., 1::2] = odd(first, second, sin, cos)
    return out


def half_tables(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., :D // 2], sin[..., D // 2:]
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos, sin)
    out[..., 1::2] = odd(first, second, cos, sin)
    return out


def halves_of_the_lane(x, cos, sin):
    first, second = x.chunk(2, -1)
    _, _, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos, sin)
    out[..., 1::2] = odd(first, second, cos, sin)
    return out


def two_values(x, cos, sin):
    first, _, cos, sin = parts(x, cos, sin)
    second = x.abs()[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos, sin)
    out[..., 1::2] = odd(first, second, cos, sin)
    return out


def product_elsewhere(x, cos, sin):
    first, second, cos, sin = parts(x, cos, sin)
    product = first * cos
    out = torch.empty_like(x)
    out[..., 0::2] = product - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out, product


def value_written_between(x, cos, sin):
    x = x.clone()
    first, second, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = even(first, second, cos, sin)
    x.mul_(2)
    out[..., 1::2] = odd(first, second, cos, sin)
    return out


def masked_values(x, cos, sin):
    first, second, cos, sin = parts(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 0::2] = torch.where(first > 0, even(first, second, cos, sin), 0.0)
    out[..., 1::2] = odd(first, second, cos, sin)
    return out


LEFT_ALONE = [third_write, write_in_place_later, masked_between, read_between, viewed_before, one_write,
              written_twice, other_places, changed_places, some_rows, other_buffer, larger_buffer,
              other_signs, other_difference, other_tables, exchanged_tables, half_tables,
              halves_of_the_lane, two_values, product_elsewhere, value_written_between, masked_values]


@DYNAMIC
@pytest.mark.parametrize("form", LEFT_ALONE, ids=lambda f: f.__name__)
def test_left_alone(form, dynamic):
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        rotary(Written(form), *written(dtype), count=0, dynamic=dynamic)
