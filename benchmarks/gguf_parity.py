"""GGUF files that heedful writes, run by llama.cpp: are its greedy ids those of the model that was written?

    python benchmarks/gguf_parity.py --llama-cpp llama.cpp [--dtype float32] [--only gemma2 ...]

A small random model of every family that can be written, and real ones: the decoders that ship, and SmolLM2 and
stories15M where they were pulled. Each is written by `save_gguf` and served by llama-server with KV cache in float32
and without flash attention. It is given token ids, and continues them greedily; heedful continues them on its plain
path in float32. `logprob` is the largest difference between the two log-probabilities of a generated token. `text` says
whether llama.cpp's tokenizer gives heedful's ids of some texts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import heedful
from heedful.generate.batch import greedy_batch
from heedful.loaded import Loaded
from heedful.models.base import Batch, DecoderModel
from heedful.models.gemma import Gemma, GemmaConfig
from heedful.models.gpt import GPT, GPTConfig
from heedful.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from heedful.models.llama import Llama, LlamaConfig
from heedful.models.mistral import Mistral, MistralConfig
from heedful.models.mixtral import Mixtral, MixtralConfig
from heedful.models.olmo import Olmo, OlmoConfig
from heedful.models.phi import Phi, PhiConfig
from heedful.models.qwen import Qwen, QwenConfig
from heedful.text import Tokenizer, characters, train_bpe

sys.path.insert(0, str(Path(__file__).parent))
from peers.servers import free_port

PROMPT, NEW, CONTEXT = 40, 64, 256
SIZES = dict(d_model=128, n_layers=3, n_heads=4, vocab_size=512, max_len=CONTEXT)
GROUPED = dict(**SIZES, n_kv_heads=2, d_ff=192)
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + i / 10 for i in range(16)],
    "long_factor": [1 + i / 2 for i in range(16)], "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
GEMMA_2 = dict(after_norms=True, query_scale=64.0, score_cap=50.0, logit_cap=30.0, window=16)
RANDOM: dict[str, Callable[[], DecoderModel]] = {
    "gpt-2": lambda: GPT.create(GPTConfig(**SIZES)),
    "gptneox": lambda: GPTNeoX.create(GPTNeoXConfig(**SIZES, d_ff=384)),
    "gptneox, serial": lambda: GPTNeoX.create(GPTNeoXConfig(**SIZES, d_ff=384, parallel=False, tied=True)),
    "llama": lambda: Llama.create(LlamaConfig(**GROUPED)),
    "llama 3.2": lambda: Llama.create(LlamaConfig(**GROUPED, scaling=LLAMA_3, theta=5e5, d_head=64, tied=True)),
    "llama, yarn": lambda: Llama.create(LlamaConfig(**GROUPED, scaling=YARN)),
    "llama, linear": lambda: Llama.create(LlamaConfig(**GROUPED, scaling={"rope_type": "linear", "factor": 2.0})),
    "mistral": lambda: Mistral.create(MistralConfig(**GROUPED, window=128)),
    "mixtral": lambda: Mixtral.create(MixtralConfig(**GROUPED, n_experts=4)),
    "qwen2": lambda: Qwen.create(QwenConfig(**GROUPED)),
    "qwen3": lambda: Qwen.create(QwenConfig(**GROUPED, d_head=64, head_norms=True, tied=True)),
    "gemma": lambda: Gemma.create(GemmaConfig(**GROUPED, d_head=64)),
    "gemma2": lambda: Gemma.create(GemmaConfig(**GROUPED, d_head=64, **GEMMA_2)),
    "phi3": lambda: Phi.create(PhiConfig(**GROUPED)),
    "phi3, longrope": lambda: Phi.create(PhiConfig(**{**GROUPED, "max_len": 1024}, scaling=LONGROPE)),
    "phi4-mini": lambda: Phi.create(PhiConfig(**GROUPED, rotary_share=0.75, tied=True)),
    "olmo2": lambda: Olmo.create(OlmoConfig(**GROUPED)),
}
REAL = ("tiny", "shakespeare", "sums", "tiny-books", "books", "chat", "stories15m", "smollm2-135m-instruct")
PATTERNS = ("BPE gpt2", "BPE llama3", "BPE qwen2")
PROMPTS = {"sums": "12+34="}
PROMPT_TEXT = "First of all, the king and his three sons went to the forest."
QUESTION = "What do you know about the sea?"
TEXTS = (
    PROMPT_TEXT,
    "It's 12345 o'clock;\n\ndon't forget:\tthe  end.",
    "Café, naïve: 日本語 한국어 👍🏽 ½",
    " a  b",
    "1+2",
)


class LlamaServer:
    """llama-server with one file, from when it answers until the end of the `with`."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.port = free_port()
        command = [str(folder / "build" / "bin" / "llama-server"), "-m", str(file), "--port", str(self.port)]
        command += ["-c", str(CONTEXT), "-np", "1", "-t", "2", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen([*command, "--no-warmup", "--no-ui"], stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self) -> LlamaServer:
        while True:
            try:
                self.ask("health")
                return self
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None:
                    self.log.seek(0)
                    lines = [line for line in self.log.read().splitlines() if "error" in line.lower()]
                    raise RuntimeError(lines[0] if lines else "llama-server ended") from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a request."""
        address = f"http://127.0.0.1:{self.port}/{path}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(address, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def greedy(self, prompt: list[int], n: int) -> list[tuple[int, float]]:
        """The ids that continue a prompt, each with its log-probability; it ends where llama.cpp ends a text."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "n_probs": 1, "cache_prompt": False}
        return [(p["id"], p["logprob"]) for p in self.ask("completion", **body)["completion_probabilities"]]

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text with what the model puts around it."""
        return list(self.ask("tokenize", content=text, add_special=True, parse_special=False)["tokens"])


def random_model(name: str) -> Loaded:
    """A small random model, whose tokens are characters: llama-server refuses to send text that is no UTF-8."""
    torch.manual_seed(0)
    model = RANDOM[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1 + (p.ndim == 1 and "gemma" not in name))
    letters = [chr(code) for code in range(32, 600) if chr(code).isprintable()]
    return Loaded(
        model, characters(letters, model.config.vocab_size, special=["<unk>"]), "random"
    )  # by a name llama.cpp may know a model


def pattern_tokenizer(pattern: str) -> Tokenizer:
    corpus = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    return train_bpe((path.read_text(encoding="utf-8") for path in corpus), 512, pattern=pattern)


def tiny_gpt(vocab_size: int) -> GPT:
    return GPT.create(GPTConfig(d_model=32, n_layers=1, n_heads=2, vocab_size=vocab_size, max_len=CONTEXT)).eval()


def log_probabilities(loaded: Loaded, prompt: list[int], ids: list[int]) -> list[float]:
    """heedful's log-probabilities of the ids after the prompt."""
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([prompt + ids])).logits
    found = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return found.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def greedy(loaded: Loaded, prompt: list[int], n: int) -> list[int]:
    (ids,) = greedy_batch(loaded.model, Batch(torch.tensor([prompt])), n)
    return list(ids)


def serve_written(loaded: Loaded, folder: Path, dtype: str, use: Callable[[LlamaServer], Any]) -> Any:
    """Write the model, serve the file, and return what `use` makes of the server."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of contexts that end with a window
        loaded.save_gguf(Path(place) / "model.gguf", dtype=dtype)
        with LlamaServer(folder, Path(place) / "model.gguf") as server:
            return use(server)


def same_texts(loaded: Loaded, server: LlamaServer) -> str:
    """How many of the texts are the same ids; those with characters that the tokenizer does not have are left out."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    texts = [t for t in TEXTS if tokenizer.knows_bytes or tokenizer.unk_id not in tokenizer.encode(t)]
    same = [server.tokenize(t) == tokenizer.encode(t, add_special=True) for t in texts]
    return f"{sum(same)} of {len(same)}"


def compare(loaded: Loaded, prompt: list[int], folder: Path, dtype: str) -> str:
    """Both programs continue the prompt: the columns of the table."""
    n = min(NEW, (loaded.model.context_length or CONTEXT) - len(prompt))
    theirs, texts = serve_written(loaded, folder, dtype, lambda s: (s.greedy(prompt, n), same_texts(loaded, s)))
    ids = [index for index, _ in theirs]
    ours = greedy(loaded, prompt, len(ids))
    same = next((i for i, (a, b) in enumerate(zip(ours, ids, strict=True)) if a != b), len(ids))
    expected = log_probabilities(loaded, prompt, ids)
    error = max(abs(a - b) for (_, a), b in zip(theirs[: same or 1], expected, strict=False))
    return f"{same} of {len(ids)} | {error:.1e} | {texts}"


def load_case(name: str) -> tuple[Loaded, list[int]]:
    """A model of the table, and its prompt."""
    if name in RANDOM:
        drawn = torch.randint(5, 500, (PROMPT,), generator=torch.Generator().manual_seed(1))
        return random_model(name), drawn.tolist()
    loaded = heedful.load(name, dtype=torch.float32)
    assert loaded.tokenizer is not None
    if loaded.tokenizer.chat_template is not None:
        return loaded, loaded.tokenizer.chat([{"role": "user", "content": QUESTION}])
    prompt = loaded.tokenizer.encode(PROMPTS.get(name, PROMPT_TEXT), add_special=True)
    return loaded, prompt[: min(CONTEXT, loaded.model.context_length or CONTEXT) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="its sources, built in their folder build")
    parser.add_argument("--dtype", default="float32", help="of the file; heedful's own ids are in float32")
    parser.add_argument("--only", nargs="+", choices=[*RANDOM, *REAL, *PATTERNS], default=[*RANDOM, *REAL, *PATTERNS])
    options = parser.parse_args()
    torch.set_num_threads(2)
    print("| model | parameters | same ids | logprob | same texts |\n|---|---|---|---|---|")
    for name in options.only:
        if name in PATTERNS:
            loaded = Loaded(tiny_gpt(512), pattern_tokenizer(name.removeprefix("BPE ")), name)
            texts = serve_written(loaded, options.llama_cpp, "float32", lambda s, loaded=loaded: same_texts(loaded, s))
            print(f"| {name} | | | | {texts} |", flush=True)
            continue
        try:
            loaded, prompt = load_case(name)
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        kind = f"{name}, random" if name in RANDOM else name
        columns = compare(loaded, prompt, options.llama_cpp, options.dtype)
        print(f"| {kind} | {loaded.model.n_parameters() / 1e6:.1f}M | {columns} |", flush=True)


if __name__ == "__main__":
    main()
