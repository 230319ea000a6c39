"""Adapters to schedulers of other projects, as their packages ship them.

Owns nothing but the translation to plain values; records of what the kit found lie in
`properties/records`. Imports those packages when an adapter starts, and nothing of Lockstep.
"""
