"""A decoder of transformers as an OpenVINO model that keeps its keys and values itself, as optimum-intel makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build(folder: Path) -> Any:
    import openvino
    import torch
    from openvino._offline_transformations import apply_make_stateful_transformation
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    heads = config.num_attention_heads
    groups, width = getattr(config, "num_key_value_heads", heads), config.hidden_size // heads

    class Past(DynamicCache):  # its own cache begins with an empty tensor, which cannot be traced
        def __init__(self, past: list[Any]) -> None:
            super().__init__()
            self.past = past

        def update(self, key: Any, value: Any, layer: int, *_: Any, **__: Any) -> Any:
            for i, new in ((2 * layer, key), (2 * layer + 1, value)):
                self.past[i] = torch.cat([self.past[i], new], 2)
            return self.past[2 * layer], self.past[2 * layer + 1]

        def get_seq_length(self, layer: int = 0) -> Any:
            return self.past[2 * layer].shape[2]

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, position_ids: Any, beam_idx: Any, past: Any) -> Any:
            cache = Past([part.index_select(0, beam_idx) for part in past])
            before, n = cache.get_seq_length(), input_ids.shape[1]
            mask = torch.arange(before + n)[None] <= torch.arange(before, before + n)[:, None]
            given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask[None, None]}
            out = self.model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True), *cache.past

    count = 2 * config.num_hidden_layers
    example = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "position_ids": torch.arange(4, 7)[None].repeat(2, 1),
        "beam_idx": torch.arange(2),
        "past": tuple(torch.randn(2, groups, 4, width) for _ in range(count)),
    }
    with torch.no_grad():
        made = openvino.convert_model(Step(), example_input=example)
    shapes = {"input_ids": [-1, -1], "position_ids": [-1, -1], "beam_idx": [-1]}
    shapes |= {f"past.{i}": [-1, groups, -1, width] for i in range(count)}
    for put, (name, shape) in zip(made.inputs, shapes.items(), strict=True):
        put.get_tensor().set_names({name})
        put.get_node().set_partial_shape(openvino.PartialShape(shape))
    for i, put in enumerate(made.outputs):
        put.get_tensor().set_names({f"present.{i - 1}" if i else "next"})
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, {f"past.{i}": f"present.{i}" for i in range(count)})
    return made
