"""All code that uses other libraries' private parts, with a probe for each.  (Every process.)"""
