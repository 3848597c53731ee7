"""What are strategies made of that are too large for one file, or have something in common?"""
