"""What else papers ask of a denoising run: clocks, circuits, features, anatomy of attention, and uses of sinks."""
