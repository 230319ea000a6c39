"""One server with SmolLM2 for all tests that only ask it."""

import pytest

from tests.engine.serving import running


@pytest.fixture(scope="session")
def smollm2_server(smollm2_folder):
    options = ("--device", "cpu", "--num-kvcache-blocks", "256", "--max-model-len", "512")
    with running(smollm2_folder, *options, "--served-model-name", "smollm2") as started:
        yield started
