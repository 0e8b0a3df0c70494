"""A course kit: the exercise "give this model its KV cache back", made from the real sources, and its grader."""
