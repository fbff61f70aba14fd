"""The reference is the papers' formulas over PyTorch's single cells, one row and one step at a time: nothing is
batched, padded, packed or computed ahead. It has our parameters' names, since no other layout is in use."""

from __future__ import annotations

from collections.abc import Generator
from itertools import product

import torch
from torch import Tensor, nn

from heedful.models.seq2seq import Seq2Seq, Seq2SeqConfig
from support.case import VOCAB, EncoderDecoder

N_TARGETS, WIDTH, EMBED = 47, 16, 12


class Answer:
    def __init__(self, logits: Tensor, loss: Tensor | None) -> None:
        self.logits, self.loss = logits, loss


class Reference(nn.Module):
    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.settings = config
        with torch.device("meta"):
            shapes = {n: p.shape for n, p in Seq2Seq(config).named_parameters()}
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))

    @property
    def config(self):
        hub = {"model_type": "heedful", "family": "seq2seq", **self.settings.to_dict()}
        return type("Hub", (), {"to_dict": lambda _self: dict(hub)})()

    def cell(self, where: str, layer: str, x: Tensor, state: list[Tensor]) -> list[Tensor]:
        weights = [
            self.get_parameter(f"{where}.cells.{kind}_{layer}")
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        if self.settings.cell == "lstm":
            return list(torch.lstm_cell(x[None], [s[None] for s in state], *weights))
        return [torch.gru_cell(x[None], state[0][None], *weights)]

    def direction(self, layer: str, xs: list[Tensor], width: int) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of one encoder layer read in the order given, and the state it ends in."""
        state = [torch.zeros(width) for _ in range(2 if self.settings.cell == "lstm" else 1)]
        outs = []
        for x in xs:
            state = [s[0] for s in self.cell("encoder", layer, x, state)]
            outs.append(state[0])
        return outs, state

    def encode(self, source: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        xs = list(self.get_parameter("source_embed.weight")[source])
        ends = []
        for i in range(self.settings.n_layers):
            if self.settings.bidirectional:
                there, end = self.direction(f"l{i}", xs, WIDTH // 2)
                back, beginning = self.direction(f"l{i}_reverse", xs[::-1], WIDTH // 2)
                xs = [torch.cat(pair) for pair in zip(there, back[::-1], strict=True)]
                ends.append([torch.cat(pair) for pair in zip(end, beginning, strict=True)])
            else:
                xs, end = self.direction(f"l{i}", xs, WIDTH)
                ends.append(end)
        return torch.stack(xs), ends  # (S, E), state of each layer

    def look(self, query: Tensor, annotations: Tensor) -> Tensor:
        """The context of one query (E,) over annotations (S, E)."""
        scores = []
        for h in annotations:
            if self.settings.attention == "dot":
                scores.append(query @ h)
            elif self.settings.attention == "general":
                scores.append(query @ self.get_parameter("decoder.align.score.key.weight") @ h)
            else:
                part = "decoder.align.score."
                w = torch.cat(
                    [self.get_parameter(part + "query.weight"), self.get_parameter(part + "key.weight")],
                    dim=1,
                )
                scores.append(self.get_parameter(part + "v.weight")[0] @ torch.tanh(w @ torch.cat([query, h])))
        weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
        return sum(a * h for a, h in zip(weights, annotations, strict=True))

    def decoder_of(self, source: Tensor) -> Generator[Tensor, Tensor, None]:
        """Takes the target so far, token by token (`send`), and gives the logits of what comes next."""
        annotations, states = self.encode(source)
        attention, logits = self.settings.attention, torch.empty(0)
        while True:
            token = yield logits
            x = y = self.get_parameter("target_embed.weight")[token]
            if attention == "additive":
                context = self.look(states[-1][0], annotations)
                x = torch.cat([y, context])
            for i in range(self.settings.n_layers):
                states[i] = [s[0] for s in self.cell("decoder.recurrence", f"l{i}", x, states[i])]
                x = states[i][0]
            if attention == "none":
                said = x
            else:
                if attention == "additive":
                    known = torch.cat([context, x, y])
                else:
                    known = torch.cat([self.look(x, annotations), x])
                said = torch.tanh(self.get_parameter("decoder.combine.weight") @ known)
            logits = self.get_parameter("head.weight") @ said + self.get_parameter("head.bias")

    def row(self, source: Tensor, tokens: Tensor) -> Tensor:
        decoder = self.decoder_of(source)
        next(decoder)
        return torch.stack([decoder.send(token) for token in tokens])

    def forward(self, input_ids, attention_mask, decoder_input_ids, use_cache=False, labels=None):
        lengths = attention_mask.sum(dim=1)
        rows = [
            self.row(source[:n], target)
            for source, n, target in zip(input_ids, lengths, decoder_input_ids, strict=True)
        ]
        logits = torch.stack(rows)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Answer(logits, loss)


class Seq2SeqCase(EncoderDecoder):
    def build_reference(self):
        """Weights so large that the decoders look at some places and not at others."""
        reference = super().build_reference()
        with torch.no_grad():
            for p in reference.parameters():
                p *= 3
        return reference

    @torch.no_grad()
    def reference_greedy(self, reference, batch, n):
        out = []
        for row in self.rows(batch):
            decoder, said = reference.decoder_of(row.source[0]), [torch.tensor(self.start_id)]
            next(decoder)
            for _ in range(n):
                said.append(decoder.send(said[-1]).argmax())
            out.append([int(token) for token in said[1:]])
        return out

    def batch(self):
        batch = super().batch()
        batch.tokens %= N_TARGETS
        batch.targets = torch.where(batch.targets < 0, batch.targets, batch.targets % N_TARGETS)
        return batch


def case(cell: str, bidirectional: bool, attention: str, n_layers: int = 1) -> Seq2SeqCase:
    config = Seq2SeqConfig(cell, bidirectional, attention, WIDTH, EMBED, n_layers, VOCAB, target_vocab_size=N_TARGETS)
    name = f"{cell}-{'bi' if bidirectional else 'uni'}-{attention}" + (f"-{n_layers}" if n_layers > 1 else "")
    return Seq2SeqCase(f"seq2seq-{name}", lambda: Reference(config), exports=False)


CASES = [
    *(
        case(*choice)
        for choice in product(("lstm", "gru"), (False, True), ("none", "additive", "dot", "general", "concat"))
    ),
    case("lstm", True, "additive", 2),
    case("gru", False, "general", 2),
]
