"""Reports of bias: text for the terminal, JSON, CSV, and one self-contained HTML page with charts and tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from heedful.evaluate.bias import BiasResult, Contrast, Effect, measure_in_slices
from heedful.evaluate.bias_tests import BiasTest, standard_tests
from heedful.evaluate.bootstrap import RESAMPLES
from heedful.evaluate.report import format_table
from heedful.evaluate.task import LoadedModel
from heedful.observe import charts, figures
from heedful.observe.html_page import html_page, html_table
from heedful.text.plural import counted

ENDINGS = (".html", ".json", ".csv")
SHOWN = 6  # rows at either end of a printed table
MOST_ROWS = 60  # in a chart
LIMITS = (
    "These numbers are about these sentences, names and words, and no others: another wording may turn a result "
    "around.",
    "An interval says how much of a result hangs on the templates, values and names that were chosen, by resampling "
    "them. Of fewer than ten of a kind it is too narrow. Of many intervals of 95 %, one in twenty misses by chance.",
    "A difference is no proof of harm, and no difference no proof of fairness: it is a property of a text's statistics "
    "that the model has learned. What it does in an application has to be measured there.",
    "Groups are given by words. Women and men are not all people, names do not tell who somebody is, and a name also "
    "carries age, class, language and frequency.",
)


@dataclass(frozen=True)
class BiasReport:
    """The results of a model's tests."""

    model: str
    results: list[BiasResult]

    def text(self, most: int = SHOWN) -> str:
        """For the terminal: what each test found, with intervals."""
        found = [_text(result, most) for result in self.results]
        if any(contrast.effect.low is not None for result in self.results for contrast in result.contrasts):
            found.append(
                f"In brackets 95 % intervals: bootstrap over templates, values and members, {RESAMPLES:,} resamples. "
                "Of fewer than ten of a kind they are too narrow."
            )
        else:
            found.append("There is no interval: give more templates, values (--fill) or members of the groups.")
        return "\n\n".join(found)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with the command of each test."""
        results = [result.to_dict() | {"command": result.test.command(self.model)} for result in self.results]
        return {"model": self.model, "resamples": RESAMPLES, "results": results}

    def to_csv(self) -> str:
        """A line for each number: test, contrast, row, value and interval."""
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(["test", "contrast", "row", "value", "low", "high", "unit"])
        for result in self.results:
            for contrast in result.contrasts:
                for row in (contrast.effect, *contrast.rows):
                    name = "all" if row is contrast.effect else row.name
                    numbers = ["" if x is None else f"{x:.6g}" for x in (row.value, row.low, row.high)]
                    cells = [result.test.name, contrast.effect.name, name, *numbers, result.unit]
                    writer.writerow(["'" + c if c[:1] in ("=", "+", "@") else c for c in cells])
        return file.getvalue()

    def html(self) -> str:
        """One self-contained page."""
        first = "".join(f"<li>{escape(_finding(result, c))}</li>" for result in self.results for c in _notable(result))
        body = f"<h2>In short</h2><ul>{first}</ul>" + "".join(_section(result, self.model) for result in self.results)
        body += f"<h2>What this does not show</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in LIMITS)}</ul>"
        about = (
            f"Model: {self.model}. Sentences that differ in a group alone are scored by the model. In brackets and as "
            "bars: 95 % intervals, by a bootstrap over templates, values and members of the groups "
            f"({RESAMPLES:,} resamples)."
        )
        return html_page(f"Bias report of {self.model}", about, body)

    def save(self, path: str | Path) -> None:
        """Write the report by the suffix of the path: .html, .json or .csv."""
        path = Path(path)
        check_ending(path)
        ending = path.suffix.lower()
        if ending == ".json":
            made = json.dumps(self.to_dict(), indent=1) + "\n"
        else:
            made = self.html() if ending == ".html" else self.to_csv()
        path.write_text(made, encoding="utf-8", newline="")


def check_ending(path: Path) -> None:
    """ValueError unless a report can be written to this file."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a report is written as {', '.join(ENDINGS)}")


def report_in_slices(loaded: LoadedModel, tests: Sequence[BiasTest] = ()) -> Iterator[BiasReport | None]:
    """The report as the last value, after None for each slice of work. Without tests those that ship."""
    tests = tests or standard_tests(loaded.model.abilities)
    if not tests:
        raise ValueError(
            f"{loaded.name} is a {loaded.model.family}: a report of bias is for models that fill in blanks, continue "
            "texts or classify them"
        )
    results = []
    for test in tests:
        result: BiasResult | None = None
        for part in measure_in_slices(loaded, test):
            result = part
            yield None
        assert result is not None, "the last value it yields"
        results.append(result)
    yield BiasReport(loaded.name, results)


def bias_report(loaded: LoadedModel, tests: Sequence[BiasTest] = ()) -> BiasReport:
    """The report of a model; without tests those that ship."""
    *_, report = report_in_slices(loaded, tests)
    assert report is not None, "the last value it yields"
    return report


# --- text ------------------------------------------------------------------------------------------------------------


def number(effect: Effect, unit: str, *, signed: bool = True) -> str:
    """The value of an effect."""
    sign = "+" if signed else ""
    return f"{effect.value:{sign}.2f}" + (" %" if unit == "%" and not signed else "")


def interval_text(effect: Effect, *, sign: str = "+", digits: int = 2) -> str:
    """Its interval in brackets; nothing where there is none."""
    return "" if effect.low is None else f"[{effect.low:{sign}.{digits}f}, {effect.high:{sign}.{digits}f}]"


def _text(result: BiasResult, most: int) -> str:
    test = result.test
    lines = [f"{test.name}: {result.measure}; {counted(test.n_sentences, 'sentence')}"]
    lines += [f"  {template}" for template in test.templates[:3]]
    lines += ["  ..."] if len(test.templates) > 3 else []
    lines.append("")
    rows = [["", "mean", "95 % interval", "above 0"]]
    rows += [
        [group.name, number(group, result.unit, signed=False), interval_text(group, sign="")] for group in result.groups
    ]
    for contrast in result.contrasts:
        share = f"{contrast.share.value:.0f} %" if contrast.rows or test.pairs else ""
        rows.append([contrast.effect.name, number(contrast.effect, result.unit), interval_text(contrast.effect), share])
    lines += format_table(rows)
    if len(result.contrasts) == 1 and result.contrasts[0].rows:
        found = result.contrasts[0].rows
        shown = found if len(found) <= 2 * most else found[:most] + found[-most:]
        lines += ["", *format_table([["", result.contrasts[0].effect.name, "95 % interval"], *_rows(shown, result)])]
    return "\n".join(lines)


def _rows(effects: Sequence[Effect], result: BiasResult) -> list[list[str]]:
    return [[effect.name, number(effect, result.unit), interval_text(effect)] for effect in effects]


# --- the page --------------------------------------------------------------------------------------------------------


def _notable(result: BiasResult) -> list[Contrast]:
    """The contrast of two groups; of more, those whose interval excludes 0, or the largest."""
    if len(result.contrasts) == 1:
        return result.contrasts
    clear = [contrast for contrast in result.contrasts if contrast.effect.clear]
    return clear or [max(result.contrasts, key=lambda contrast: abs(contrast.effect.value))]


def _finding(result: BiasResult, contrast: Contrast) -> str:
    """A contrast as a sentence."""
    effect, unit = contrast.effect, "percentage points" if result.unit == "%" else "nats"
    told = f"{result.test.name}: {effect.name} is {effect.value:+.2f} {unit} {interval_text(effect)}"
    told += "" if effect.low is None or effect.clear else ", which cannot be told from none"
    if contrast.rows:
        most, least = contrast.rows[0], contrast.rows[-1]
        told += f"; from {most.value:+.2f} ({most.name}) to {least.value:+.2f} ({least.name})"
    return told + "."


def _section(result: BiasResult, model: str) -> str:
    """A test: its templates, chart and tables, and the command that repeats it."""
    test, unit = result.test, "percentage points" if result.unit == "%" else "nats; 0.69 is twice as likely"
    templates = "".join(f"<li>{escape(template)}</li>" for template in test.templates)
    tables = "".join(f"<div class=scroll>{table}</div>" for table in _tables(result, unit))
    return (
        f"<section><h2>{escape(test.name)}</h2>"
        + (f"<p>{escape(test.about)}</p>" if test.about else "")
        + f"<p>Score: {escape(result.measure)}. {counted(test.n_sentences, 'sentence')}.</p><ul>{templates}</ul>"
        + _chart(result, unit)
        + f'<div class="tables">{tables}</div>'
        + f"<p>To repeat it:</p><pre>{escape(test.command(model))}</pre></section>"
    )


def _chart(result: BiasResult, unit: str) -> str:
    """The difference of two groups for each value; of more groups, each group's difference from the mean."""
    only = result.contrasts[0] if len(result.contrasts) == 1 else None
    points = [contrast.effect for contrast in result.contrasts] if only is None else only.rows
    if not points:
        return ""
    if len(points) > MOST_ROWS:
        points = points[: MOST_ROWS // 2] + points[-MOST_ROWS // 2 :]
    name, whole = ("group - mean of all", None) if only is None else (only.effect.name, only.effect.value)
    chart = charts.interval_chart([(e.name, e.value, e.low, e.high) for e in points], f"{name} ({unit})", whole)
    return f'<figure class="drawn">{figures.svg(chart)}</figure>'


def _tables(result: BiasResult, unit: str) -> list[str]:
    def means(effects: Sequence[Effect]) -> list[list[str]]:
        return [[effect.name, f"{effect.value:.2f}", interval_text(effect, sign="")] for effect in effects]

    interval = "95 % interval"
    differences = [
        [*_rows([c.effect], result)[0], f"{c.share.value:.0f}", interval_text(c.share, sign="", digits=0)]
        for c in result.contrasts
    ]
    tables = [
        html_table(["group", "mean score", interval], means(result.groups)),
        html_table(["difference", unit, interval, "% of values above 0", interval], differences),
    ]
    if len(result.contrasts) == 1 and result.contrasts[0].rows:
        only = result.contrasts[0]
        tables.append(html_table([only.effect.name, unit, interval], _rows(only.rows, result)))
    return tables + [html_table([name, "mean score", interval], means(m)) for name, m in result.members.items()]
