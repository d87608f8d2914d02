"""Tiny models of diffusers' transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers.models.transformers as transformers_of_diffusers
import torch
from diffusers.utils import logging
from feed import given_input

logging.set_verbosity_error()

HEADS, HEAD_DIM, LAYERS, TEXT = 2, 32, 2, 32
WIDTH = HEADS * HEAD_DIM
BATCH, TOKENS, SIDE, FRAMES = 2, 8, 8, 4
#: how the halves of a head are shared out among the axes, by their number
AXES = {2: (16, 16), 3: (8, 12, 12), 4: (8, 8, 8, 8)}

#: (pattern of the whole name, size), the first that matches counts; a size is never enlarged
RULES = tuple((re.compile(rf"(?:{pattern})\Z"), size) for pattern, size in (
    (r"(in|out|io)_channels|.*vision_dim|in_dim|out_dim|latent_dim|.*latent.*_dim", 16),
    (r"(num_)?(.*_)?(kv|key_value)_(attention_)?heads", HEADS),
    (r".*num_.*heads|.*n_?heads|.*_num_heads|num_heads|.*heads", HEADS),
    (r".*head_dim|.*dim_head", HEAD_DIM),
    (r".*(num_.*(layers|blocks)|n_.*layers|n?layers|depth)", LAYERS),
    (r".*(hidden_size|inner_dim|model_dim|token_dim|d_model|embed_dim|caption_projection_dim)|dim|cross_attention_dim"
     r"|.*_attention_dim", WIDTH),
    (r".*(text|caption|context|cond|joint|pooled|projection|time|condition|freq|feat|feats|image|embedding|global"
     r"|states|pair|rank|ff|ffn|intermediate|adaln|llm|motion|style|face|token).*_?(dim|dims|size|channels)(_t5|_dim)?",
     TEXT),
    (r"sample_(size|height|width)|.*image_size", SIDE),
    (r".*vocab_size|.*codebook_size|num_embeds.*", 100),
    (r"(num_)?experts|num_routed_experts", 4),
    (r"norm_num_groups", 8),
))
#: variants: how wide a channel count is left
SHAPES = 2

Shape = tuple[int, ...]
_AXES = r"(rope_)?ax[ie]s.*dims?.*|rope_(axes_)?dims?.*|rope_dim_list"
#: config fields that say how wide the text is, the likeliest first
_TEXT_WIDTHS = ("joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim",
                "cross_attention_dim", "context_in_dim", "cap_feat_dim",
                "encoder_hidden_states_channels", "text_hidden_dim")


def names() -> list[str]:
    """The classes of diffusers.models.transformers."""
    module = transformers_of_diffusers
    return [name for name in dir(module) if inspect.isclass(getattr(module, name))]


def build(name: str, shape: int, override: Mapping[str, Any]) -> torch.nn.Module:
    """The model of that class, its sizes made small."""
    model_class = getattr(transformers_of_diffusers, name)
    fields = {}
    for field, parameter in inspect.signature(model_class.__init__).parameters.items():
        value = _tiny(field, parameter.default, shape)
        if value is not parameter.default:
            fields[field] = value
    fields.update({key: tuple(value) if isinstance(value, list) else value
                   for key, value in override.get("config", {}).items()})
    return model_class(**fields)


def _tiny(name: str, default: Any, shape: int) -> Any:
    if isinstance(default, (tuple, list)) and re.match(_AXES, name):
        return type(default)(AXES[len(default)]) if len(default) in AXES else default
    if type(default) is not int or (shape == 1 and name.endswith("in_channels")):
        return default
    for pattern, size in RULES:
        if pattern.match(name):
            return min(default, size)
    return default


def inputs(name: str, model: torch.nn.Module, override: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Sets of keyword arguments to try: latents as an image, a video or tokens, and what goes with them."""
    given = override.get("inputs", {})
    parameters = inspect.signature(model.forward).parameters
    size = dict(model.config)
    channels = size.get("in_channels") or WIDTH
    tokens, text = SIDE * SIDE, TOKENS
    latents: tuple[Shape, ...] = ((BATCH, channels, SIDE, SIDE), (BATCH, channels, FRAMES, SIDE, SIDE),
                                  (BATCH, tokens, channels), (BATCH, FRAMES, channels, SIDE, SIDE))
    context = next((size[key] for key in _TEXT_WIDTHS if type(size.get(key)) is int), TEXT)
    axes = next((len(v) for k, v in size.items() if re.match(r"axes_dims?", k)), 3)
    makers = {
        "encoder_hidden_states": lambda: torch.randn(BATCH, text, context),
        "timestep": lambda: torch.tensor([500.0] * BATCH), "guidance": lambda: torch.tensor([3.0] * BATCH),
        "r_timestep": lambda: torch.tensor([100.0] * BATCH),
        "pooled_projections": lambda: torch.randn(BATCH, size.get("pooled_projection_dim", TEXT)),
        "encoder_attention_mask": lambda: torch.ones(BATCH, text, dtype=torch.bool),
        "txt_ids": lambda: torch.zeros(text, axes), "img_ids": lambda: torch.zeros(tokens, axes),
        "img_shapes": lambda: [(1, SIDE, SIDE)] * BATCH,
        "original_size": lambda: torch.tensor([[64, 64]] * BATCH),
        "target_size": lambda: torch.tensor([[64, 64]] * BATCH),
        "crop_coords": lambda: torch.tensor([[0, 0]] * BATCH),
        "class_labels": lambda: torch.tensor([1] * BATCH),
        "image_rotary_emb": lambda: None,
        "added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None},
        "txt_seq_lens": lambda: [text] * BATCH, "ids_per_batch": lambda: None,
    }
    optional = ("encoder_hidden_states", "timestep", "pooled_projections", "txt_ids", "img_ids", "img_shapes",
                "encoder_attention_mask")
    required = [key for key, p in parameters.items() if p.default is p.empty and key != "hidden_states"]
    sets = [required]
    for more in (("encoder_hidden_states", "timestep"), optional[:5], optional,
                 ("timestep", "class_labels"), ("encoder_hidden_states", "timestep", "added_cond_kwargs"),
                 ("encoder_hidden_states", "timestep", "encoder_attention_mask", "img_shapes",
                  "txt_seq_lens"),
                 ("guidance", *optional)):
        names_ = [*required, *(key for key in more if key in parameters and key not in required)]
        if names_ not in sets:
            sets.append(names_)
    for shape in latents if "hidden_states" in parameters and "hidden_states" not in given else (None,):
        for wanted in sets:
            torch.manual_seed(0)
            made = {} if shape is None else {"hidden_states": torch.randn(shape)}
            for key in dict.fromkeys([*wanted, *given]):
                if key in given:
                    if given[key] is not None:
                        made[key] = given_input(given[key])
                elif key not in makers:
                    raise LookupError(f"no rule makes the input {key!r}")
                else:
                    made[key] = makers[key]()
            yield made
