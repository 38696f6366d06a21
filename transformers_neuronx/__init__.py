"""Autoregressive transformers as pure functions over fixed-shape tensors, written in XLA HLO."""

from transformers_neuronx.version import __version__ as __version__
