"""One folder or script per figure, table or checkpoint; nothing here is installed with the package."""
