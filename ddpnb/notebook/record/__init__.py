"""What was measured, and what follows from it?  (Notebook side.)"""
