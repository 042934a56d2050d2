"""Windows' rules for files, pretended on Linux."""
