"""Puts this folder on the import path, so that the rooms' tests share their helpers."""
