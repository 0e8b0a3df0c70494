"""A report as pictures. The only folder that knows matplotlib."""
