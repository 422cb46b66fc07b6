"""The command line: options in, one library call each. Holds no decoding logic."""
