"""Connectors for serving engines, each in a package of its own that imports the engine; nothing else imports them."""
