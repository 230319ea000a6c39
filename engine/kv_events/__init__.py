"""What the prefix cache gains and loses, published as vLLM's KV events for KV-aware routers.

Owns block hashes, the format on the wire and the ZeroMQ sockets. Imports `engine.core` and
`engine.arguments`; zmq and cbor2 only where they are used.
"""
