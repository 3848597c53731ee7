"""What runs in every rank?  Never imports IPython displays, ipywidgets or matplotlib."""
