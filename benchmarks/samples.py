"""Ten unedited samples of a model for its card, with seeds 0 to 9.

python benchmarks/samples.py MODEL --prompt "The old house" [--max-tokens 80] [--temperature 0.8]
"""

from __future__ import annotations

import argparse

import heedful


def main() -> None:
    """Print the samples as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    loaded = heedful.load(options.model)
    print(
        f"## Ten samples\n\nSeeds 0 to 9, temperature {options.temperature:g}, {options.max_tokens} tokens after "
        f'"{options.prompt}", unedited (`python benchmarks/samples.py`):\n'
    )
    for seed in range(10):
        text = loaded.generate(
            options.prompt, max_tokens=options.max_tokens, temperature=options.temperature, seed=seed
        )
        print(f"{seed}. " + " / ".join(line.strip() for line in (options.prompt + text).splitlines() if line.strip()))


if __name__ == "__main__":
    main()
