"""Kernels to come."""
