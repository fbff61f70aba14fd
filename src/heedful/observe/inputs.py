"""A text or an image as a model's input: the batch of one row, and a label for each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from heedful.generate.batch import generate_batch
from heedful.generate.request import Sampling
from heedful.models.base import Batch, EncoderDecoderModel, GenerativeModel, Model
from heedful.models.encoder import EncoderModel, has_segments
from heedful.models.image_gpt import ImageGPT
from heedful.models.seq2seq import Seq2Seq
from heedful.models.vit import ViT
from heedful.models.vocabulary import check_token_ids
from heedful.text.tokenizer import Tokenizer

VISIBLE_BLANKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
MAX_CHARACTERS = 100_000  # characters: more is a mistake, or an attack
LARGEST_PIXEL = 3.0  # pixels are from -1 to 1; ImageNet's mean and deviation, which some models expect, give up to 2.64


@dataclass(frozen=True)
class ModelInput:
    """A batch of one row with the tokens at its positions as text, for the axes of figures.

    `tokens` are the input of the decoder, or of the only stack; of an encoder-decoder, `source` is the input of the
    encoder, and `targets` are what the decoder is to predict, `targets[t]` after `tokens[t]`.
    """

    batch: Batch
    tokens: list[str]
    source: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    target_ids: list[int] = field(default_factory=list)  # the ids of `targets`

    def labels(self, stack_name: str) -> list[str]:
        """The input tokens of the encoder or the decoder."""
        return self.source if stack_name == "encoder" and self.source else self.tokens


def text_input(
    model: Model,
    tokenizer: Tokenizer | None,
    text: str,
    *,
    second: str | None = None,
    target: str | Sequence[int] | None = None,
    max_tokens: int | None = None,
    add_special: bool = True,
) -> ModelInput:
    """The input for a text, of any family that reads text; without a tokenizer the text is token ids, "3 1 4".

    `second` is sentence B of a BERT. An encoder-decoder generates its target greedily, up to `max_tokens`, unless
    `target` gives one, as text or as token ids. `add_special=False` leaves out the special tokens around a text, for
    one that has them.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the text has {len(text):,} characters: at most {MAX_CHARACTERS:,} can be looked at")
    if isinstance(model, ViT):
        raise ValueError("this model reads images: use image_input, or give the command an image file")
    if second is not None and not isinstance(model, EncoderModel):
        raise ValueError(f"a {model.family} model reads one text: a second is for BERT and its kin")
    if target is not None and not isinstance(model, EncoderDecoderModel | Seq2Seq):
        raise ValueError(f"a {model.family} model has no target: that is for encoder-decoders")
    segments = None
    if second is not None:
        if tokenizer is None:
            raise ValueError("two texts need a tokenizer, and this model has none")
        ids, sides = tokenizer.encode_pair(text, second)
        segments = torch.tensor([sides], device=model.device) if has_segments(model) and any(sides) else None
    else:
        ids = token_ids(model, tokenizer, text, add_special)
    if isinstance(model, ImageGPT):
        ids = [model.start_id, *ids]
    model.check_length(len(ids))
    labels = [token_label(tokenizer, i) for i in ids]
    row = torch.tensor([ids], device=model.device)
    if isinstance(model, EncoderDecoderModel | Seq2Seq):
        return _encoder_decoder_input(model, tokenizer, row, labels, target, max_tokens)
    return ModelInput(Batch(row, segments=segments), labels, ids=ids)


def image_input(model: Model, image: Tensor) -> ModelInput:
    """The input for an image (C, height, width) from -1 to 1, or uint8, of a ViT; the positions are [CLS] and the
    patches."""
    if not isinstance(model, ViT):
        raise ValueError(f"a {model.family} model does not read images as they are")
    height, width = model.config.patch
    rows, columns = image.shape[-2] // height, image.shape[-1] // width
    places = [f"{r + 1},{c + 1}" for r in range(rows) for c in range(columns)]
    return ModelInput(Batch(images=scale_images(image[None]).to(model.device)), ["[CLS]", *places])


def scale_images(images: Tensor) -> Tensor:
    """Images as floats from -1 to 1: uint8 from 0 to 255 is scaled; ValueError for other numbers outside."""
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    if not images.is_floating_point() or not bool((images.abs() <= LARGEST_PIXEL).all()):
        values = f"{images.min():g} to {images.max():g}" if images.numel() else "nothing"
        kind = str(images.dtype).removeprefix("torch.")
        raise ValueError(f"pixels are floats from -1 to 1, or uint8 from 0 to 255; these are {kind} from {values}")
    return images


def token_label(tokenizer: Tokenizer | None, id: int) -> str:
    """A token as a label: its text with the space before it; whitespace alone is made visible."""
    if tokenizer is None or id >= tokenizer.vocab_size:
        return str(id)
    raw = tokenizer.token(id)
    if raw in tokenizer.special_tokens:
        return raw
    try:
        text = tokenizer.decode_bytes([id]).decode()
    except UnicodeDecodeError:
        return f"⟨{tokenizer.decode_bytes([id]).hex(' ')}⟩"  # bytes of an incomplete character
    except ValueError:  # the tokenizer has no byte-level tokens
        text = raw.replace("▁", " ")
    return text if text.strip() else "".join(VISIBLE_BLANKS.get(c, c) for c in text) or VISIBLE_BLANKS[""]


def token_ids(model: Model, tokenizer: Tokenizer | None, text: str, add_special: bool = True) -> list[int]:
    """The ids of a text, with special tokens; without a tokenizer the text is the ids."""
    if tokenizer is None:
        most: int = model.config.vocab_size
        try:
            ids = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"this model has no tokenizer: write numbers from 0 to {most - 1}, as 3 1 4") from None
        if not ids:
            raise ValueError(f"this model reads numbers from 0 to {most - 1}, at least one")
        check_token_ids(ids, most, "the text")
        return ids
    ids = tokenizer.encode(text, add_special=add_special)
    if not ids:
        ids = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    if not ids:
        raise ValueError("the text is empty, and this model has no token to begin one with")
    return ids


def _encoder_decoder_input(
    model: EncoderDecoderModel | Seq2Seq,
    tokenizer: Tokenizer | None,
    source: Tensor,
    labels: list[str],
    target: str | Sequence[int] | None,
    max_tokens: int | None,
) -> ModelInput:
    ends = _eos_ids(model, tokenizer)
    writer = None if tokenizer is None else tokenizer.target
    if target is not None:
        written = token_ids(model, writer, target) if isinstance(target, str) else list(target)
        ended = bool(written) and written[-1] in ends
        written = written[:-1] if ended else written
    else:
        most = 2 * source.shape[1] + 16 if ends else source.shape[1]
        most = min(most, max_tokens or most, model.context_length or most)
        written = greedy_target(model, source, most, ends)
        ended = bool(ends) and len(written) < most
    decoder_ids = [model.start_id, *written]
    target_ids = written + ends[:1] if ended else written
    decoder_ids = decoder_ids[: len(target_ids)] if target_ids else decoder_ids  # without <eos> the last has no target
    model.check_length(len(decoder_ids))
    batch = Batch(torch.tensor([decoder_ids], device=model.device), source=source)
    targets = [token_label(writer, i) for i in target_ids]
    return ModelInput(batch, [token_label(writer, i) for i in decoder_ids], labels, targets, decoder_ids, target_ids)


def greedy_target(
    model: EncoderDecoderModel | Seq2Seq, source: Tensor, max_tokens: int, ends: Sequence[int]
) -> list[int]:
    """The target that greedy decoding gives for a source (1, S), without <eos>."""
    banned = [ids[0] for ids in model.generation.get("bad_words_ids") or () if len(ids) == 1]
    sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(banned, -100.0))
    return generate_batch(cast(GenerativeModel[Any], model), Batch(source=source), max_tokens, sampling, stop=ends)[0]


def _eos_ids(model: Model, tokenizer: Tokenizer | None) -> list[int]:
    told = model.special.get("eos_token_id")
    told = tokenizer.target.eos_id if told is None and tokenizer is not None else told
    ids = told if isinstance(told, list) else [] if told is None else [told]
    return [i for i in ids if i >= 0]
