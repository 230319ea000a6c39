"""Golden suites: the engine's numbers against HF Transformers."""
