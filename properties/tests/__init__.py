"""The property suites; part of the repository, not of the wheel."""
