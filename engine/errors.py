"""What can be wrong with a model folder."""

from __future__ import annotations

from engine.core.errors import InputError


class UnsupportedModel(InputError):
    """The checkpoint asks for something that is not implemented; it is refused, never ignored."""


class WeightError(InputError):
    """A weight is missing, extra, mis-shaped or unreadable; the message names tensor and file."""
