"""Trials of a submission, and versions of the answer with a mistake, in a file for each exercise.

The files run in the process of a submission (course/probe.py) and import its package. Each has:

    trials      yields what is tried and what came of it, a number, a text or lists of these
    NEAR        how far numbers may be apart, as a share of the larger one or of 1
    MISTAKES    name -> points, title and hint
    FORMS       choices, none of them wrong, with which each mistake is tried; the first are the package's own
    ALSO        further versions: the name of a mistake, and what `install` is given behind it; by default none
    install     puts a version of the answer with these mistakes into the package; without any, it is right
"""
