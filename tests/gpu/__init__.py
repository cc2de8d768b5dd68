"""Tests that need a GPU; elsewhere they are skipped, and say so."""
