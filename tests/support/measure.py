"""What parity means, measured: each function gives the largest error of ours against the reference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from heedful.generate.batch import greedy_batch
from heedful.models.mapping import to_hub
from support.case import Case, error
from support.tokenizer_parity import check_exported_tokenizer, tokenizer_of


def logits(case: Case, path: str = "plain") -> float:
    reference, ours, batch = case.reference(), case.model(path), case.batch()
    counted = case.counted(batch)
    with torch.no_grad():
        return error(ours(batch).logits[counted], case.reference_logits(reference, batch)[counted])


def loss(case: Case, path: str = "plain") -> float:
    reference, ours, batch = case.reference(), case.model(path), case.batch()
    with torch.no_grad():
        return error(case.objective(ours, batch).mean, case.reference_loss(reference, batch))


def gradients(case: Case, path: str = "plain") -> float:
    """Of every parameter, by the reference's names; ours come through the same map as the weights."""
    reference, ours, batch = case.reference(), case.model(path), case.batch()
    case.objective(ours, batch).mean.backward()
    case.reference_loss(reference, batch).backward()
    weights = case.weights(ours)
    theirs = {weights.canonical_name(n): p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in ours.named_parameters()}
    worst = 0.0
    names = set()
    for name, gradient in to_hub(weights, found):
        names.add(name)
        want = theirs.get(name)
        worst = max(worst, error(gradient, torch.zeros_like(gradient) if want is None else want))
    left = {n for n in set(theirs) - names if theirs[n].abs().max() > 0}
    assert not left, f"the reference has gradients that ours has not: {sorted(left)}"
    return worst


def greedy_ids(case: Case, path: str = "plain", n: int = 20) -> int:
    """How many of n greedy ids differ, over a padded batch and with our cache on."""
    reference, ours, batch = case.reference(), case.model(path), case.batch()
    prompt = batch if case.packs else type(batch)(source=batch.source, source_lengths=batch.source_lengths)
    mine, theirs = greedy_batch(ours, prompt, n), case.reference_greedy(reference, batch, n)
    assert [len(r) for r in mine] == [n] * len(theirs)
    return sum(a != b for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))


@torch.no_grad()
def cached(case: Case, path: str = "plain") -> float:
    """Reading token by token with a cache against reading at once, rows of unequal length together."""
    ours, batch = case.model(path), case.batch()
    whole = ours(batch).logits
    first = type(batch)(batch.tokens[:, :3], source=batch.source, source_lengths=batch.source_lengths)
    got, state = ours.start(first)
    worst = error(got, whole[:, 2])
    for t in range(3, batch.tokens.shape[1]):
        worst = max(worst, error(ours.step(batch.tokens[:, t], state), whole[:, t]))
    return worst


@torch.no_grad()
def round_trip(case: Case) -> float:
    """Our export, read by the reference's own from_pretrained: its logits against the original's. The tokenizer that
    goes with it must be the same too."""
    from heedful.weights.save import save

    reference, batch, ours = case.reference(), case.batch(), case.model()
    tokenizer = tokenizer_of(ours.family)
    with tempfile.TemporaryDirectory() as folder:
        save(ours, Path(folder), tokenizer)
        kind = reference.config._attn_implementation  # the same arithmetic on both sides
        again, info = type(reference).from_pretrained(folder, output_loading_info=True, attn_implementation=kind)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        again.eval()
        if tokenizer is not None:
            check_exported_tokenizer(Path(folder), tokenizer, ours, again)
        counted = case.counted(batch)
        return error(case.reference_logits(again, batch)[counted], case.reference_logits(reference, batch)[counted])
