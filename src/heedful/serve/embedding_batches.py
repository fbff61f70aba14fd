"""Dynamic batching of embeddings: the texts of requests that wait for a model at the same time share its batches.

A job is one request's texts. All of a model's jobs run in its thread, in turns: the job whose turn it is computes a
batch that begins with its longest text and is filled with texts of nearly that length, its own and those of other jobs.
So many requests of one text each cost what one request of many texts costs, and a request of thousands of texts takes
its turns with the others.

    N texts of a job, B rows of a batch, E model width
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heedful.loaded import Loaded
from heedful.tasks.embed import MAX_BATCH, batch_by_length, embed_rows

MAX_CANDIDATES = 4096  # texts that are considered for a batch


class EmbeddingJob(Iterator[Tensor]):
    """The texts of a request as token ids. Iterating computes batches until all are done; the last value is the vectors
    (N, E) in the order of the texts."""

    def __init__(self, batcher: EmbeddingBatcher, rows: Sequence[Sequence[int]]) -> None:
        self.batcher, self.rows = batcher, rows
        self.waiting = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the longest first
        self.vectors = torch.empty(len(rows), batcher.loaded.model.config.d_model)
        self.is_over = False

    def __next__(self) -> Tensor:
        """A batch, or the end; what other jobs have computed of this one is done already."""
        if self.is_over:
            raise StopIteration
        try:
            if self.waiting:
                self.batcher.compute(self)
        except Exception:
            self.close()
            raise
        self.is_over = not self.waiting
        return self.vectors

    def close(self) -> None:
        """Give it up."""
        self.waiting, self.is_over = [], True


class EmbeddingBatcher:
    """The embedding jobs of one model. A job that nobody waits for any more is forgotten with its handle."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._jobs: WeakKeyDictionary[EmbeddingJob, None] = WeakKeyDictionary()
        self._lock = threading.Lock()  # for the list of jobs, to which the event loop adds

    def add(self, rows: Sequence[Sequence[int]]) -> EmbeddingJob:
        """A job for these rows of token ids; on the event loop."""
        job = EmbeddingJob(self, rows)
        with self._lock:
            self._jobs[job] = None
        return job

    def compute(self, job: EmbeddingJob) -> None:
        """Compute a batch that begins with the job's longest text; in the model's thread."""
        longest = len(job.rows[job.waiting[0]])
        with self._lock:
            others = [other for other in self._jobs if other is not job]
        own = ((job, i) for i in job.waiting)
        fitting = ((other, i) for other in others for i in other.waiting if len(other.rows[i]) <= longest)
        candidates = list(islice(chain(own, fitting), MAX_CANDIDATES))
        batch = next(batch_by_length([len(owner.rows[i]) for owner, i in candidates], MAX_BATCH))
        chosen = [candidates[k] for k in batch]
        try:
            vectors = self._embed(chosen)
        except Exception:  # not for the texts of others
            chosen = [(owner, i) for owner, i in chosen if owner is job]
            vectors = self._embed(chosen)
        done: dict[EmbeddingJob, set[int]] = {}
        for (owner, i), vector in zip(chosen, vectors, strict=True):
            owner.vectors[i] = vector
            done.setdefault(owner, set()).add(i)
        for owner, indices in done.items():
            owner.waiting = [i for i in owner.waiting if i not in indices]

    def _embed(self, chosen: Sequence[tuple[EmbeddingJob, int]]) -> Tensor:
        return embed_rows(self.loaded.model, [job.rows[i] for job, i in chosen], self.loaded.pooling).cpu()  # (B, E)
