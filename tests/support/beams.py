"""transformers' beam search on a case's reference, to be held against."""

from __future__ import annotations

import torch
from torch import nn

from heedful.models.base import Batch
from support.case import Case, real

NO_TOKEN = 1000  # no token of any of them: only written after an end, never read


def prompts_of(case: Case) -> Batch:
    """What there is before an answer: the case's batch without the target that it teaches."""
    batch = case.batch()
    return batch if batch.source is None else Batch(source=batch.source, source_lengths=batch.source_lengths)


def softened(case: Case, scale: float) -> nn.Module:
    """The reference less sure of itself, so that answers of many lengths compete."""
    reference = case.reference()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:  # Marian's are no weights
                parameter *= scale
    return reference


def reference_beams(case: Case, reference: nn.Module, batch: Batch, **settings):
    """transformers' generate: the whole answers and their scores, row by row."""
    if batch.source is not None:
        ids, mask = batch.source, real(batch.source_lengths, *batch.source.shape)
    else:  # it wants its padding on the left
        rows, n = case.rows(batch), batch.tokens.shape[1]
        ids = torch.stack([nn.functional.pad(r.tokens[0], (n - r.tokens.shape[1], 0)) for r in rows])
        mask = torch.arange(n) >= n - batch.lengths[:, None]
    out = reference.generate(
        ids, attention_mask=mask.long(), do_sample=False, forced_eos_token_id=None, pad_token_id=NO_TOKEN,
        return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip
    new = out.sequences[:, 1 if batch.source is not None else ids.shape[1] :]
    answers = [tuple(t for t in row if t != NO_TOKEN) for row in new.tolist()]
    n = settings["num_return_sequences"]
    return [
        list(zip(answers[i : i + n], out.sequences_scores[i : i + n].tolist(), strict=True))
        for i in range(0, len(answers), n)
    ]
