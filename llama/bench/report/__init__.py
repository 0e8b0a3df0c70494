"""What shows: a report as tables, sentences, pictures, a page and files."""
