"""The engine's parts, one by one, against HF's modules on random weights."""
