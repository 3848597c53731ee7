"""How do an asynchronous worker and its server exchange tensors?  (Rank side.)"""
