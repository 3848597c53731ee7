"""Flat buffers, an emulated link, and how ranks meet without a collective (ranks)."""
