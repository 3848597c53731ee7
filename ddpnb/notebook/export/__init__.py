"""How does a comparison leave the notebook, for other tools to read?  (Notebook side.)"""
