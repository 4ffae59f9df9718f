"""Tools of the measurements, which know nothing about the questions."""
