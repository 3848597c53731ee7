"""The fork server: imports torch once, and forks and ends the controller and the ranks."""
