"""Conformance kit: the laws against somebody else's scheduler, through a small adapter.

Owns the adapter's protocol and the report. Imports the search and the follower; adapters import
nothing of Lockstep.
"""

from properties.conformance.kit import Report, check_adapter
from properties.conformance.protocol import AdapterProblem, SchedulerAdapter

__all__ = ["AdapterProblem", "Report", "SchedulerAdapter", "check_adapter"]
