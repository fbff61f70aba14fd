"""Small models with adapters that do something."""

import torch

from heedful.models.registry import FAMILIES
from heedful.nn.lora import adapted
from heedful.train.recipe import AdapterSettings


def lora_settings(kind="lora", **more):
    return AdapterSettings(kind=kind, **{"rank": 4, "alpha": 8.0, **more} if "lora" in kind else more)


def tiny(family="gpt", seed=0, **sizes):
    torch.manual_seed(seed)
    cls = FAMILIES[family].load()
    usual = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 23, "max_len": 16}
    return cls.create(cls.config_class.from_dict({**usual, **sizes})).eval()


def stir(model, seed=0):
    """Adapters that do something: B is zero at first."""
    draw = torch.Generator().manual_seed(seed)
    for layer in adapted(model).values():
        layer.lora_b.data = torch.randn(layer.lora_b.shape, generator=draw) * 0.2
    return model
