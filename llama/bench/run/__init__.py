"""What measures: a cell in a process of its own, what it was seen doing, and what several repetitions come to."""
