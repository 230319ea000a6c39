"""Conformance kit: the laws against somebody else's scheduler, through a small adapter.

Owns the adapter's protocol and the report. Imports the laws, the search and the follower; adapters
import nothing of Lockstep.
"""

from properties.conformance.kit import check_adapter
from properties.conformance.protocol import AdapterProblem, SchedulerAdapter
from properties.conformance.report import Finding, Report

__all__ = ["AdapterProblem", "Finding", "Report", "SchedulerAdapter", "check_adapter"]
