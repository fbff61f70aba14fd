"""Every published size has exactly the paper's, or the reference's, number of parameters."""

import pytest
import torch
import transformers
from transformers import AutoConfig

from heedful.models.registry import FAMILIES, create, size, sizes


@pytest.mark.parametrize("name", sizes())
def test_parameters(name):
    assert create(name, device="meta").n_parameters() == size(name).parameters


@pytest.mark.parametrize("name", sizes())
def test_the_reference_counts_the_same(name):
    """The reference builds what our config.json describes, and counts as many."""
    model = create(name, device="meta")
    try:
        hub = model.config.to_hub()
    except (ValueError, NotImplementedError):
        pytest.skip("the hub has no layout for this one")
    kind = hub.pop("model_type")
    config = AutoConfig.for_model(kind, **hub)
    with torch.device("meta"):
        reference = getattr(transformers, hub["architectures"][0])(config)
        if hub.get("tie_word_embeddings") is False and kind == "t5":
            # The reference ties every fresh T5; from v1.1 on the published files have two matrices.
            reference.lm_head.weight = torch.nn.Parameter(torch.empty_like(reference.lm_head.weight))
    # Marian's tables of sinusoids are frozen parameters there, and the bias of its logits a buffer.
    counted = [p for p in reference.parameters() if p.requires_grad]
    counted += [b for name, b in reference.named_buffers() if name == "final_logits_bias"]
    assert sum(p.numel() for p in counted) == size(name).parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_where_the_registry_says(family):
    found = FAMILIES[family].load()
    assert found.family == family


def test_an_unknown_name_gets_its_neighbours():
    with pytest.raises(ValueError, match="gpt2-medium"):
        size("gpt2-medum")


def test_an_unknown_setting_gets_its_neighbour():
    with pytest.raises(ValueError, match="did you mean n_layers"):
        create("gpt2", device="meta", n_layer=3)


@pytest.mark.parametrize("name", sizes())
def test_the_table_says_the_main_settings_itself(name):
    """`heedful info` reads it without the family's code: what matters must not hide in a default."""
    chosen = size(name)
    config = FAMILIES[chosen.family].load().config_class.from_dict(chosen.settings)
    for key in ("d_model", "n_layers", "n_heads", "d_ff", "vocab_size", "max_len"):
        if getattr(config, key, None) is not None:
            assert chosen.settings[key] == getattr(config, key)
