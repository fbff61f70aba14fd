"""The original Transformer against torch.nn.Transformer, and Marian's translators against transformers'."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from heedful.models.mapping import Fuse, WeightMap, rule
from heedful.models.transformer import Transformer, TransformerConfig
from heedful.weights.load import DictSource, load_tensors
from support.case import VOCAB, EncoderDecoder, randomize, real

TINY = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB, max_position_embeddings=64, scale_embedding=True,
    activation_function="swish", pad_token_id=VOCAB - 1, decoder_start_token_id=VOCAB - 1, eos_token_id=0,
    forced_eos_token_id=0, dropout=0.0, attn_implementation="eager",
)  # fmt: skip


class Composed(nn.Module):
    """torch.nn.Transformer between embeddings, the paper's sinusoids and an output layer."""

    def __init__(self, *, norm_first=False, shared=True, tied=True, target_vocab=VOCAB):
        super().__init__()
        self.source = nn.Embedding(VOCAB, 64)
        self.target = self.source if shared else nn.Embedding(target_vocab, 64)
        self.core = nn.Transformer(64, 4, 2, 3, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.output = nn.Linear(64, target_vocab, bias=False)
        if tied:
            self.output.weight = self.target.weight
        self.settings = dict(norm_first=norm_first, shared=shared, tied=tied, target_vocab_size=target_vocab)

    def embed(self, embedding, tokens):
        place = [
            [
                math.sin(p / 10000 ** (i / 64)) if i % 2 == 0 else math.cos(p / 10000 ** ((i - 1) / 64))
                for i in range(64)
            ]
            for p in range(tokens.shape[1])
        ]
        return embedding(tokens) * math.sqrt(64) + torch.tensor(place)

    def forward(self, source, padded, tokens):
        future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        hidden = self.core(
            self.embed(self.source, source),
            self.embed(self.target, tokens),
            tgt_mask=future,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return self.output(hidden)


def torch_names():
    rules = [rule("source_embed", "source"), rule("target_embed", "target"), rule("head", "output")]
    for half in "encoder", "decoder":
        ours, theirs = f"{half}.blocks.{{}}.", f"core.{half}.layers.{{}}."
        norms = ["attention", "feedforward"] if half == "encoder" else ["attention", "cross", "feedforward"]
        rules += [rule(f"{ours}{n}_norm", f"{theirs}norm{i}") for i, n in enumerate(norms, start=1)]
        for mine, name in ("attention", "self_attn"), ("cross", "multihead_attn"):
            for kind in "weight", "bias":
                parts = [f"{ours}{mine}.{part}.{kind}" for part in ("query", "key", "value")]
                rules.append(rule(parts, f"{theirs}{name}.in_proj_{kind}", Fuse(), tensor=True))
            rules.append(rule(f"{ours}{mine}.output", f"{theirs}{name}.out_proj"))
        rules.append(rule(ours + "feedforward.up", theirs + "linear1"))
        rules.append(rule(ours + "feedforward.down", theirs + "linear2"))
        rules.append(rule(f"{half}.norm", f"core.{half}.norm"))
    return WeightMap(rules)


@dataclass
class Torch(EncoderDecoder):
    exports: bool = False

    def weights(self, ours):
        return torch_names()

    def ours(self, reference):
        config = TransformerConfig(
            d_model=64, n_layers=2, n_decoder_layers=3, n_heads=4, d_ff=48, vocab_size=VOCAB,
            final_norms=True, dropout=0.0, **reference.settings,
        )  # fmt: skip
        with torch.device("meta"):
            model = Transformer(config)
        tensors = {n: p.detach().clone() for n, p in reference.named_parameters()}
        load_tensors(model, DictSource(tensors), weights=torch_names())
        return model.eval()

    def _call(self, reference, batch, labels=None):
        padded = ~real(batch.source_lengths, *batch.source.shape)
        logits = reference(batch.source, padded, batch.tokens)
        if labels is None:
            return SimpleNamespace(logits=logits)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@dataclass
class Marian(EncoderDecoder):
    start_id: int = VOCAB - 1

    def build_reference(self):
        torch.manual_seed(0)
        model = randomize(self.make())
        with torch.no_grad():  # the tables are no weights, the bias is one that is kept as a buffer
            for half in model.model.encoder, model.model.decoder:
                half.embed_positions.weight.copy_(half.embed_positions.create_weight())
            model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(5))
        return model

    def idle(self, parameter):
        return parameter == "head.bias"  # a buffer there

    def ours(self, reference):
        tensors = {n: p.detach().clone() for n, p in reference.named_parameters()}
        tensors["final_logits_bias"] = reference.final_logits_bias.clone()
        with torch.device("meta"):
            model = Transformer(TransformerConfig.from_hub(reference.config.to_dict()))
        load_tensors(model, DictSource(tensors))
        return model.eval()


def marian(**changes):
    return lambda: MarianMTModel(MarianConfig(**{**TINY, **changes}))


TWO = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCAB + 6)
CASES = [
    Torch("transformer", Composed),
    Torch("transformer-pre-norm", lambda: Composed(norm_first=True)),
    Torch("transformer-untied", lambda: Composed(shared=False, tied=False, target_vocab=VOCAB + 4)),
    Marian("marian", marian()),
    Marian("marian-two-vocabularies", marian(**TWO, decoder_layers=1)),
    Marian("marian-uneven", marian(decoder_attention_heads=2, decoder_ffn_dim=80, encoder_layerdrop=0.1)),
    Marian("marian-untied", marian(**TWO, tie_word_embeddings=False)),
]
