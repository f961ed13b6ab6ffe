"""The HTTP front (Flask on gunicorn): bytes in, bytes out. Must not know what a prompt means."""
