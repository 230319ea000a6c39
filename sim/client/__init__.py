"""A load generator for any OpenAI-compatible server: a workload's requests at their times.

Owns prompts of real token ids, the open loop over HTTP, and results in vLLM's keys. Imports
`sim.workloads`; the server is only known by its URL.
"""
