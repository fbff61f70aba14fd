"""The Vision Transformer: the order of its patches, images of other sizes, the bare encoder."""

import pytest
import torch
from transformers import ViTConfig, ViTModel

from heedful.models.registry import for_hub
from heedful.models.vit import ViT, cut_patches
from heedful.models.vit import ViTConfig as OurConfig
from heedful.weights.load import DictSource, load_tensors
from heedful.weights.save import save
from support.case import error, randomize
from support.cases.vit import TINY

SMALL = dict(d_model=32, n_layers=2, n_heads=4, d_ff=48, image_size=12, patch_size=4)


def bare():
    torch.manual_seed(0)
    reference = randomize(ViTModel(ViTConfig(**TINY)))
    hub = reference.config.to_dict() | {"architectures": ["ViTModel"]}
    family = for_hub(hub).load()
    with torch.device("meta"):
        model = family(family.config_class.from_hub(hub))
    load_tensors(model, DictSource({n: p.detach().clone() for n, p in reference.named_parameters()}))
    return model.eval(), reference


def test_patches_run_along_the_rows_channel_by_channel():
    image = torch.arange(2 * 4 * 6).view(1, 2, 4, 6)
    patches = cut_patches(image, (2, 2))
    assert patches.shape == (1, 6, 8)
    assert patches[0, 0].tolist() == [0, 1, 6, 7, 24, 25, 30, 31]
    assert patches[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]  # to the right
    assert patches[0, 3].tolist() == [12, 13, 18, 19, 36, 37, 42, 43]  # then down


@torch.no_grad()
@pytest.mark.parametrize("size", [(12, 12), (24, 24), (8, 8), (16, 8), (4, 36)])
def test_any_size_equals_the_reference(size):
    model, reference = bare()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    theirs = reference(images, interpolate_pos_encoding=True)
    output = model(images)
    assert error(output.hidden, theirs.last_hidden_state) < 1e-5
    assert error(output.extra["pooled"], theirs.pooler_output) < 1e-5


def test_the_bare_model_goes_back_to_the_reference(tmp_path):
    model, reference = bare()
    save(model, tmp_path / "saved")
    again = ViTModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in reference.named_parameters())


def test_images_that_do_not_fit_are_refused():
    model = ViT.create(OurConfig(**SMALL))
    with pytest.raises(ValueError, match="10 x 12"):
        model(torch.zeros(1, 3, 10, 12))
    with pytest.raises(ValueError, match="3 channels"):
        model(torch.zeros(1, 1, 12, 12))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pooler_act": "relu"}, "pooler_act"),
        ({"pooler_output_size": 5}, "pooler_output_size"),
        ({"image_size": [224, 112, 3]}, "image_size"),
        ({"image_size": [224, 100]}, "multiple"),
        ({"image_size": 225}, "multiple"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        OurConfig.from_hub({"model_type": "vit", **changes})
