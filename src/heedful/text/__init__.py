"""Tokenizers of every family, training new ones, chat templates, and a trace of BPE merges."""

from heedful.text.bpe_dropout import BPEDropout
from heedful.text.bpe_trace import Merge, Trace, WordTrace, learned_merges, trace_merges, trace_tokenizer
from heedful.text.template import render_template
from heedful.text.tokenizer import Tokenizer
from heedful.text.train import (
    byte_tokens,
    characters,
    symbols,
    train_bpe,
    train_unigram,
    train_wordpiece,
    words,
)
from heedful.text.unknown import UnknownTextWarning, unknown_share, warn_if_unknown

__all__ = [
    "BPEDropout",
    "Merge",
    "Tokenizer",
    "Trace",
    "UnknownTextWarning",
    "WordTrace",
    "byte_tokens",
    "characters",
    "learned_merges",
    "render_template",
    "symbols",
    "trace_merges",
    "trace_tokenizer",
    "train_bpe",
    "train_unigram",
    "train_wordpiece",
    "unknown_share",
    "warn_if_unknown",
    "words",
]
