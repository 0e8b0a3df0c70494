"""Texts that outlive a call or share a model: sessions and their files, and the scheduler of many texts."""
