"""The meaning of a request: API schemas, templates, text.

Must not know: Flask, gevent, torch, the environment.
"""
