"""The code of every rank.  It imports no IPython display, ipywidgets or matplotlib."""
