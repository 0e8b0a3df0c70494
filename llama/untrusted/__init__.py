"""Readers of untrusted files. They compare a header with its file before they use anything of it, and know no model."""
