"""Tables of texts, for terminals and for pages, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]


def number(value: object, digits: int = 4) -> str:
    """A number for people; whole numbers are grouped."""
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def text_table(header: Sequence[str], rows: Rows, indent: str = "") -> str:
    """Columns side by side, the first one to the left; an empty header is left out."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        texts.append((indent + "  ".join([line[0].ljust(widths[0]), *cells])).rstrip())
    return "\n".join(texts)


def html_table(
    header: Sequence[str], rows: Rows, classes: Sequence[str] = (), kind: str = ""
) -> str:
    """An HTML table that scrolls in itself where it is wider than the page.

    `classes` are those of the rows, one each; the kinds `text` and `facts` are for
    cells that are no figures and for names beside figures: they wrap on a phone.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = []
    for index, row in enumerate(rows):
        mark = f' class="{escape(classes[index])}"' if classes else ""
        body.append(f"<tr{mark}>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>")
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f'<div class="wide {kind}"><table>{top}<tbody>{"".join(body)}</tbody></table></div>'
