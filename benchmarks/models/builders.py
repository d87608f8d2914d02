"""Makes the models of `specs`: random weights in bf16, on the device that they are to run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .specs import Spec

BF16 = torch.bfloat16
#: Times and guidance are multiplied by 1000 in bf16 inside the models; these come out exact, so that eager's
#: error is that of the arithmetic.
TIMESTEP, GUIDANCE = 500.0, 4.0

Inputs = dict[str, Any]


def build(spec: Spec, layers: int, tiny: bool, device: torch.device) -> tuple[nn.Module, Inputs]:
    """A model and the keyword arguments of its call, both from seed 0.

    Raises:
        ImportError: its library is not installed.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = _BUILDERS[spec.builder](spec.config(layers, tiny), **spec.inputs(tiny))
        for parameter in model.parameters():  # norms start as ones and zeros: give each its own weights
            if parameter.ndim == 1:
                nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return as_loaded(model.to(device).eval().requires_grad_(False)), inputs


def as_loaded(model: nn.Module) -> nn.Module:
    """`model` as a checkpoint loaded in bf16: its parameters, but for those that the library keeps in fp32.
    Buffers, which are computed, stay as they are."""
    wide = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not wide & set(name.split(".")):
            parameter.data = parameter.data.to(BF16)
    return model


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def seedvr(config, vid: int, txt: int):
    from .seedvr import SeedVR

    width, dim = config["width"], config["head_dim"]
    angles = torch.arange(vid)[:, None, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return SeedVR(**config), {
        "vid": randn(vid, width), "txt": randn(txt, width), "emb": 0.2 * randn(2, 3, width),
        "angles": angles.repeat_interleave(2, -1)}


def flux(config, batch: int, side: int, txt: int):
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**config)
    rows = torch.arange(side).repeat_interleave(side)
    columns = torch.arange(side).repeat(side)
    return model, {
        "hidden_states": randn(batch, side * side, model.config.in_channels),
        "encoder_hidden_states": randn(batch, txt, model.config.joint_attention_dim),
        "pooled_projections": randn(batch, model.config.pooled_projection_dim),
        "timestep": torch.full((batch,), TIMESTEP / 1000).to(BF16),
        "guidance": torch.full((batch,), GUIDANCE),
        "img_ids": torch.stack((torch.zeros_like(rows), rows, columns), -1).to(BF16),
        "txt_ids": torch.zeros(txt, 3).to(BF16), "return_dict": False}


def sd3(config, batch: int, side: int, txt: int):
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(**config)
    return model, {
        "hidden_states": randn(batch, model.config.in_channels, side, side),
        "encoder_hidden_states": randn(batch, txt, model.config.joint_attention_dim),
        "pooled_projections": randn(batch, model.config.pooled_projection_dim),
        "timestep": torch.full((batch,), TIMESTEP), "return_dict": False}


def wan(config, batch: int, frames: int, height: int, width: int, txt: int):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(**config)
    return model, {
        "hidden_states": randn(batch, model.config.in_channels, frames, height, width),
        "encoder_hidden_states": randn(batch, txt, model.config.text_dim),
        "timestep": torch.full((batch,), int(TIMESTEP)), "return_dict": False}


def hunyuan(config, batch: int, frames: int, height: int, width: int, txt: int):
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(**config)
    return model, {
        "hidden_states": randn(batch, model.config.in_channels, frames, height, width),
        "encoder_hidden_states": randn(batch, txt, model.config.text_embed_dim),
        "encoder_attention_mask": torch.ones(batch, txt, dtype=torch.bool),
        "pooled_projections": randn(batch, model.config.pooled_projection_dim),
        "timestep": torch.full((batch,), int(TIMESTEP)),
        "guidance": torch.full((batch,), GUIDANCE * 1000).to(BF16), "return_dict": False}


def vit(config, batch: int):
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**config), add_pooling_layer=False)
    side = model.config.image_size
    return model, {"pixel_values": randn(batch, model.config.num_channels, side, side), "return_dict": False}


def _language_model(kind: str) -> Callable:
    def make(config, batch: int, tokens: int):
        from transformers import AutoConfig, AutoModel

        full = AutoConfig.for_model(kind, **config)
        model = AutoModel.from_config(full, attn_implementation="sdpa")
        inputs = {"input_ids": torch.randint(full.vocab_size, (batch, tokens)), "return_dict": False}
        return model, inputs if kind == "bert" else {**inputs, "use_cache": False}

    return make


_BUILDERS: dict[str, Callable] = {
    "seedvr": seedvr, "flux": flux, "sd3": sd3, "wan": wan, "hunyuan": hunyuan, "vit": vit,
    "bert": _language_model("bert"), "gpt2": _language_model("gpt2"), "llama": _language_model("llama")}
