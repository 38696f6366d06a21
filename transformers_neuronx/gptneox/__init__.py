"""GPT-NeoX, and Pythia, which is one."""
