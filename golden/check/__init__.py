"""`golden check`: anybody's checkpoint, on any machine, against HF Transformers.

Owns the prompts, the truth of a folder, the ways to be served, their judgement and its report.
Imports the golden rules, runners and records; knows no stored reference and no server.
"""
