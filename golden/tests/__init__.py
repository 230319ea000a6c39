"""The numeric suites as pytest runs them; part of the repository, not of the wheel.

Owns the choice of small cases for every run. Imports `golden` and `engine`.
"""
