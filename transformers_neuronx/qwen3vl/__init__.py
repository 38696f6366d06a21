"""Qwen3-VL, text and images."""
