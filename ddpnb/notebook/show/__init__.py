"""How is a record drawn?  Pure functions of a snapshot.  (Notebook side.)"""
