"""How is a comparison drawn?  One figure, live and from the store.  (Notebook side.)"""
