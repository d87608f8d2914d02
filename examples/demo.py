"""Three models, compiled with ascend_ln_fuse, with what it did to each and how exact the results are.

    python examples/demo.py [--device cpu|cuda|npu]

1. An attention block written like the one of SeedVR, a video transformer: the article's case.
2. A video transformer of diffusers (CogVideoX), small and with random weights.
3. A language model of transformers (Qwen3), likewise.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import time
import warnings
from collections import Counter

import torch
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn import functional as F

console = Console(highlight=False, width=min(Console().width, 110) if sys.stdout.isatty() else 100)


# -- the models


class MMAttention(nn.Module):
    """Attention over the tokens of a video and of its text, as SeedVR writes it."""

    def __init__(self, heads: int = 3, head_dim: int = 128):
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.qkv_vid, self.qkv_txt = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.norm_q_vid, self.norm_k_vid = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.norm_q_txt, self.norm_k_txt = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, vid, txt):
        from einops import rearrange

        vid_qkv = rearrange(self.qkv_vid(vid), "l (o h d) -> l o h d", o=3, h=self.heads)
        txt_qkv = rearrange(self.qkv_txt(txt), "l (o h d) -> l o h d", o=3, h=self.heads)
        vid_q, vid_k, vid_v = vid_qkv.unbind(1)
        txt_q, txt_k, txt_v = txt_qkv.unbind(1)
        vid_q, txt_q = self.norm_q_vid(vid_q), self.norm_q_txt(txt_q)
        vid_k, txt_k = self.norm_k_vid(vid_k), self.norm_k_txt(txt_k)
        q, k, v = (torch.cat(pair).transpose(0, 1)
                   for pair in ((vid_q, txt_q), (vid_k, txt_k), (vid_v, txt_v)))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self.out(rearrange(mixed, "h l d -> l (h d)"))


def attention():
    return MMAttention(), {"vid": torch.randn(4 * 16 * 16, 384), "txt": torch.randn(77, 384)}


def cogvideox():
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.utils import logging

    logging.set_verbosity_error()
    model = CogVideoXTransformer3DModel(
        num_layers=4, num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=4,
        time_embed_dim=64, text_embed_dim=64, max_text_seq_length=16,
        sample_width=16, sample_height=16, sample_frames=9)
    return model, {"hidden_states": torch.randn(1, 3, 4, 16, 16),
                   "encoder_hidden_states": torch.randn(1, 16, 64),
                   "timestep": torch.tensor([500]), "return_dict": False}


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(num_hidden_layers=4, hidden_size=256, intermediate_size=512, head_dim=64,
                         num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, use_cache=False)
    return Qwen3ForCausalLM(config), {"input_ids": torch.arange(96)[None], "return_dict": False}


MODELS = {
    "An attention block written like SeedVR's": attention,
    "CogVideoX of diffusers, 4 layers": cogvideox,
    "Qwen3 of transformers, 4 layers": qwen3,
}


# -- running one


def show(title: str, build, device: torch.device) -> bool:
    """Compile, compare, print. True if the result is as exact as eager's, by the project's bound."""
    from ascend_ln_fuse import last_reports
    from ascend_ln_fuse.report import render

    console.print()
    console.print(Rule(Text(title, "bold"), align="left"))
    torch.manual_seed(0)
    try:
        model, inputs = build()
    except ImportError as error:
        console.print(f"left out: {error}", style="yellow")
        return True
    for parameter in model.parameters():  # norms start as ones and zeros: give each its own weights
        if parameter.ndim == 1:
            nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    model, inputs = move(model, inputs, device, torch.bfloat16)
    exact_model, exact_inputs = move(copy.deepcopy(model), inputs, torch.device("cpu"), torch.float64)
    already = len(last_reports())
    with torch.no_grad():
        eager = first(model(**inputs))
        started = time.perf_counter()
        compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
        ours = first(compiled(**inputs))
        seconds = time.perf_counter() - started
        exact = first(exact_model(**exact_inputs))
    reports = last_reports()[already:]
    for report in reports:
        console.print(Text.from_ansi(render(report, width=console.width, color=console.is_terminal)))
    for line in in_words(reports):
        console.print(line)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("error against float64")
    table.add_column("largest", justify="right")
    table.add_column("mean", justify="right")
    errors = {}
    for name, result in (("eager", eager), ("fused", ours)):
        errors[name] = (result.double().cpu() - exact).abs()
        table.add_row(name, f"{errors[name].max():.3e}", f"{errors[name].mean():.3e}")
    console.print(table)
    ulp = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    fine = bool(errors["fused"].max() <= 2 * errors["eager"].max() + ulp)
    verdict = Text("within the bound (twice eager's error plus one rounding step)", "green") if fine \
        else Text("beyond the bound", "bold red")
    console.print(verdict, Text(f"first call, tracing included: {seconds:.1f} s", "dim"), sep="; ")
    if build is attention and reports and reports[0].sites:
        show_kernel(reports[0].sites[0], device)
        if device.type == "cpu":
            fine &= interpret(compiled, inputs, model)
    return fine and not any(report.error for report in reports)


def show_kernel(site, device: torch.device) -> None:
    source = site.call.source() if site.call else None
    if source:
        where = "an Ascend 910B3 would run (generated here, not run)" if device.type == "cpu" else "ran"
        console.print()
        console.print(f"The kernel that {where}, for [bold]{site.where}[/bold]:")
        console.print(Syntax(source.strip(), "python", background_color="default", word_wrap=True))


def interpret(compiled, inputs, model) -> bool:
    """The kernels themselves on the CPU, by Triton's interpreter, on a few tokens."""
    if importlib.util.find_spec("triton") is None:
        return True
    few = {name: tensor[:24] for name, tensor in inputs.items()}
    os.environ["ASCEND_LN_FUSE_INTERPRET"] = "1"
    try:
        with torch.no_grad():
            ours, eager = compiled(**few), model(**few)
    finally:
        del os.environ["ASCEND_LN_FUSE_INTERPRET"]
    difference = (ours.double() - eager.double()).abs().max().item()
    console.print("The kernels' own code, run by Triton's interpreter on 48 tokens, differs from eager "
                  f"by at most {difference:.1e}.")
    return difference <= 2 * torch.finfo(ours.dtype).eps * eager.abs().max().item()


def move(model, inputs, device, dtype):
    def place(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else x.dtype)

    return model.to(device, dtype).eval(), {name: place(x) for name, x in inputs.items()}


def first(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def in_words(reports) -> list[Text]:
    """What the reports say, in a few sentences."""
    sites = [site for report in reports for site in report.sites]
    fused = [site for site in sites if site.status == "fused"]
    lines = []
    if fused:
        ops = sum(len(site.kernels_removed) for site in fused)
        hidden = Counter(name for site in fused for name in site.hidden_kernels)
        text = f"{len(fused)} of {len(sites)} norm sites are fused; they stand for {ops} operators of the " \
               f"graph."
        if hidden:
            names = ", ".join(f"{count} {name}" for name, count in hidden.most_common())
            text += f" On an Ascend NPU, {sum(hidden.values())} kernels that nobody wrote would go too " \
                    f"({names}): a prediction from CANN's sources."
        pairs = [(s.bytes_before, s.bytes_after) for s in fused if s.bytes_before and s.bytes_after]
        before, after = (sum(column) for column in zip(*pairs))
        text += f" The sites read and write {after / 2**20:.2f} MiB a call instead of {before / 2**20:.2f}."
        lines.append(Text(text))
    for reason, count in Counter(s.reason for s in sites if s.status != "fused").items():
        lines.append(Text(f"Left alone ({count}): {reason}.", "yellow"))
    for report in reports:
        if report.error:
            lines.append(Text(f"The pass failed; the original graph ran: {report.error}", "bold red"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu"])
    device = torch.device(parser.parse_args().device)
    warnings.filterwarnings("ignore")
    if device.type == "npu":
        import torch_npu  # noqa: F401 - registers the device
    started = time.perf_counter()
    where = {"cpu": "On a CPU the fused sites run as plain PyTorch: the rewriting and the numbers are real, "
                    "the speed is not.",
             "cuda": "The fused sites run as generated Triton kernels on the GPU.",
             "npu": "The fused sites run as generated Triton kernels on the NPU."}[device.type]
    console.print(Panel(Text.assemble(
        ("ascend_ln_fuse", "bold"), f" on {device.type}, torch {torch.__version__}\n",
        'Each model is compiled with torch.compile(model, backend="ascend_ln_fuse"), with no other '
        f"change, and runs in bf16. {where}"), border_style="cyan"))
    results = [show(title, build, device) for title, build in MODELS.items()]
    console.print()
    console.print(Rule(style="dim"))
    console.print(f"{sum(results)} of {len(results)} models as they should be, "
                  f"in {time.perf_counter() - started:.0f} s.")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
