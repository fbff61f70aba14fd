"""`heedful complete-image`: the rest of images of which the first rows are given, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from heedful.cli.arguments import add_model
from heedful.cli.results import add_json, print_json, progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The images, how much of them is given, the model, the picture."""
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files; scaled to the model's size")
    parser.add_argument("--out", type=Path, metavar="PNG", help="the picture: what is given | completions, a row each")
    parser.add_argument("--keep", type=float, default=0.5, metavar="P", help="of the rows, from the top (default 0.5)")
    parser.add_argument("-n", type=int, default=4, metavar="N", help="completions of each image (default 4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same completions (default 0)")
    add_model(parser, "digits-gpt")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Write the picture; print its name, or with --json the pixels."""
    from heedful.cli.arguments import load_model
    from heedful.cli.images import load_image
    from heedful.tasks.complete_image import completion_picture, save_picture, to_bytes

    if options.out is None and not options.json:
        raise ValueError("where to? --out completed.png, or --json")
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise ValueError(f"{options.out}: the picture is written as .png")
    if not 0 < options.keep < 1 or options.n < 1:
        raise ValueError("--keep is a share of the rows between 0 and 1, and -n 1 or more")
    loaded = load_model(options.model, "complete_image", options.device)
    given, found = [], []
    with progress_bar(len(options.images)) as advance:
        for path in options.images:
            image = load_image(loaded.model, path)
            rows = image[:, : min(image.shape[1] - 1, max(1, round(options.keep * image.shape[1])))]
            given.append(rows)
            found.append(loaded.complete_image(rows, options.n, temperature=options.temperature, seed=options.seed))
            advance(1)
            if options.json:
                print_json({"input": str(path), "rows": rows.shape[1], "images": to_bytes(found[-1]).tolist()})
    if options.out is not None:
        save_picture(completion_picture(given, found), options.out)
        if not options.json:
            print(options.out)
    return 0
