"""A course kit: five exercises on the KV cache, made from the real sources, and their grader.

exercises.py        each exercise as a value: what is removed, its task, its mistakes, its trials
make.py, holes.py   make an exercise; find the places that are removed
grade.py, sandbox.py    grade submissions; run each in a process with limits
mistakes.py, probe.py, diagnose.py    of the first exercise: its mistakes, what is observed, what it means
trials/             of the four others: their mistakes, and versions of the answer with each
kit/, tasks/        the files that students get
"""
