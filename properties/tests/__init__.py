"""The property suites as pytest runs them; part of the repository, not of the wheel.

Owns the budget of the default run. Imports any room of `properties`.
"""
