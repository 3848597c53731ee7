"""The fork server: imports torch once, forks the controller and the ranks, ends them."""
