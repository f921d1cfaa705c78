"""One module per revision, the first is 0001."""
