"""The mutation run's bookkeeping: equivalents are matched by their exact change."""

from properties.mutation.equivalents import EQUIVALENT, parse_diff

DIFF = """--- engine/core/scheduler.py
+++ engine/core/scheduler.py
@@ -1,3 +1,3 @@
     sequence = self._sequence(request_id)
     if self._open:
-        self._aborting[request_id] = None
+        self._aborting[request_id] = ""
         return None
"""


def test_a_justified_change_is_found_by_its_lines():
    assert parse_diff(DIFF) in EQUIVALENT


def test_another_change_of_the_same_line_is_not_justified():
    assert parse_diff(DIFF.replace('= ""', "= request_id")) not in EQUIVALENT


def test_every_justification_names_a_line_of_the_kernel():
    from pathlib import Path

    sources = "\n".join(
        " ".join(path.read_text().split())
        for path in (Path(__file__).parents[2] / "engine" / "core").glob("*.py")
    )
    for (before, after), reason in EQUIVALENT.items():
        assert " ".join(before.split()) in sources, before
        assert before != after
        assert len(reason) > 20
