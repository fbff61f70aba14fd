"""int4 with compensated rounding errors (kernels/gptq.py), calibrated on a text or on what the model itself writes."""

from __future__ import annotations

import torch

from heedful.generate.engine import Engine
from heedful.generate.model_with_tokenizer import ModelWithTokenizer
from heedful.generate.request import Request, Sampling
from heedful.kernels.quantize_model import CalibrationReport, quantize_blocks
from heedful.models.base import Batch, DecoderModel
from heedful.models.encoder import EncoderModel

N_TOKENS = 32_768  # of the calibration text
WINDOW = 512  # tokens of a row, or the model's context length if that is less
TOKENS_OF_A_BATCH = 2048
SAMPLES = 32  # texts that the model writes at once


def calibrate_int4(
    loaded: ModelWithTokenizer, text: str | None = None, *, n_tokens: int = N_TOKENS, seed: int = 0
) -> CalibrationReport:
    """Round the weights of the model's blocks to int4, in place, with the inputs that a text gives them.

    Without a text a decoder writes one itself, sampled at temperature 1. The first `n_tokens` are used. Evaluate on
    another text. The result is for `save(quantize="int4")` or for `accelerate` with precision "int4".
    """
    if not isinstance(loaded.model, (DecoderModel, EncoderModel)):
        raise ValueError(
            f"{loaded.name} is no model of one text: give the batches to calibrate it on to "
            "heedful.kernels.quantize_model.quantize_blocks"
        )
    if text is None:
        loaded.require("generate")
    ids = sample_text(loaded, n_tokens, seed) if text is None else loaded._text_tokenizer.encode(text)[:n_tokens]
    if not ids:
        raise ValueError("the text to calibrate on is empty")
    width = min(loaded.model.context_length or WINDOW, WINDOW, len(ids))
    rows = torch.tensor(ids[: len(ids) // width * width], device=loaded.model.device).view(-1, width)
    return quantize_blocks(loaded.model, [Batch(part) for part in rows.split(max(1, TOKENS_OF_A_BATCH // width))])


def sample_text(loaded: ModelWithTokenizer, n_tokens: int, seed: int) -> list[int]:
    """Token ids of texts that the model writes from nothing, one after the other."""
    assert isinstance(loaded.model, DecoderModel)
    begin, _ = loaded.encode_prompt("")
    longest = min(loaded.model.context_length or WINDOW, WINDOW) - len(begin)
    engine, end = Engine(loaded.model, max_rows=SAMPLES), frozenset(loaded.eos_ids)
    found: list[int] = []
    while len(found) < n_tokens:
        sampling = Sampling(seed=seed)
        request = Request(begin, None, longest, sampling, stop_ids=end, n=SAMPLES, include_stop_str_in_output=True)
        before = len(found)
        for choice in engine.run([request])[0].choices:
            found += [*begin, *choice.tokens]
        assert len(found) > before
        seed += 1
    return found[:n_tokens]
