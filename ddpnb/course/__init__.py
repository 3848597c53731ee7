"""The exercises of the lessons, and how ``%ddp_exercise`` checks them."""
