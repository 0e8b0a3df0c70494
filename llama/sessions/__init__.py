"""The parts of a session: its stream, its file, and the digests of its model in the file."""
