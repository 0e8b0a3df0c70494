"""The version of this package: apart from `llama/__init__.py`, because files that the package names refer to it."""

__version__ = "0.1.0"
