"""Files on disk: atomic writes, locks, JSON and tensors with checksums; every room writes and reads through it."""
