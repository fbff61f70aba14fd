"""Pre-training BERT beside transformers' Trainer: the same size, text, tokenizer, batch and time on one GPU.

    python benchmarks/bert_trainer.py --train ../shared/data/books/train.txt.xz \\
        --validation ../shared/data/books/val.txt.xz --tokenizer FOLDER --steps 1500

Trainer first (bf16, torch_compile, fused AdamW, DataCollatorForLanguageModeling), for --steps steps. Then our recipe
`bert-books` for as many steps as its speed allows in the same time, both counted from the first step to the last, with
what compiles on the way; each has a linear schedule that ends there. Tokens are hidden one by one, a fifth of them, as
Trainer's collator does; the loss of both is measured by the same code on the same held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH, BATCH, MASKED, LR, WARMUP = 128, 256, 0.2, 1e-3, 0.1
SIZES = {"d_model": 320, "n_layers": 6, "n_heads": 5, "d_ff": 1280}


def train_with_trainer(corpus: Any, tokenizer: Path, steps: int, out: Path) -> float:
    """Train BertForMaskedLM on windows of the corpus, and save it; the seconds."""
    import torch
    from torch.utils.data import Dataset
    from transformers import (
        AutoTokenizer,
        BertConfig,
        BertForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    torch.set_float32_matmul_precision("high")
    pieces = AutoTokenizer.from_pretrained(tokenizer)
    inside = LENGTH - 2

    class Windows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(corpus.tokens) // inside

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = corpus.tokens[i * inside : (i + 1) * inside].tolist()
            return {"input_ids": [pieces.cls_token_id, *ids, pieces.sep_token_id]}

    config = BertConfig(
        vocab_size=len(pieces), hidden_size=SIZES["d_model"], num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"], intermediate_size=SIZES["d_ff"], max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    settings = TrainingArguments(
        output_dir=str(out / "trainer"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LR,
        lr_scheduler_type="linear", warmup_steps=int(WARMUP * steps), adam_beta2=0.98, weight_decay=0.01, bf16=True,
        torch_compile=True, optim="adamw_torch_fused", dataloader_num_workers=6, logging_steps=100, report_to=[],
        save_strategy="no", seed=1,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(pieces, mlm_probability=MASKED)
    model = BertForMaskedLM(config)
    trainer = Trainer(model=model, args=settings, train_dataset=Windows(), data_collator=collator)
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    model.save_pretrained(out / "trainer-model")
    pieces.save_pretrained(out / "trainer-model")
    return seconds


def train_with_heedful(options: argparse.Namespace, steps: int, out: Path) -> dict[str, Any]:
    """Train the recipe bert-books; its summary."""
    changes = {
        "data.source": options.train.resolve(), "data.validation": options.validation.resolve(),
        "tokenizer.path": options.tokenizer.resolve(), "data.whole_words": "false", "data.masked": MASKED,
        "train.steps": steps,
        "train.batch_size": BATCH, "train.eval_every": steps, "schedule.warmup": int(WARMUP * steps),
        "optimizer.lr": LR, **{f"model.{k}": v for k, v in SIZES.items()}, "train.workers": 3,
    }  # fmt: skip
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "heedful", "train", "bert-books", "--out", str(out), *sets]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found


def step_seconds(run: Path) -> tuple[float, float]:
    """Seconds of a run until its steps are steady, and of a steady step (the median)."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    took = [line["seconds"] for line in lines if "seconds" in line and "loss" in line]
    steady = sorted(took[len(took) // 3 :])[len(took[len(took) // 3 :]) // 2]
    return sum(max(0.0, s - steady) for s in took), steady


def validation_loss(model: Any, corpus: Any, tokenizer: Any, n_batches: int = 40) -> float:
    """Nats per hidden token of held-out text."""
    import torch

    from heedful.data.corruption import MaskedWindows
    from heedful.data.dataset import Draw
    from heedful.models.base import Batch
    from heedful.train.objectives import masked

    windows = MaskedWindows(corpus, tokenizer, LENGTH, shifted=False, pairs=False, share=MASKED, documents=False)
    total = n = 0.0
    with torch.inference_mode():
        for i in range(n_batches):
            batch = windows.batch([Draw(0, (i * 64 + k) % len(windows)) for k in range(64)], seed=0)
            assert batch.targets is not None
            loss = masked(model, Batch(batch.ids.to(model.device), targets=batch.targets.to(model.device)))
            total, n = total + float(loss.sum), n + float(loss.n_targets)
    return total / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="text, such as books/train.txt.xz")
    parser.add_argument("--validation", type=Path, required=True, help="text held out")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("out/bert-trainer"))
    options = parser.parse_args()
    import torch

    import heedful
    from heedful.data.prepare import prepare_corpus
    from heedful.data.sources import TextSource
    from heedful.weights.describe import load_tokenizer

    tokenizer = load_tokenizer(str(options.tokenizer))
    train, held = (prepare_corpus(TextSource(path), tokenizer)[0] for path in (options.train, options.validation))
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    seconds = train_with_trainer(train, options.tokenizer, options.steps, options.out)
    results["trainer"] = {"steps": options.steps, "seconds": seconds}
    train_with_heedful(options, 150, options.out / "probe")
    begin, step = step_seconds(options.out / "probe")
    steps = max(100, math.floor((seconds - begin) / step))
    summary = train_with_heedful(options, steps, options.out / "heedful")
    results["heedful"] = {"steps": steps, "seconds": summary["seconds"]}
    for name, folder in ("trainer", "trainer-model"), ("heedful", "heedful"):
        loaded = heedful.load(options.out / folder, device="cuda", dtype=torch.float32)
        got = results[name]
        got["tokens_per_second"] = got["steps"] * BATCH * LENGTH / got["seconds"]
        got["validation_loss"] = validation_loss(loaded.model, held, tokenizer)
        print(
            f"{name}: {got['steps']:,} steps in {got['seconds']:.0f} s, {got['tokens_per_second']:,.0f} tokens/s, "
            f"{got['validation_loss']:.3f} nats per hidden token", flush=True,
        )  # fmt: skip
    (options.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
