"""The official Ascend toolchain, offline: lower, compile, lint, interpret, cost, run natively."""
