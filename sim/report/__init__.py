"""What people look at: charts, pages and text tables of runs, fits and plans.

Owns looks. Imports results and metrics; nothing that computes imports it.
"""
