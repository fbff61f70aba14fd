"""A model with only the tokens that its data has, and with some of its layers: where a small student begins.

    python benchmarks/zoo_data/prune.py MODEL FOLDER --data chats.jsonl [--least 3] [--layers 0 1 7 14 21 28 29]

Keeps the tokens that occur at least so often in the texts of the conversations, bytes, special tokens, and what
byte-pair encoding merges on the way to a kept token. So every text of kept tokens is encoded as before, and the model
says of it what it said before, but for the words that it has no more. With fewer layers it says nonsense until it is
trained again. The folder's weights are bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend

import heedful
from heedful.loaded import Loaded
from heedful.text import Tokenizer
from heedful.text.byte_level import CHAR_OF_BYTE

SHARD = 15 * 10**6  # bytes of a file
LAYER = re.compile(r"^(decoder\.blocks\.)(\d+)\.")


def contents(paths: Iterable[Path]) -> Iterator[str]:
    """The messages of conversations."""
    for path in paths:
        for line in path.open(encoding="utf-8"):
            yield from (message["content"] for message in json.loads(line)["messages"])


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[int]:
    """How often each token occurs."""
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 4096:
            counts.update(i for ids in tokenizer.encode_batch(batch) for i in ids)
            batch = []
    counts.update(i for ids in tokenizer.encode_batch(batch) for i in ids)
    return counts


def kept_tokens(spec: dict[str, Any], wanted: Iterable[int]) -> list[str]:
    """The wanted tokens of a byte-level BPE, those they are merged from, bytes and special tokens, by their old ids."""
    vocab = ids_of(spec)
    names = {index: name for name, index in vocab.items()}
    parts = {a + b: (a, b) for a, b in map(pair_of, spec["model"]["merges"])}
    kept = {character for character in CHAR_OF_BYTE if character in vocab}
    kept |= {token["content"] for token in spec["added_tokens"]}
    queue = [names[index] for index in wanted]
    while queue:
        name = queue.pop()
        if name not in kept:
            kept.add(name)
            queue += parts.get(name, ())
    return sorted(kept, key=vocab.__getitem__)


def ids_of(spec: dict[str, Any]) -> dict[str, int]:
    """The id of every token, special ones too."""
    return {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}


def pair_of(merge: str | list[str]) -> tuple[str, str]:
    """The two tokens of a merge, of either form in tokenizer.json."""
    a, b = merge.split(" ") if isinstance(merge, str) else merge
    return a, b


def prune_tokenizer(tokenizer: Tokenizer, wanted: Iterable[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with fewer tokens, and the old id of each."""
    spec: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    kept = kept_tokens(spec, wanted)
    old = [ids_of(spec)[name] for name in kept]
    ids = {name: index for index, name in enumerate(kept)}
    merges = [pair for pair in map(pair_of, spec["model"]["merges"]) if {*pair, "".join(pair)} <= ids.keys()]
    spec["model"] |= {"vocab": ids, "merges": [list(pair) for pair in merges]}
    for token in spec["added_tokens"]:
        token["id"] = ids[token["content"]]
    backend = Backend.from_str(json.dumps(spec))
    return Tokenizer(backend, roles=tokenizer.roles, chat_template=tokenizer.chat_template), old


def template_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the chat template writes around messages."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    return tokenizer.chat(turns) + tokenizer.chat([{"role": "system", "content": "a"}, *turns])


def prune(loaded: Loaded, wanted: Iterable[int]) -> Loaded:
    """A decoder with tied embeddings and its tokenizer, with fewer tokens."""
    assert loaded.tokenizer is not None and loaded.model.config.tied, "a decoder with tied embeddings"
    tokenizer, old = prune_tokenizer(loaded.tokenizer, {*wanted, *template_tokens(loaded.tokenizer)})
    model = type(loaded.model).create(loaded.model.config.replace(vocab_size=len(old)))
    state = {name: p.detach() for name, p in loaded.model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[name][old] if name.startswith("embed.") else state[name])
    places = {index: place for place, index in enumerate(old)}
    for key, value in loaded.model.special.items():
        model.special[key] = [places[i] for i in value] if isinstance(value, list) else places[value]
    model.generation = dict(loaded.model.generation)
    return Loaded(model, tokenizer, loaded.name)


def keep_layers(loaded: Loaded, layers: list[int]) -> Loaded:
    """A decoder with some of its layers."""
    model = type(loaded.model).create(loaded.model.config.replace(n_layers=len(layers)))
    state = {name: p.detach() for name, p in loaded.model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[LAYER.sub(lambda found: f"{found[1]}{layers[int(found[2])]}.", name)])
    model.special, model.generation = dict(loaded.model.special), dict(loaded.model.generation)
    return Loaded(model, loaded.tokenizer, loaded.name)


def compact(path: Path) -> None:
    """Write a file of JSON without spaces."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Count, prune, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="conversations, or {token id: count} (.json)"
    )
    parser.add_argument("--least", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", help="those to keep (default: all)")
    parser.add_argument("--generation", default="{}", metavar="JSON", help="for generation_config.json")
    options = parser.parse_args()
    loaded = heedful.load(options.model)
    assert loaded.tokenizer is not None
    counts = count_tokens(loaded.tokenizer, contents(p for p in options.data if p.suffix != ".json"))
    for path in options.data:
        if path.suffix == ".json":
            counts.update({int(token): n for token, n in json.loads(path.read_text()).items()})
    wanted = {token for token, n in counts.items() if n >= options.least}
    small = prune(loaded, wanted)
    if options.layers:
        small = keep_layers(small, options.layers)
    small.model.generation |= json.loads(options.generation)
    small.model.bfloat16()
    small.save(options.folder, max_shard=SHARD)
    compact(options.folder / "tokenizer.json")
    lost = 1 - sum(counts[token] for token in wanted) / counts.total()
    n, before = small.model.config.vocab_size, loaded.model.config.vocab_size
    print(f"{n:,} of {before:,} tokens; {lost:.4%} of the text is of others")


if __name__ == "__main__":
    main()
