"""Cost models: how long a step takes, in integer nanoseconds."""
