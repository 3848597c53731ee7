"""How does one compare strategies with controls in place of a magic's line?  (Notebook side.)"""
