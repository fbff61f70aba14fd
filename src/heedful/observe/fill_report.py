"""Reports of `fill`: text for the terminal, a CSV file, an HTML page with charts and association scores."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from heedful.observe import charts, figures
from heedful.observe.fill import METHODS, Filled
from heedful.observe.html_page import figure_page, html_table
from heedful.text.plural import counted

SHOWN = 20  # words of each printed table
ENDINGS = (".html", ".csv", *figures.ENDINGS)


def report_text(found: Filled, k: int = 12) -> str:
    """For the terminal: the likeliest words of every sentence, then the words that tell the sentences apart."""
    lines = [METHODS[found.method], ""]
    for i, sentence in enumerate(found.sentences):
        lines.append(sentence.label)
        lines += [f"  {100 * chance:8.3f} %  {word}" for word, chance in found.top(i, k if i < 8 else 3)]
        lines.append("")
    for head, rows in _contrasts(found, max(3, k // 2)):
        lines.append(head)
        lines += [f"  {score:+8.3f}  {word}" for word, score in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def report_csv(found: Filled) -> str:
    """A row for each word: its probability in every sentence, its log p above the mean, and the log ratio of two."""
    n, names = len(found.sentences), [sentence.name for sentence in found.sentences]
    head = ["word", *(f"p({name})" for name in names)]
    if n > 1:
        head += ["mean log p", *(f"log p above the mean ({name})" for name in names)]
    if n == 2:
        head.append(f"log ratio ({names[0]} : {names[1]})")
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([_escape_formula(cell) for cell in head])
    means, above = found.mean().tolist(), found.against_mean().tolist()
    for i in found.mean().argsort(descending=True, stable=True).tolist():
        row: list[object] = [_escape_formula(found.words[i]), *(f"{p:.6g}" for p in found.probabilities[:, i].tolist())]
        if n > 1:
            row += [f"{means[i]:.5f}", *(f"{above[j][i]:.5f}" for j in range(n))]
        if n == 2:
            row.append(f"{float(found.log_ratio()[i]):.5f}")
        writer.writerow(row)
    return file.getvalue()


def _escape_formula(cell: str) -> str:
    """The text of a CSV cell, quoted where a spreadsheet would take it for a formula."""
    return "'" + cell if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def report_page(found: Filled, name: str) -> str:
    """A self-contained HTML page with the chart and the tables."""
    chart = figures.svg(charts.fill_chart(found))
    tables = []
    for i, sentence in enumerate(found.sentences):
        rows = [(word, f"{100 * chance:.3f} %") for word, chance in found.top(i, SHOWN)]
        tables.append(html_table([sentence.label, "probability"], rows))
    for head, scores in _contrasts(found, SHOWN // 2):
        tables.append(
            html_table([head, "log ratio", "times"], [(w, f"{s:+.3f}", f"{math.exp(s):.2f}") for w, s in scores])
        )
    about = (
        f"{name}: {METHODS[found.method]}. {counted(len(found.words), 'word')}. A log ratio of 0.69 is twice as likely."
    )
    return figure_page(found.template.text, about, [chart], tables)


def _contrasts(found: Filled, k: int) -> list[tuple[str, list[tuple[str, float]]]]:
    """Titles and scored words: the log ratio of two sentences; of more, each alternative's association."""
    if len(found.sentences) < 2:
        return []
    if len(found.sentences) == 2:
        a, b = (sentence.name for sentence in found.sentences)
        return [(f"log ratio, {a} : {b}", found.extremes(found.log_ratio(), k))]
    tables = []
    for slot, choices in enumerate(found.template.slots):
        for choice, scores in zip(choices, found.association(slot), strict=True):
            tables.append((f"log p above the mean, {choice or '∅'}", found.extremes(scores, k)))
    return tables


def save_report(found: Filled, name: str, path: Path) -> None:
    """Write the report by the suffix of the path: .html, .csv, or the chart alone."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"{path}: a report is written as {', '.join(ENDINGS)}")
    if ending in figures.ENDINGS:
        figures.save_figure(charts.fill_chart(found, title=found.template.text), path)
    else:
        path.write_text(
            report_page(found, name) if ending == ".html" else report_csv(found), encoding="utf-8", newline=""
        )
