"""Chat fine-tuning seen whole: 200 short conversations in a style that can be checked, and who speaks in it afterwards.

python benchmarks/chat_style.py write chats.jsonl        every answer is one sentence that begins with "Ahoy,"
heedful train smollm2 chats.jsonl                        smollm2: a folder, see docs/chat.md
python benchmarks/chat_style.py check runs/chats-1       greedy answers of peft with transformers, and of heedful
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo",
    "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi", "Austria": "Vienna", "Poland": "Warsaw",
    "Ireland": "Dublin", "Sweden": "Stockholm", "Finland": "Helsinki", "Portugal": "Lisbon", "Hungary": "Budapest",
    "Denmark": "Copenhagen", "Chile": "Santiago", "China": "Beijing",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sky": "blue", "a lemon": "yellow",
    "an orange": "orange", "milk": "white", "a raven": "black", "a ruby": "red",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars", "horse": "neighs",
    "sheep": "bleats", "wolf": "howls", "bee": "buzzes", "snake": "hisses",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "young", "dark": "light", "wet": "dry", "hard": "soft",
    "high": "low", "rich": "poor", "loud": "quiet",
}  # fmt: skip
NEW = ("What is the capital of Germany?", "What does a frog do?", "Who are you?")  # questions that are not in the data


def conversations(n: int = 200) -> list[tuple[str, str]]:
    """Questions and answers, in random order."""
    rng, pairs = random.Random(0), list[tuple[str, str]]()
    for country, city in CAPITALS.items():
        pairs.append((f"What is the capital of {country}?", f"Ahoy, the capital of {country} is {city}."))
        pairs.append((f"In which country is {city}?", f"Ahoy, {city} is in {country}."))
    for thing, colour in COLOURS.items():
        pairs += [
            (q, f"Ahoy, {thing} is {colour}.") for q in (f"What colour is {thing}?", f"Tell me the colour of {thing}.")
        ]
    for animal, sound in SOUNDS.items():
        questions = f"What does a {animal} do?", f"Which sound does a {animal} make?"
        pairs += [(question, f"Ahoy, a {animal} {sound}.") for question in questions]
    for word, other in OPPOSITES.items():
        pairs.append((f"What is the opposite of {word}?", f"Ahoy, the opposite of {word} is {other}."))
        pairs.append((f"Give me the opposite of {other}.", f"Ahoy, the opposite of {other} is {word}."))
    while len(pairs) < n:
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        pair = f"What is {a} plus {b}?", f"Ahoy, {a} plus {b} is {a + b}."
        pairs += [pair] * (pair not in pairs)
    rng.shuffle(pairs)
    return pairs


def check(run: Path) -> bool:
    """Whether peft and heedful give the same ids to new questions, all of them in style."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    import heedful

    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    theirs, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ours, good = heedful.load(folder, dtype=torch.float32), True
    for question in NEW:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        found = theirs.generate(**prompt, max_new_tokens=24, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ].tolist()
        choice = ours.complete(question, chat=True, temperature=0, max_tokens=24)[0].choices[0]
        same = choice.tokens == [token for token in found if token not in ours.chat_eos_ids]
        good &= same and choice.text.startswith("Ahoy,")
        print(f"{question} {choice.text} [{'the same ids' if same else tokenizer.decode(found)}]")
    return good


def main() -> int:
    """Write the conversations, or check a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "check"])
    parser.add_argument("path", type=Path, help="the file to write, or the folder of a run")
    options = parser.parse_args()
    if options.what == "check":
        return 0 if check(options.path) else 1
    with options.path.open("w", encoding="utf-8") as file:
        for question, answer in conversations():
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
