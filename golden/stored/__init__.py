"""References that travel: a truth computed once, in a file, and the rules for what is compared.

Owns the file's format, the identity of a model, and the rules on log-probabilities of which some
may be unknown. Imports `golden.check`; knows no server.
"""
