"""Models by their name on the Hugging Face hub, for the engine, the suites and the simulator.

Owns which files of a hub's model are needed and how their absence is said. Imports
`engine.core.errors` only, and `huggingface_hub` when a name asks for it; no torch.
"""
