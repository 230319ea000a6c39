"""A config with any wrong value is read or refused in one line, never a crash."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import ConfigError, InputError
from sim.specs.models import model_named
from sim.specs.read_model import architecture_of

LINES = (Path(__file__).parents[1] / "data" / "case_models.jsonl").read_text().splitlines()
CONFIGS = [json.loads(line)["config"] for line in LINES]
QUANTIZATIONS = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["a"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "lm_head": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*gate"],
     "config_groups": {"group_0": {
         "targets": ["Linear"], "input_activations": {"num_bits": 8, "type": "float"},
         "weights": {"num_bits": 8, "type": "float", "strategy": "block",
                     "block_structure": [128, 128]}}}},
]  # fmt: skip
WRONG = st.sampled_from(
    [None, "", "x", [], {}, [None], ["x"], {"x": 1}, True, False, 0, -1, 1, 3, 7, 10**30, 1.5,
     float("nan"), [128], [0, 0], "re:[", "re:("]
)  # fmt: skip


def places(value, path=()):
    """The path of every value in a document."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield (*path, key)
            yield from places(part, (*path, key))


def put(document, path, value):
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_config_with_a_wrong_value_is_read_or_refused_in_one_line(data):
    config = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    if data.draw(st.booleans()):
        config["quantization_config"] = copy.deepcopy(data.draw(st.sampled_from(QUANTIZATIONS)))
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(config))))
        put(config, path, copy.deepcopy(data.draw(WRONG)))
    try:
        built = architecture_of("config.json", "m", config)
        assert built.num_params > 0 and built.weight_bytes(2) > 0
        assert built.kv_values_per_token >= 0 and 0 < built.active_params <= built.num_params
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "null", '{"model_type": 5}', "[" * 100_000])
def test_what_is_no_config_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises((InputError, ConfigError), match=r"config\.json"):
        model_named(str(path))
