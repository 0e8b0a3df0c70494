"""What the commands do, a file each: arguments in, the library called, lines out.

`python -m llama` and the scripts at the top of the repository run them. Importing this package does nothing.
"""
