"""Prefill and decode: how the engine calls a model, with contiguous KV caches or with a paged pool's blocks.

Whole prompts are prefilled in padded batches, long ones in chunks. With a pool, the blocks of a prefix that is known
are reused instead of computed (prefix caching).

    B rows, T tokens of a prompt, V vocabulary
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.generate.detokenizer import SupportsDecode
from heedful.generate.request import Request
from heedful.generate.scheduler import bucket_by_length
from heedful.generate.sequence import GeneratedSequence, SequenceGroup
from heedful.generate.turns import Owner
from heedful.kernels.cpu.decode import KernelStack
from heedful.kernels.cpu.memory import huge_zeros
from heedful.kernels.cuda import decode_graphs, supports_graphs
from heedful.models.base import Batch, DecoderModel, EncoderDecoderModel, GenerativeModel
from heedful.models.vocabulary import check_token_ids, vocab_sizes
from heedful.nn.paged import BlockPool, PagedState
from heedful.nn.state import KeyValueState, State

if TYPE_CHECKING:
    from heedful.kernels.cuda.graphs import ChosenTokens

CAPACITY_AHEAD = 256  # positions allocated for new tokens at prefill; more are added when these are full

Chunk = tuple[SequenceGroup, int]  # a prompt, and how many tokens of it to prefill


class ModelRunner:
    """A model and where its KV caches live: with `pool_tokens` in a paged pool of that size."""

    def __init__(self, model: GenerativeModel[Any], pool_tokens: int | None = None, block: int = 16) -> None:
        self.model = model
        self.decoder_only = isinstance(model, DecoderModel)
        self.n_prefilled = 0  # prompt tokens that went through the model
        self.pool: BlockPool | None = None
        if pool_tokens is not None:
            kinds = DecoderModel, EncoderDecoderModel
            if not isinstance(model, kinds) or type(model.new_state(0, 0)) is not KeyValueState:
                raise ValueError(f"a {type(model).__name__} cannot be paged: use state='contiguous'")
            spare = 1 if supports_graphs(model) else 0  # the block that rows not in use write to
            self.pool = BlockPool(pool_tokens // block + spare, block, allocate=huge_zeros, kind=model.kv_cache)
        self.graphs = decode_graphs(model, self.pool)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts reuse the blocks of a known prefix; an encoder-decoder's depend on its source."""
        return self.pool is not None and self.decoder_only

    # --- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """ValueError if the model cannot run the request: no prompt or source, too many tokens, ids out of range."""
        n_inputs, n_outputs = vocab_sizes(self.model)
        if self.decoder_only and request.source is not None:
            raise ValueError("this model continues a prompt and has no encoder: it takes no source")
        if self.decoder_only and not request.prompt:
            raise ValueError("the prompt is empty: begin with a token, for example the one that begins a text")
        if not self.decoder_only and not request.source:
            raise ValueError("this model answers a source, and the request has none")
        for name, ids, size in ("prompt", request.prompt, n_outputs), ("source", request.source or (), n_inputs):
            self.model.check_length(len(ids), f"the {name}'s ")
            check_token_ids(ids, size, f"the {name}")

    def decoder_prompt(self, request: Request) -> tuple[int, ...]:
        """What the decoder is prefilled with: the prompt, or an encoder-decoder's start token."""
        return request.prompt or (getattr(self.model, "start_id", 0),)

    def cache_tokens(self, request: Request) -> int:
        """How many tokens all sequences of a request may come to keep in the KV cache."""
        n = len(self.decoder_prompt(request)) + request.max_tokens
        n = n if self.model.context_length is None else min(n, self.model.context_length)
        if self.pool is not None:
            n = -(-n // self.pool.block_size) * self.pool.block_size
        return n * (request.best_of or request.n)

    def new_group(
        self, id: int, request: Request, tokenizer: SupportsDecode | None, owner: Owner | None = None
    ) -> SequenceGroup:
        """A request that was checked, as a group of sequences for the scheduler; without an owner it is its own."""
        prompt, size = self.decoder_prompt(request), 1 if self.pool is None else self.pool.block_size
        owner = owner or Owner(None, id)
        return SequenceGroup(id, request, prompt, self.cache_tokens(request), tokenizer, owner, size)

    # --- decode ------------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], state: State, beside: Sequence[Chunk] = ()) -> Tensor:
        """One decode step: the last token of each row in, logits (B, V) out; with chunks of prompts in the same pass,
        so that the weights are read once for all."""
        if not beside:
            if self.graphs is not None and type(state) is PagedState:
                return self.graphs.logits(tokens, state)
            return self.model.step(self._tensor(tokens), state)
        assert isinstance(self.model, DecoderModel) and isinstance(state, PagedState)
        for group, _ in beside:
            self._reuse_prefix(group)
        prompts = [group.prompt[group.n_prefilled : group.n_prefilled + n] for group, n in beside]
        states = [state, *(group.state for group, _ in beside if isinstance(group.state, PagedState))]
        whole = PagedState.concatenated(states)
        logits, _ = self.model.start(Batch(*self._padded([*([token] for token in tokens), *prompts])), state=whole)
        whole.write_back(states)
        for (group, _), prompt, row in zip(beside, prompts, logits[len(tokens) :], strict=True):
            self._prefilled(group, row[None], len(prompt))
        return logits[: len(tokens)]

    def decode_and_sample(self, sequences: Sequence[GeneratedSequence], state: State) -> ChosenTokens | None:
        """One decode step whose tokens are sampled in the CUDA graph; None where that cannot be."""
        if self.graphs is None or type(state) is not PagedState or not all([s.samples_on_device for s in sequences]):
            return None
        samplers, before = [s.sampler for s in sequences], state.lengths
        if any(max(sampler.params.logit_bias, default=0) >= self.graphs.n_tokens for sampler in samplers):
            return None  # the sampler says what is wrong
        scores = any(s.n_top_logprobs is not None for s in sequences)
        try:
            return self.graphs.choose([s.tokens[-1] for s in sequences], state, samplers, scores=scores)
        except Exception as error:
            warnings.warn(f"decoding goes on without CUDA graphs: {error}", stacklevel=2)
            state.truncate(before)
            self.graphs = None
            return None

    def combinable(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that a decode pass can take along. The C kernels alone leave the padding out."""
        if self.pool is None or not isinstance(getattr(self.model, "decoder", None), KernelStack):
            return []
        fit = [chunk for chunk in chunks if isinstance(chunk[0].state, PagedState) and not chunk[0].request.echo]
        return next(self._waves(fit), [])

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill_batch(self, groups: Sequence[SequenceGroup]) -> tuple[Tensor, State]:
        """Prefill whole prompts as one padded batch: logits (B, V) after each, and their KV cache."""
        prompts = [group.prompt for group in groups]
        logits, state = self._start(groups, prompts)
        for group in groups:
            group.n_prefilled = len(group.prompt)
            self.n_prefilled += group.n_prefilled
        return logits, state

    def _start(self, groups: Sequence[SequenceGroup], prompts: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """Prefill prompts into a state of their own."""
        batch = self.batch(groups, prompts)
        if self.pool is None:
            return self.model.start(batch, capacity=self._capacity(groups))
        assert isinstance(self.model, EncoderDecoderModel)
        state = PagedState(self.pool, len(self.model.decoder.blocks), len(groups), cross=True)
        try:
            return self.model.start(batch, state=state)
        except Exception:
            state.select([])  # frees its blocks
            raise

    def allocate(self, group: SequenceGroup) -> None:
        """Give an admitted request its table of blocks, beginning with those of a cached prefix."""
        if self.pool is not None and isinstance(self.model, DecoderModel):
            group.state = PagedState(self.pool, len(self.model.decoder.blocks), 1)
            self._reuse_prefix(group)

    def prefix_waves(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Chunks in padded batches, one after the other, such that no block is computed twice."""
        for wave in self._waves(chunks):
            yield from bucket_by_length([chunk for chunk in wave if not chunk[0].request.echo], self._chunk_length)
            yield from ([chunk] for chunk in wave if chunk[0].request.echo)

    def _waves(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Of prompts that continue with the same block only the first is in a wave; others reuse its blocks later."""
        left = list(chunks)
        while left:
            now: list[Chunk] = []
            later: list[Chunk] = []
            seen: set[tuple[int, ...]] = set()
            for group, n in left:
                self._reuse_prefix(group)
                prefix = self._next_prefix(group)
                (later if prefix in seen else now).append((group, n))
                if prefix is not None:
                    seen.add(prefix)
            yield now
            left = later

    def _reuse_prefix(self, group: SequenceGroup) -> None:
        if not group.request.echo:  # scoring a prompt takes all of its logits
            assert isinstance(group.state, PagedState)
            group.n_prefilled = group.state.reuse_prefix(0, group.prompt)

    def _next_prefix(self, group: SequenceGroup) -> tuple[int, ...] | None:
        """The prompt up to the end of its next block, where that block can be shared; else None."""
        assert self.pool is not None
        end = (group.n_prefilled // self.pool.block_size + 1) * self.pool.block_size
        return group.prompt[:end] if end < len(group.prompt) and not group.request.echo else None

    @staticmethod
    def _chunk_length(chunk: Chunk) -> int:
        group, n = chunk
        return min(n, len(group.prompt) - group.n_prefilled)

    def prefill_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Prefill n more tokens of each prompt, several as one padded batch; keep the logits after each."""
        if len(chunks) == 1:
            return self._prefill_chunk(*chunks[0])
        assert isinstance(self.model, DecoderModel)
        groups = [group for group, _ in chunks]
        states = [group.state for group in groups if isinstance(group.state, PagedState)]
        whole = PagedState.concatenated(states)
        prompts = [group.prompt[group.n_prefilled : group.n_prefilled + n] for group, n in chunks]
        logits, _ = self.model.start(self.batch(groups, prompts), state=whole)
        whole.write_back(states)
        for group, prompt, row in zip(groups, prompts, logits, strict=True):
            self._prefilled(group, row[None], len(prompt))

    def _prefill_chunk(self, group: SequenceGroup, n: int) -> None:
        echo = group.request.echo
        if group.state is None and self.shares_prefixes:
            self.allocate(group)
        elif group.state is None:
            first = group.prompt[: 1 if echo else n]  # `start` gives the last logits alone, an echo needs all
            logits, group.state = self._start([group], [first])
            self._prefilled(group, logits, len(first))
            n -= len(first)
        tokens = group.prompt[group.n_prefilled : group.n_prefilled + n]
        if tokens:
            logits = self.model.step(self._tensor([tokens]), group.state, last=not echo)
            self._prefilled(group, logits[0] if echo else logits, len(tokens))

    def _prefilled(self, group: SequenceGroup, logits: Tensor, n: int) -> None:
        """Record n prefilled tokens; logits (n, V) after each of them, or (1, V) after the last."""
        if group.request.echo:
            group.score_prompt(logits)
        group.last_logits = logits[-1]
        group.n_prefilled += n
        self.n_prefilled += n
        if isinstance(group.state, PagedState):
            group.state.cache_prefix(0, group.prompt)

    def take_state(self, groups: Sequence[SequenceGroup]) -> State:
        """The KV caches of prefilled prompts as the rows of one state, which the groups give up."""
        states = [group.state for group in groups]
        for group in groups:
            group.state = None
        if len(states) > 1:
            return PagedState.concatenated([state for state in states if isinstance(state, PagedState)])
        assert states[0] is not None
        return states[0]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def batch(self, groups: Sequence[SequenceGroup], prompts: Sequence[Sequence[int]]) -> Batch:
        """The prompts, and the sources of an encoder-decoder, as a padded batch."""
        tokens, lengths = self._padded(prompts)
        if self.decoder_only:
            return Batch(tokens, lengths)
        return Batch(tokens, lengths, *self._padded([group.request.source or () for group in groups]))

    def _tensor(self, ids: Sequence[Any]) -> Tensor:
        return torch.tensor(ids, device=getattr(self.model, "device", None))

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        longest = max(map(len, rows))
        tokens = self._tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        uneven = any(len(row) < longest for row in rows)
        return tokens, self._tensor([len(row) for row in rows]) if uneven else None

    def _capacity(self, groups: Sequence[SequenceGroup]) -> int:
        need = max(len(group.prompt) + min(group.request.max_tokens, CAPACITY_AHEAD) for group in groups)
        return need if self.model.context_length is None else min(need, self.model.context_length)
