"""LLaMA."""
