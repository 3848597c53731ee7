"""What crosses between the processes, and what all of them know."""
