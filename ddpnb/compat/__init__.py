"""All code that uses private parts of libraries, with a probe for each part.  (Every process.)"""
