"""Dense decoder models and the resolution of their configuration."""
