"""What programs written for AWS's transformers-neuronx use, and this package does not need itself."""
