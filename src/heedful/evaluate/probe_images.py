"""Linear probes of image models: how well a logistic regression on frozen features of each layer classifies images.

The features of an image are the mean over its positions, pixels or patches, of what a layer's attention norm gives out
(Chen et al. 2020, section 2.4, for image GPT, where the middle layers are the best; here for ViT too).

    N images, L layers, E width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heedful.data.images import ImageSet
from heedful.evaluate.probe import LinearProbe, ProbeResult, Progress
from heedful.models.base import Batch, Model
from heedful.models.image_gpt import ImageGPT, quantize
from heedful.models.vit import ViT

IMAGE_BATCH = 32


def probe_images(
    model: Model,
    train: ImageSet,
    dev: ImageSet,
    layers: Sequence[str] | None = None,
    *,
    progress: Progress = lambda what, done, of: None,
) -> list[ProbeResult]:
    """Fit and score a probe on each layer, or on some: "first" for the embeddings, or a layer's number from 0."""
    if train.labels is None or dev.labels is None:
        raise ValueError("a probe predicts the classes of images, and these have none")
    dev = dev.with_names(train.names)
    assert dev.labels is not None
    known = image_features(model, train, lambda done, of: progress("reading", done, of))
    tested = image_features(model, dev, lambda done, of: progress("reading more", done, of))
    every = ["first", *map(str, range(len(known) - 1))]
    chosen = every if layers is None or list(layers) == ["each"] else list(layers)
    if unknown := [name for name in chosen if name not in every]:
        raise ValueError(f"there is no layer {unknown[0]}: this model has first and 0 to {len(known) - 2}")
    labels, expected = torch.from_numpy(train.labels), torch.from_numpy(dev.labels)
    rows = []
    for i, which in enumerate(chosen):
        progress(f"fitting {which}", i, len(chosen))
        here = every.index(which)
        fitted = LinearProbe.fit(known[here], labels, len(train.names))
        right, right_known = (fitted(tested[here]) == expected), (fitted(known[here]) == labels)
        accuracy, train_accuracy = (float(x.float().mean()) for x in (right, right_known))
        rows.append(ProbeResult(which, known.shape[-1], accuracy, None, train_accuracy))
    progress("fitting", len(chosen), len(chosen))
    return rows


@torch.no_grad()
def image_features(
    model: Model, images: ImageSet, progress: Callable[[int, int], None] = lambda done, of: None
) -> Tensor:
    """The features of images by layer (L + 1, N, E): the input of the first layer, then the output of each."""
    if not isinstance(model, ImageGPT | ViT):
        raise ValueError("this model reads no images")
    stack = model.decoder if isinstance(model, ImageGPT) else model.encoder
    norms = [*(block.get_submodule("attention_norm") for block in stack.blocks), stack.get_submodule("norm")]
    seen: list[Tensor] = []
    hooks = [norm.register_forward_hook(lambda _module, _inputs, out: seen.append(out.mean(dim=1))) for norm in norms]
    was_training = model.training
    model.eval()
    parts = []
    try:
        for begin in range(0, len(images), IMAGE_BATCH):
            model.hidden(_inputs(model, images.scaled(slice(begin, begin + IMAGE_BATCH)).to(model.device)))  # type: ignore[arg-type]
            parts.append(torch.stack(seen).float().cpu())
            seen.clear()
            progress(min(begin + IMAGE_BATCH, len(images)), len(images))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return torch.cat(parts, dim=1)


def _inputs(model: ImageGPT | ViT, pixels: Tensor) -> Batch | Tensor:
    """Images (B, C, H, W) from -1 to 1 as the model's `hidden` reads them."""
    if isinstance(model, ViT):
        if pixels.shape[1] != model.config.n_channels:
            raise ValueError(f"the model reads images of {model.config.n_channels} channels, not {pixels.shape[1]}")
        return pixels
    if tuple(pixels.shape[2:]) != model.image_shape:
        height, width = model.image_shape
        raise ValueError(
            f"the model reads images of {height} x {width} pixels, not {pixels.shape[2]} x {pixels.shape[3]}"
        )
    return model.training_batch(quantize(pixels, model.palette.to(pixels.device)))
