"""What the pages of results of this repository are made with: merged runs and their sections. Not in the wheel."""
