"""DPO and GRPO against TRL: the loss and the gradient of every parameter, of one LLaMA on one batch."""

from __future__ import annotations

import pytest
import torch

import heedful
from heedful.data.ragged import pad_ids
from heedful.models.mapping import to_hub
from heedful.train.dpo import DPO
from heedful.train.grpo import GRPO
from heedful.train.policy import choices_as_rows, target_log_probs
from heedful.train.rollouts import rollout_batch

trl = pytest.importorskip("trl", reason="TRL, the reference, is not installed")
transformers = pytest.importorskip("transformers", reason="the reference is not installed")
datasets = pytest.importorskip("datasets", reason="TRL's datasets are not installed")

PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
ANSWERS = (([20, 21, 2], [22, 2]), ([23, 2], [24, 25, 26, 2]), ([27, 28, 29, 2], [30, 31, 2]))
CPU = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two random models, the policy and its reference, and a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 40)}}, "<unk>"))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(tmp_path_factory.mktemp("model"))
        transformers.LlamaForCausalLM(config).save_pretrained(made[-1])
    return *made, tokenizer


def ours(folder):
    return heedful.load(folder).model.double().train()


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()


def rows_and_masks(n=3):
    """TRL's batch: n prompts with answers, the chosen ones before the rejected ones, and what is of an answer."""
    every = [(prompt, pair[i]) for i in range(2) for prompt, pair in zip(PROMPTS[:n], ANSWERS[:n], strict=True)]
    texts = [[*prompt, *answer] for prompt, answer in every]
    own = [[*[0] * len(prompt), *[1] * len(answer)] for prompt, answer in every]
    ids = pad_ids(texts, 0)
    attended = pad_ids([[1] * len(text) for text in texts], 0)
    return {"input_ids": ids, "attention_mask": attended, "completion_mask": pad_ids(own, 0)}


def assert_same(mine, loss, model, wanted):
    """The mean loss, and by the hub's names the gradients, to a millionth of the largest: TRL's head is in float32."""
    loss.mean.backward()
    wanted.backward()
    torch.testing.assert_close(loss.mean, wanted, atol=1e-6, rtol=1e-6, check_dtype=False)
    found = dict(to_hub(mine.weight_map(), {name: p.grad for name, p in mine.named_parameters()}))
    named = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == named.keys()
    largest = max(float(gradient.abs().max()) for gradient in named.values())
    for name, gradient in named.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6 * largest, rtol=0)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo(folders, tmp_path, loss_type):
    policy, reference, tokenizer = folders
    model = theirs(policy)
    arguments = trl.DPOConfig(output_dir=str(tmp_path), beta=0.3, loss_type=[loss_type], **CPU)
    rows = datasets.Dataset.from_list([{"prompt": "w5 ", "chosen": "w20", "rejected": "w22"}])
    trainer = trl.DPOTrainer(model, theirs(reference), arguments, train_dataset=rows, processing_class=tokenizer)
    pairs = [(prompt, answer) for prompt, pair in zip(PROMPTS, ANSWERS, strict=True) for answer in pair]
    batch = rollout_batch(*map(list, zip(*pairs, strict=True)), torch.zeros(3, 2))  # chosen, rejected, chosen, ...
    mine = ours(policy)
    loss = DPO(ours(reference), beta=0.3, loss_type=loss_type)(mine, batch)
    assert_same(mine, loss, model, trainer.compute_loss(trainer.model, rows_and_masks()))
    margin = trainer._metrics["train"]["rewards/margins"][-1]
    assert float(loss.metrics["margin"][0]) / 3 == pytest.approx(margin, abs=1e-5)
    assert float(loss.metrics["accuracy"][0]) / 3 == pytest.approx(trainer._metrics["train"]["rewards/accuracies"][-1])


def test_dpo_with_fine_tuning(folders, tmp_path):
    """One pair: TRL's mean is over the tokens of all chosen answers, the paper's over those of each."""
    policy, reference, tokenizer = folders
    model = theirs(policy)
    both = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    rows = datasets.Dataset.from_list([{"prompt": "w5 ", "chosen": "w20", "rejected": "w22"}])
    arguments = trl.DPOConfig(output_dir=str(tmp_path), beta=0.3, **both, **CPU)
    trainer = trl.DPOTrainer(model, theirs(reference), arguments, train_dataset=rows, processing_class=tokenizer)
    mine, batch = ours(policy), rollout_batch([PROMPTS[0]] * 2, list(ANSWERS[0]), torch.zeros(1, 2))
    loss = DPO(ours(reference), beta=0.3, sft=0.5)(mine, batch)
    assert_same(mine, loss, model, trainer.compute_loss(trainer.model, rows_and_masks(1)))


@pytest.mark.parametrize(("loss_type", "kl", "temperature"), [("grpo", 0.2, 1.0), ("dr_grpo", 0.0, 0.7)])
def test_grpo(folders, tmp_path, loss_type, kl, temperature):
    """On completions that an older model sampled, so that ratios are clipped."""
    policy, reference, tokenizer = folders
    model = theirs(policy)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), beta=kl, loss_type=loss_type, temperature=temperature, max_completion_length=6,
        num_generations=2, per_device_train_batch_size=6, epsilon=0.2, **CPU,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "w5"}])
    trainer = trl.GRPOTrainer(model, lambda **_: 0.0, arguments, rows, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.25, 0.5]], dtype=torch.float64)
    pairs = [(prompt, answer) for prompt, pair in zip(PROMPTS, ANSWERS, strict=True) for answer in pair]
    batch = rollout_batch(*map(list, zip(*pairs, strict=True)), rewards)
    mine, before = ours(policy), ours(reference)
    objective = GRPO(None, before, kl=kl, temperature=temperature, max_tokens=6, loss_type=loss_type)
    with torch.no_grad():
        old = target_log_probs(mine, choices_as_rows(batch), temperature=temperature)
        old = old + 0.4 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1)) * (old != 0)
        then = target_log_probs(before, choices_as_rows(batch), temperature=temperature)
    batch.log_probs = old.view_as(batch.tokens)
    loss = objective(mine, batch)

    width, n = max(len(answer) for _, answer in pairs), max(len(prompt) for prompt, _ in pairs)

    def of_completions(numbers):
        found = torch.zeros(len(pairs), width, dtype=torch.float64)
        for row, (prompt, answer) in enumerate(pairs):
            found[row, : len(answer)] = numbers[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        return found

    advantages = rewards - rewards.mean(1, keepdim=True)
    if loss_type == "grpo":
        advantages /= rewards.std(1, keepdim=True) + 1e-4
    inputs = {
        "prompt_ids": torch.tensor([[*[0] * (n - len(prompt)), *prompt] for prompt, _ in pairs]),
        "prompt_mask": torch.tensor([[*[0] * (n - len(prompt)), *[1] * len(prompt)] for prompt, _ in pairs]),
        "completion_ids": pad_ids([answer for _, answer in pairs], 0),
        "completion_mask": pad_ids([[1] * len(answer) for _, answer in pairs], 0),
        "advantages": advantages.flatten(),
        "old_per_token_logps": of_completions(old),
        "ref_per_token_logps": of_completions(then),
    }
    assert_same(mine, loss, model, trainer.compute_loss(trainer.model, inputs))
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > 0.1
