"""This machine: cores, memory, control groups, standard streams, progress bars, the colours of pages, and files."""
