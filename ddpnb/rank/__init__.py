"""What runs in every rank; imports no IPython display, ipywidgets or matplotlib."""
