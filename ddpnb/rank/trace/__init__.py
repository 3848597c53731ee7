"""What a rank does inside one step or one cell, recorded."""
