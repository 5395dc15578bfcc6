"""Operators as PyTorch sees them: checks, routing, layouts, autograd, and the PyTorch path."""
