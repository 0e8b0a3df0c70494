"""Stands in for the fast step; see choose.py."""
