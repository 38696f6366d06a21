"""BLOOM."""
