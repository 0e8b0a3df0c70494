"""The parts of a session: its text, its stream, its file, and what a file says of the model that fed it."""
