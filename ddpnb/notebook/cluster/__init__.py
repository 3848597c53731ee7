"""How are processes started, fed, heard and ended?  (Notebook side.)"""
