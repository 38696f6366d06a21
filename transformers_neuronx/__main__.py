"""`python -m transformers_neuronx`."""

from transformers_neuronx.cli import main

main()
