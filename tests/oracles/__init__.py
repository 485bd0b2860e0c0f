"""Slow, plain NumPy reference computations, written from the specification alone."""
