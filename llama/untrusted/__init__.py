"""Readers of untrusted files: a header is compared with its file before anything of the file is used."""
