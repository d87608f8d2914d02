"""What laying out streams that lie across memory is for: models of libraries."""

import pytest
import torch
from cat_pieces import compiled
from checks import assert_within_bound

from ascend_ln_fuse import last_reports

NOTE = "1 stream that lies across memory is copied where it begins: {} norms read rows"


def siglip(transformers):
    config = transformers.SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                             num_attention_heads=2, image_size=32, patch_size=4)
    return transformers.SiglipVisionModel(config), torch.randn(2, 3, 32, 32), 7


def whisper(transformers):
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(d_model=32, encoder_layers=3, encoder_attention_heads=2,
                                        encoder_ffn_dim=64, max_source_positions=64, num_mel_bins=8)
    return WhisperEncoder(config), torch.randn(2, 8, 128), 7


def vit(transformers):
    config = transformers.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                    num_attention_heads=2, image_size=32, patch_size=4)
    return transformers.ViTModel(config), torch.randn(2, 3, 32, 32), 0


@pytest.mark.parametrize("build", [siglip, whisper, vit])
def test_transformers(build):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made, x, norms = build(transformers)
    made = made.eval().requires_grad_(False)
    with torch.no_grad():
        ours, eager = (f(x).last_hidden_state for f in (compiled(made), made))
        assert_within_bound(ours, eager, made.double()(x.double()).last_hidden_state)
    assert last_reports()[-1].notes == ((NOTE.format(norms),) if norms else ())


def test_diffusers():
    """The image stream of HunyuanVideo, in blocks of two streams."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    made = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8)).eval().requires_grad_(False)
    given = dict(hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([1]), guidance=torch.ones(1),
                 encoder_hidden_states=torch.randn(1, 5, 16), encoder_attention_mask=torch.ones(1, 5),
                 pooled_projections=torch.randn(1, 8))
    before = len(last_reports())
    with torch.no_grad():
        ours, eager = (f(**given, return_dict=False)[0] for f in (compiled(made), made))
        wide = {key: x.double() if x.is_floating_point() else x for key, x in given.items()}
        assert_within_bound(ours, eager, made.double()(**wide, return_dict=False)[0])
    assert sum(NOTE.format(4) in report.notes for report in last_reports()[before:]) == 1
