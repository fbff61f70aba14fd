from dataclasses import dataclass

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from heedful.models.mapping import WeightMap, rule
from support.case import Decoder
from support.cases.llama import TINY

N_EXPERTS = 4


class StackExperts:
    """The reference keeps all experts of a layer in one tensor in memory, though not in its files."""

    def __init__(self, n_parts: int) -> None:
        self.n_parts = n_parts  # matrices per expert, one above the other

    def load(self, theirs, shapes):
        return [part for expert in theirs[0] for part in expert.chunk(self.n_parts)]

    def save(self, ours):
        per_expert = [ours[i : i + self.n_parts] for i in range(0, len(ours), self.n_parts)]
        return [torch.stack([torch.cat(parts) for parts in per_expert])]

    def shapes(self, ours):
        rows = sum(s[0] for s in ours[: self.n_parts])
        return [torch.Size([len(ours) // self.n_parts, rows, ours[0][1]])]


@dataclass
class Mixtral(Decoder):
    exact: bool = False

    def weights(self, ours):
        files = ours.weight_map()
        rules = [r for r in files.rules if not any("feedforward.experts" in n for n in r.ours)]
        rules = [r for r in rules if r.ours != ("decoder.blocks.{}.feedforward.router",)]
        expert, theirs = "decoder.blocks.{{}}.feedforward.experts.{}.{}.weight", "model.layers.{}.mlp."
        both = [expert.format(i, part) for i in range(N_EXPERTS) for part in ("gate", "up")]
        down = [expert.format(i, "down") for i in range(N_EXPERTS)]
        rules += [
            rule("decoder.blocks.{}.feedforward.router", theirs + "gate"),
            rule(both, theirs + "experts.gate_up_proj", StackExperts(2), tensor=True),
            rule(down, theirs + "experts.down_proj", StackExperts(1), tensor=True),
        ]
        return WeightMap(rules)


def mixtral(**changes):
    return lambda: MixtralForCausalLM(
        MixtralConfig(**{**TINY, "num_local_experts": N_EXPERTS, "experts_implementation": "eager", **changes})
    )


CASES = [Mixtral("mixtral", mixtral()), Mixtral("mixtral-window", mixtral(sliding_window=5))]
