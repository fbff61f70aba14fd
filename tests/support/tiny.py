"""A tiny random model of every family."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from heedful.models.base import Model
from heedful.models.registry import FAMILIES

SETTINGS: dict[str, Any] = dict(
    d_model=32, n_layers=2, n_heads=4, d_head=8, d_ff=48, vocab_size=61, max_len=64, image_size=8, patch_size=4,
    d_rotary=4,
)  # fmt: skip


def tiny(family: str, **changes: Any) -> Model:
    """Every number of it random, so that none can be lost unseen."""
    kind = FAMILIES[family].load()
    known = {f.name for f in dataclasses.fields(kind.config_class)}
    settings = {k: v for k, v in SETTINGS.items() if k in known}
    if "n_kv_heads" in known:
        settings["n_kv_heads"] = 2
    model = kind.create(kind.config_class(**{**settings, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model
