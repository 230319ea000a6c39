"""Coverage-guided search: operation lists grown by what new code they reach in the kernel.

Owns the mutations of lists and the kept corpus. Imports the search; libFuzzer (by Atheris)
drives it.
"""
