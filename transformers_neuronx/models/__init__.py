"""Models as users make and call them."""
