"""What a rank does inside one step, what it holds, and what its machine can do."""
