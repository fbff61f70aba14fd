"""The same time and size on the same books: bits per byte of heedful's recipe `books` and of nanoGPT; needs a GPU.

    python benchmarks/books.py BOOKS --nanogpt FOLDER --tokenizer FOLDER [--minutes 20] [--out OUT]

BOOKS has train.txt and val.txt (or .xz): whole books, those of val.txt held out. The tokenizer (`heedful
train-tokenizer BOOKS/train.txt --vocab-size 8192`) is the same for both, and so are layers (12), width (384), context
(512 tokens), the batch of 128 rows, bfloat16 and torch.compile; nanoGPT's train.py runs with AdamW, a learning rate of
1e-3 falling to a tenth by a cosine, weight decay 0.1, betas 0.9 and 0.95, no dropout. Both run at the same time on one
GPU; a short run of both tells how many steps fit into the minutes, which count without the start. Printed: steps,
seconds, and bits per byte of all held-out books in windows of 512 tokens that overlap by half.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import heedful
from heedful.data.corpus import Corpus
from heedful.data.prepare import prepare_corpus
from heedful.data.sources import TextSource
from heedful.text.tokenizer import Tokenizer

LENGTH, BATCH = 512, 128
NANOGPT = (
    f"--dataset=books --n_layer=12 --n_head=6 --n_embd=384 --block_size={LENGTH} --batch_size={BATCH} --dropout=0.0 "
    "--gradient_accumulation_steps=1 --learning_rate=1e-3 --min_lr=1e-4 --warmup_iters=300 --eval_iters=20 "
    "--always_save_checkpoint=True"
).split()


def find(folder: Path, name: str) -> Path:
    """The file of the books, compressed or not."""
    return next(path for path in (folder / name, folder / f"{name}.xz") if path.exists())


def start_nanogpt(folder: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """Its own train.py, as a process."""
    command = [sys.executable, "train.py", *NANOGPT, f"--out_dir={out}", f"--eval_interval={max(1, steps // 8)}"]
    command += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
    return subprocess.Popen(command, cwd=folder, stdout=(out / "log.txt").open("wb"), stderr=subprocess.STDOUT)


def start_heedful(books: Path, tokenizer: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """`heedful train books`, as a process."""
    settings = {
        "data.source": find(books, "train.txt"), "data.validation": find(books, "val.txt"), "tokenizer.path": tokenizer,
        "train.steps": steps, "train.eval_every": max(1, steps // 8), "train.batch_size": BATCH, "data.length": LENGTH,
    }  # fmt: skip
    command = [sys.executable, "-m", "heedful", "train", "books", "--out", str(out / "run"), "--quiet"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return subprocess.Popen(command, stdout=(out / "log.txt").open("wb"), stderr=subprocess.STDOUT)


def nanogpt_seconds(out: Path) -> list[float]:
    """Seconds of each logged step."""
    found = re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", (out / "log.txt").read_text())
    return [float(milliseconds) / 1000 for milliseconds in found]


def heedful_seconds(out: Path) -> list[float]:
    """Seconds of each logged step."""
    lines = [json.loads(line) for line in (out / "run" / "log.jsonl").read_text().splitlines()]
    return [line["seconds"] * LENGTH * BATCH / line["tokens"] for line in lines if line["kind"] == "step"]


def train_both(options: argparse.Namespace, name: str, steps: dict[str, int]) -> dict[str, Path]:
    """Run both programs at the same time; the folders of what they wrote."""
    folders = {program: options.out / name / program for program in ("nanogpt", "heedful")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    begin = time.perf_counter()
    processes = {
        "nanogpt": start_nanogpt(options.nanogpt, folders["nanogpt"], steps["nanogpt"]),
        "heedful": start_heedful(options.books, options.tokenizer, folders["heedful"], steps["heedful"]),
    }
    for program, process in processes.items():
        code = process.wait()
        print(f"{name}: {program} ended with {code} after {time.perf_counter() - begin:.0f} s", flush=True)
    return folders


@torch.inference_mode()
def bits_per_byte(logits: Callable[[torch.Tensor], torch.Tensor], corpus: Corpus, rows: int = 32) -> float:
    """Of every token but the first, in windows of LENGTH; each but the first window scores its second half alone."""
    ids = torch.from_numpy(corpus.tokens[: (len(corpus.tokens) - 1) // LENGTH * LENGTH + 1].astype(np.int64)).cuda()
    half, total = LENGTH // 2, 0.0
    starts = list(range(0, len(ids) - LENGTH, half))
    for at in range(0, len(starts), rows):
        windows = torch.stack([ids[start : start + LENGTH + 1] for start in starts[at : at + rows]])  # (B, T + 1)
        out = logits(windows[:, :-1].contiguous()).float()  # (B, T, V)
        losses = F.cross_entropy(out.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(-1, LENGTH)
        total += losses[:, half:].sum().item() + (losses[0, :half].sum().item() if at == 0 else 0.0)
    return total / (len(ids) - 1) / np.log(2) / corpus.bytes_per_token


def nanogpt_logits(folder: Path, out: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its last checkpoint, as a function from ids to logits."""
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig

    saved = torch.load(out / "ckpt.pt", map_location="cuda", weights_only=True)
    model = GPT(GPTConfig(**saved["model_args"])).cuda().eval()
    model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in saved["model"].items()})
    print(f"nanogpt: {sum(p.numel() for p in model.parameters()):,} parameters")
    return lambda ids: model(ids, ids)[0]


def heedful_logits(out: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The best checkpoint of the run, as a function from ids to logits."""
    model = heedful.load(out / "run", device="cuda").model.eval()
    print(f"heedful: {model.n_parameters():,} parameters")
    return lambda ids: model(ids).logits


def main() -> None:
    """Prepare, measure the speed, train, score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("books-benchmark"))
    options = parser.parse_args()
    for name in ("books", "nanogpt", "tokenizer", "out"):
        setattr(options, name, getattr(options, name).resolve())
    shutil.rmtree(options.out, ignore_errors=True)
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    data = options.nanogpt / "data" / "books"
    data.mkdir(parents=True, exist_ok=True)
    corpora = {
        name: prepare_corpus(TextSource(find(options.books, f"{name}.txt")), tokenizer)[0] for name in ("train", "val")
    }
    for name, corpus in corpora.items():
        corpus.tokens.astype(np.uint16).tofile(data / f"{name}.bin")
        print(f"{name}: {len(corpus.tokens):,} tokens, {corpus.bytes_per_token:.3f} bytes each", flush=True)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": tokenizer.vocab_size}))

    short = train_both(options, "short", {"nanogpt": 300, "heedful": 300})
    steps = {}
    for program, read in (("nanogpt", nanogpt_seconds), ("heedful", heedful_seconds)):
        seconds = float(np.median(read(short[program])[3:]))
        steps[program] = int(60 * options.minutes / seconds)
        print(
            f"{program}: {1000 * seconds:.1f} ms a step, {steps[program]:,} steps in {options.minutes:g} minutes",
            flush=True,
        )
    folders = train_both(options, "long", steps)
    for program, logits in (
        ("nanogpt", nanogpt_logits(options.nanogpt, folders["nanogpt"])),
        ("heedful", heedful_logits(folders["heedful"])),
    ):
        print(f"{program}: {bits_per_byte(logits, corpora['val']):.4f} bits per byte", flush=True)


if __name__ == "__main__":
    main()
