"""`python -m heedful.lessons.child`: the process in which a server runs cells.

A line of JSON on stdin is the job, lines of JSON on stdout are what happens; what cells print goes nowhere else. When
stdin ends, so does the process: nobody waits for it any more.

    {"ready": true}                                                        it has imported what takes long
    job  {"cells": [{"cell": 3, "source": ..., "shown": true}], ...}       the cells of a lesson
    ->   {"cell": 3, "text": ..., "figures": [base64], "error": ""}        a cell as it ends
    job  {"exercise": NAME, "source": ..., "before": ..., ...}             an answer to an exercise
    ->   {"right": false, "text": ...}

A job also has `folder`, the working folder, and its limits, `memory` in bytes and `seconds`. An answer is somebody's
code: it runs in the kernel's sandbox where there is one (sandbox.py).
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from heedful.lessons.execute import CellRunner
from heedful.lessons.limits import forbid_side_effects, limit_process
from heedful.lessons.sandbox import confine_process


def do_job() -> int:
    """Do one job; 0 if it came to its end."""
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot  # noqa: F401

    from heedful.lessons import checking  # noqa: F401

    send(events, {"ready": True})
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    job = json.loads(line)
    os.chdir(job["folder"])
    limit_process(job["memory"], job["seconds"])
    if "exercise" in job:
        forbid_side_effects()
        confine_process()
    threading.Thread(target=end_with_stdin, daemon=True).start()  # now, so that it is confined too
    for event in run_cells(job) if "cells" in job else [run_answer(job)]:
        send(events, event)
    return 0


def send(events: BinaryIO, event: dict[str, Any]) -> None:
    """Write one event."""
    events.write(json.dumps(event).encode("ascii") + b"\n")
    events.flush()


def end_with_stdin() -> None:
    """Wait for the end of stdin, then end this process."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def run_cells(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the cells of a lesson in order. One that is not shown tells only its error."""
    runner = CellRunner()
    for cell in job["cells"]:
        output = runner.run(cell["source"])
        if cell["shown"] or output.error:
            figures = [base64.b64encode(figure).decode("ascii") for figure in output.figures]
            yield {"cell": cell["cell"], "text": output.text, "figures": figures, "error": output.error}


def run_answer(job: dict[str, Any]) -> dict[str, Any]:
    """Check an answer to an exercise."""
    from heedful.lessons.answers import judge_answer

    runner = CellRunner()
    before = runner.run(job["before"])
    assert not before.error, before.error
    judged = judge_answer(job["exercise"], job["source"], runner.namespace)
    return {"right": judged.right, "text": judged.text}


if __name__ == "__main__":
    code = do_job()
    sys.stderr.flush()
    os._exit(code)  # threads that cells have left do not hold it up
