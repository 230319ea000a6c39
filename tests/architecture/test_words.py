"""Ids in prose are never ambiguous: laws are `LAW-B2`, rules of a policy `P-B2`, bugs `BUG-C48`."""

import io
import re
import subprocess
import tokenize
from pathlib import Path

from properties.laws import all_laws

ROOT = Path(__file__).parents[2]
# Letters of laws, policy rules and bugs; a quote right before or behind makes it a value.
BARE = re.compile(r"(?<![\w\"'-])[ABCEKLMPSTVW]\d{1,3}(?![\w\"'])")
# Products, hardware, percentiles and rules of a linter that only look like ids.
OTHER = re.compile(
    r"V1\b|\bL2 (cache|rate)|\bglobal\.L2\b|\bP\d\d\b|noqa: E\d+"
    r"|\b(A10|A100|B200|L4|L20|L40|T4|V100)\b|\bM/M/1|\bC\+\+"
)
BUG = re.compile(r"BUG-([BC]\d{2,3})")
BUG_TEST = re.compile(r"def test_bug_((?:[bc]\d{2,3}_)+)")


def tracked(*patterns):
    names = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in names.stdout.split() if (ROOT / name).is_file()]


def prose_of(text):
    """Comments and strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or (
            tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        ):
            value = re.fullmatch(r"[rbf]*([\"'])(.*)\1", token.string, re.DOTALL)
            if token.type == tokenize.STRING and value and re.fullmatch(r"[A-Z]\d+", value[2]):
                continue  # the short id as a value: `law="B2"`
            yield token.start[0], token.string


def bare_ids(text):
    return BARE.findall(OTHER.sub("", text))


def test_no_comment_docstring_or_message_quotes_a_bare_id():
    found = []
    for name in tracked("engine/*.py", "sim/*.py", "properties/*.py", "golden/*.py", "tests/*.py"):
        if name == "tests/architecture/test_words.py" or name.endswith("equivalents.py"):
            continue
        for line, text in prose_of((ROOT / name).read_text()):
            found += [f"{name}:{line} {bare}" for bare in bare_ids(text)]
    assert not found


def test_no_document_quotes_a_bare_id():
    found = [
        (name, bare)
        for name in tracked("docs/*.md", "README.md", "CONTRIBUTING.md")
        for bare in bare_ids((ROOT / name).read_text())
    ]
    assert not found


def test_a_bare_id_is_noticed():
    assert bare_ids("a block is free (B2), as in C48") == ["B2", "C48"]
    assert not bare_ids('LAW-B2, P-B2, BUG-C48, opt_out = ("B2",), vLLM V1, an L4')


def test_every_quoted_law_exists():
    known = {law.id for law in all_laws()}
    for name in tracked("*.py", "*.md"):
        if name != "tests/architecture/test_words.py":
            quoted = set(re.findall(r"LAW-([A-Z]\d+)", (ROOT / name).read_text()))
            assert quoted <= known, name


def test_every_quoted_policy_rule_is_described():
    rules = set(re.findall(r"\*\*P-(\w+) ", (ROOT / "docs/policies.md").read_text()))
    for name in tracked("*.py", "*.md"):
        if name != "tests/architecture/test_words.py":
            quoted = set(re.findall(r"\bP-([A-Z]\d+)\b", (ROOT / name).read_text()))
            assert quoted <= rules, name


def test_the_list_of_bugs_names_all_that_code_quotes_and_only_those():
    quoted = {}
    for name in tracked("*.py"):
        text = (ROOT / name).read_text()
        ids = set(BUG.findall(text))
        ids |= {part.upper() for run in BUG_TEST.findall(text) for part in run.split("_") if part}
        if name != "tests/architecture/test_words.py":
            for bug in ids:
                quoted.setdefault(bug, set()).add(name)
    listed = {}
    for row in re.findall(
        r"^\| BUG-(\S+) \|.*\| (.*) \|$", (ROOT / "docs/bugs.md").read_text(), re.M
    ):
        listed[row[0]] = set(re.findall(r"`([^`]+)`", row[1]))
    assert listed.keys() == quoted.keys()
    assert all(places and places <= quoted[bug] for bug, places in listed.items())
