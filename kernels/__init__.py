"""Regions and the kernels generated for them. Knows Triton and devices, knows no graphs."""
