"""Inputs for a transformers model, by the names of its forward's parameters and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from shrink import HIDDEN, IMAGE, PATCH, TEXT_IDS

BATCH, TOKENS = 2, 12
#: audio samples, and frames of features
SAMPLES, FRAMES = 2400, 64
#: flat patches of an image, time x height x width
GRID = (1, 4, 4)


class Sizes:
    """Looks a number up in a config: by its names, then in its sub-configs."""

    def __init__(self, config):
        self.config = config

    def of(self, *names: str, default: int) -> int:
        return next(iter(self.all(*names)), default)

    def all(self, *names: str):
        """The values of these names, the outer configs first."""
        level = [self.config]
        while level:
            for config in level:
                for name in names:
                    value = getattr(config, name, None)
                    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
                        value = value[-1]
                    if type(value) is int:
                        yield value
            level = [sub for config in level for sub in vars(config).values() if hasattr(sub, "to_diff_dict")]


def _ids(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, shape)


def _image(sizes: Sizes) -> tuple[int, int, int]:
    side = sizes.of("image_size", "img_size", "input_size", "input_resolution", default=IMAGE)
    return sizes.of("num_channels", "in_channels", "in_chans", "num_input_channels", default=3), side, side


def _patch_length(sizes: Sizes) -> int:
    """Numbers in a flat patch, as Qwen2-VL and its kin take them."""
    patch = sizes.of("patch_size", "spatial_patch_size", default=PATCH)
    time = sizes.of("temporal_patch_size", default=1)
    return sizes.of("in_channels", "num_channels", "in_chans", default=3) * time * patch * patch


def _features(sizes: Sizes) -> torch.Tensor:
    bins = sizes.of("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_feat_size",
                    "input_size", "num_mel_channels", "feature_dim", default=80)
    frames = sizes.of("max_source_positions", default=FRAMES // 2) * 2
    return torch.randn(BATCH, bins, frames)


def _boxes(sizes: Sizes) -> torch.Tensor:
    corner = torch.randint(0, 8, (BATCH, TOKENS, 2))
    return torch.cat([corner, corner + torch.randint(1, 8, (BATCH, TOKENS, 2))], -1)


#: parameter of a forward -> its tensor
FEEDS: dict[str, Callable[[Sizes], Any]] = {
    "input_ids": lambda s: _ids((BATCH, TOKENS)),
    "decoder_input_ids": lambda s: _ids((BATCH, TOKENS)),
    "qformer_input_ids": lambda s: _ids((BATCH, TOKENS)),
    "attention_mask": lambda s: torch.ones(BATCH, TOKENS, dtype=torch.long),
    "bbox": _boxes,
    "pixel_values": lambda s: torch.randn(BATCH, *_image(s)),
    "pixel_values_videos": lambda s: torch.randn(BATCH, s.of("num_frames", default=4), *_image(s)),
    "input_features": _features,
    "input_values": lambda s: torch.randn(BATCH, SAMPLES),
    "input_features_mask": lambda s: torch.ones(BATCH, FRAMES, dtype=torch.long),
    "past_time_features": lambda s: torch.randn(BATCH, s.of("context_length", default=32),
                                                s.of("num_time_features", default=0)),
    "past_observed_mask": lambda s: torch.ones(BATCH, s.of("context_length", default=32)),
    "target_sizes": lambda s: torch.tensor([[4, 4]] * BATCH),
    "padding_mask": lambda s: torch.ones(BATCH, SAMPLES, dtype=torch.bool),
    "grid_thw": lambda s: torch.tensor([GRID] * BATCH),
    "image_grid_thw": lambda s: torch.tensor([GRID] * BATCH),
    "hidden_states": lambda s: torch.randn(BATCH * GRID[0] * GRID[1] * GRID[2], _patch_length(s)),
    "inputs_embeds": lambda s: torch.randn(BATCH, TOKENS, s.of("hidden_size", "d_model", default=HIDDEN)),
    "query_embeds": lambda s: torch.randn(BATCH, 8, s.of("hidden_size", default=HIDDEN)),
    "encoder_hidden_states": lambda s: torch.randn(
        BATCH, 8, s.of("encoder_hidden_size", "cross_hidden_size", "hidden_size", default=HIDDEN)),
    "past_values": lambda s: torch.randn(BATCH, s.of("context_length", default=32),
                                         s.of("num_input_channels", default=1)),
    "inputs": lambda s: torch.randn(BATCH, TOKENS, s.of("d_model", default=HIDDEN)),
}


#: other shapes that models want of the same name
OTHERWISE: dict[str, tuple[Callable[[Sizes], torch.Tensor], ...]] = {
    "pixel_values": (
        lambda s: torch.randn(BATCH, s.of("num_frames", default=4), *_image(s)),
        lambda s: torch.randn(BATCH * GRID[0] * GRID[1] * GRID[2], _patch_length(s)),
        lambda s: torch.randn(BATCH, 2, *_image(s)),
        lambda s: torch.randn(BATCH, s.of("num_channels", default=3), 2 * IMAGE, 2 * IMAGE),
        lambda s: torch.randn(BATCH, 1, 2 * IMAGE, 2 * IMAGE)),
    "input_values": (
        lambda s: torch.randn(BATCH, 1, SAMPLES),
        lambda s: torch.randn(BATCH, s.of("max_length", default=FRAMES), s.of("num_mel_bins", default=128))),
    "input_features": (
        lambda s: _features(s).mT.contiguous(),
        lambda s: torch.randn(BATCH, FRAMES, s.of("feature_projection_input_dim", "input_size", default=160)),
        lambda s: torch.randn(BATCH, 1, FRAMES, s.of("num_mel_bins", default=64))),
    "hidden_states": (
        lambda s: torch.randn(GRID[0] * GRID[1] * GRID[2] * BATCH, s.of("hidden_size", default=HIDDEN)),),
    "past_values": (lambda s: torch.randn(BATCH, s.of("context_length", default=32)),),
}


def feeds(model: torch.nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Keyword arguments for `model`, from the fewest to the most: what its forward requires, its main input,
    and the decoder's tokens of an encoder-decoder; then pictures or sound too; then all that a rule can make.

    Args:
        given: per parameter a shape (of normal numbers) or `{word: ...}` with a word of `_WORDS`, in the
            place of the rule's; null leaves the parameter out.

    Raises:
        LookupError: a parameter is required that no rule makes.
    """
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    wanted = [name for name, p in parameters.items() if p.default is p.empty
              and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    wanted += [name for name in ([main] if isinstance(main, str) else main)
               if name not in wanted and (name in parameters or not wanted)]
    if "decoder_input_ids" in parameters and getattr(model.config, "is_encoder_decoder", False):
        wanted.append("decoder_input_ids")
    wanted += [name for name in given if name not in wanted]
    sizes, seen = Sizes(model.config), []
    for more in ((), *MORE):
        names = list(dict.fromkeys([*wanted, *(name for name in more if name in parameters)]))
        if names in seen:
            continue
        seen.append(names)
        made = {name: _make(name, given, sizes) for name in names if given.get(name, 0) is not None}
        if "use_cache" in parameters and "use_cache" not in given:
            made["use_cache"] = False  # a cache is an object of its own, and no output
        yield made
        for name in names:
            for other in OTHERWISE.get(name, ()) if name not in given else ():
                yield {**made, name: other(sizes)}


#: what is added where the inputs so far do not do
MORE = (("input_ids",), ("pixel_values",), ("input_ids", "pixel_values"), ("input_ids", "input_features"),
        ("input_ids", "input_values"), ("bbox",), ("input_features_mask",), ("decoder_input_ids",),
        ("input_ids", "pixel_values", "qformer_input_ids", "decoder_input_ids"),
        ("pixel_values", "bbox"), ("encoder_hidden_states",), ("image_grid_thw",), ("attention_mask",),
        ("target_sizes",))


def _make(name: str, given: Mapping[str, Any], sizes: Sizes) -> Any:
    if name in given:
        return given_input(given[name])
    if name not in FEEDS:
        raise LookupError(f"no rule makes the input {name!r}")
    return FEEDS[name](sizes)


def given_input(spec: Any) -> Any:
    """The input that overrides.json describes (see `feeds`)."""
    if isinstance(spec, list):
        return torch.randn(*spec)
    (word, value), = spec.items()
    return _WORDS[word](value)


_WORDS: dict[str, Callable[[Any], Any]] = {
    "ids": lambda shape: _ids(tuple(shape)),
    "ones": lambda shape: torch.ones(*shape, dtype=torch.long),
    "zeros": lambda shape: torch.zeros(*shape, dtype=torch.long),
    "float_ones": lambda shape: torch.ones(*shape),
    "float_zeros": lambda shape: torch.zeros(*shape),
    "true": lambda shape: torch.ones(*shape, dtype=torch.bool),
    "list": lambda shapes: [torch.randn(*shape) for shape in shapes],
    "pairs": lambda pairs: [(torch.randn(*shape), torch.ones(*mask)) for shape, mask in pairs],
    "rotary": lambda shape: torch.polar(torch.ones(*shape), torch.randn(*shape)),
    "range": lambda size: torch.arange(size),
    "ranges": lambda sizes: [torch.arange(size) for size in sizes],
    "tensor": torch.tensor,
    "value": lambda value: value,
}
