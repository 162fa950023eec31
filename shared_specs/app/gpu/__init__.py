"""The four bounded commands that test and measure on a GPU."""
