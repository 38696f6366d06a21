"""Llama 4, text."""
