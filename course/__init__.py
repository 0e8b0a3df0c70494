"""A course kit: five exercises on the KV cache, made from the real sources, and their grader.

    exercises.py                        each exercise as a value: what is removed, its task, its mistakes
    holes.py, make.py                   find the places that are removed; make an exercise
    sandbox.py, grade.py                run a submission with limits; grade it
    probe.py, diagnose.py, mistakes.py  of the first exercise: what is observed, what that means, its mistakes
    trials/                             of the four others: versions of the answer with each of their mistakes
    kit/, tasks/                        files that students get

docs/course.md has the commands.
"""
