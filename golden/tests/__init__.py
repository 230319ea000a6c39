"""The numeric suites; part of the repository, not of the wheel."""
