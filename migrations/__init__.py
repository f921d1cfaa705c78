"""Alembic revisions of the store's schema."""
