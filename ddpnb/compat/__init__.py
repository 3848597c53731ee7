"""All uses of other libraries' private parts, each with a probe.  (Every process.)"""
