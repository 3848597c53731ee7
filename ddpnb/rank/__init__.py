"""Code that runs on ranks and never imports IPython.display, ipywidgets or matplotlib."""
