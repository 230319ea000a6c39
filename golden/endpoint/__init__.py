"""`golden endpoint`: a running server with OpenAI's endpoints against a stored reference.

Owns the HTTP client, the ways in which servers tell log-probabilities, and load levels. Imports
`golden.stored` for the rules; nothing of the engine is needed at the other end.
"""
