"""The clock: denoising time read from the residual stream, and moved along its directions."""
