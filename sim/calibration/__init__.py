"""Cost models fitted to recorded steps: features, fit, profile, report."""
