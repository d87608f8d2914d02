"""PyTorch's OpInfo samples of the norms."""
