"""The matrix of other engines as one HTML file without scripts: verdicts by release and column."""

from __future__ import annotations

from html import escape

import fourfold
from fourfold.conformance.verdicts import COLUMNS, WORDS, Verdict
from fourfold.page.document import MARK, content_hash
from fourfold.show.conformance import said_of
from fourfold.verbs.conformance import Conformance

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem;
  padding: 0 1rem; }
p, ul { max-width: 76rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { border: 1px solid var(--line); padding: .3rem .5rem; text-align: left; }
thead th { vertical-align: bottom; background: var(--soft); }
th:first-child { position: sticky; left: 0; background: Canvas; }
td b { display: block; } td small, td i { display: block; font-style: normal; opacity: .75; }
.equal b { color: #2e7d32; } .stand-in b { color: #00796b; } .fault { background: #c6282833; }
.fault b { color: #c62828; } .refused b, .blocked b { opacity: .6; font-weight: normal; }
@media (prefers-color-scheme: dark) {
  .equal b { color: #81c784; } .stand-in b { color: #4db6ac; } .fault b { color: #ff8a80; } }
li { margin: .4rem 0; } code { white-space: nowrap; }
"""


def matrix_page(answer: Conformance) -> str:
    cells = dict(zip(_keys(answer), answer.verdicts, strict=True))
    releases = list(dict.fromkeys(_name(one) for one in answer.verdicts))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in releases)
    body = "".join(
        f'<tr><th scope="row">{escape(column)}</th>'
        + "".join(_cell(cells.get((name, column))) for name in releases)
        + "</tr>"
        for column in COLUMNS
        if any((name, column) in cells for name in releases)
    )
    words = "".join(f"<li><b>{word}</b>: {escape(text)}</li>" for word, text in WORDS.items())
    policy = f"default-src 'none'; style-src {content_hash(_STYLE)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Engines against one process</title><style>{_STYLE}</style></head><body>
<h1>Engines against one process</h1>
<p>Each cell trains a tiny model for three clipped AdamW steps by the engine's own parallel code and
compares loss, every gradient, norm, parameters and copies of weights with a plain fp64 decoder in
one process. The number is the largest relative difference of a gradient.</p>
<ul>{words}</ul>
<div class="wide"><table><thead><tr><th scope="col">axis or option</th>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
{_details(answer)}
<p>fourfold {fourfold.__version__}</p></body></html>
"""


def _name(one: Verdict) -> str:
    return f"{one.engine} {one.version}".strip()


def _keys(answer: Conformance) -> list[tuple[str, str]]:
    pairs = zip(answer.columns, answer.verdicts, strict=True)
    return [(_name(one), column) for column, one in pairs]


def _cell(one: Verdict | None) -> str:
    if one is None:
        return "<td></td>"
    number = "" if one.difference is None else f"<small>{one.difference:.0e}</small>"
    standins = f"<i>{escape(', '.join(one.standins))}</i>" if one.standins else ""
    label = f"<i><code>{escape(one.cell)}</code></i>"
    return f'<td class="{one.verdict}"><b>{one.verdict}</b>{number}{standins}{label}</td>'


def _details(answer: Conformance) -> str:
    """Faults first, then what was refused or blocked, with the reason."""
    parts = []
    titles = {"fault": "Faults", "blocked": "Blocked", "refused": "Refused"}
    for word, title in titles.items():
        lines = [
            f"<li><b>{escape(_name(one))}</b> <code>{escape(one.cell)}</code>: "
            f"{escape('; '.join(_bare(line) for line in said_of(one)))}</li>"
            for one in answer.verdicts
            if one.verdict == word
        ]
        parts += [f"<h2>{title}</h2><ul>{''.join(lines)}</ul>"] if lines else []
    return "\n".join(parts)


def _bare(line: str) -> str:
    return line.partition(": ")[2]
