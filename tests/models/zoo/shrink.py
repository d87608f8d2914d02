"""Tiny configs: every size of a transformers or diffusers config made small by the name it goes by.

Rules know the field's words (`num_attention_heads`, `n_layer`, `patch_size`), not models. Where a model needs
something else, `overrides.json` says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any


class Layers(int):
    """The number of layers, told from other sizes that are 2."""


HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
LAYERS = Layers(2)
VOCAB = 128
#: token ids that inputs are made of; special tokens lie outside of them
TEXT_IDS = range(10, 90)
#: where special tokens other than these begin
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FIRST_SPECIAL = 100
IMAGE, PATCH = 32, 8
#: how the halves of a head are shared out among time, height and width
SECTIONS = {"mrope_section": [4, 2, 2]}

#: (pattern of the whole name, size). The first that matches counts. A size is never enlarged.
RULES: tuple[tuple[str, int], ...] = tuple((rf"(?:{pattern})\Z", size) for pattern, size in (
    (r".*vocab_size(_or_config_json_file)?|.*vocab(ulary)?_dim|entity_vocab.*|.*codebook_size|num_embeddings",
     VOCAB),
    (r".*(num|n)_?(key_value|kv)_?heads|n_head_kv|num_query_groups|.*multi_query_group_num", 2),
    (r"rotary_dim", HEAD_DIM),
    (r".*heads?|.*num_attention_heads?_.*|.*_n_heads|attention_heads?", HEADS),
    (r".*(hidden|num|n|encoder|decoder|transformer|swin|conformer).*_(layers|blocks|layer)|n_layers?|num_layers?_.*"
     r"|depth|.*_depth|num_(hidden_)?(layers|blocks)|.*num_blocks.*", LAYERS),
    (r"(qk|q|k|v)?_?(nope|rope|pe|value|v)_head_dim|.*head_dim|.*_kv_channels|kv_channels|attention_key_size|d_kv"
     r"|.*head_size|qk_(nope|rope)_head_dim", HEAD_DIM),
    (r".*lora_(rank|dim)|.*_rank", HEAD_DIM),
    (r".*(intermediate|ffn|ff|inner|mlp|feed_?forward).*(size|dim|dims|channels)|d_inner|n_inner|d_ff",
     HIDDEN),
    (r".*(hidden|embedding|embed|embd|projection|proj|output|input|model|latent|text|vision|caption|context|joint"
     r"|cross_attention|feature|time|encoder|decoder|hid|entity|quantizer|codevector|bottleneck|fusion)"
     r"_?(state_)?(size|dims?|width)", HIDDEN),
    (r"d_model|dim|n_embd|n_embed|width|embed_dim|hidden_dim|out_dim|fusion_hidden_size|base_channels"
     r"|hidden_channels|decoder_channels|d_embed|lru_width|conv_dim|num_channels_latents|projection_size",
     HIDDEN),
    (r".*(max|n)_?(position(al)?|seq|source|target|text)_?(embeddings|len|length|positions).*|n_positions|n_ctx"
     r"|max_(seq(uence)?|sentence)_len(gth)?|max_.*_positions|seq_length|context_length", 128),
    (r".*experts?_per_tok(en)?|.*top_?k(_experts)?|moe_k|.*num_shared_experts|num_selected_experts"
     r"|n_shared_experts", 2),
    (r".*(num|n)_.*experts|num_experts.*|moe_num_.*experts?|.*_experts", 4),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r".*(num|n)_.*(queries|latents|slots|prompts)|num_queries|query_length", 8),
    (r".*image_size|.*img_size|input_size|input_resolution|.*crop_size", IMAGE),
    (r".*patch_size", PATCH),
    (r".*sliding_window|attention_window|local_attention_window|window_size|.*block_size|chunk_size", 8),
    (r"num_frames|frames", 4),
    (r"ssm_state_size|d_state|state_size|mamba_d_state|linear_.*_dim", HEAD_DIM),
))
_RULES = tuple((re.compile(pattern), size) for pattern, size in RULES)
#: fields whose default None leaves a model without what it needs, though the config's own __post_init__ ran
FILLS = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "vocab_size": VOCAB, "num_experts_per_tok": 2,
         "n_routed_experts": 4, "num_experts": 4, "moe_intermediate_size": HIDDEN, "prediction_length": 8,
         "intermediate_size": HIDDEN, "top_k_experts": 2, "hidden_size": HIDDEN}
#: lists of sizes, a value a stage or a layer: depths become 1, widths shrink together
_DEPTHS = re.compile(r".*(depths?|layers|blocks|num_layers)\Z")
_STAGE_WIDTHS = re.compile(r".*(hidden_sizes|embed_dims?|dims?|channels|neck_hidden_sizes|widths?|conv_dim"
                           r"|filter_sizes|out_features_dims)\Z")
#: layers that are read on the way
_TAPS = ("out_indices", "vision_feature_layer", "backbone_out_indices", "feature_layers")
_TAPS_BY_NAME = ("out_features",)
_CHANNELS = re.compile(r"embed_dim|embedding_size|.*image_size|hidden_size|.*channels|num_mel_bins|width\Z")
_TOKEN = re.compile(r".*_token(_id|_index|_idx)?(s|_list)?\Z|.*_(bos|eos|pad)_id\Z|.*_(id|index)\Z")


@dataclasses.dataclass(frozen=True)
class Rules:
    """A variant of the rules: some models want sizes kept that others can have small.

    Attributes:
        stages: lists of sizes, a stage each, are made small too.
        channels: widths of convolutions and swin's embeddings are.
        layers: how many there are; more for models that read several on the way.
    """

    stages: bool = True
    channels: bool = True
    layers: int = LAYERS


#: in the order in which they are tried
VARIANTS = (Rules(), Rules(stages=False), Rules(layers=4), Rules(stages=False, channels=False),
            Rules(stages=False, channels=False, layers=4))


def tiny_value(name: str, default: Any, rules: Rules) -> Any:
    """The small form of a field's default; the default itself where no rule knows the name."""
    if isinstance(default, bool) or default is None:
        return default
    if not rules.stages and isinstance(default, (list, tuple)) and not _DEPTHS.match(name):
        return default
    if not rules.channels and _CHANNELS.match(name):
        return default
    if isinstance(default, (list, tuple)) and default and all(type(x) is int for x in default):
        return type(default)(_tiny_list(name, list(default)))
    if type(default) is not int:
        return default
    for pattern, size in _RULES:
        if pattern.match(name):
            return min(default, rules.layers if size is LAYERS else size)
    return default


def _tiny_list(name: str, default: list[int]) -> list[int]:
    if _DEPTHS.match(name):
        return [1] * len(default)
    if _STAGE_WIDTHS.match(name) and max(default) > HIDDEN:
        scale = max(default) / HIDDEN
        return [max(16, int(x / scale) // 16 * 16) for x in default]
    if re.match(r".*(image_size|img_size)\Z", name):
        return [min(x, IMAGE) for x in default]
    if re.match(r".*patch_size\Z", name):
        return [min(x, PATCH) for x in default]
    return default


class TokenIds:
    """Special tokens get ids within the small vocabulary; one name has one id in all parts of a config."""

    def __init__(self):
        self.ids: dict[str, int] = dict(SPECIAL)

    def of(self, name: str) -> int:
        return self.ids.setdefault(name, FIRST_SPECIAL + len(self.ids) - len(SPECIAL))


def tiny_fields(config_class: type, overrides: Mapping[str, Any], tokens: TokenIds,
                given: Mapping[str, Any] | None = None, rules: Rules = VARIANTS[0]) -> dict[str, Any]:
    """Keyword arguments for the tiny config of a transformers config class.

    Args:
        overrides: values of fields that rules get wrong; for a sub-config a mapping of its own.
        given: values with which a composite config makes this one, in the place of its defaults.
    """
    given = dict(given or {})
    default = config_class(**given)
    subs = {name for name, value in vars(default).items() if hasattr(value, "to_diff_dict")}
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(config_class):
        if not f.init:
            continue
        raw = given.get(f.name, f.default if f.default is not dataclasses.MISSING else
                        f.default_factory() if f.default_factory is not dataclasses.MISSING else None)
        if f.name in subs:
            sub = getattr(default, f.name)
            inner, made = overrides.get(f.name) or {}, _given(config_class, f.name, raw)
            fields[f.name] = type(sub)(**tiny_fields(type(sub), inner, tokens, made, rules))
        elif f.name == "layer_types" or f.name.endswith("_layer_types"):
            kinds = getattr(default, f.name, None)
            if isinstance(kinds, (list, tuple)) and kinds:
                kinds = list(dict.fromkeys(kinds))
                fields[f.name] = (kinds * LAYERS)[:max(LAYERS, len(kinds))]
        elif raw is None and f.name in FILLS and getattr(default, f.name, None) is None:
            fields[f.name] = FILLS[f.name]
        elif f.name in SECTIONS and isinstance(raw, (list, tuple)):
            fields[f.name] = SECTIONS[f.name]
        elif isinstance(raw, dict) or f.name == "rope_parameters":
            raw = raw if raw is not None else getattr(default, f.name, None)
            if not isinstance(raw, dict):
                continue
            small = {key: SECTIONS.get(key, value) for key, value in raw.items()}
            if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
                small |= SECTIONS
            if small != raw:
                fields[f.name] = small
        elif _TOKEN.match(f.name) and type(raw) is int and raw > 2:
            fields[f.name] = tokens.of(f.name)
        elif f.name in _TAPS and isinstance(raw, (list, tuple)) and not hasattr(raw[0], "upper"):
            fields[f.name] = _taps(raw, rules)
        elif f.name in _TAPS_BY_NAME and isinstance(raw, (list, tuple)) and rules.layers > LAYERS:
            fields[f.name] = [f"stage{min(i + 1, rules.layers)}" for i in range(len(raw))]
        elif f.name in SPECIAL and (type(raw) is int or isinstance(raw, list)):
            fields[f.name] = SPECIAL[f.name]
        else:
            value = tiny_value(f.name, raw, rules)
            if value is not raw:
                fields[f.name] = value
    heads, groups = (getattr(default, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads == groups and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if "layer_types" in fields:
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in fields:
                fields[name] = len(fields["layer_types"])
    for name, value in given.items():
        if name not in fields and name not in subs:
            tapped = name in _TAPS and isinstance(value, (list, tuple))
            fields[name] = _taps(value, rules) if tapped else tiny_value(name, value, rules)
    fields.update({name: value for name, value in overrides.items() if name not in subs})
    return fields


def _taps(indices: list | tuple, rules: Rules) -> list | tuple:
    """As many of the layers that there are."""
    return type(indices)(min(i + 1, rules.layers) for i in range(len(indices)))


def _given(config_class: type, name: str, raw: Any) -> dict[str, Any]:
    """What a composite config passes to its sub-config of that name."""
    spec = getattr(config_class, "sub_configs_defaults", {}).get(name)
    made = dict(getattr(spec, "init_kwargs", None) or {})
    return {**made, **raw} if isinstance(raw, dict) else made
