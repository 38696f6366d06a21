"""What programs contain and cost, whether a model fits, and how two models differ."""
