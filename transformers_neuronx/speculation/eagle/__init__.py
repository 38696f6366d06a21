"""EAGLE-3: a layer that drafts for a model, from the model's own hidden states."""
