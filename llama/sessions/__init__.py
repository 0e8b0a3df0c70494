"""The parts of a session: its ids and cache, its stream, its file, and the digests of its model in the file."""
