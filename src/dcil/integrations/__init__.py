"""Thin adapters to other training frameworks, one file each."""
