"""Text in the manner of Shakespeare, written by the model `shakespeare`: what the lesson bigram-to-gpt learns from.

    python benchmarks/zoo_data/plays.py > src/heedful/lessons/plays.txt

Eighty scenes of 2,560 characters, drawn from the model's own distribution (temperature 1, no filter), in a minute on
one core. Each begins after an empty line; when the context is full, its second half is read again and it goes on.
"""

from __future__ import annotations

import torch

import heedful
from heedful.models.base import Batch

N_SCENES, N_PARTS, LENGTH = 80, 20, 128


@torch.inference_mode()
def write_scenes() -> list[str]:
    """The scenes, without the lines that their ends cut."""
    loaded = heedful.load("shakespeare", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    written = torch.tensor([loaded.tokenizer.encode("\n\n")] * N_SCENES)
    for _ in range(N_PARTS):
        logits, state = loaded.model.start(Batch(written[:, -LENGTH:]))
        for _ in range(LENGTH):
            logits[:, list(loaded.banned_ids)] = -torch.inf
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            written = torch.cat([written, chosen], dim=1)
            logits = loaded.model.step(chosen[:, 0], state)
    scenes = [loaded.tokenizer.decode(ids) for ids in written.tolist()]
    return [scene[: scene.rindex("\n")].strip() for scene in scenes]


if __name__ == "__main__":
    print("\n\n".join(write_scenes()))
