"""Predicted against recorded runs."""
