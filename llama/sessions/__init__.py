"""The file of a session, and the digests of its model in the file."""
