"""Adapters that let inference engines use kvbackend: one module or package each, imported only by name."""
