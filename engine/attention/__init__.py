"""Paged attention: one signature, three backends."""
