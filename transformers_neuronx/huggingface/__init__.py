"""What users of Transformers expect: models by the name of a checkpoint, and `generate()`."""
