"""Makers of checkpoints: a real small model for everyone, and random ones of any shape."""
