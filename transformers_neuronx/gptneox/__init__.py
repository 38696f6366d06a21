"""GPT-NeoX, including Pythia."""
