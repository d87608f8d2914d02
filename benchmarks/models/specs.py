"""The models, one entry each: published sizes, the inputs of a usual call, and small sizes for smoke runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIT, OTHER = "DiT", "other"


@dataclass(frozen=True)
class Spec:
    """A model at its published size, but for the number of layers.

    Attributes:
        builder: function of `builders` that makes it.
        library: distribution that it is from; "" for our own code.
        kind: `DIT` for video and image transformers, else `OTHER` (the goals differ).
        size: the configuration.
        depth: configuration field -> layers for each of `--layers`.
        published: the `--layers` that make the depth of the published model.
        layers: how many are built unless `--layers` says otherwise.
        call: what its inputs are made from; `words` says it for the table.
        tiny, tiny_call: what replaces entries of `size` and `call` in a smoke run.
    """

    name: str
    builder: str
    library: str
    kind: str
    size: Mapping[str, Any]
    depth: Mapping[str, int]
    published: int
    layers: int
    call: Mapping[str, int]
    words: str
    tiny: Mapping[str, Any] = field(default_factory=dict)
    tiny_call: Mapping[str, int] = field(default_factory=dict)

    def config(self, layers: int, tiny: bool) -> dict[str, Any]:
        """The configuration with that many layers."""
        return {**self.size, **(self.tiny if tiny else {}), **{k: n * layers for k, n in self.depth.items()}}

    def depth_words(self, layers: int) -> str:
        """That many of the published layers, for the tables: "2 of 19 double + 38 single"."""
        kinds = {name: f" {_STREAMS[name]}" if len(self.depth) > 1 else "" for name in self.depth}
        words = " + ".join(f"{n * self.published}{kinds[name]}" for name, n in self.depth.items())
        return words if layers == self.published else f"{layers} of {words}"

    def inputs(self, tiny: bool) -> dict[str, int]:
        return {**self.call, **(self.tiny_call if tiny else {})}


#: What layers are called in a model that has some of each kind.
_STREAMS = {"num_layers": "double", "num_single_layers": "single"}
_TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
_TINY_LM = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}

SPECS: tuple[Spec, ...] = (
    # A share of 8 of SeedVR-7B's block: 3 of 24 heads, so that q, k, v are the article's [50220, 9, 128].
    Spec("SeedVR-like MMDiT", "seedvr", "", DIT,
         {"width": 3072, "heads": 3, "head_dim": 128, "mlp": 1536, "windows": 31}, {"layers": 1}, 36, 4,
         {"vid": 50220, "txt": 58},
         "50220 video tokens in 31 windows, 58 of text; 1 of 8 tensor-parallel shares",
         {"width": 96, "head_dim": 32, "mlp": 64, "windows": 4}, {"vid": 64, "txt": 5}),
    Spec("FLUX.1-dev", "flux", "diffusers", DIT,
         {"guidance_embeds": True, "axes_dims_rope": (16, 56, 56)}, {"num_layers": 1, "num_single_layers": 2},
         19, 2, {"batch": 1, "side": 64, "txt": 512},
         "batch 1, 1024 x 1024: 4096 + 512 tokens",
         {**_TINY_HEADS, "in_channels": 16, "joint_attention_dim": 48, "pooled_projection_dim": 32,
          "axes_dims_rope": (8, 12, 12)}, {"side": 4, "txt": 8}),
    Spec("SD3.5-large", "sd3", "diffusers", DIT,
         {"sample_size": 128, "num_attention_heads": 38, "caption_projection_dim": 2432,
          "pos_embed_max_size": 192, "qk_norm": "rms_norm"}, {"num_layers": 1}, 38, 4,
         {"batch": 1, "side": 128, "txt": 333}, "batch 1, 1024 x 1024: 4096 + 333 tokens",
         {**_TINY_HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "pos_embed_max_size": 8,
          "caption_projection_dim": 64, "joint_attention_dim": 48, "pooled_projection_dim": 32},
         {"side": 8, "txt": 8}),
    Spec("Wan2.1-1.3B", "wan", "diffusers", DIT,
         {"num_attention_heads": 12, "ffn_dim": 8960}, {"num_layers": 1}, 30, 2,
         {"batch": 1, "frames": 21, "height": 60, "width": 104, "txt": 512},
         "batch 1, 81 frames of 832 x 480: 32760 tokens, 512 of text",
         {**_TINY_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 48, "freq_dim": 32, "ffn_dim": 128},
         {"frames": 2, "height": 8, "width": 8, "txt": 8}),
    Spec("HunyuanVideo", "hunyuan", "diffusers", DIT,
         {"guidance_embeds": True}, {"num_layers": 1, "num_single_layers": 2}, 20, 2,
         {"batch": 1, "frames": 16, "height": 40, "width": 64, "txt": 256},
         "batch 1, 61 frames of 512 x 320: 10240 + 256 tokens",
         {**_TINY_HEADS, "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 48,
          "pooled_projection_dim": 32, "rope_axes_dim": (8, 12, 12)},
         {"frames": 2, "height": 8, "width": 8, "txt": 8}),
    Spec("ViT-L/16", "vit", "transformers", OTHER,
         {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 224},
         {"num_hidden_layers": 1}, 24, 4, {"batch": 32}, "batch 32, 224 x 224: 197 tokens",
         {**_TINY_LM, "image_size": 32}, {"batch": 2}),
    Spec("BERT-large", "bert", "transformers", OTHER,
         {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
         {"num_hidden_layers": 1}, 24, 4, {"batch": 8, "tokens": 512}, "batch 8, 512 tokens",
         {**_TINY_LM, "vocab_size": 100}, {"batch": 2, "tokens": 16}),
    Spec("GPT-2 XL", "gpt2", "transformers", OTHER,
         {"n_embd": 1600, "n_head": 25}, {"n_layer": 1}, 48, 4,
         {"batch": 4, "tokens": 1024}, "batch 4, 1024 tokens",
         {"n_embd": 64, "n_head": 2, "vocab_size": 100}, {"batch": 2, "tokens": 16}),
    Spec("Llama-3-8B", "llama", "transformers", OTHER,
         {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
          "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
         {"num_hidden_layers": 1}, 32, 4, {"batch": 1, "tokens": 4096}, "batch 1, 4096 tokens",
         {**_TINY_LM, "num_key_value_heads": 1, "vocab_size": 100}, {"tokens": 16}),
)


def chosen(names: list[str] | None) -> list[Spec]:
    """The specs whose names contain one of `names`, in any case; all of them for None.

    Raises:
        ValueError: a name that none contains.
    """
    if not names:
        return list(SPECS)
    for name in names:
        if not any(name.lower() in spec.name.lower() for spec in SPECS):
            raise ValueError(f"no model {name!r}; known: {', '.join(spec.name for spec in SPECS)}")
    return [spec for spec in SPECS if any(name.lower() in spec.name.lower() for name in names)]
