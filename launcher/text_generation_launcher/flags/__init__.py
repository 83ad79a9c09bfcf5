"""The flags of the launcher by subject, in the order of --help."""
