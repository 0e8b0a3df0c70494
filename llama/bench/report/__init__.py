"""Reports of the benchmark: tables, sentences, plots, a page and files."""
