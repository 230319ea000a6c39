"""The one HTML page: headings, text, tables and charts in a file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

_BEGIN = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
_PROGRAM = "Lockstep: "
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1340px;
       padding: 0 1rem; color: #1c1e21; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.lead, .empty { color: #5a6068; margin-top: 0; }
p.warn { background: #fff1d6; color: #5c3d00; padding: .6rem .8rem; border-radius: 6px; }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .8rem; border-bottom: 1px solid #d8dce0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td + td { white-space: nowrap; }  /* figures and their units stay on one line */
.wide { overflow-x: auto; }
.text td + td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr.fail td, tr.error td { background: #fcc; color: #1c1e21; } tr.skip td { color: #777; }
.grid2 { display: grid; gap: 1.2rem;
         grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: currentColor; stroke-opacity: .14; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: .4rem;
            vertical-align: middle; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px;
      background: #f3f4f6; color: #1c1e21; padding: .8rem; border-radius: 6px; }
summary { cursor: pointer; }
@media (max-width: 600px) {  /* a phone: plots shrink, so that their text must not */
  body { margin: 1rem auto; padding: 0 .7rem; } svg text { font-size: 17px; }
  th, td { padding: .25rem .45rem; font-size: 14px; }
  .facts td + td { white-space: normal; overflow-wrap: anywhere; }
}
@media (prefers-color-scheme: dark) {
  body { color: #e4e6e9; background: #16181b; } p.lead, .empty { color: #9aa1a9; }
  th, td { border-color: #34383d; } pre { background: #22262a; color: #e4e6e9; }
}
"""


def page(title: str, lead: str, sections: Mapping[str, str], top: str = "") -> str:
    """One page; `top` and the sections under their headings are ready HTML."""
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections.items())
    return (
        f'{_BEGIN}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_PROGRAM}{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{top}{body}</body></html>\n'
    )


def is_page(path: Path) -> bool:
    """Whether a file is a page of this program."""
    with path.open("rb") as file:
        head = file.read(1024)
    return head.startswith(_BEGIN.encode()) and f"<title>{_PROGRAM}".encode() in head


def figures(charts: Mapping[str, str]) -> str:
    """Charts side by side, each with its caption."""
    items = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"
        for title, chart in charts.items()
    )
    return f'<div class="grid2">{items}</div>'
