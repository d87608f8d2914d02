"""The pass for users who stay with another compiler: as a custom pass of Inductor's, and of npugraph_ex's.

Both put `torch.ops.ascend_ln_fuse.region` into the graph, which those compilers see as one op. A pass works
inside of one compilation, so neither can try the graph without fused sites and measure which is faster, as
the backend does (`Options.inner_choice`): what fits is fused.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from .backend import fuse_module
from .options import Options, parse_options
from .versions import sources

#: what the options of a pass may be: the compiler is the one that runs it
_OPTIONS = ("report", "training", "self_check", "masks", "cats")


class InductorPass(CustomGraphPass):
    """What `inductor_pass` returns: call it with the graph that Inductor hands over."""

    def __init__(self, options: Options):
        self.options = options

    def __call__(self, graph: Graph) -> None:
        """Fuses the graph of `graph.owning_module`.

        Raises:
            TypeError: no torch.fx.Graph that belongs to a GraphModule.
        """
        owner = getattr(graph, "owning_module", None)
        if not isinstance(owner, GraphModule):
            raise TypeError("graph must be a torch.fx.Graph that belongs to a GraphModule, not "
                            f"{type(graph).__name__}")
        fuse_module(owner, self.options)

    def uuid(self) -> Any:
        """Part of the key of Inductor's caches: another version of the pass compiles anew. The report is
        left out, since it does not change a graph."""
        return ("ascend_ln_fuse", sources(), self.options.training, self.options.self_check,
                self.options.masks, self.options.cats)


def inductor_pass(**options) -> InductorPass:
    """A pass for `torch._inductor.config.pre_grad_custom_pass`: Inductor compiles what is left around the
    fused ops.

        torch.compile(model, options={"pre_grad_custom_pass": ascend_ln_fuse.inductor_pass()})

    It runs on Dynamo's graph, so training works too. Inductor may keep several passes in a list. What fits is
    fused, measured or not; the backend with options={"inner": "inductor"} keeps what is faster.

    Args:
        **options: report, training, self_check, masks and cats of `ascend_ln_fuse.Options`.

    Raises:
        ValueError, TypeError: an unknown option, or one whose value is not valid.
    """
    return InductorPass(_options(options))


def npugraph_ex_pass(gm: GraphModule, example_inputs=None, config=None) -> None:
    """A pass for npugraph_ex's `post_grad_custom_pre_pass`, which hands over the ATen graph of a forward.

        torch.compile(model, backend="npugraph_ex",
                      options={"post_grad_custom_pre_pass": ascend_ln_fuse.npugraph_ex_pass})

    Any compiler behind AOTAutograd can use it: `gm` is changed in place and recompiled. Nothing is measured.

    Args:
        gm: an ATen graph whose nodes carry fake tensors in meta["val"].
        example_inputs, config: not read.

    Raises:
        TypeError: `gm` is no torch.fx.GraphModule.
    """
    if not isinstance(gm, GraphModule):
        raise TypeError(f"gm must be a torch.fx.GraphModule, not {type(gm).__name__}")
    fuse_module(gm, _options({}))


def _options(given: dict) -> Options:
    for name in given:
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r} of a pass of ascend_ln_fuse; valid options: "
                             f"{', '.join(_OPTIONS)}")
    # Any other word than "eager": the ops in the graph must be traceable.
    return parse_options({**given, "inner": "inductor"})
