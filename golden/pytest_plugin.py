"""The pytest plugin of the installed package: the golden rules and the laws in a fork's own suite.

Loaded by every pytest run of an environment, so nothing is imported here but pytest; what a test
does not ask for costs it nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from golden.stored.reference_file import StoredReference

_HELP = {
    "lockstep_model": "model folder of the fixture lockstep_model",
    "lockstep_reference": "file of golden record for the fixture lockstep_reference",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Both settings as options and as lines of the configuration."""
    group = parser.getgroup("lockstep")
    for name, text in _HELP.items():
        group.addoption(f"--{name.replace('_', '-')}", default=None, metavar="PATH", help=text)
        parser.addini(name, text, default="")


@pytest.fixture(scope="session")
def lockstep_model(request: pytest.FixtureRequest) -> str:
    """The model folder that a suite is about, as text.

    From `--lockstep-model`, the environment variable LOCKSTEP_MODEL, or `lockstep_model` in the
    configuration; relative paths there start at the root of the suite.
    """
    return str(_setting(request.config, "lockstep_model"))


@pytest.fixture(scope="session")
def lockstep_reference(request: pytest.FixtureRequest) -> StoredReference:
    """The reference of `--lockstep-reference`, LOCKSTEP_REFERENCE or `lockstep_reference`."""
    path = _setting(request.config, "lockstep_reference")
    from golden.stored.reference_file import read_reference

    return read_reference(path)


@pytest.fixture(scope="session")
def assert_golden() -> Callable[..., Any]:
    """`golden.stored.assertion.assert_golden(outputs, reference, dtype=None)`."""
    from golden.stored.assertion import assert_golden

    return assert_golden


@pytest.fixture(scope="session")
def assert_keeps_laws() -> Callable[..., Any]:
    """`properties.conformance.kit.assert_keeps_laws(adapter, workloads=200, seed=0)`."""
    from properties.conformance.kit import assert_keeps_laws

    return assert_keeps_laws


def _setting(config: pytest.Config, name: str) -> Path:
    written = config.getoption(name) or os.environ.get(name.upper())
    if written:
        return Path(str(written))
    listed = str(config.getini(name))
    if not listed:
        flag = f"--{name.replace('_', '-')}"
        pytest.fail(
            f"{name}: give {flag} PATH, set {name.upper()}, or write `{name} = PATH` into the "
            "configuration of pytest",
            pytrace=False,
        )
    return Path(config.rootpath) / listed
