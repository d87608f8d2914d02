"""One word for every spelling of an op, and none for what the table does not know."""

import operator

import pytest
import torch
from einops import rearrange
from torch.fx import Graph
from torch.nn import functional as F

from ascend_ln_fuse.kinds import KINDS, REGROUPING_VIEWS, STRIDE_FREE_VIEWS, is_foreign, kind

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """A node that calls `target`: a method where it is a name, else a function."""
    op = "call_method" if isinstance(target, str) else "call_function"
    return Graph().create_node(op, target, args, kwargs)


SPELLINGS = {
    "add": (torch.add, operator.add, "add", "__add__", "__radd__", torch.Tensor.add,
            torch.Tensor.__add__, aten.add, aten.add.Tensor, aten.add.Scalar,
            torch.ops.prims.add.default),
    "sub": (torch.sub, torch.subtract, operator.sub, "sub", "subtract", aten.sub.Tensor),
    "rsub": (torch.rsub, "__rsub__", aten.rsub.Scalar),
    "mul": (torch.mul, torch.multiply, operator.mul, "mul", "__rmul__", aten.mul.Tensor),
    "div": (torch.div, torch.true_divide, operator.truediv, "div", "__truediv__", aten.div.Tensor),
    "pow": (torch.pow, operator.pow, "pow", "__pow__", aten.pow.Tensor_Scalar),
    "neg": (torch.neg, operator.neg, "neg", "__neg__", aten.neg.default),
    "abs": (torch.abs, operator.abs, abs, "abs", "absolute", aten.abs.default),
    "square": (torch.square, "square", aten.square.default),
    "sqrt": (torch.sqrt, "sqrt", aten.sqrt.default),
    "rsqrt": (torch.rsqrt, "rsqrt", aten.rsqrt.default, torch.ops.prims.rsqrt.default),
    "reciprocal": (torch.reciprocal, "reciprocal", aten.reciprocal.default),
    "mean": (torch.mean, "mean", aten.mean.dim),
    "var": (torch.var, "var", aten.var.correction),
    "var_mean": (torch.var_mean, aten.var_mean.correction),
    "sum": (torch.sum, "sum", aten.sum.dim_IntList),
    "exp": (torch.exp, "exp", aten.exp.default),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid", aten.sigmoid.default),
    "silu": (F.silu, torch._C._nn.silu, aten.silu.default),
    "gelu": (F.gelu, torch._C._nn.gelu, aten.gelu.default),
    "relu": (F.relu, torch.relu, "relu", aten.relu.default),
    "tanh": (torch.tanh, F.tanh, "tanh", aten.tanh.default),
    "maximum": (torch.maximum, "maximum", aten.maximum.default),
    "to": ("to", "float", "bfloat16", "half", "double", "type", "type_as", aten._to_copy.default,
           aten.to.dtype, torch.ops.prims.convert_element_type.default),
    "copy": ("contiguous", "clone", torch.clone, aten.clone.default, aten.contiguous.default),
    "layer_norm": (F.layer_norm, torch.layer_norm, aten.layer_norm.default, aten.native_layer_norm,
                   aten.native_layer_norm.default, torch.native_layer_norm),
    "rms_norm": (F.rms_norm, torch.rms_norm, aten.rms_norm.default, aten._fused_rms_norm.default),
    "getitem": (operator.getitem,),
    "view": ("view", aten.view.default),
    "reshape": ("reshape", torch.reshape, aten.reshape.default),
    "permute": ("permute", torch.permute, aten.permute.default),
    "transpose": ("transpose", torch.transpose, aten.transpose.int),
    "select": ("select", torch.select, aten.select.int),
    "slice": (aten.slice.Tensor,),
    "unbind": ("unbind", torch.unbind, aten.unbind.int),
    "split": ("split", torch.split, aten.split.Tensor),
    "split_with_sizes": ("split_with_sizes", aten.split_with_sizes.default),
    "chunk": ("chunk", torch.chunk, aten.chunk.default),
    "expand": ("expand", aten.expand.default),
    "unsqueeze": ("unsqueeze", torch.unsqueeze, aten.unsqueeze.default),
    "rearrange": (rearrange,),
    "linear": (F.linear, torch._C._nn.linear, aten.linear.default),
    "item": ("item", aten.item.default),
}


@pytest.mark.parametrize("word", SPELLINGS)
def test_every_spelling_has_one_word(word):
    assert [kind(call(target)) for target in SPELLINGS[word]] == [word] * len(SPELLINGS[word])


def layer_norm(x):
    """A user's function by the name of a norm."""
    return x


UNKNOWN = {
    "in-place methods": ("add_", "mul_", "relu_", "sigmoid_", "copy_", "__iadd__", "__setitem__"),
    "in-place functions": (operator.iadd, operator.imul, operator.setitem, torch.relu_, F.relu_,
                           aten.add_.Tensor, aten.add_, aten.copy_.default),
    "a user's functions": (layer_norm, lambda x: x),
    "higher-order ops": (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop),
    "other arithmetic": (torch.float_power, "float_power", operator.floordiv, torch.remainder),
    "comparisons": (operator.eq, torch.equal, "lt"),
}


@pytest.mark.parametrize("group", UNKNOWN)
def test_what_the_table_does_not_know_has_no_word(group):
    assert [kind(call(target)) for target in UNKNOWN[group]] == [None] * len(UNKNOWN[group])


def test_only_calls_have_a_word():
    graph = Graph()
    assert kind(graph.placeholder("add")) is None
    assert kind(graph.get_attr("add")) is None
    assert kind(graph.create_node("call_module", "layer_norm")) is None
    assert kind(graph.output(())) is None


def test_a_user_op_by_a_known_name_is_foreign(tmp_path):
    library = torch.library.Library("aln_kinds", "DEF")
    library.define("layer_norm(Tensor x) -> Tensor")
    mine = torch.ops.aln_kinds.layer_norm
    assert kind(call(mine)) is kind(call(mine.default)) is None
    assert is_foreign(mine) and is_foreign(mine.default)
    assert not any(map(is_foreign, (aten.add, aten.add.Tensor, torch.add, "add")))
    library._destroy()


def test_the_view_tables_name_known_kinds():
    assert STRIDE_FREE_VIEWS | REGROUPING_VIEWS <= set(KINDS.values())
    assert not STRIDE_FREE_VIEWS & REGROUPING_VIEWS
