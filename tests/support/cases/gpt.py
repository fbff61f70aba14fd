from dataclasses import dataclass

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)
from transformers.pytorch_utils import Conv1D

from heedful.models.gpt import GPT, GPTConfig
from heedful.weights.load import DictSource, load_tensors
from support.case import VOCAB, Classifier, Decoder, randomize

TINY = dict(
    n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


BAND = 4  # shorter than the batch's rows


def gpt2(head=GPT2LMHeadModel, **changes):
    return lambda: head(GPT2Config(**{**TINY, **changes}, attn_implementation="eager"))


@dataclass
class GPT3(Decoder):
    """Against the reference's GPT-2 with bands in the masks of its odd layers, and heads of a free size."""

    exports: bool = False  # the hub has no layout for it
    d_head: int | None = None

    def build_reference(self):
        torch.manual_seed(0)
        model = self.make()
        for i, block in enumerate(model.transformer.h):
            if self.d_head is not None:
                widen(block.attn, self.d_head)
            if i % 2:
                block.attn.register_forward_pre_hook(add_band, with_kwargs=True)
        return randomize(model)

    def ours(self, reference):
        config = GPTConfig.from_hub(reference.config.to_dict())
        with torch.device("meta"):
            model = GPT(config.replace(band=BAND, d_head=self.d_head))
        load_tensors(model, DictSource({n: p.detach().clone() for n, p in reference.named_parameters()}))
        return model.eval()


def add_band(_module, args, kwargs):
    mask = kwargs["attention_mask"]  # (B, 1, T, T), what is added to the scores
    place = torch.arange(mask.shape[-1])
    far = place[:, None] - place >= BAND
    return args, kwargs | {"attention_mask": mask.masked_fill(far, torch.finfo(mask.dtype).min)}


def widen(attention, d_head):
    """Heads of another size than width / heads, as the 13B's 40 x 128 in 5140."""
    inner, width = attention.num_heads * d_head, attention.embed_dim
    attention.head_dim, attention.split_size, attention.scaling = d_head, inner, d_head**-0.5
    attention.c_attn, attention.c_proj = Conv1D(3 * inner, width), Conv1D(width, inner)


CASES = [
    Decoder("gpt1", lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**TINY))),
    Decoder("gpt2", gpt2()),
    Decoder("gpt2-gelu-wide", gpt2(activation_function="gelu", n_inner=48)),
    Decoder("gpt2-untied", gpt2(tie_word_embeddings=False, attn_pdrop=0.2, embd_pdrop=0.1)),
    Classifier("gpt2-classify", gpt2(GPT2ForSequenceClassification, num_labels=3, pad_token_id=0)),
    GPT3("gpt3", gpt2(n_layer=4)),
    GPT3("gpt3-13b", gpt2(n_layer=4, n_embd=30, n_head=3), d_head=16),
]
