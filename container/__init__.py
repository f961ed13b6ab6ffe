"""The box: processes, platform conventions and HTTP. Must not know torch or transformers."""
