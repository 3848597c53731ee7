"""The code that runs on ranks.  It never imports IPython's display, ipywidgets or matplotlib."""
