"""The version, and nothing else."""

__version__ = "1.0.0.dev0"
