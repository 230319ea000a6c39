"""Profile files: whichever field is damaged, the error names file and field."""

import json
from pathlib import Path

import pytest

import sim
from engine.core.errors import InputError
from sim.cost.pipeline_profile import pipeline_from_json
from sim.cost.profile import parse_profile

DATA = Path(sim.__file__).parent / "data"
SHIPPED = {path.name: json.loads(path.read_text()) for path in DATA.glob("*.json")}
# What older files may lack, and what the reader passes over.
OPTIONAL = {"free_running_percent", "pauses_of_the_recording", "tracking", "lockstep"}
PASSED_OVER = {"scheduling"}
CHECKED = [
    (name, field)
    for name, document in SHIPPED.items()
    for field in document
    if field not in ("format", "version", *PASSED_OVER)
]


def read(document, name):
    if document["format"] == "lockstep-profile":
        return parse_profile(json.dumps(document), name)
    return pipeline_from_json(document, name)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_read(name):
    assert read(SHIPPED[name], name).path == name


@pytest.mark.parametrize(("name", "field"), CHECKED)
@pytest.mark.parametrize("wrong", [17.5, ["x"], {"a": "b"}], ids=["number", "list", "object"])
def test_a_field_of_the_wrong_type_is_named(name, field, wrong):
    if field == "model" and isinstance(wrong, dict):
        pytest.skip("of a model nothing but its shape is compared, and that later")
    with pytest.raises(InputError, match=rf"^{name}: damaged profile \(.*\b{field}\b"):
        read({**SHIPPED[name], field: wrong}, name)


@pytest.mark.parametrize(("name", "field"), CHECKED)
def test_a_missing_field_is_named_unless_older_files_lack_it(name, field):
    document = {key: value for key, value in SHIPPED[name].items() if key != field}
    if field in OPTIONAL:
        read(document, name)
        return
    with pytest.raises(InputError, match=rf"^{name}: damaged profile \(.*\b{field}\b"):
        read(document, name)
