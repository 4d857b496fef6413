"""memlab inside a notebook: the only files, with the course's, that import IPython and ipywidgets."""
